"""Tests that the experiments and examples compose, and that the code of the examples does what their pages say."""

import asyncio
import json
import random
import re
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlpipe.algorithms.advantages import AdvantageInputs, own_advantages
from rlpipe.algorithms.losses import LossInputs, policy_loss
from rlpipe.algorithms.plugins import record_code
from rlpipe.common.imports import import_object
from rlpipe.configs.compose import list_groups, load_config, quoted, require_rewards
from rlpipe.configs.data_sources import all_sources
from rlpipe.configs.schema.algorithm_config import AdvantageConfig, AlgorithmConfig, LossConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.render.formats import apply_transform
from rlpipe.data.row import UnusableRow
from rlpipe.data.sources.open_rows import open_rows
from rlpipe.episodes.load_environment import import_kind
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.run import pipeline
from rlpipe.scoring.code_execution import passes_tests
from rlpipe.scoring.rewards import load_reward, missing_columns
from rlpipe.scoring.toolbox import gsm8k_accuracy, math_answer
from rlpipe.types import NO_VERSION, Prompt, Rollout, RolloutGroup

ROOT = Path(__file__).parents[2]
EXAMPLE_FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.yaml"))
ALGORITHMS = {"full_finetuning": "grpo", "rloo": "rloo", "gspo": "gspo", "dr_grpo": "dr_grpo", "dapo": "dapo"}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("experiment", list_groups()["experiment"])
def test_every_experiment_is_valid_and_its_code_can_be_imported_anywhere(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # experiments belong to the installed package
    config = load_config([f"experiment={experiment}"])
    require_rewards(config)
    for reward in config.scoring.rewards.values():
        load_reward(reward.path, reward.kwargs)
    for path in (config.data.transform, config.model.prepare):
        assert path is None or import_object(path)


@pytest.mark.parametrize("file", EXAMPLE_FILES)
def test_every_file_of_the_examples_is_valid_and_its_columns_are_there(file: str) -> None:
    config = load_config(file=file)
    require_rewards(config)
    for source in all_sources(config.data):
        row = open_rows(source.data, seed=0)[0]
        for reward in config.scoring.rewards.values():
            assert missing_columns(load_reward(reward.path, reward.kwargs), reward.kwargs, row) == []


def test_there_is_an_example_in_every_folder() -> None:
    folders = {path for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {folder.name for folder in folders} == {
        "agent_frameworks",
        "calculator",
        "code",
        "custom_reward",
        "ebft",
        "ebft_strided",
        "frozen_lake",
        "gsm8k",
        "guess",
        "images",
        "judge",
        "math",
        "own_algorithm",
        "own_data",
        "preferences",
        "process_reward",
        "reward_model",
        "sft",
        "tictactoe",
        "words",
    }
    assert all((folder / "README.md").is_file() for folder in folders)


@pytest.mark.parametrize("experiment", ALGORITHMS)
def test_the_algorithms_start_from_one_policy_and_have_folders_of_their_own(experiment: str) -> None:
    config, quickstart = load_config([f"experiment={experiment}"]), load_config(["experiment=quickstart"])
    assert (config.model.path, config.model.prepare) == (quickstart.model.path, quickstart.model.prepare)
    assert config.output == f"outputs/{experiment}"
    alone = load_config(["experiment=quickstart", f"algorithm={ALGORITHMS[experiment]}"])
    assert (config.algorithm.advantage, config.algorithm.loss) == (alone.algorithm.advantage, alone.algorithm.loss)


def test_the_python_example_is_the_yaml_example(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over: dict[str, Any] = {}

    def train(config: Any, rewards: Any) -> dict[str, float]:
        handed_over.update(config=config, rewards=rewards)
        return {"reward_start": 0.0, "reward_end": 1.0}

    folder = ROOT / "examples" / "custom_reward"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("sys.argv", ["run.py", "algorithm.num_steps=3"])
    monkeypatch.setattr("rlpipe.train", train, raising=False)
    runpy.run_path(str(folder / "run.py"), run_name="__main__")
    ours, theirs = handed_over["config"], load_config(file=folder / "run.yaml")
    assert ours.algorithm.num_steps == 3
    assert ours.algorithm.group_size == theirs.algorithm.group_size
    assert (ours.model.prepare, ours.rollout, ours.learner) == (theirs.model.prepare, theirs.rollout, theirs.learner)
    assert [reward.__name__ for reward in handed_over["rewards"]] == ["alphabet", "Novelty"]


def chat(*texts: str) -> list[list[dict[str, Any]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def group_of(*texts: str) -> RolloutGroup:
    tokenizer = make_tokenizer()
    prompt = Prompt(prompt_id=0, epoch=0, token_ids=np.array([4], np.int32), prompt="vowels", task={})
    rollouts = [make_rollout(index, tokenizer(text)["input_ids"]) for index, text in enumerate(texts)]
    return RolloutGroup(group_id=0, prompt=prompt, rollouts=rollouts)


def make_rollout(index: int, completion_ids: list[int]) -> Rollout:
    length = 1 + len(completion_ids)
    drawn = np.arange(length) > 0
    return Rollout(
        group_id=0,
        sample_index=index,
        prompt_id=0,
        task={},
        token_ids=np.array([4, *completion_ids], np.int32),
        loss_mask=drawn,
        logprobs=np.zeros(length, np.float32),
        policy_versions=np.where(drawn, 0, NO_VERSION).astype(np.int32),
    )


def test_alphabet_is_the_share_of_allowed_characters() -> None:
    alphabet = import_object("examples/custom_reward/rewards.py:alphabet")
    assert alphabet(chat("aexx", "12", ""), ["aeiou", "0123456789", "aeiou"]) == [0.5, 1.0, 0.0]


def test_novelty_remembers_across_groups() -> None:
    novelty = import_object("examples/custom_reward/rewards.py:Novelty")()
    novelty.tokenizer = make_tokenizer()
    novelty.setup()
    assert novelty.score(group_of("ab", "ab", "cd")) == [1.0, 0.5, 1.0]
    assert novelty.score(group_of("ab", "ef")) == [pytest.approx(1 / 3), 1.0]


def gsm8k_rows(*overrides: str) -> Any:
    local = ["data=jsonl", "data.name=null", "data.held_out.split=null", "data.held_out.size=1"]
    config = load_config(["experiment=gsm8k", *local, *overrides])
    return apply_transform(open_rows(config.data, seed=0), config.data, make_tokenizer())


def test_gsm8k_rows_become_prompts_with_answers() -> None:
    rows = gsm8k_rows("data.path=examples/gsm8k/rows.jsonl")
    raw = [json.loads(line) for line in Path("examples/gsm8k/rows.jsonl").read_text().splitlines()]
    assert [rows[index] for index in range(len(rows))] == [
        {"prompt": row["question"], "answer": row["answer"]} for row in raw
    ]


def test_gsm8k_skips_a_row_without_a_final_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "2"}) + "\n")
    with pytest.raises(UnusableRow, match="no final number"):
        gsm8k_rows(f"data.path={file}")[0]


def test_gsm8k_rewards_on_made_rows() -> None:
    rows = gsm8k_rows("data.path=examples/gsm8k/rows.jsonl")
    answers = [rows[index]["answer"] for index in range(len(rows))]
    assert gsm8k_accuracy(chat(*answers), answers) == [1.0] * len(answers)
    assert gsm8k_accuracy(chat(*["It is -12345."] * len(answers)), answers) == [0.0] * len(answers)
    final_line = import_object("examples/gsm8k/recipe.py:final_line")
    assert final_line(chat(*answers)) == [1.0] * len(answers)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 * 4 = 12\n#### 12", 1.0),
        ("It costs more.\n\n#### $1,200.50\n", 1.0),
        ("Below zero.\n#### -5", 1.0),
        ("3 * 4 = 12 #### 12", 0.0),
        ("#### 12", 0.0),
        ("\n#### 12", 0.0),
        ("3 * 4 = 12\n#### twelve", 0.0),
        ("3 * 4 = 12\n#### 12 pencils", 0.0),
        ("3 * 4 = 12\n#### 12\n#### 13", 0.0),
        ("The answer is 12.", 0.0),
    ],
)
def test_gsm8k_format_wants_an_explanation_and_one_final_line(text: str, expected: float) -> None:
    final_line = import_object("examples/gsm8k/recipe.py:final_line")
    assert final_line(chat(text)) == [expected]


