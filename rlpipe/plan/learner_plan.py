"""The plan of the learner, and the changes that make it fit or faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from operator import attrgetter
from typing import Any

from transformers import PreTrainedConfig

from rlpipe.common.formatting import GIB
from rlpipe.configs.constraints import contradictions
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import RlpipeError
from rlpipe.hardware.device import Device
from rlpipe.hardware.device_profiles import larger_devices
from rlpipe.learner.strategies.chunked import UNPLANNED_TOWER
from rlpipe.learner.workload import sequence_tokens
from rlpipe.offload.decision import Knobs
from rlpipe.offload.planner.planner import AMORTISING_SEQUENCES
from rlpipe.plan.engine_memory import EngineSetup
from rlpipe.plan.learner_estimate import LearnerEstimate, TraceCache
from rlpipe.plan.learner_memory import LearnerMemory, MemoryBudget
from rlpipe.plan.learner_time import StepTime, Work
from rlpipe.plan.remedy import Remedy

RANKS = (2, 4, 8)
"""Numbers of ranks that are proposed."""
LIMITS = ("device_memory_gib", "host_memory_gib")
MAX_DOUBLED = 4
"""Most times that a machine's memory is doubled."""
MAX_PAIRS = 3
"""Most pairs of changes that are proposed if no single change is enough."""

Options = Mapping[str, Any]
"""Values by dotted option name, as on the command line."""


def remedies(case: LearnerEstimate) -> list[Remedy]:
    """Return the smallest change of each kind with which the learner fits; if there are none, pairs of changes."""
    return _alone(case) or list(islice(_pairs(case), MAX_PAIRS))


def _alone(case: LearnerEstimate) -> list[Remedy]:
    changes = [change for kind in _kinds(case) if (change := _first_that_fits(case, kind)) is not None]
    return [*changes, *_other_ranks(case), *_more_host_memory(case), *_larger_device(case)]


def _pairs(case: LearnerEstimate) -> Iterator[Remedy]:
    """Yield pairs of changes with which the learner fits; not all, because planning one takes up to seconds.

    Each pair has the change that saves most (chunked offload, or else more ranks) and the smallest sufficient change of
    another kind; then come pairs with other hardware.
    """
    kinds = [options for kind in _kinds(case) if (options := [*kind])]
    offload, ranks = _chunked(case.config), _more_ranks(case)
    strongest = (offload or ranks)[-1:]
    for kind in (*kinds, *([ranks] if offload and ranks else [])):
        pairs: list[Options] = [
            {**strong, **options} for strong in strongest for options in kind if not {*strong} & {*options}
        ]
        if (change := _first_that_fits(case, pairs)) is not None:
            yield change
    for strong in strongest:
        yield from _with_hardware(case, strong, _more_host_memory)
    for kind in kinds:
        if kind != offload:  # chunks would be traced again for every device
            yield from _with_hardware(case, kind[-1], _larger_device)


def _with_hardware(
    case: LearnerEstimate, options: Options, larger: Callable[[LearnerEstimate], Iterator[Remedy]]
) -> Iterator[Remedy]:
    changed = _change(case, options)
    if changed is not None:
        for remedy in larger(changed[1]):
            yield replace(remedy, change=f"{changed[0]} {remedy.change}")


def with_options(config: Config, options: Options) -> Config:
    """Return a copy of the config with other values of some options, by their dotted names."""
    for name, value in options.items():
        config = _with_option(config, name.split("."), value)
    return config


def _with_option(section: Any, path: list[str], value: Any) -> Any:
    name, *inner = path
    return replace(section, **{name: _with_option(getattr(section, name), inner, value) if inner else value})


def read_option(config: Config, name: str) -> Any:
    return attrgetter(name)(config)


def _kinds(case: LearnerEstimate) -> Iterator[list[Options]]:
    """Yield the options of each kind of change, ordered from the smallest change."""
    config, learner = case.config, case.config.learner
    is_full_training = config.model.adapter.kind == "none"
    if learner.offload == "chunked":
        yield _unlimited(config)
        yield [{"learner.chunked.state_dtype": "bfloat16"}] if is_full_training else []
    else:
        yield [{"model.gradient_checkpointing": True}]
        yield [{"learner.optimizer.name": "adamw_8bit"}]
        yield _chunked(config)
    if learner.strategy == "zero3":
        yield [{"learner.zero3.offload_optimizer": True}]
        yield [{"learner.zero3.offload_optimizer": True, "learner.zero3.offload_parameters": True}]
    yield [{"learner.max_tokens_per_microbatch": tokens} for tokens in _shorter(config)]
    if config.model.adapter.kind == "lora":
        yield [{"model.adapter.kind": "qlora"}]
    if is_full_training:
        yield [{"model.adapter.kind": "lora"}]


def _chunked(config: Config) -> list[Options]:
    """Return the options for chunked offload; empty if it is chosen already."""
    if config.learner.offload == "chunked":
        return []
    offload = {"learner.offload": "chunked", "model.gradient_checkpointing": False}
    is_full_training = config.model.adapter.kind == "none"
    return [offload, *([{**offload, "learner.chunked.state_dtype": "bfloat16"}] if is_full_training else [])]


def _unlimited(config: Config) -> list[Options]:
    """Return options that remove the config's limits and knobs of chunks: each alone, then all of them."""
    names = [f"learner.chunked.{name}" for name in (*LIMITS, *(entry.name for entry in fields(Knobs)))]
    names = [name for name in names if read_option(config, name) is not None]
    return [*({name: None} for name in names), dict.fromkeys(names)]


