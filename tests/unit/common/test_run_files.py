"""The names of a run's files: the docs list all of them."""

import re
from pathlib import Path

from rlpipe.common import run_files

PAGE = Path(__file__).parents[3] / "docs" / "cluster.md"


def test_the_docs_list_every_file() -> None:
    section = PAGE.read_text().partition("## The run's folder\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`([^`]+?)/?`", " ".join(cells))
    assert {value for name, value in vars(run_files).items() if name.isupper()} <= {*listed}
