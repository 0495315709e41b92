"""Checks for options of loss masks that contradict each other, or leave nothing to train on."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from rlpipe.configs.data_sources import mixed_sources
from rlpipe.configs.role_boundaries import OPTION, read_role_boundaries
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError

ROLES = ("system", "user", "assistant", "tool")
"""Roles whose turns can be distinguished without ``data.role_boundaries``."""


def check_masks(config: Config) -> Iterator[str]:
    trains_rows = config.algorithm.kind != "rl"
    shared = [*_check(config.data, trains_rows)]
    yield from shared
    if config.data.source == "mix" and not shared:
        for source in mixed_sources(config.data):
            for problem in _check(source.data, trains_rows):
                yield problem.replace("data.", f"data.sources.{source.name}.")


def _check(data: DataConfig, trains_rows: bool) -> Iterator[str]:
    try:
        markers = read_role_boundaries(data.role_boundaries or ())
    except ConfigError as error:
        yield str(error)
        return
    counts_all = data.loss_mask == "all" or data.train_on_inputs or data.text_column is not None
    if not trains_rows or counts_all:
        return
    if data.role_boundaries is not None and not markers:
        yield f"{OPTION}: empty, so that no token of a conversation is trained; add entries, or set null"
        return
    known = [marker.role for marker in markers] or ROLES
    for role in data.roles_to_train:
        if role not in known:
            nearest = get_close_matches(role, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(dict.fromkeys(known))}"
            yield f"data.roles_to_train: no turns of {role!r} can be told{' by ' + OPTION if markers else ''}; {hint}"
    if not data.roles_to_train and data.train_on_eos != "all" and data.chat:
        yield "data.roles_to_train: empty, so that no token of a conversation is trained; name roles, as in [assistant]"
