"""Tests of the log lines about a run's rows that reach its user."""

import logging

from rlpipe.data.render_rows import forward_logs


def test_lines_for_users_and_warnings_are_handed_on_while_rows_are_read() -> None:
    heard: list[str] = []
    masks, rows = (logging.getLogger(f"rlpipe.data.{name}") for name in ("masks.resolve", "row_source"))
    with forward_logs(heard.append, warnings=True):
        masks.info("loss mask: %s", "built in")
        rows.info("a row is held out")
        rows.warning("a row is skipped")
        masks.warning("an odd template")
    masks.info("not any more")
    assert heard == ["loss mask: built in", "a row is skipped", "an odd template"]


def test_warnings_can_be_left_to_the_log() -> None:
    heard: list[str] = []
    with forward_logs(heard.append, warnings=False):
        logging.getLogger("rlpipe.data.cached_rows").info("rows.jsonl: 3 prepared rows are read")
        logging.getLogger("rlpipe.data.sources.row_source").warning("a row is skipped")
    assert heard == ["rows.jsonl: 3 prepared rows are read"]