def test_gsm8k_counts_as_correct_by_its_accuracy_alone() -> None:
    config = load_config(["experiment=gsm8k"])
    weights = {name: reward.weight for name, reward in config.scoring.rewards.items()}
    assert weights["accuracy"] >= config.data.held_out.correct_at > weights["format"]


def test_gsm8k_on_eight_gpus_uses_all_of_them() -> None:
    config = load_config(["experiment=gsm8k_8gpu"])
    engines = config.rollout.num_engines * config.rollout.num_gpus
    assert engines + config.learner.num_ranks * config.learner.num_gpus == 8
    assert config.model.path == load_config(["experiment=gsm8k"]).model.path


def hub_rows(experiment: str, *overrides: str) -> Any:
    """Return the example's rows, with the columns of the experiment's data set, after its recipe's transform."""
    local = ["data=jsonl", "data.name=null", "data.split=train", "data.held_out.split=null", "data.held_out.size=1"]
    path = f"data.path=examples/{experiment}/hub_rows.jsonl"
    config = load_config([f"experiment={experiment}", *local, path, *overrides])
    rows = apply_transform(open_rows(config.data, seed=0), config.data, make_tokenizer())
    return [rows[index] for index in range(len(rows))]


def raw_rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_reward_model_prompts_come_without_answers() -> None:
    raw = raw_rows("examples/reward_model/hub_rows.jsonl")
    assert hub_rows("reward_model") == [{"prompt": row["prompt"]} for row in raw]


