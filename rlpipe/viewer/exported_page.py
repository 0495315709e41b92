"""The viewer as one HTML file, to send to someone: its programs and styles, and as much of the runs as fits."""

from __future__ import annotations

import re
import sqlite3
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlpipe.common.atomic_io import write_whole
from rlpipe.errors import DataError, InputError
from rlpipe.replay.ledger.run_ledger import GroupState
from rlpipe.viewer.comparison import Side, groups_of_prompt, shared_prompts
from rlpipe.viewer.group_detail import image_kind
from rlpipe.viewer.group_index import STATUS_BITS
from rlpipe.viewer.group_query import GroupQuery
from rlpipe.viewer.static_files import join_modules, static_files
from rlpipe.viewer.viewed_run import ViewedRun
from rlpipe.viewer.web_app import to_json

MAX_BYTES = 6 * 2**20
"""Size of all groups' completions and images, after which further ones are left out."""
MAX_POINTS, MAX_EVENTS = 1000, 1000
MAX_TOKENS = 1000
NUM_NEWEST, NUM_EXTREME = 300, 100
"""Groups of a run in the table: the newest, and those with the highest and the lowest rewards."""
NUM_READ, NUM_EXTREME_READ = 24, 8
"""Groups of a run with their completions, likewise."""
NUM_COMPARED = 12
"""Prompts of each kind whose answers can be compared."""


def write_page(runs: Sequence[ViewedRun], target: Path) -> tuple[int, list[str]]:
    """Write the page; return its size in bytes, and what was left out, which the page says, too."""
    trees: list[dict[str, Any]] = []
    left_out = ["this is a copy: it does not follow a run that goes on"]
    remaining_bytes = MAX_BYTES
    for run in runs:
        try:
            run.refresh()
        except (InputError, OSError, sqlite3.Error) as error:
            run.leave_ledger(str(error))
            left_out.append(f"{run.name}: its groups, as they can't be read: {error}")
    for run in runs:
        tree, used, lines = _describe_run(
            run, remaining_bytes // max(len(runs) - len(trees), 1), _compared(runs, run, held_out=False)
        )
        held_out = _compared(runs, run, held_out=True)
        used += _add_groups(tree, run, held_out, max(remaining_bytes - used, 0))
        tree["held_out"] = [*held_out.values()]
        remaining_bytes -= used
        trees.append(tree)
        left_out += [f"{run.name}: {line}" for line in lines]
    title = f"exported {time.strftime('%Y-%m-%d %H:%M')}; parts of the runs were left out"
    orders = {"states": [*GroupState], "statuses": [*STATUS_BITS]}  # which the page sorts by, as the server does
    page = make_page({"title": title, "left_out": left_out, "runs": trees, **orders})
    try:
        write_whole(target, page)
    except OSError as error:
        raise InputError(f"--export {target} can't be written ({error.strerror}): give a file in a folder") from None
    return len(page.encode()), left_out


def _compared(runs: Sequence[ViewedRun], run: ViewedRun, *, held_out: bool) -> dict[int, dict[str, Any]]:
    """Return the groups of a run, by id, that answer prompts which other runs, or versions, have answered, too."""
    groups_by_id: dict[int, dict[str, Any]] = {}
    for other_run in runs:
        left, right = (Side(run=side_run, held_out=held_out) for side_run in (run, other_run))
        with suppress(DataError):
            for prompt in shared_prompts(left, right)[:NUM_COMPARED]:
                groups = groups_of_prompt(left, int(prompt["key"]))
                shown = {"key": prompt["key"], "prompt": prompt["prompt"]}
                groups_by_id |= {group["group_id"]: {**group, **shown} for group in [*groups[:1], *groups[-1:]]}
    return groups_by_id


