"""Prepares a run before anything starts: output folder, resume point, rewards, checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlpipe.common import run_files
from rlpipe.common.atomic_io import create_once, held, is_held, why_not_writable, write_whole
from rlpipe.common.hub import absolute_source
from rlpipe.common.imports import import_object, reading_files
from rlpipe.configs.data_sources import all_sources
from rlpipe.configs.options import changed_options, to_tree, to_yaml
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config, longest_conversation
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import ConfigError, DataError, ModelError
from rlpipe.learner.checkpoint_files import (
    damaged,
    latest,
    read_extra,
    resolve_checkpoint,
    set_damaged_aside,
    set_newer_aside,
)
from rlpipe.learner.workload import REWARD_HEADS
from rlpipe.models.gguf_models import model_folder
from rlpipe.models.model_files import (
    WHOLE_QUANTIZED,
    converted_folder,
    is_gguf,
    is_quantized_model,
    read_known_config,
    read_num_experts,
)
from rlpipe.replay.ledger.query import ledger_path
from rlpipe.replay.ledger.restore import RunStart, mark_output, why_unusable
from rlpipe.rollout.engine import resolve_engine
from rlpipe.rollout.serving_choice import choose_serving
from rlpipe.scoring.pools import FEATURE_PATH, feature_configs
from rlpipe.scoring.rewards import (
    ENVIRONMENT_PATH,
    TASK_COLUMN,
    RewardActor,
    check_reward,
    load_reward,
    missing_columns,
    runs_code_of_models,
)
from rlpipe.tracking.phases import PHASES
from rlpipe.types import Prompt

RewardLike = Callable[..., Any]


@dataclass(kw_only=True, frozen=True)
class ResumePoint:
    """State from which a run continues; the defaults are those of a new run."""

    checkpoint: Path | None = None
    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    num_rows: int | None = None
    """Position in the rows of SFT, and their number in an epoch; RL keeps them in the ledger."""
    run_id: str | None = None
    """Id of the run that wrote the checkpoint."""
    dtype: str | None = None
    """Type that the run computed in."""
    num_steps: int | None = None
    """Steps that the run was asked for when it wrote the checkpoint."""
    newest: Path | None = None
    """The newest checkpoint in the output when the point was read."""
    messages: Sequence[str] = ()
    """Lines about the resume point for the user."""


@dataclass(kw_only=True, frozen=True)
class Run:
    """Checked input of a run."""

    config: Config
    model: ModelConfig
    """The config's model with absolute paths, which are valid in any working directory."""
    rewards: Mapping[str, RewardConfig]
    callables: Mapping[str, RewardLike]
    """Rewards that the caller passed as objects, by name."""
    output: Path
    requested_dtype: str
    """``model.dtype`` as the user wrote it; in ``config`` and ``model``, ``auto`` may have been replaced by a type."""


def prepare_run(config: Config, rewards: Sequence[RewardLike] = ()) -> Run:
    """Import every reward, then create the policy with ``model.prepare`` if it does not exist yet.

    Raises ``InputError`` if a reward or the policy can't be used.
    """
    run_rewards, callables = collect_rewards(config, rewards)
    if config.model.prepare is not None:
        prepare = import_object(config.model.prepare, what="model.prepare", error=ConfigError)
        create_once(Path(config.model.path), lambda: prepare(config))
    with _converting(config.model.path):
        model = _with_absolute_paths(config.model)
    return Run(
        config=config,
        model=model,
        rewards=run_rewards,
        callables=callables,
        output=Path(config.output).absolute(),
        requested_dtype=config.model.dtype,
    )


def _converting(path: str) -> AbstractContextManager[None]:
    """Return the progress phase of converting a GGUF file, or a null context if there is nothing to convert."""
    if not is_gguf(path) or converted_folder(path).exists():
        return nullcontext()
    return PHASES.phase(f"dequantizing {path}, which is done once")


@contextmanager
def open_output(run: Run, start: ResumePoint) -> Iterator[ResumePoint]:
    """Create the run's folder, lock it against other runs, and write the resolved config to it.

    Yields the resume point, which is read again if another run has written a checkpoint since. Raises ``ConfigError``
    if the folder can't be written, or if another run writes there.
    """
    with hold_output(run.output):
        if _newest(run.config) != start.newest:
            start = read_resume_point(run.config)
        with naming_output(run.output):
            write_whole(run.output / run_files.CONFIG, to_yaml(run.config))
            mark_output(run.output)
        yield start


@contextmanager
def hold_output(output: Path) -> Iterator[None]:
    """Create a run's folder, and lock it within the block; raise ``ConfigError`` if another run holds it."""
    with naming_output(output):
        output.mkdir(parents=True, exist_ok=True)
    with held(output) as has_lock:
        if not has_lock:
            raise _held_error(output)
        yield


