"""Prints what packages require, themselves included, that this environment lacks or has in a version that does not fit.

``pip install --no-deps --target`` puts these into a folder of their own: a process that has it in its path before
this environment's packages can use them, and the environment stays as it is.
"""

import json
import subprocess
import sys


def main() -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *sys.argv[1:]]
    found = subprocess.run(command, stdout=subprocess.PIPE)
    if found.returncode != 0:  # pip has written why
        sys.exit(found.returncode)
    for package in json.loads(found.stdout)["install"]:
        print(f"{package['metadata']['name']}=={package['metadata']['version']}")


if __name__ == "__main__":
    main()