def _describe_run(run: ViewedRun, max_bytes: int, compared: Iterable[int]) -> tuple[dict[str, Any], int, list[str]]:
    """Return what the page holds of a run, the bytes of its groups, and what was left out."""
    series = run.series.get(run.series.names, most_points=MAX_POINTS)
    summary = run.summary()
    summary["ended_at"] = summary["ended_at"] or time.time()  # the page's curves end now
    tree: dict[str, Any] = {"summary": summary, "series": series, "groups": {}, "images": {}}
    tree |= {"diagnosis": run.diagnosis(), "parts": run.parts()}
    lines = []
    if any(curve["stands_for"] > 1 for curve in series.values()):
        lines.append(f"curves have at most {MAX_POINTS} points, means of several steps")
    if run.index is None:
        with suppress(DataError):
            tree["events"], tree["marks"] = run.events(limit=MAX_EVENTS), run.marks()
        return tree, 0, [*lines, "it has no ledger, which keeps the groups"]
    extremes = [GroupQuery(sort="reward", descending=descending) for descending in (True, False)]
    newest = run.groups(GroupQuery(), NUM_NEWEST)
    pages = [run.groups(query, NUM_EXTREME)["rows"] for query in extremes]
    rows = {row["group_id"]: row for page in [newest["rows"], *pages] for row in page}
    group_ids = [*(row["group_id"] for row in newest["rows"][:NUM_READ]), *compared]
    group_ids += [row["group_id"] for page in pages for row in page[:NUM_EXTREME_READ]]
    missing = [group_id for group_id in dict.fromkeys(group_ids) if group_id not in rows]
    rows |= {row["group_id"]: row for row in run.rows_of(missing)}
    used = _add_groups(tree, run, [group_id for group_id in dict.fromkeys(group_ids) if group_id in rows], max_bytes)
    events = run.events(limit=MAX_EVENTS)
    tree |= {
        "rows": sorted(rows.values(), key=lambda row: -row["group_id"]),
        "choices": run.choices(),
        "events": events,
        "marks": run.marks(),
    }
    if len(rows) < run.index.num_groups:
        lines.append(f"the table has {len(rows):,} of {run.index.num_groups:,} groups: new, best, worst, and compared")
    lines.append(f"{len(tree['groups'])} groups have their completions, up to {MAX_TOKENS} tokens of each")
    if events["before"] is not None:
        lines.append(f"only the newest {len(events['events'])} events")
    return tree, used, lines


def _add_groups(tree: dict[str, Any], run: ViewedRun, group_ids: Iterable[int], max_bytes: int) -> int:
    """Add groups in full, with their images, as long as there is room; return the bytes that they take."""
    used = 0
    for group_id in group_ids:
        try:
            group = run.group(group_id, most_tokens=MAX_TOKENS)
        except DataError:  # its tokens are damaged, or another viewer has read the run's evaluations anew
            continue
        images = [run.image(group_id, number) for number in range(group.get("num_images", 0))]
        size = len(to_json(group)) + sum(len(image) * 4 // 3 for image in images)
        if used + size > max_bytes:
            continue
        used += size
        tree["groups"][str(group_id)] = group
        for number, image in enumerate(images):
            tree["images"][f"{group_id}/{number}"] = f"data:{image_kind(image)};base64,{b64encode(image).decode()}"
    return used


def make_page(content: dict[str, Any]) -> str:
    """Return the page with its content, under a policy that lets only the programs written here run."""
    files = {path: text.decode() for path, text in static_files().items()}
    styles = [files["vendor/uPlot.min.css"], files["base.css"], files["views.css"]]
    scripts = [files["vendor/uPlot.iife.min.js"], join_modules(files, "app.js")]
    assert not any("</script" in script or "</style" in style for script in scripts for style in styles)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; style-src {' '.join(map(_digest, styles))};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = to_json(content).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    head, body = files["index.html"].split("</head>")
    head = re.sub(r"<(link rel=\"stylesheet\"|script) .*\n", "", head)
    head = head.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    styled = "".join(f"<style>{style}</style>\n" for style in styles)
    ending = (
        f'<script type="application/json" id="exported">{data}</script>\n<script>{scripts[0]}</script>\n'
        f'<script type="module">{scripts[1]}</script>\n</body>'
    )
    return f"{head}{styled}</head>{body.replace('</body>', ending)}"


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
