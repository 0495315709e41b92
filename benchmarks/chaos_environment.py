"""Environment of ``benchmarks.chaos``, which asks for sums, and the parser of its policy's turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rlpipe
from rlpipe.episodes.parsing import ParsedTurn
from rlpipe.episodes.tools import ToolCall


class Sums(rlpipe.Environment):
    """Ask for a sum until the answer is right."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._asked, self._answer = str(row["prompt"]), str(row["completion"])
        return self._asked

    def step(self, action: str) -> rlpipe.Step:
        is_right = action == self._answer
        return rlpipe.Step(self._asked, reward=float(is_right), done=is_right)


def read_turn(text: str, prefix: str) -> ParsedTurn:
    """Read a turn that ends with 0 to 4 as a call of the server's tool."""
    if text[-1:] not in "01234":
        return ParsedTurn(content=text)
    return ParsedTurn(content="", calls=[ToolCall(id=f"{prefix}0".rjust(9, "0"), name="look")])
