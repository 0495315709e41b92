"""The replay actor that Ray starts in place of a dead one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from rlpipe.actors.replay import ReplayActor, ReplaySetup
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import LedgerLost
from rlpipe.replay.ledger.restore import RunStart


def test_one_that_died_before_it_was_told_to_start_has_lost_no_ledger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check the order in which Ray calls the process that replaces it: it repeats ``start`` among the other calls."""
    context = SimpleNamespace(was_current_actor_reconstructed=True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)

    async def run() -> None:
        actor = ReplayActor(ReplaySetup.of(Config(), tmp_path / "ledger.sqlite", {}))
        with pytest.raises(LedgerLost, match=r"restarted on a machine without .*ledger\.sqlite"):
            await actor.wait_updates(0, 0, 0.0)
        await actor.start(RunStart(config=to_tree(Config())))
        assert not (await actor.wait_updates(0, 0, 0.0)).reports

    asyncio.run(run())
