"""The plan of a run, composed of sections, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from transformers import PreTrainedConfig

from rlpipe.common.formatting import count
from rlpipe.configs.constraints import check_model
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError
from rlpipe.hardware.device import Device
from rlpipe.hardware.dtypes import AUTO
from rlpipe.plan.actors import engine_kind, rank_kind
from rlpipe.plan.dtype_work import planned_dtype
from rlpipe.plan.engine_plan import plan_engine
from rlpipe.plan.learner_estimate import LearnerEstimate, TraceCache, Untraceable
from rlpipe.plan.learner_plan import plan_case
from rlpipe.plan.machine_plan import plan_machine
from rlpipe.plan.model_shape import describe_offline, read_shape
from rlpipe.plan.scorer_plan import ScorerPlan, plan_scorers
from rlpipe.plan.sections import (
    Section,
    device_section,
    engine_section,
    learner_section,
    loop_section,
    machine_section,
    read_loop,
    scorers_section,
    to_text,
    unplanned_section,
)

ASSUMPTION = "All prompts and completions are assumed to have full length. Shorter ones take less time."


@dataclass(kw_only=True, slots=True, frozen=True)
class Report:
    """The sections of a plan, as text or JSON."""

    sections: Sequence[Section]

    def to_json(self) -> str:
        """Return one object, with an object for each section."""
        return json.dumps({section.name: section.data for section in self.sections})

    def to_text(self) -> str:
        return f"{to_text(self.sections)}\n\n{ASSUMPTION}"


def make_report(config: Config, device: Device) -> Report:
    """Plan the config on the device; raise ``ConfigError`` or ``ModelError`` if that is impossible."""
    described = describe_offline(config.model.path, config.model)
    return Report(sections=[*make_sections(config, described, device)])


def with_planned_dtype(config: Config, device: Device) -> Config:
    """Replace ``auto`` by the dtype that a run on such devices chooses.

    Raises ``ConfigError`` if another option is incompatible with that dtype.
    """
    if config.model.dtype != AUTO:
        return config
    settled = replace(config, model=replace(config.model, dtype=planned_dtype(config, device)))
    for problem in check_model(settled.model, on_gpu=device.kind == "cuda"):
        raise ConfigError(f"{problem} (model.dtype={AUTO} is {settled.model.dtype} on {device.name})")
    return settled


def make_sections(config: Config, described: PreTrainedConfig, device: Device) -> Iterator[Section]:
    """Yield the sections in the order in which they are shown, one for each kind of actor."""
    requested, config = config, with_planned_dtype(config, device)
    yield device_section(device, [config.model.dtype])
    yield model_section(config, described, requested_dtype=requested.model.dtype)
    if config.algorithm.kind == "ebft_strided":
        reason = f"algorithm.kind={config.algorithm.kind} samples in the learner, which a plan does not cover"
        yield unplanned_section(reason)
    elif config.algorithm.kind != "rl":
        case = LearnerEstimate(config=config, drafts=TraceCache(described, device), engines=None)
        try:
            yield learner_section(plan_case(case), device)
        except Untraceable as error:
            yield unplanned_section(str(error))
            return
        yield machine_section(plan_machine(case, None, [], device), device)
    else:
        yield from _make_rl_sections(config, requested, described, device)


def _make_rl_sections(
    config: Config, requested: Config, described: PreTrainedConfig, device: Device
) -> Iterator[Section]:
    """Yield the sections of an RL run; scorers get the dtypes as requested, because they settle ``auto`` themselves.

    If the learner's model can't be traced, the machine and the step are left out.
    """
    engine = plan_engine(config, described, device)
    yield engine_section(engine, device)
    case = LearnerEstimate(config=config, drafts=TraceCache(described, device), engines=engine.setup)
    engines = engine_kind(config, engine)
    try:
        learner = plan_case(case)
    except Untraceable as error:
        yield unplanned_section(str(error))
        if scorers := plan_scorers(requested, described, device, [engines]):
            yield scorers_section(scorers, device)
        return
    yield learner_section(learner, device)
    scorers = plan_scorers(requested, described, device, [engines, rank_kind(config, case.memory, case.budget, device)])
    if scorers:
        yield scorers_section(scorers, device)
    planned = [scorer for scorer in scorers if isinstance(scorer, ScorerPlan)]
    yield machine_section(plan_machine(case, engines, planned, device), device)
    if (loop := read_loop(config, engine, learner, planned)) is not None:
        yield loop_section(loop)


def model_section(config: Config, described: PreTrainedConfig, *, requested_dtype: str) -> Section:
    shape = read_shape(described, config.model)
    active = f", {count(shape.num_active + shape.num_looked_up)} active" if shape.num_experts > 1 else ""
    rows = [
        ("parameters", f"{count(shape.num_parameters)}{active}"),
        ("layers", f"{shape.num_layers:,} of width {shape.hidden_size:,}"),
        ("vocabulary", f"{shape.vocab_size:,}"),
        ("type", config.model.dtype + (" (model.dtype=auto)" if requested_dtype == AUTO else "")),
    ]
    data = {**asdict(shape), "dtype": config.model.dtype}
    return Section(name="model", title=f"model {config.model.path}", rows=rows, data=data)
