"""The measurements and choices of ``rlpipe merge`` for an adapter that QLoRA trained."""

from __future__ import annotations

import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from learner_cases import make_batches, make_learner
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpipe import cli
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.learner.checkpoints import export_policy
from rlpipe.learner.merging import MergeDifference, MergeRequest, merge
from rlpipe.models.adapter import FILE, TrainingRecord, read_record
from rlpipe.models.nf4 import to_nf4_and_back
from rlpipe.models.tiny_model import make_tiny_policy

LINES = ["12+30=42", "7+5=12", "the sum of 1 and 2 is 3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("base"), hidden_size=64, num_layers=2, intermediate_size=128)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an exported QLoRA policy after some steps."""
    algorithm = AlgorithmConfig(kind="sft", num_steps=10)
    settings = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2))
    learner = make_learner(base, adapter="qlora", learner=settings, algorithm=algorithm)
    for step in range(8):
        learner.train_step(make_batches(step=step, algorithm=algorithm)[0])
    folder = tmp_path_factory.mktemp("policy") / "policy"
    export_policy(learner.policy, folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES) + "\n\n")
    return path


def load_base(base: Path, *, nf4: bool) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if nf4:
        to_nf4_and_back(model)
    return model


def merge_by_peft(base: Path, adapter: Path, *, nf4: bool) -> nn.Module:
    return PeftModel.from_pretrained(load_base(base, nf4=nf4), adapter).merge_and_unload().eval()


@torch.no_grad()
def logprobs(model: nn.Module, base: Path) -> Tensor:
    """Return the log-probs of all tokens of all lines, except the first token of each line."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [torch.tensor(tokenizer.encode(line)) for line in LINES]
    scores = [model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0] for row in rows]
    return torch.cat(scores)


def test_both_gaps_are_those_of_whole_models_and_the_smaller_one_is_taken(
    base: Path, adapter: Path, text: Path, tmp_path: Path
) -> None:
    lines = list(merge(MergeRequest(base=str(base), adapter=str(adapter), output=tmp_path / "merged", text=text)))
    live = logprobs(PeftModel.from_pretrained(load_base(base, nf4=True), adapter).eval(), base)
    for precision, line in zip(("full", "nf4"), lines[:2], strict=True):
        merged = merge_by_peft(base, adapter, nf4=precision == "nf4")
        gap = float((logprobs(merged, base) - live).abs().mean())
        measured = re.fullmatch(rf"base in {precision}: log-probs differ by (\S+) nats on average", line)
        assert measured is not None
        assert float(measured[1]) == pytest.approx(gap, rel=0.02, abs=1e-6)
    assert lines[2].startswith("merged into the base in nf4")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    expected = merge_by_peft(base, adapter, nf4=True).state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())


def test_an_explicit_base_precision_overrides_the_closer_one(
    base: Path, adapter: Path, text: Path, tmp_path: Path
) -> None:
    request = MergeRequest(
        base=str(base), adapter=str(adapter), output=tmp_path / "merged", text=text, base_precision="full"
    )
    assert list(merge(request))[2].startswith("merged into the base in full")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    expected = merge_by_peft(base, adapter, nf4=False).state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())


def test_the_smaller_gap_decides(
    base: Path, adapter: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MergeDifference, "measure", lambda *_: {"full": 0.1, "nf4": 0.2})
    lines = list(merge(MergeRequest(base=str(base), adapter=str(adapter), output=tmp_path / "merged", text=text)))
    assert lines[-1] == f"merged into the base in full: {tmp_path / 'merged'}"


def test_nothing_is_measured_for_an_adapter_over_the_base_as_it_is(base: Path, adapter: Path, tmp_path: Path) -> None:
    request = MergeRequest(base=str(base), adapter=str(adapter), output=tmp_path / "merged", trained_on="full")
    assert list(merge(request)) == [f"merged into the base in full: {tmp_path / 'merged'}"]


def test_the_command_samples_texts_and_finds_the_base_by_itself(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_record(adapter) == TrainingRecord(base_precision="nf4")
    outputs = []
    for name in ("one", "two"):
        assert cli.main(["merge", str(adapter), str(tmp_path / name)]) == 0
        outputs.append(capsys.readouterr().out.replace(name, "OUTPUT"))
    assert outputs[0] == outputs[1], "the same texts are sampled"
    assert len(re.findall(r"differ by [\d.e-]+ nats", outputs[0])) == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    AutoTokenizer.from_pretrained(tmp_path / "one")
    assert not hasattr(model, "peft_config")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "OUT"], "adapter=nowhere: there is no such folder"),
        (["BASE", "OUT"], "holds no PEFT adapter"),
        (["ADAPTER", "OUT", "--base", "nowhere/at-all"], "--base=nowhere/at-all: there is no such folder"),
        (["ADAPTER", "BASE"], "exists: choose another folder"),
        (["ADAPTER", "OUT", "--text", "none.txt"], "--text: none.txt can't be read"),
        (["ADAPTER", "OUT", "--base-precision", "half"], "invalid choice: 'half'"),
        (["ADAPTER"], "required: OUTPUT"),
        (
            ["ADAPTER", "OUT", "--trained-on", "full", "--text", "none.txt"],
            "--text: nothing is measured for an adapter that was trained on the unchanged base",
        ),
        (["BROKEN", "OUT"], "rlpipe.json can't be read: ValueError: the adapter's weights say that it has digests"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    (broken / FILE).write_text('{"precision": "half"}')
    places = {"ADAPTER": str(adapter), "OUT": str(tmp_path / "out"), "BASE": str(base), "BROKEN": str(broken)}
    try:
        code = cli.main(["merge", *(places.get(argument, argument) for argument in arguments)])
    except SystemExit as exit_:
        code = exit_.code
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert message in error
    assert "\n" not in error
    assert not (tmp_path / "out").exists()


def test_texts_that_begin_with_the_end_token_are_measured_up_to_their_own_end() -> None:
    sampled = torch.tensor([[2, 5, 6, 2, 2], [2, 7, 8, 9, 9], [2, 2, 0, 0, 0]])
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
    adapted = SimpleNamespace(generate=lambda **_: sampled)
    gap = MergeDifference(model, adapted, SimpleNamespace(running=lambda live: nullcontext()), None)  # type: ignore[arg-type]
    assert gap.sample(num=3, num_tokens=4, start=2).lengths.tolist() == [4, 5, 2]
