"""The matrix products of engines, learner ranks and scorers on CPUs, whose speed decides ``model.dtype=auto``."""

from __future__ import annotations

from collections.abc import Sequence

from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.cgroup import learner_threads
from rlpipe.hardware.device import Device
from rlpipe.hardware.device_profiles import own_name
from rlpipe.hardware.dtype_speed import Products, cpu_types, products
from rlpipe.hardware.dtypes import NARROW, WIDE, cpu_name
from rlpipe.models.model_files import model_products, read_widths
from rlpipe.rollout.engine import default_sequences, engine_threads


def engine_products(config: Config) -> Products | None:
    """Return the products of an engine's decode step, one token per running sequence; None on a GPU."""
    if config.rollout.num_gpus:
        return None
    algorithm, rollout = config.algorithm, config.rollout
    groups = -(-algorithm.groups_per_step // rollout.num_engines) * (1 + config.replay.max_staleness)
    limits = (rollout.engine_args.get(name) for name in ("max_num_seqs", "max_batch_size"))
    max_sequences = next((limit for limit in limits if isinstance(limit, int)), default_sequences(rollout))
    rows = min(groups * algorithm.completions_per_prompt, max_sequences)
    return products(rows=rows, widths=read_widths(config.model.path), num_threads=engine_threads(rollout))


def learner_products(config: Config) -> Products | None:
    """Return the products of a micro batch's forward and backward pass; None on a GPU."""
    if config.learner.num_gpus:
        return None
    return products(
        rows=config.learner.max_tokens_per_microbatch,
        widths=read_widths(config.model.path),
        num_threads=learner_threads(config.learner),
        backward=True,
    )


def scorer_products(path: str, num_cpus: float) -> Products:
    """Return the products of a scorer's own model; Ray gives the scorer a thread per CPU."""
    return model_products(path, max(1, int(num_cpus)))


def planned_dtype(config: Config, device: Device) -> str:
    """Return the dtype that ``model.dtype=auto`` stands for on such devices; may time this machine's CPU."""
    has_engines = config.algorithm.kind == "rl" and config.rollout.dtype is None
    candidates = (engine_products(config) if has_engines else None, learner_products(config))
    return dtype_on(device, [entry for entry in candidates if entry is not None])


def dtype_on(device: Device, kinds: Sequence[Products], *, on_gpu: bool = True) -> str:
    """Return the dtype that ``auto`` stands for: as timed for these products if ``device`` is this machine's CPU.

    For any other device it is ``Device.auto_dtype``.
    """
    if (device.kind, device.name, device.hardware) != ("cpu", own_name("cpu"), cpu_name()):
        return device.auto_dtype(on_gpu=on_gpu)
    return NARROW if all(cpu_types(entry).auto == NARROW for entry in kinds) else WIDE
