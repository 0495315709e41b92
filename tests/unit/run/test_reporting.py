"""The terminal messages of a run, apart from its metrics."""

from rlpipe.configs.schema.rollout_config import SamplingConfig
from rlpipe.run.reporting import cut_notice


def test_a_changed_distribution_is_reported_with_the_options_that_change_it() -> None:
    notice = cut_notice(SamplingConfig(top_p=0.9, top_k=20))
    assert notice is not None
    assert "(top_p, top_k)" in notice


def test_the_whole_distribution_needs_no_notice() -> None:
    assert cut_notice(SamplingConfig(temperature=0.7)) is None
