"""The speed of a CPU's matrix products in each dtype: timed once for a model's sizes, and stored beside the profile."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.common.atomic_io import write_whole
from rlpipe.hardware.device_profiles import machines_folder, own_name
from rlpipe.hardware.dtypes import NARROW, WIDE, DeviceTypes, cpu_name, cpu_switches, gpu_types, rocm_types

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_ROWS, MAX_WIDTH, MAX_INNER_WIDTH = 1024, 1024, 2048
"""Largest sizes that are timed; larger products have the same rates."""
FEWEST_ROWS = 8
SHORT_PASS_S, MAX_PASS_S = 0.003, 0.04
"""Seconds that a timed pass may take in the faster and in the slower dtype; beyond these, fewer rows are timed.

A short pass is over before another process, at the start of a run, takes a core away.
"""
REPETITIONS, REPETITIONS_S = 50, 0.3
MAX_FIRST_PASS_S = 0.3
"""Seconds of a first pass, which also prepares the products, beyond which no more rows are tried."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Products:
    """The matrix products of a feed-forward layer in one process: ``rows`` tokens, up to the inner width and back."""

    rows: int
    width: int
    inner_width: int
    num_threads: int
    backward: bool = False
    """Whether the gradients of tokens and weights are computed, too."""

    @property
    def key(self) -> str:
        shape = f"{self.rows} x {self.width} x {self.inner_width}"
        return f"{shape}, {self.num_threads} threads" + ", with backward" * self.backward


def products(*, rows: int, widths: tuple[int, int], num_threads: int, backward: bool = False) -> Products:
    """Return products of at most the largest timed sizes; ``widths`` are the model's hidden and inner width."""
    return Products(
        rows=max(FEWEST_ROWS, min(rows, MAX_ROWS)),
        width=min(widths[0], MAX_WIDTH),
        inner_width=min(widths[1], MAX_INNER_WIDTH),
        num_threads=num_threads,
        backward=backward,
    )


def device_types(device: torch.device, layer: Products) -> DeviceTypes:
    """Return the dtypes that a device of this process computes in, for these products."""
    return gpu_device_types(device) if device.type == "cuda" else cpu_types(layer)


def gpu_device_types(device: torch.device) -> DeviceTypes:
    """Return the dtypes that a GPU of this machine computes in."""
    import torch

    name = torch.cuda.get_device_name(device)
    return rocm_types(name) if torch.version.hip else gpu_types(name, torch.cuda.get_device_capability(device))


def cpu_types(layer: Products, dtype: str = NARROW) -> DeviceTypes:
    """Return the dtypes that this machine's CPU computes in, with its rates for these products."""
    return DeviceTypes(device=cpu_name(), switches=cpu_switches(), rates=cpu_rates(layer, dtype))


def cpu_rates(layer: Products, dtype: str) -> dict[str, float]:
    """Return the FLOP/s in float32 and in ``dtype`` on this machine: the stored rates, or newly timed ones.

    Timing takes less than a second after the import of torch. A dtype that torch can't multiply in is left out.
    """
    if (stored := kept_rates(layer, dtype)) is not None:
        return stored
    rates = time_products(layer, dtype)
    _store(layer, rates)
    return rates


def kept_rates(layer: Products, dtype: str) -> dict[str, float] | None:
    """Return the stored rates for this processor, these switches and this torch version; does not import torch."""
    stored = _read().get(_machine(), {}).get(layer.key, {})
    try:
        return {name: float(stored[name]) for name in {WIDE: None, dtype: None}}
    except (KeyError, TypeError, ValueError):
        return None


def forget_rates() -> None:
    """Delete the stored rates, so that all products of this machine are timed again."""
    _path().unlink(missing_ok=True)


def time_products(layer: Products, dtype: str) -> dict[str, float]:
    """Return the FLOP/s in float32 and in ``dtype``, each from the fastest of many alternating passes."""
    with threads(layer.num_threads):
        passes: dict[str, Pass] = {}
        for name in {WIDE: None, dtype: None}:
            try:
                passes[name] = _feed_forward(layer, name)
            except RuntimeError:  # no such products
                if name == WIDE:
                    raise
        rows = _affordable_rows(layer, passes)
        best = {name: _seconds(run, rows) for name, run in passes.items()}
        deadline = time.perf_counter() + REPETITIONS_S
        for _ in range(REPETITIONS):
            if time.perf_counter() > deadline:
                break
            best = {name: min(best[name], _seconds(run, rows)) for name, run in passes.items()}
    flops = 4 * rows * layer.width * layer.inner_width * (3 if layer.backward else 1)
    return {name: flops / seconds for name, seconds in best.items()}


Pass = Callable[[int], object]
"""Function that computes a number of rows once."""


def _affordable_rows(layer: Products, passes: Mapping[str, Pass]) -> int:
    """Return the model's number of rows, or as many as fit in a pass of the allowed time, at least ``FEWEST_ROWS``."""
    rows = FEWEST_ROWS
    while True:
        first = [_seconds(run, rows) for run in passes.values()]  # prepares for this shape, which may take long
        if max(first) > MAX_FIRST_PASS_S:
            return rows
        seconds = [_seconds(run, rows) for run in passes.values()]
        if rows == layer.rows or 2 * min(seconds) > SHORT_PASS_S or 2 * max(seconds) > MAX_PASS_S:
            return rows
        rows = min(2 * rows, layer.rows)


def _seconds(run: Pass, rows: int) -> float:
    begin = time.perf_counter()
    run(rows)
    return time.perf_counter() - begin


def _feed_forward(layer: Products, dtype_name: str) -> Pass:
    """Return a pass over the layer; raise ``RuntimeError`` if torch does not multiply in the dtype."""
    import torch
    from torch.nn.functional import linear

    dtype, generator = getattr(torch, dtype_name), torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        # Values as large as activations and weights; from a separate generator, so that the run's is not advanced.
        values = torch.empty(shape).uniform_(-0.1, 0.1, generator=generator)
        return values.to(dtype).requires_grad_(layer.backward)

    tokens = random(layer.rows, layer.width)
    up, down = random(layer.inner_width, layer.width), random(layer.width, layer.inner_width)

    def run(rows: int) -> None:
        out = linear(linear(tokens[:rows], up), down)
        if layer.backward:
            torch.autograd.grad(out, [tokens, up, down], out.detach())

    linear(tokens[:1, :1], up[:1, :1])
    return run


def _machine() -> str:
    """Return the key of this machine: everything that the rates depend on except the products."""
    return " | ".join([cpu_name(), f"torch {version('torch')}", *cpu_switches()])


def _path() -> Path:
    return machines_folder() / "products" / f"{own_name('cpu')}.json"


def _read() -> dict[str, Any]:
    """Return the rates by machine and products; empty if there is no file, or a damaged one that is written anew."""
    try:
        content = json.loads(_path().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s can't be read and will be replaced: %s", _path(), error)
        return {}
    is_valid = isinstance(content, dict) and all(
        isinstance(entry, dict) and all(isinstance(rates, dict) for rates in entry.values())
        for entry in content.values()
    )
    return content if is_valid else {}


def _store(layer: Products, rates: Mapping[str, float]) -> None:
    content = _read()
    machine_rates = content.setdefault(_machine(), {})
    machine_rates[layer.key] = {**machine_rates.get(layer.key, {}), **rates}
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_whole(_path(), json.dumps(content, indent=2) + "\n")
    except OSError as error:
        logger.warning("the rates of this machine can't be stored, and will be measured again next time: %s", error)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have torch compute with ``count`` threads."""
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
