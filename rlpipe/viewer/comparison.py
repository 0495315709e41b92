"""Comparison of what two runs, or two policy versions of one run, wrote to the same prompt."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rlpipe.viewer.viewed_run import HELD_OUT, ViewedRun

MAX_PROMPTS = 200
MAX_GROUPS = 200


@dataclass(kw_only=True, frozen=True)
class Side:
    """A run, and the span of the versions that sampled its groups; a bound that is None is open."""

    run: ViewedRun
    least: int | None = None
    most: int | None = None
    held_out: bool = False
    """Whether the prompts are those of evaluations, each with one greedy answer of a version."""

    @property
    def table(self) -> str:
        return "held_out" if self.held_out else "entries"

    @property
    def condition(self) -> tuple[str, list[int]]:
        bounds = {"version >= ?": self.least, "version <= ?": self.most}
        used = {test: value for test, value in bounds.items() if value is not None}
        return " AND ".join(["prompt IS NOT NULL", *used]), [*used.values()]


def shared_prompts(left: Side, right: Side, text: str = "") -> list[dict[str, Any]]:
    """Return the prompts that both sides have answers to, with the means of their rewards, the largest change first.

    For one run without versions, they are the prompts that more than one version has answered.
    """
    is_one = left == right
    with closing(left.run.needed_index().connect()) as connection:
        connection.execute("ATTACH ? AS other", (f"{right.run.needed_index().path.absolute().as_uri()}?mode=ro",))
        groups = []
        for schema, side in (("main", left), ("other", right)):
            test, values = side.condition
            groups.append(
                (
                    "SELECT key, start, lower, count(*) AS number, avg(reward) AS reward, min(version) AS oldest,"
                    f" max(version) AS newest FROM {schema}.{side.table}"
                    f" JOIN {schema}.prompts USING (prompt) WHERE {test} GROUP BY prompt",
                    values,
                )
            )
        condition = "a.newest > a.oldest" if is_one else "1"
        rows = connection.execute(
            f"SELECT a.key, a.start, a.number, a.reward, a.oldest, a.newest,"
            " b.number, b.reward, b.oldest, b.newest"
            f" FROM ({groups[0][0]}) AS a JOIN ({groups[1][0]}) AS b USING (key)"
            f" WHERE {condition} AND (? = '' OR instr(a.lower, ?))"
            f" ORDER BY abs(coalesce(b.reward - a.reward, 0)) DESC, a.newest - a.oldest DESC LIMIT {MAX_PROMPTS}",
            (*groups[0][1], *groups[1][1], text.lower(), text.lower()),
        ).fetchall()
    names = ("number", "reward", "oldest", "newest")
    return [
        {
            "key": str(row[0]),  # numbers of 64 bits are too long for JavaScript
            "prompt": row[1],
            "left": dict(zip(names, row[2:6], strict=True)),
            "right": dict(zip(names, row[6:], strict=True)),
        }
        for row in rows
    ]


def groups_of_prompt(side: Side, key: int) -> list[dict[str, Any]]:
    """Return the groups of a prompt on one side, the newest version first."""
    test, values = side.condition
    columns = "group_id, step, version, reward, state"
    if side.held_out:
        columns = f"-number, NULL, version, reward, '{HELD_OUT}'"
    with side.run.needed_index().reading() as connection:
        rows = connection.execute(
            f"SELECT {columns} FROM {side.table} WHERE {test}"
            " AND prompt = (SELECT prompt FROM prompts WHERE key = ?)"
            f" ORDER BY version DESC, 1 DESC LIMIT {MAX_GROUPS}",
            (*values, key),
        ).fetchall()
    return [dict(zip(("group_id", "step", "version", "reward", "state"), row, strict=True)) for row in rows]
