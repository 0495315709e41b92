"""Seconds until the first view of `rlpipe view` is drawn, and until its table shows a filter, for a large run.

A run is written as it would be after ``--groups`` groups of ``--group-size`` rollouts, all of whose records and tokens
are kept. A fresh process serves it without an index, and a headless Chromium opens it: ``first_view_s`` is from the
request to the drawn curves, ``first_groups_s`` the same for the table. Once the index is complete, ``filter_s`` is the
slowest filter's median, from the key that is pressed, or the choice, to the redrawn table. Run: ``python -m
benchmarks.viewer``. With 1,000,000 rollouts or more, the exit code is 1 if the first view takes over a second, or a
filter over 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from playwright.sync_api import Page, sync_playwright

from rlpipe.common import run_files
from rlpipe.replay.ledger.database import pack_arrays
from rlpipe.replay.ledger.run_ledger import Ledger
from rlpipe.types import NO_VERSION, Prompt, Rollout, RolloutGroup

GROUPS_PER_STEP = 16
COMPLETION_TOKENS = 200
WORDS = [
    "train",
    "boat",
    "apple",
    "river",
    "seven",
    "often",
    "how",
    "many",
    "which",
    "cost",
    "more",
    "after",
    "sells",
    "buys",
    "hours",
    "days",
]
METRICS = [f"other/{number}" for number in range(40)]
FILTERS: dict[str, dict[str, str]] = {
    "reward": {"reward_min": "0.4", "reward_max": "0.6"},
    "rare reward": {"reward_min": "0.99"},
    "function": {"function": "format", "function_min": "0.9"},
    "length": {"length_min": "230"},
    "version": {"version_min": "100", "version_max": "110"},
    "step": {"step_min": "1000", "step_max": "1099"},
    "staleness": {"staleness_min": "1", "staleness_max": "1"},
    "state": {"state": "DISCARDED"},
    "outcome": {"status": "truncated"},
    "reason": {"reason": "no reward variance"},
    "common word": {"text": "apple"},
    "rare text": {"text": "row 4711 "},
    "no match": {"text": "zebra"},
    "everything": {
        "text": "river",
        "reward_min": "0.2",
        "function": "right",
        "function_max": "0.9",
        "length_min": "180",
    },
}
FULL_SIZE = 1_000_000
"""Rollouts for which the limits hold."""
LIMITS_S = {"first_view_s": 1.0, "filter_s": 0.3}
SORTS = ("reward", "reward:format", "length", "id")
DRAWN = ".charts[data-points]:not([data-points='0'])"
TIMED = """async ([values]) => {
  const form = document.querySelector("form.filters");
  const table = document.querySelector("table.groups");
  form.querySelectorAll("input").forEach((input) => { input.value = ""; });
  form.querySelectorAll("select").forEach((select) => { select.selectedIndex = 0; });
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value;
  const changed = form.elements[Object.keys(values).at(-1)];
  return new Promise((done) => {
    const start = performance.now();
    new MutationObserver((_, observer) => {
      observer.disconnect();
      requestAnimationFrame(() => done((performance.now() - start) / 1000));
    }).observe(table, { attributeFilter: ["data-asked"] });
    changed.dispatchEvent(new Event("input", { bubbles: true }));
  });
}"""
"""Program that sets filters as if they were typed, and returns the seconds until the table is drawn again."""


def write_run(folder: Path, num_groups: int, group_size: int) -> None:
    """Write a finished run's ledger, metrics and config."""
    folder.mkdir(parents=True)
    num_steps = num_groups // GROUPS_PER_STEP
    config = {
        "name": "large",
        "model": {"path": "none", "tokenizer": None, "revision": None, "trust_remote_code": False},
        "algorithm": {"kind": "rl", "num_steps": num_steps},
    }
    (folder / run_files.CONFIG).write_text(json.dumps(config))
    with closing(Ledger(folder / run_files.LEDGER)) as ledger:
        ledger.set(run_id="large", config=config)
    arrays = pack_arrays(_sample(group_size))
    with closing(sqlite3.connect(folder / run_files.LEDGER)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        rows = _rows(num_groups, group_size)
        while batch := list(islice(rows, 10_000)):
            marks = ", ".join("?" * 25)
            connection.executemany(f"INSERT INTO groups VALUES ({marks})", [row for row, _ in batch])
            records = [(row[0], record) for row, record in batch]
            connection.executemany("INSERT INTO payloads VALUES (?, ?)", records)
            connection.executemany("INSERT INTO tokens VALUES (?, ?)", [(number, arrays) for number, _ in records])
        connection.commit()
    with (folder / run_files.METRICS).open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(json.dumps({"step": step, **_metrics(step)}) + "\n")


def _sample(group_size: int) -> RolloutGroup:
    prompt = Prompt(prompt_id=0, epoch=0, token_ids=np.arange(100, dtype=np.int32), prompt="", task={})
    length = 100 + COMPLETION_TOKENS
    mask = np.arange(length) >= 100
    generator = np.random.default_rng(0)
    rollouts = [
        Rollout(
            group_id=0,
            sample_index=index,
            prompt_id=0,
            task={},
            token_ids=generator.integers(0, 50_000, length, np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -generator.random(length), 0).astype(np.float32),
            policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        )
        for index in range(group_size)
    ]
    return RolloutGroup(group_id=0, prompt=prompt, rollouts=rollouts)


def _rows(num_groups: int, group_size: int) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield each group's columns, and its record."""
    generator = random.Random(0)
    for number in range(num_groups):
        step = number // GROUPS_PER_STEP
        text = f"In row {number} of the data, {' '.join(generator.choices(WORDS, k=40))}?"
        rewards = [round(generator.random(), 3) for _ in range(group_size)]
        rollouts = [
            {
                "sample_index": index,
                "status": "truncated" if generator.random() < 0.01 else "completed",
                "finish_reason": "stop",
                "rewards": {"right": reward, "format": round(generator.random(), 3)},
                "reward": reward,
                "advantage": reward - 0.5,
            }
            for index, reward in enumerate(rewards)
        ]
        record = {
            "prompt_id": number,
            "epoch": 0,
            "prompt": [{"role": "user", "content": text}],
            "generate_s": 1.0,
            "score_s": 0.1,
            "engine": "rollout-0",
            "logged": {},
            "rollouts": rollouts,
        }
        is_trained = number % 10 != 9
        state, reason = ("TRAINED", None) if is_trained else ("DISCARDED", "no reward variance")
        statistics = (float(np.mean(rewards)), float(np.std(rewards)), max(rewards))
        tokens = int(group_size * (150 + generator.random() * 100))
        yield (
            (
                *(number, 0, number, number, 0, 0, step, state, step if is_trained else None, reason, *statistics),
                *(group_size, tokens + 100 * group_size, tokens, max(step - 1, 0), "rollout-0", 1.0, 0.1),
                *(1e9 + number, 1e9 + number, 1e9 + number, 1e9 + number, 1e9 + number),
            ),
            json.dumps(record),
        )


def _metrics(step: int) -> dict[str, float]:
    noise = random.Random(step).random()
    main = {"time": 1e9 + 16.0 * step, "reward": 0.5 + noise / 10, "loss": noise, "entropy": 1 + noise}
    times = {f"time/{name}": 1 + noise for name in ("step", "train", "wait", "generate", "score", "sync")}
    return {**main, **times, **dict.fromkeys(METRICS, noise)}


def measure(page: Page, address: str, repeats: int) -> dict[str, Any]:
    """Open the page and use its filters; return the seconds."""
    started = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(DRAWN)
    first_view = time.perf_counter() - started
    opened = time.perf_counter()
    page.evaluate("location.hash = '#/groups'")
    page.wait_for_selector("table.groups tbody tr[data-group]")
    first_groups = time.perf_counter() - opened
    page.wait_for_selector(".indexing", state="hidden", timeout=1_200_000)
    index_s = time.perf_counter() - started
    print(f"first view {first_view:.2f} s, table {first_groups:.2f} s, index {index_s:.0f} s", flush=True)
    seconds = {}
    for sort in SORTS:
        page.evaluate("sort => { location.hash = `#/groups?sort=${encodeURIComponent(sort)}`; }", sort)
        page.wait_for_selector("main[data-view=groups]")
        page.wait_for_timeout(1000)
        # In turns, because the server keeps what the last text was found in.
        rounds = [{name: page.evaluate(TIMED, [values]) for name, values in FILTERS.items()} for _ in range(repeats)]
        for name in FILTERS:
            seconds[f"{name}, by {sort}"] = taken = median(one[name] for one in rounds)
            print(f"{name}, by {sort}: {1000 * taken:.0f} ms", flush=True)
    return {
        "first_view_s": first_view,
        "first_groups_s": first_groups,
        "index_s": index_s,
        "filter_s": max(seconds.values()),
        "filters": seconds,
    }


def exceeded(rollouts: int, result: Mapping[str, Any]) -> list[str]:
    """Return a line for each limit that a result exceeds; none for a run of fewer rollouts than the limits hold for."""
    if rollouts < FULL_SIZE:
        return []
    return [f"{name} is {result[name]:.2f}, over {limit}" for name, limit in LIMITS_S.items() if result[name] > limit]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=125_000)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the run there, and use it again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlpipe-viewer-") as scratch:
        folder = arguments.folder or Path(scratch) / "run"
        if not folder.is_dir():
            write_run(folder, arguments.groups, arguments.group_size)
        print(f"the ledger has {(folder / run_files.LEDGER).stat().st_size / 2**20:,.0f} MiB", flush=True)
        environment = {**os.environ, "XDG_CACHE_HOME": f"{scratch}/cache"}
        started = time.perf_counter()
        command = [sys.executable, "-m", "rlpipe", "view", str(folder)]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            start_s = time.perf_counter() - started
            program = shutil.which("chromium") or shutil.which("google-chrome")
            options = ["--no-sandbox"] if os.geteuid() == 0 else []
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=program, args=options)
                result = measure(browser.new_page(), address, arguments.repeats)
        finally:
            server.terminate()
            server.wait()
        index_bytes = sum(file.stat().st_size for file in Path(scratch, "cache").rglob("*.sqlite"))
    rollouts = arguments.groups * arguments.group_size
    print(json.dumps({"rollouts": rollouts, "start_s": start_s, **result, "index_mb": index_bytes / 1e6}))
    problems = exceeded(rollouts, result)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