def test_reward_model_and_engine_share_a_gpu() -> None:
    config = load_config(["experiment=reward_model"])
    reward = config.scoring.rewards["preference"]
    assert config.rollout.num_gpus + reward.serve.replicas * reward.num_gpus == pytest.approx(1)


def test_reward_model_pairs_are_in_the_order_that_is_measured() -> None:
    config = load_config(file="examples/reward_model/run.yaml")
    polite = load_reward(config.scoring.rewards["polite"].path, config.scoring.rewards["polite"].kwargs)
    pattern = config.scoring.rewards["polite"].kwargs["pattern"]
    rows = raw_rows("examples/reward_model/rows.jsonl")
    assert sum(polite(chat(*[row["rejected"] for row in rows]), pattern=pattern)) == 0
    assert sum(polite(chat(*[row["chosen"] for row in rows]), pattern=pattern)) > len(rows) / 4


def test_spoiled_answers_differ() -> None:
    spoil = import_object("examples/reward_model/prepare.py:spoil")
    text, draws = "hello, your red hat. enjoy!", random.Random(0)
    assert all(spoil(text, draws) != text for _ in range(1000))


def test_pairs_of_the_reward_model_are_spoiled_differently_and_always_in_the_same_way() -> None:
    sources = load_config(file="examples/reward_model/train.yaml").data.sources
    rows = raw_rows("examples/reward_model/rows.jsonl")
    spoiled = {}
    for name in ("spoiled", "spoiled_again"):
        transforms = [import_object(sources[name]["transform"])(sources[name]["transform_args"]) for _ in range(2)]
        spoiled[name], again = ([transform(row)["rejected"] for row in rows] for transform in transforms)
        assert spoiled[name] == again
        assert all(row["chosen"] != rejected for row, rejected in zip(rows, spoiled[name], strict=True))
    same = [one == other for one, other in zip(spoiled["spoiled"], spoiled["spoiled_again"], strict=True)]
    assert sum(same) < len(rows) / 10


