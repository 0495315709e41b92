"""The controller's loops, with everything around them replaced by what the test says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from rlpipe.errors import RunError
from rlpipe.replay.ledger.run_ledger import GroupState
from rlpipe.run import controller
from rlpipe.run.controller import Controller


async def forever(*arguments: Any, **options: Any) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> Controller:
    """Return the controller of a run that resumes with one group to score, by scorers that never answer."""
    monkeypatch.setattr(controller, "watch_hosts", forever)
    monkeypatch.setattr(controller, "shares_gpus", lambda config: False)
    monkeypatch.setattr(controller, "was_sampled_from", lambda group, prompt: True)
    group = MagicMock(group_id=3)
    own = object.__new__(Controller)
    own._stopped, own._last_version, own._evaluations = asyncio.Event(), asyncio.Event(), []
    own._stop_reason, own._config, own._output, own._reporter = None, MagicMock(), MagicMock(), MagicMock()
    own._workers, own._cluster = MagicMock(pools=[], start=AsyncMock()), MagicMock()
    own._monitor = MagicMock(follow=forever, record_parts=forever, watch=forever, stop_learner=AsyncMock())
    own._monitor.ended = asyncio.Event()
    own._pool = MagicMock(run=forever)
    own._scoring = MagicMock(score_stored=MagicMock(side_effect=forever))
    own._prompts, own._replay, own._ask = MagicMock(), MagicMock(), AsyncMock(return_value=[group])
    own._resume_state = SimpleNamespace(unfinished=[(group, GroupState.GENERATED)], cursor=None)  # type: ignore[assignment]
    monkeypatch.setattr(own, "_follow_versions", forever)
    monkeypatch.setattr(own, "_watch_engines", forever)
    return own


def test_a_run_that_is_stopped_does_not_wait_for_the_scores_of_resumed_groups(resumed: Controller) -> None:
    async def scenario() -> None:
        learner: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(resumed.run(lambda: learner))
        await asyncio.sleep(0.01)
        resumed._scoring.score_stored.assert_called_once()  # type: ignore[attr-defined]
        await resumed.stop(RunError("it was told to"))
        learner.set_result(None)
        await asyncio.wait((running,), timeout=20)
        assert running.done()
        with pytest.raises(RunError, match="it was told to"):
            await running

    asyncio.run(scenario())