def _more_ranks(case: LearnerEstimate) -> list[Options]:
    """Return options with more ranks, each of which holds less."""
    sharded = {"learner.strategy": "fsdp2"} if case.config.learner.strategy == "single" else {}
    return [{**sharded, "learner.num_ranks": count} for count in RANKS if count > case.config.learner.num_ranks]


def _other_ranks(case: LearnerEstimate) -> Iterator[Remedy]:
    """Yield the first number of ranks that fits: more; or fewer, because the ranks of a machine share its memory."""
    fewer = [{"learner.num_ranks": count} for count in range(case.config.learner.num_ranks - 1, 0, -1)]
    for options in (*_more_ranks(case), *fewer):
        changed = _change(case, options)
        if changed is not None and _fits(changed[1]):
            yield _describe(*changed)
            return


def _more_host_memory(case: LearnerEstimate) -> Iterator[Remedy]:
    """Yield the least host memory that is enough, in doublings."""
    device = case.device
    for doubled in range(1, MAX_DOUBLED + 1):
        larger = replace(device, host_memory_bytes=device.host_memory_bytes * 2**doubled)
        changed = replace(case, drafts=replace(case.drafts, device=larger))
        if _fits(changed):
            yield _describe(f"--host-memory-gib {larger.host_memory_bytes / GIB:g}", changed)
            return


def _shorter(config: Config) -> Iterator[int]:
    """Yield halves of the micro batch, as long as a sequence of full length fits in."""
    tokens, min_tokens = config.learner.max_tokens_per_microbatch, sequence_tokens(config)
    if config.algorithm.kind != "rl":  # rows may be as long as a micro batch: shorter ones would be cut
        return
    while tokens > min_tokens:
        tokens = max(min_tokens, tokens // 2)
        yield tokens


def _first_that_fits(case: LearnerEstimate, kind: list[Options]) -> Remedy | None:
    """Return the first change of a kind that fits; only tried if the last one, which takes least memory, fits."""
    tried = [changed for options in kind if (changed := _change(case, options)) is not None]
    if not tried or not _fits(tried[-1][1]):
        return None
    return _describe(*next(entry for entry in tried if _fits(entry[1])))


def _change(case: LearnerEstimate, options: Options) -> tuple[str, LearnerEstimate] | None:
    """Return the changed case with its text; None if nothing changes, or if the options contradict each other."""
    options = {name: value for name, value in options.items() if read_option(case.config, name) != value}
    config = with_options(case.config, options)
    if not options or {*contradictions(config)} - {*contradictions(case.config)}:
        return None
    return " ".join(f"{name}={_text(value)}" for name, value in options.items()), replace(case, config=config)


def _fits(case: LearnerEstimate) -> bool:
    try:
        return case.problem is None
    except RlpipeError:
        return False


def _describe(text: str, case: LearnerEstimate) -> Remedy:
    assert case.memory is not None, "what fits has a memory"
    return Remedy(change=text, seconds=case.time.seconds, num_bytes=case.memory.device.total)


def _larger_device(case: LearnerEstimate) -> Iterator[Remedy]:
    """Yield the smallest device of the table that is large enough."""
    for device in larger_devices(case.device):
        changed = replace(case, drafts=replace(case.drafts, device=device))
        if _fits(changed):
            yield _describe(f"--device {device.name}", changed)
            return


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(kw_only=True, slots=True, frozen=True)
class LearnerPlan:
    """The plan of one rank; all ranks are alike."""

    strategy: str
    offload: str
    num_ranks: int
    num_parameters: int
    """Number of parameters, including the adapter."""
    num_trained: int
    budget: MemoryBudget
    memory: LearnerMemory | None
    """Memory of a rank; None if no offload schedule fits."""
    decision: str | None
    """Decision of chunked offload, as the learner will log it."""
    problem: str | None
    """Why a rank does not fit; None if it does."""
    work: Work
    time: StepTime | None
    """Time of a step; None if a rank does not fit."""
    changes: Sequence[Remedy]
    """Changes with which it fits; empty if it fits."""
    notes: Sequence[str] = ()
    """Remarks for the user."""

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second of all ranks."""
        return self.work.step_tokens / self.time.seconds if self.time is not None else 0.0


def plan_learner(
    config: Config, described: PreTrainedConfig, device: Device, engines: EngineSetup | None = None
) -> LearnerPlan:
    """Plan one rank of the config's learner.

    ``described`` is transformers' config of its model, ``engines`` the setup of engines that may be on the same GPUs.
    Raises ``ConfigError`` if the learner does not run on such a device or if its options are impossible, and
    ``ModelError`` if the model can't be described or traced.
    """
    return plan_case(LearnerEstimate(config=config, drafts=TraceCache(described, device), engines=engines))


def plan_case(case: LearnerEstimate) -> LearnerPlan:
    """Plan the learner of a case; raises as ``plan_learner`` does."""
    problem, learner = case.problem, case.config.learner
    return LearnerPlan(
        strategy=learner.strategy,
        offload=learner.offload,
        num_ranks=learner.num_ranks,
        num_parameters=case.policy.num_parameters,
        num_trained=case.policy.num_trained,
        budget=case.budget,
        memory=case.memory,
        decision=case.description,
        problem=problem,
        work=case.work,
        time=case.time if problem is None else None,
        changes=[] if problem is None else remedies(case),
        notes=list(_notes(case)),
    )


def _notes(case: LearnerEstimate) -> Iterator[str]:
    if case.misses_tower:
        yield UNPLANNED_TOWER
    if case.work.update_sequences < AMORTISING_SEQUENCES:
        yield (
            f"an update has {case.work.update_sequences:g} sequences, which are few for its fixed costs, such as "
            f"the optimizer; {AMORTISING_SEQUENCES} or more are better"
        )