def process_reward_rows(file: str, count: int = 200) -> list[dict[str, Any]]:
    data = load_config(file=f"examples/process_reward/{file}.yaml").data
    transform = import_object(data.transform)(data.transform_args)
    rows = open_rows(data, seed=0)
    return [transform(rows[index]) for index in range(count)]


def test_labelled_solutions_end_at_their_first_wrong_step() -> None:
    wrong = Counter[str]()
    for row in process_reward_rows("train"):
        total, *others = (int(number) for number in row["prompt"][:-1].split("+"))
        for number, step, label in zip(others, row["completions"], row["labels"], strict=False):
            found = re.fullmatch(r"(\d+)\+(\d+)=(\d+)", step)
            assert found is not None
            first, second, result = map(int, found.groups())
            assert label == (first == total and second == number and result == first + second)
            kinds = {"first": first != total, "second": second != number, "result": result != first + second}
            wrong.update(kind for kind, is_wrong in kinds.items() if is_wrong)
            total = result
        assert all(row["labels"][:-1])
        assert len(row["labels"]) == len(others) or not row["labels"][-1]
    assert wrong["result"] > wrong["first"] > 10
    assert wrong["second"] > 10


def test_solutions_of_the_policy_are_whole_and_wrong_where_carries_are_forgotten() -> None:
    rows = process_reward_rows("run")
    config = load_config(file="examples/process_reward/run.yaml")
    complete, right = (config.scoring.rewards[name] for name in ("complete", "right"))
    texts = [row["completion"] for row in rows]
    assert load_reward(complete.path, complete.kwargs)(texts, **complete.kwargs) == [1.0] * len(rows)
    found = load_reward(right.path, right.kwargs)(texts, [row["answer"] for row in rows])
    assert 0.15 < sum(found) / len(rows) < 0.4
    differences = {int(row["answer"]) - int(re.findall(r"\d+", row["completion"])[-1]) for row in rows}
    assert differences <= {0, 10, 20, 30}


def test_the_policy_of_the_process_reward_learns_by_the_transform_of_the_run_whatever_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Config] = []
    monkeypatch.setattr(pipeline, "train", trained.append)
    transform = f"{tmp_path}/mine, (1)=a.py:attempted"
    config = load_config([f"data.transform={quoted(transform)}"], file="examples/process_reward/run.yaml")
    import_object("examples/process_reward/solutions.py:warm_up")(config)
    assert [warm_up.data.transform for warm_up in trained] == [transform]


def test_math_answers_of_made_rows_are_right() -> None:
    rows = hub_rows("math")
    raw = raw_rows("examples/math/hub_rows.jsonl")
    assert rows == [{"prompt": row["prompt"], "answer": row["solution"]} for row in raw]
    for row in rows:
        texts = [f"It is 1, 2 or so. \\boxed{{{row['answer']}}}", "\\boxed{-1}"]
        assert math_answer(texts, [row["answer"]] * 2) == [1.0, 0.0]


