"""Checks of a run's config on this machine: output, rewards, model, data, types and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal

import torch

from rlpipe.common import run_files
from rlpipe.common.atomic_io import existing_folder, is_held, why_not_writable
from rlpipe.common.formatting import gib
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import open_run_prompts, open_source
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.doctor import reward_calls
from rlpipe.doctor.machine_checks import MAX_CLOCK_S, check_disks, cluster_address, connection_error
from rlpipe.doctor.observations import Observation, ok, problem, skipped, warning
from rlpipe.errors import ConfigError
from rlpipe.hardware.cgroup import free_host_bytes, host_memory_bytes
from rlpipe.hardware.device import Device
from rlpipe.hardware.device_profiles import DEVICES, find_device, own_name
from rlpipe.hardware.dtype_speed import cpu_types, gpu_device_types
from rlpipe.hardware.dtypes import AUTO, WIDE, DeviceTypes, cpu_name
from rlpipe.learner.checkpoint_files import list_checkpoints
from rlpipe.plan.dtype_work import engine_products, learner_products
from rlpipe.plan.report import Report, make_report
from rlpipe.replay.ledger.query import ledger_path
from rlpipe.replay.ledger.restore import why_unusable
from rlpipe.run.prepare import (
    Run,
    check_adapter_targets,
    check_base,
    check_context,
    check_reward_columns,
    collect_rewards,
    prepare_run,
    read_resume_point,
    run_start,
)
from rlpipe.types import Prompt

STATE_BYTES = 12
"""Bytes of a trained parameter in a checkpoint: its weight and two moments in float32."""
SAMPLE_ROWS = 50
CALLED_ROWS = 4
"""Rows with whose answers reward functions are called."""


@dataclass
class RunChecks:
    """The checks of one config; later ones use what earlier ones have loaded."""

    config: Config
    run: Run | None = None
    report: Report | None = field(default=None, init=False)
    prompts: Sequence[Prompt] = field(default=(), init=False)

    def all(self) -> Mapping[str, Callable[[], Iterator[Observation]]]:
        return {
            "output": self.check_output,
            "hosts": self.check_hosts,
            "rewards": self.check_rewards,
            "model": self.check_model,
            "data": self.check_data,
            reward_calls.SUBJECT: self.check_reward_calls,
            "type": self.check_dtype,
            "plan": self.check_plan,
            "disk": self.check_disks,
        }

    @property
    def is_made_first(self) -> bool:
        """Whether the policy does not exist yet, and the run will make it."""
        model = self.config.model
        return model.prepare is not None and not Path(model.path).exists()

    def check_output(self) -> Iterator[Observation]:
        """Check that the output can be written, that no other run writes there, and what the run would resume from."""
        output = Path(self.config.output).absolute()
        point = read_resume_point(self.config)
        if is_held(output):
            raise ConfigError(f"another run writes to output={output}: wait until it ends, or choose another output")
        folder = self.config.ledger.folder
        if folder is not None and cluster_address(self.config) is None:
            if (reason := why_not_writable(Path(folder).absolute())) is not None:
                raise ConfigError(f"ledger.folder={folder}: {reason}; choose another")
            why_unusable(ledger_path(output, self.config.name, folder), run_start(self.config, point))
        yield ok("output", f"{output}, " + ("a new run" if point.checkpoint is None else f"from {point.checkpoint}"))

    def check_hosts(self) -> Iterator[Observation]:
        """Check that the hosts of a cluster share the output's files, agree about the time, and are large enough."""
        address = cluster_address(self.config)
        if address is None or connection_error(address) is not None:  # which the check of the network tells
            return
        from rlpipe.run.host_probe import probe_cluster  # Ray takes a second

        existing = existing_folder(Path(self.config.output).absolute())
        with NamedTemporaryFile(dir=existing, prefix=".rlpipe-doctor-") as file:
            cluster = probe_cluster(self.config, Path(file.name))
        if cluster.lack is not None:
            yield problem("hosts", cluster.lack)
        for host in cluster.hosts:
            if not host.sees_file:
                share = "put output on a file system that all hosts share, and the ledger on a disk (ledger.folder)"
                yield problem("hosts", f"host {host.address} does not see {existing}", share)
            if abs(host.ahead_s) > MAX_CLOCK_S:
                text = f"the clock of host {host.address} is {host.ahead_s:+.0f} s from this machine's"
                yield problem("hosts", text, "set both by NTP")
        agree = all(host.sees_file and abs(host.ahead_s) <= MAX_CLOCK_S for host in cluster.hosts)
        if agree and cluster.lack is None:
            yield ok(
                "hosts", f"{len(cluster.hosts)} hosts see {existing}, their clocks agree, and the run fits on them"
            )

    def check_rewards(self) -> Iterator[Observation]:
        rewards, _ = collect_rewards(self.config, [])
        yield ok("rewards", ", ".join(rewards) or "none, as the run needs none")

    def check_model(self) -> Iterator[Observation]:
        """Load the tokenizer and the description of the model, but not its weights."""
        if self.is_made_first:
            yield skipped("model", f"model.prepare={self.config.model.prepare} makes it when the run starts")
            return
        run = prepare_run(self.config)
        tokenizer = load_tokenizer(run.model)
        self.run = run
        check_base(run)
        if self.config.algorithm.kind == "rl":
            check_context(run)
            check_adapter_targets(run)
        yield ok("model", f"{self.config.model.path}, {len(tokenizer):,} tokens in its vocabulary")

    def check_data(self) -> Iterator[Observation]:
        """Render the first rows, and check that rewards get the columns that they need."""
        if self.run is None:
            yield skipped("data", "it needs the model's tokenizer")
            return
        tokenizer = load_tokenizer(self.run.model)
        held_out = ""
        if self.config.algorithm.kind == "rl":
            source, held_out_prompts = open_run_prompts(self.config, self.run.model, tokenizer)
            check_reward_columns(self.run, [*held_out_prompts[:1], *source.examples()])
            held_out = f", {len(held_out_prompts)} held out"
        else:
            source = open_source(self.config, tokenizer)  # type: ignore[assignment]
        items = source.take(min(SAMPLE_ROWS, source.num_rows or SAMPLE_ROWS))
        if self.config.algorithm.kind == "rl":
            self.prompts = items[:CALLED_ROWS]
        unusable = {name: number for name, number in source.skip_counts.items() if name != "held_out" and number}
        rows = "any number of" if source.num_rows is None else f"{source.num_rows:,}"
        text = f"{rows} rows{held_out}"
        if sum(unusable.values()) > SAMPLE_ROWS / 2:
            reasons = ", ".join(f"{number} {name}" for name, number in unusable.items())
            yield warning("data", f"{text}; of the first rows, many can't be used ({reasons})", "rlpipe data stats")
        else:
            yield ok("data", text)

    def check_reward_calls(self) -> Iterator[Observation]:
        """Call the reward functions on answers to the first rows; episodes are scored in the trial step alone."""
        if self.run is None or not self.prompts or self.config.environment.takes_rows:
            return
        if called := reward_calls.called_rewards(self.run.rewards):
            eos_id = load_tokenizer(self.run.model).eos_token_id
            yield from reward_calls.call_rewards(called, self.run.model, self.prompts, eos_id)

    def check_dtype(self) -> Iterator[Observation]:
        """Check that this machine's devices are fast in the types that the config asks for."""
        fast: dict[str, None] = {}
        for option, dtype, types, fix in self._chosen_types():
            if types.is_slow(dtype):
                can = types.narrow is not None or dtype in types.rates
                yield (warning if can else problem)("type", f"{option}={dtype}: {types.describe(dtype)}", fix)
                return
            fast[f"{option}={dtype}"] = None
        description = f"{', '.join(fast)}, which this machine is fast in"
        yield ok("type", description if fast else f"model.dtype={self.config.model.dtype}")

    def _chosen_types(self) -> Iterator[tuple[str, str, DeviceTypes, str]]:
        """Yield option, dtype, the dtypes of the device if they are known, and the fix, for learner and engines."""
        config = self.config
        learner = ("model.dtype", config.model.dtype, "set model.dtype=auto")
        engine = ("rollout.dtype", config.rollout.dtype, "leave rollout.dtype out") if config.rollout.dtype else learner
        components = [(learner, config.learner.num_gpus, learner_products)]
        if config.algorithm.kind == "rl":
            components.append((engine, config.rollout.num_gpus, engine_products))
        for (option, dtype, fix), num_gpus, products_of in components:
            if dtype in (AUTO, WIDE):
                continue
            if num_gpus and torch.cuda.is_available():
                yield option, dtype, gpu_device_types(torch.device("cuda")), fix
            elif not num_gpus and not self.is_made_first and (products := products_of(config)) is not None:
                yield option, dtype, cpu_types(products, dtype), fix

    def check_plan(self) -> Iterator[Observation]:
        """Check that engines, learner and rewards fit into the memory of this machine, by the plan."""
        if self.is_made_first:
            yield skipped("plan", "it needs the model")
            return
        if len(set(_uses_gpus(self.config))) > 1:
            yield skipped("plan", "learner and engines compute on different kinds of devices, which it does not cover")
            return
        if _on_gpu(self.config) and not torch.cuda.is_available():
            yield skipped("plan", "this machine has no GPU; rlpipe plan --device NAME plans for another one")
            return
        self.report = make_report(self.config, this_device(self.config))
        needed = None
        for section in self.report.sections:
            needed = section.data.get("num_bytes", needed) if section.name == "machine" else needed
            if section.data.get("planned") is False:
                yield skipped("plan", section.data["reason"])
            elif section.data.get("fits") is False:
                changes = [
                    change["change"] if isinstance(change, dict) else change for change in _changes(section.data)
                ]
                yield problem("plan", f"{section.title}: {section.data['problem']}", " or ".join(changes[:3]))
        if needed is None:
            return
        if needed > free_host_bytes():
            yield warning(
                "plan",
                f"the run takes {gib(needed)}, and {gib(free_host_bytes())} are free now",
                "end other programs first",
            )
        elif needed <= host_memory_bytes():
            yield ok("plan", f"the run takes {gib(needed)} of this machine's {gib(host_memory_bytes())}")

    def check_disks(self) -> Iterator[Observation]:
        yield from check_disks(Path(self.config.output).absolute(), self._checkpoint_bytes())

    def _checkpoint_bytes(self) -> int | None:
        """Return the bytes that a run's checkpoints will take besides those that are there; None if not known.

        One more than the run keeps is on the disk while it is written.
        """
        sections = self.report.sections if self.report is not None else ()
        trained = next((data["num_trained"] for section in sections if "num_trained" in (data := section.data)), None)
        if trained is None:
            return None
        num_there = len(list_checkpoints(Path(self.config.output).absolute() / run_files.CHECKPOINTS))
        return int(trained) * STATE_BYTES * max(self.config.checkpoint.keep + 1 - num_there, 1)


