"""Tool that runs Python programs of the policy; it needs ``environment.isolation=sandbox``."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from rlpipe.scoring.remote_program import end_program, start_program

MAX_PRINTED_BYTES = 2**18


def python(code: str) -> str:
    """Run a Python program, and return what it prints.

    Args:
        code: the program; it has no network, and reads and writes files of its own folder alone
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "program.py"
        file.write_text(code, errors="surrogatepass")
        process = start_program(
            [str(file)], folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        with process.stdout as output:
            try:
                printed = output.read(MAX_PRINTED_BYTES)  # a program that prints without end is ended then
            finally:
                end_program(process)
    return printed.decode(errors="replace").replace(f"{folder}/", "")


python.needs_sandbox = True  # type: ignore[attr-defined]