def test_math_can_hold_out_math_500(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    row = {"problem": "What is $1 / 2$?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "answer": "\\frac{1}{2}"}
    file.write_text(json.dumps({**row, "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"}))
    assert hub_rows("math", f"data.path={file}") == [{"prompt": row["problem"], "answer": row["answer"]}]


def test_math_products_are_right_in_the_form_of_the_warm_up() -> None:
    rows = raw_rows("examples/math/rows.jsonl")[:100]
    assert math_answer([row["worked"] for row in rows], [row["answer"] for row in rows]) == [1.0] * len(rows)


def test_code_passes_the_tests_of_made_rows() -> None:
    rows, raw = hub_rows("code"), raw_rows("examples/code/hub_rows.jsonl")
    for row, source in zip(rows, raw, strict=True):
        assert source["test_list"][0] in row["prompt"]
        assert not any(test in row["prompt"] for test in source["test_list"][1:])
        texts = [f"Like this:\n```python\n{source['code']}\n```", "```python\ndef nothing(): ...\n```"]
        assert passes_tests(chat(*texts), [row["tests"]] * 2) == [1.0, 0.0]


def test_code_of_the_warm_up_passes() -> None:
    for row in raw_rows("examples/code/rows.jsonl"):
        exec(f"{row['program']}\n{row['tests']}", {})


def play(environment: Any, row: dict[str, Any], actions: list[str]) -> list[Any]:
    """Return the steps of a game up to its end."""
    environment.reset(row, seed=0)
    steps: list[Any] = []
    for action in actions:
        steps.append(environment.step(action))
        if steps[-1].done:
            break
    return steps


@pytest.mark.parametrize("guesses", [["7"], ["16", "8", "4", "6", "7"], ["31", "1", "40", "a", "7"]])
def test_a_game_of_guesses_that_is_won_earns_1_in_all(guesses: list[str]) -> None:
    game = import_object("examples/guess/guess.py:Guess")
    steps = play(game(), {"number": 7}, guesses)
    assert len(steps) == len(guesses)
    assert sum(step.reward for step in steps) == pytest.approx(1)
    lost = play(game(), {"number": 7}, ["8", "6", "9", "9", "9", "9"])
    assert (len(lost), sum(step.reward for step in lost)) == (5, pytest.approx(0.75))


def test_an_agent_and_an_environment_of_the_guessing_game_give_the_same_rewards() -> None:
    class Client:
        def __init__(self, guesses: list[str]) -> None:
            self.chat = SimpleNamespace(completions=self)
            self._guesses = enumerate(guesses)

        async def create(self, **_: Any) -> Any:
            number, guess = next(self._guesses)
            message = SimpleNamespace(content=guess)
            return SimpleNamespace(id=str(number), choices=[SimpleNamespace(message=message)])

    solve = import_object("examples/guess/agent.py:play")
    for guesses in (["16", "8", "4", "6", "7"], ["31", "1", "a", "40", "8"]):
        steps = play(import_object("examples/guess/guess.py:Guess")(), {"number": 7}, guesses)
        rewards = asyncio.run(solve(7, Client(guesses)))
        assert list(rewards.values()) == pytest.approx([step.reward for step in steps])


def test_tic_tac_toe_counts_moves_that_are_not_allowed() -> None:
    illegal = import_object("examples/tictactoe/tictactoe.py:illegal")
    own, board = {"role": "assistant", "content": "1"}, {"role": "user", "content": "X...O...."}
    assert illegal([[own], [{**own, "content": "x"}], [own, board, own], [own, board, {**own, "content": "9"}]]) == [
        *(0.0, 1.0, 1.0, 0.0)
    ]


def test_frozen_lake_is_crossed_by_the_way_of_the_warm_up() -> None:
    lake = import_object("examples/frozen_lake/lake.py:Lake")
    distances = import_object("examples/frozen_lake/lake.py:distances")
    neighbour = import_object("examples/frozen_lake/lake.py:neighbour")
    for row in raw_rows("examples/frozen_lake/rows.jsonl")[:50]:
        left, place, actions = distances("".join(row["make"]["desc"])), 0, []
        while left[place]:
            ways = {move: neighbour(place, move) for move in ("left", "down", "right", "up")}
            actions.append(next(move for move, field in ways.items() if left.get(field) == left[place] - 1))
            place = ways[actions[-1]]
        steps = play(lake(), row, actions)
        assert len(steps) == len(actions)
        assert [step.reward for step in steps] == pytest.approx([1 / len(steps)] * len(steps))
        assert (steps[-1].done, sum(step.reward for step in steps)) == (True, pytest.approx(1.0))


def test_frozen_lake_shows_the_player_and_the_fields_around_and_ends_after_ten_moves() -> None:
    row = {"make": {"desc": ["SFFF", "FHFH", "FFFH", "HFFG"]}}
    lake = import_object("examples/frozen_lake/lake.py:Lake")
    assert lake().reset(row, seed=0) == "PFFF\nFHFH\nFFFH\nHFFG\nSFFS"
    steps = play(lake(), row, ["north", "right", *["up"] * 10])
    assert steps[0].observation.startswith("'north' is not a direction")
    assert steps[1].observation == "SPFF\nFHFH\nFFFH\nHFFG\nSHFF"
    assert (len(steps), sum(step.reward for step in steps)) == (1 + 10, pytest.approx(1 / 6))


def test_a_hole_of_frozen_lake_takes_back_what_was_gained() -> None:
    row = {"make": {"desc": ["SFFF", "FHFH", "FFFH", "HFFG"]}}
    steps = play(import_object("examples/frozen_lake/lake.py:Lake")(), row, ["right", "left", "down", "right"])
    assert [step.reward for step in steps] == pytest.approx([1 / 6, -1 / 6, 1 / 6, -1 / 6])
    assert [step.done for step in steps] == [False, False, False, True]


@pytest.mark.parametrize("framework", ["openai", "langgraph", "openai_agents", "smolagents"])
def test_the_agents_of_the_frameworks_are_functions(framework: str) -> None:
    override = f"environment.agent=examples/agent_frameworks/agent.py:{framework}"
    config = load_config([override], file="examples/agent_frameworks/run.yaml")
    assert import_kind(config.environment).agent is not None


def test_committed_rows_are_unique() -> None:
    for file in (ROOT / "examples").rglob("*.jsonl"):
        counts = Counter(file.read_text().splitlines())
        assert max(counts.values()) == 1, file


def test_the_own_advantage_is_the_rank_in_the_group() -> None:
    config = load_config(file="examples/own_algorithm/run.yaml").algorithm.advantage
    rewards = [np.array([1, 3, np.nan, 2], np.float32), np.array([1, 1], np.float32)]
    counts = [np.array([2, 1, 1, 1], np.int32), np.array([1, 1], np.int32)]
    got = own_advantages(rewards, AdvantageInputs(config=config, num_tokens=counts))
    assert [values.tolist() for values in got] == [pytest.approx([-2 / 3, 2 / 3, 0, 0]), [0, 0]]


def surrogate_inputs() -> LossInputs:
    """Return three tokens with the ratios 0.5, 1 and 8."""
    return LossInputs(
        logprobs=torch.tensor([-1.0, -2.0, -0.5], requires_grad=True),
        old_logprobs=torch.tensor([-1.0, -2.0, -0.5]) - torch.tensor([0.5, 1.0, 8.0]).log(),
        advantages=torch.tensor([1.0, -1.0, 2.0]),
        loss_mask=torch.ones(3, dtype=torch.bool),
        sequence_ids=torch.tensor([0, 0, 0]),
        num_loss_tokens=3,
        num_sequences=1,
        max_completion_tokens=3,
    )


def test_the_own_loss_bounds_the_weight() -> None:
    config = load_config(file="examples/own_algorithm/run.yaml").algorithm.loss
    output = policy_loss(surrogate_inputs(), config)
    assert output.loss.item() == pytest.approx((0.5 * 1 - 1 * 2 + 3 * 2 * 0.5) / 3)
    values = output.metrics.values()
    assert values["own/ratio"] == pytest.approx((0.5 + 1 + 8) / 3)
    assert (values["clip_ratio/low_mean"], values["clip_ratio/high_mean"]) == (0, pytest.approx(1 / 3))


def test_the_functions_on_the_page_of_algorithms_do_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n\n".join(blocks))
    advantage = AdvantageConfig(path=f"{tmp_path}/page.py:best_only", kwargs={"margin": 0.5})
    loss = LossConfig(path=f"{tmp_path}/page.py:bounded")
    recorded = record_code(AlgorithmConfig(advantage=advantage, loss=loss))
    inputs = AdvantageInputs(config=recorded.advantage, num_tokens=[np.array([1, 1, 1], np.int32)])
    assert own_advantages([np.array([1, 0.5, 0], np.float32)], inputs)[0].tolist() == [1, 1, 0]
    output = policy_loss(surrogate_inputs(), recorded.loss)
    assert output.loss.item() == pytest.approx((0.5 * 1 - 1 * 2 + 2 * 2 * 0.5) / 3)