def _changes(data: Mapping[str, Any]) -> list[Any]:
    changes = data.get("changes")
    return list(changes) if isinstance(changes, list | tuple) else []


def _uses_gpus(config: Config) -> list[bool]:
    """Return whether the learner, and the engines if there are any, compute on GPUs."""
    engines = [config.rollout.num_gpus > 0] if config.algorithm.kind == "rl" else []
    return [config.learner.num_gpus > 0, *engines]


def _on_gpu(config: Config) -> bool:
    return any(_uses_gpus(config))


def this_device(config: Config) -> Device:
    """Return this machine as a device: as measured if it was, else with assumed rates and its own memory."""
    kind: Literal["cuda", "cpu"] = "cuda" if _on_gpu(config) else "cpu"
    host = host_memory_bytes()
    with suppress(ConfigError):
        device = find_device()
        if device.kind == kind:
            return replace(device, host_memory_bytes=host)
    memory = torch.cuda.get_device_properties(0).total_memory if kind == "cuda" else host
    processor = cpu_name() if kind == "cpu" else None  # by which the plan knows that it can be timed here
    assumed = replace(next(iter(DEVICES.values())), name=own_name(kind), kind=kind, hardware=processor)
    return replace(assumed, memory_bytes=memory, host_memory_bytes=host)