def refuse_if_held(config: Config) -> None:
    """Raise ``ConfigError`` if another run holds the output now, before anything is read that it may be writing."""
    output = Path(config.output).absolute()
    with suppress(OSError):  # no such folder, or none that can be read
        if is_held(output):
            raise _held_error(output)


def _held_error(output: Path) -> ConfigError:
    return ConfigError(f"another run writes to output={output}: wait until it ends, or choose another output")


@contextmanager
def naming_output(output: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a ``ConfigError`` that names the output."""
    try:
        yield
    except OSError as error:
        raise _unwritable(output, error) from error


def _unwritable(output: Path, problem: object) -> ConfigError:
    return ConfigError(f"output={output} can't be written ({problem}): fix that, or choose another output")


def _with_absolute_paths(model: ModelConfig) -> ModelConfig:
    tokenizer, chat_template, adapter = (
        path and absolute_source(path) for path in (model.tokenizer, model.chat_template, model.adapter.path)
    )
    return replace(
        model,
        path=model_folder(absolute_source(model.path)),
        tokenizer=tokenizer,
        chat_template=chat_template,
        adapter=replace(model.adapter, path=adapter),
    )


def collect_rewards(
    config: Config, given: Sequence[RewardLike]
) -> tuple[dict[str, RewardConfig], dict[str, RewardLike]]:
    """Import and check all rewards, of the config and from the caller; return them, and the caller's objects, by name.

    Raises ``InputError`` if one can't be used.
    """
    rewards: dict[str, RewardConfig] = {}
    callables: dict[str, RewardLike] = {}
    if config.scoring.on_rollouts_scored is not None:
        import_object(config.scoring.on_rollouts_scored, what="scoring.on_rollouts_scored", error=ConfigError)
    for name, entry in config.scoring.rewards.items():
        loaded = load_reward(entry.path, entry.kwargs)
        _check_run(name, loaded, entry, config)
        rewards[name] = _completed(name, entry, loaded, config)
    for reward in given:
        name = getattr(reward, "__name__", type(reward).__name__)
        if name in rewards:
            raise ConfigError(f"two rewards are called {name!r}: rename one of them")
        check_reward(reward, {}, name)
        rewards[name] = _completed(name, RewardConfig(path=f"{reward.__module__}:{name}"), reward, config)
        callables[name] = reward
    if config.algorithm.kind == "rl" and config.algorithm.ebft.reward:
        features = feature_configs(config.algorithm.ebft.features)
        if clashes := rewards.keys() & features.keys():
            raise ConfigError(f"{', '.join(sorted(clashes))} is a name of EBFT's rewards: rename yours")
        rewards |= features
    if config.algorithm.kind == "rl" and config.environment.takes_rows:
        if "environment" in rewards:
            raise ConfigError("environment is the name of the environment's own reward: rename yours")
        rewards["environment"] = RewardConfig(path=ENVIRONMENT_PATH, weight=config.environment.weight)
    by = config.data.held_out.correct_by
    if config.algorithm.kind == "rl" and by is not None and by not in rewards:
        raise ConfigError(f"data.held_out.correct_by: no reward is called {by!r}; there are {', '.join(rewards)}")
    if config.algorithm.kind == "rl" and not rewards:
        raise ConfigError("the run has no reward: add one under scoring.rewards, or pass rewards=[...]")
    return rewards, callables


def _check_run(name: str, reward: RewardLike, entry: RewardConfig, config: Config) -> None:
    if config.algorithm.kind == "rl" and isinstance(reward, type) and issubclass(reward, RewardActor):
        try:
            reward.check_run(config.model, entry.kwargs)
        except ValueError as error:
            raise ConfigError(f"scoring.rewards.{name}: {error}") from None


def _completed(name: str, entry: RewardConfig, reward: RewardLike, config: Config) -> RewardConfig:
    """Return the reward's config with its number of processes and its memory limit filled in.

    Classes and rewards that request GPUs run in processes of their own, without a default memory limit; functions get
    the limit of ``scoring.memory_gb``. Raises ``ConfigError`` if the options contradict each other.
    """
    if isinstance(reward, type) and entry.isolation == "sandbox":
        raise ConfigError(
            f"scoring.rewards.{name}.isolation: a sandbox is a fresh process for each call, in which the state of a "
            "RewardActor class would be lost; set process, or make it a function"
        )
    _check_isolation(name, entry, reward, [source.data.task for source in all_sources(config.data)])
    if entry.is_served:
        return entry
    needs_processes = isinstance(reward, type) or entry.num_gpus > 0
    if needs_processes:
        return replace(entry, num_processes=entry.num_processes or 1)
    if entry.memory_gb is None:
        return replace(entry, memory_gb=config.scoring.memory_gb)
    if entry.num_processes is None and entry.isolation == "process":
        raise ConfigError(
            f"scoring.rewards.{name}.memory_gb: its process is shared with other rewards; set scoring.memory_gb, "
            "or give it num_processes of its own"
        )
    return entry


def _check_isolation(name: str, entry: RewardConfig, reward: RewardLike, tasks: Iterable[Any]) -> None:
    """Raise ``ConfigError`` if a reward without a sandbox runs what models write for these tasks of reasoning-gym."""
    if entry.isolation != "sandbox" and runs_code_of_models(reward, tasks):
        raise ConfigError(
            f"scoring.rewards.{name}.isolation: {entry.path} runs code that the model wrote; set it to sandbox"
        )


def check_reward_columns(run: Run, prompts: Sequence[Prompt]) -> None:
    """Raise ``DataError`` if a reward function needs a column that one of the prompts lacks.

    Raises ``ConfigError`` if one runs what models write for a prompt's task of reasoning-gym, without a sandbox.
    """
    for name, reward in run.rewards.items():
        if reward.path == FEATURE_PATH:
            continue  # rows without ground truth are skipped
        function = run.callables[name] if name in run.callables else load_reward(reward.path, reward.kwargs)
        for columns in (prompt.task.keys() for prompt in prompts):
            if missing := missing_columns(function, reward.kwargs, columns):
                existing = ", ".join(columns) or "none"
                raise DataError(
                    f"reward {name!r} needs the column {', '.join(missing)}; existing columns: {existing}; rename the"
                    f" parameter or the column, or set scoring.rewards.{name}.kwargs.{missing[0]}"
                )
        _check_isolation(name, reward, function, [prompt.task.get(TASK_COLUMN) for prompt in prompts])


def check_base(run: Run) -> None:
    """Raise ``ConfigError`` if the model's files are quantized, and the run trains, sends or saves whole models."""
    config = replace(run.config, model=run.model)
    adapter = run.model.adapter
    whole = adapter.kind == "none" or adapter.merge or config.algorithm.kind in REWARD_HEADS
    if config.algorithm.kind == "rl":
        whole = choose_serving(config, resolve_engine(config.rollout)).kind == "full"
    if whole and is_quantized_model(run.model.path):
        raise ConfigError(f"model.path={run.model.path}: {WHOLE_QUANTIZED}")


def check_adapter_targets(run: Run) -> None:
    """Raise ``ConfigError`` if the adapter's targets include experts, which engines can't apply on top of the base."""
    adapter = run.config.model.adapter
    if (
        choose_serving(run.config, resolve_engine(run.config.rollout)).kind != "lora"
        or adapter.target_modules != "all-linear"
    ):
        return
    num_experts = read_num_experts(run.model.path)
    if num_experts > 1:
        raise ConfigError(
            f"model.adapter.target_modules: all-linear includes the router and the {num_experts} experts of "
            f"model.path={run.model.path}, which engines can't serve on top of their base; set "
            "model.adapter.merge=true, or name modules such as [q_proj,k_proj,v_proj,o_proj]"
        )


def check_evaluation(run: Run, held_out: Sequence[Prompt]) -> None:
    """Raise ``ConfigError`` if there are no held-out prompts, or no rewards for their answers."""
    if not held_out:
        raise ConfigError("nothing to evaluate on: set data.held_out.size, data.held_out.path or data.held_out.split")
    if not run.rewards:
        raise ConfigError("nothing to evaluate with: add a reward under scoring.rewards")


def check_context(run: Run) -> None:
    """Raise ``ConfigError`` if the longest prompt and completion exceed the policy's maximum number of positions."""
    rollout, prompt_tokens = run.config.rollout, run.config.data.max_prompt_tokens
    num_tokens = longest_conversation(run.config)
    positions = _num_positions(run.model)
    if positions is not None and num_tokens > positions:
        limits = f"data.max_prompt_tokens={prompt_tokens} and rollout.sampling.max_tokens={rollout.sampling.max_tokens}"
        subject = (
            f"{limits} are together" if rollout.max_model_len is None else f"rollout.max_model_len={num_tokens} is"
        )
        raise ConfigError(f"{subject} more than the {positions} positions of model.path={run.model.path}: set less")


def _num_positions(model: ModelConfig) -> int | None:
    """Return the maximum number of positions in the model's config, or None if it has none."""
    try:
        with reading_files(f"model.path={model.path} can't be read", "", error=ModelError):
            settings = read_known_config(model.path)
            if settings is not None and "max_position_embeddings" in settings and not settings.get("rope_scaling"):
                config: Any = SimpleNamespace(**settings)
            else:
                from rlpipe.models.loading import describe_model

                config = describe_model(model.path, model).get_text_config()
            positions = getattr(config, "max_position_embeddings", None)
            scaling = getattr(config, "rope_parameters", None) or {}
            return None if positions is None else int(positions * scaling.get("factor", 1))
    except ModelError:
        return None  # the engine and the learner report what is wrong with it


def _newest(config: Config) -> Path | None:
    return latest(Path(config.output).absolute() / run_files.CHECKPOINTS)


def set_others_aside(output: Path, start: ResumePoint) -> ResumePoint:
    """Rename damaged checkpoints and those newer than the one that the run continues from; add messages to the point.

    To be called once nothing of the config or the data can prevent the run, by the holder of the output.
    """
    folder = output / run_files.CHECKPOINTS
    with naming_output(output):
        damaged_aside = set_damaged_aside(folder, newer_than=start.step)
        newer_aside = set_newer_aside(folder, start.step) if start.checkpoint is not None else []
    messages = [f"a checkpoint is damaged ({problem}); it is now {path}" for path, problem in damaged_aside.items()]
    messages += [f"the run continues from an older checkpoint; a newer one is now {path}" for path in newer_aside]
    if start.checkpoint is not None:
        messages += [f"resuming from {start.checkpoint}, after step {start.step}"]
    return replace(start, messages=[*start.messages, *messages])


def read_resume_point(config: Config) -> ResumePoint:
    """Return the point from which the run would continue, according to ``resume``; change nothing.

    Raises ``ConfigError`` if the output can't be written, or if its checkpoint or ledger does not fit the config.
    """
    output = Path(config.output).absolute()
    ledger = ledger_path(output, config.name, config.ledger.folder)
    if (problem := why_not_writable(output)) is not None:
        raise _unwritable(output, problem)
    newest = _newest(config)
    start = ResumePoint() if config.resume == "never" else _read_checkpoint(config, output / run_files.CHECKPOINTS)
    start = replace(start, newest=newest)
    if config.resume == "never":
        _check_is_new(output, ledger)
    if config.algorithm.kind == "rl" and config.ledger.folder is None:  # otherwise it may be on another machine
        why_unusable(ledger, run_start(config, start))
    return start


def _read_checkpoint(config: Config, folder: Path) -> ResumePoint:
    checkpoint = resolve_checkpoint(config.resume, folder)
    if checkpoint is None:
        if broken := damaged(folder):
            listed = "; ".join(f"{path.name}: {problem}" for path, problem in broken.items())
            raise ConfigError(
                f"no checkpoint in {folder} is complete ({listed}): put one back, or choose another output"
            )
        return ResumePoint()
    step, extra = read_extra(checkpoint)
    changed = changed_options(extra["config"], to_tree(config))
    if changed and config.resume_changes == "refuse":
        raise ConfigError(
            f"{checkpoint} belongs to a run with other options ({'; '.join(changed)}): set them back, "
            "or resume_changes=allow, or choose another output"
        )
    if step > config.algorithm.num_steps:
        raise ConfigError(
            f"algorithm.num_steps: {config.algorithm.num_steps} steps are less than the {step} of {checkpoint}: "
            "set it to at least that, or resume from an older checkpoint"
        )
    return ResumePoint(
        checkpoint=checkpoint,
        step=step,
        cursor=Cursor(**{name: value for name, value in extra["resume"].items() if name != "num_rows"}),
        num_rows=extra["resume"].get("num_rows"),  # both empty in RL
        run_id=extra.get("run_id"),
        dtype=extra["config"]["model"]["dtype"],
        num_steps=extra["config"]["algorithm"]["num_steps"],
    )


def ended_summary(config: Config, start: ResumePoint) -> dict[str, Any] | None:
    """Return the summary of the run if it has done all that the config asks for, or None."""
    output = Path(config.output)
    if not start.step or not (output / run_files.POLICY).is_dir():
        return None
    try:
        summary = json.loads((output / run_files.SUMMARY).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    stopped = config.algorithm.stop_loss is not None and start.num_steps == config.algorithm.num_steps
    is_last = stopped or start.step == config.algorithm.num_steps
    return summary if isinstance(summary, dict) and is_last and summary.get("steps") == start.step else None


def run_start(config: Config, start: ResumePoint) -> RunStart:
    """Return the state that the run's ledger starts or continues with."""
    return RunStart(
        config=to_tree(config),
        changes_allowed=config.resume_changes == "allow",
        output=Path(config.output).absolute(),
        step=start.step,
        checkpoint=start.checkpoint,
        run_id=start.run_id,
    )


def _check_is_new(output: Path, ledger: Path) -> None:
    if any((output / run_files.CHECKPOINTS).glob("step_*")) or (output == ledger.parent and ledger.exists()):
        raise ConfigError(f"resume=never, but {output} holds an earlier run: choose another output, or remove it")
    if ledger.exists():
        raise ConfigError(f"resume=never, but {ledger} is of an earlier run: choose another name or ledger.folder")
