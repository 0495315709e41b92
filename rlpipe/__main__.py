"""The entry point of ``python -m rlpipe``, which is the same as ``rlpipe``."""

from __future__ import annotations

import sys

from rlpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
