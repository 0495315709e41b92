from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import IMAGE_FAMILIES, picture
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpipe import cli
from rlpipe.commands import sample_texts as module
from rlpipe.commands.sample_texts import SamplingRequest, finished_in_order, render_prompts, sample_texts
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import DataError, EngineFailed, ModelError
from rlpipe.models.tiny_model import make_tiny_policy, make_tokenizer
from rlpipe.rollout.engine import Sample, build_group, failed_group
from rlpipe.types import GroupRequest, Prompt, RolloutGroup


class EchoEngine:
    """A fake engine that repeats each prompt's last tokens, and finishes the newest request first."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.stopped = fails, False
        self.waiting: list[GroupRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self.waiting.extend(requests)

    def step(self) -> list[RolloutGroup]:
        request = self.waiting.pop()
        if self.fails:
            return [failed_group(request, "the prompt is too long")]
        echo = request.prompt.token_ids[-request.max_tokens :].tolist()
        sample = Sample(
            token_ids=echo, logprobs=[-0.5] * len(echo), policy_versions=[0] * len(echo), finish_reason="length"
        )
        return [build_group(request, [sample] * request.group_size, 0.0)]

    def stop(self) -> None:
        self.stopped = True


def prompt(index: int) -> Prompt:
    return Prompt(prompt_id=index, epoch=0, token_ids=np.arange(1, 4, dtype=np.int32), prompt="a", task={})


def request(index: int) -> GroupRequest:
    return GroupRequest(group_id=index, prompt=prompt(index), group_size=1, max_tokens=2, temperature=1.0, seed=0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden_size=32, num_layers=1, intermediate_size=32)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EchoEngine:
    engine = EchoEngine()
    monkeypatch.setattr(module, "open_engine", lambda *arguments, **options: engine)
    return engine


def test_groups_come_in_the_order_of_the_prompts() -> None:
    engine = EchoEngine()
    engine.submit([request(index) for index in range(3)])
    assert [group.group_id for group in finished_in_order(engine, 3)] == [0, 1, 2]


def test_engine_without_work_is_an_error() -> None:
    with pytest.raises(EngineFailed, match="stopped before prompt 1"):
        list(finished_in_order(EchoEngine(), 1))


def test_texts_are_sampled_from_rendered_prompts(policy: Path, engine: EchoEngine) -> None:
    sampled = list(sample_texts(["abc", "xyz"], SamplingRequest(model=str(policy), chat=False, num=2, max_tokens=2)))
    assert [item.prompt for item in sampled] == ["abc", "xyz"]
    assert [[done.text for done in item.completions] for item in sampled] == [["bc", "bc"], ["yz", "yz"]]
    assert sampled[0].to_text() == "bc\n---\nbc"
    completion = json.loads(sampled[0].to_json())["completions"][0]
    assert completion == {"text": "bc", "finish_reason": "length", "num_tokens": 2, "logprob": -1.0}
    assert engine.stopped


def test_failed_prompt_stops_with_its_number(policy: Path, engine: EchoEngine) -> None:
    engine.fails = True
    with pytest.raises(EngineFailed, match="prompt 1 can't be sampled: the prompt is too long"):
        list(sample_texts(["abc"], SamplingRequest(model=str(policy))))
    assert engine.stopped


def test_prompts_go_through_the_chat_template_unless_raw() -> None:
    tokenizer = make_tokenizer()
    chat = render_prompts(["hi"], tokenizer, SamplingRequest(model="m", system_prompt="be brief"))
    assert tokenizer.decode(chat[0].token_ids) == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    assert (
        tokenizer.decode(render_prompts(["hi"], tokenizer, SamplingRequest(model="m", chat=False))[0].token_ids) == "hi"
    )
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="m has no chat template; add --raw"):
        render_prompts(["hi"], tokenizer, SamplingRequest(model="m"))


def save_adapter(policy: Path, folder: Path, **options: Any) -> Path:
    """Save a LoRA adapter that changes the policy's most likely tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(policy)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    adapted.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["applied", "merged"])
def test_policy_and_adapter_are_sampled_with_transformers(
    policy: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    base = SamplingRequest(model=str(policy), engine="hf", dtype="float32", num=2, max_tokens=8, seed=1)
    adapter = save_adapter(policy, tmp_path / "adapter", **options)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(policy), adapter).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path / "merged")
    requests = base, replace(base, adapter=str(adapter)), replace(base, model=str(tmp_path / "merged"))
    base_samples, adapted_samples, merged_samples = (
        [
            (done.text, pytest.approx(done.logprob, abs=1e-3))
            for sampled in sample_texts(["1+1=", "a", "Hello"], request)
            for done in sampled.completions
        ]
        for request in requests
    )
    assert base_samples != adapted_samples == merged_samples


def test_missing_adapter_is_named(policy: Path) -> None:
    with pytest.raises(ModelError, match="/no/adapter"):
        list(sample_texts(["hi"], SamplingRequest(model=str(policy), adapter="/no/adapter")))


@pytest.mark.parametrize("trusted", [False, True])
def test_the_models_own_code_runs_only_if_it_is_trusted(
    policy: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    opened: list[bool] = []

    def open_engine(name: str, model: ModelConfig, *_: Any, **__: Any) -> EchoEngine:
        opened.append(model.trust_remote_code)
        return EchoEngine()

    monkeypatch.setattr(module, "open_engine", open_engine)
    cli.main(["generate", "--model", str(policy), "--raw", "hi", *(["--trust-remote-code"] if trusted else [])])
    assert opened == [trusted]


def test_command_reads_standard_input(
    policy: Path, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Input:
        def read(self) -> str:
            return "1+1=\n"

    monkeypatch.setattr("sys.stdin", Input())
    assert cli.main(["generate", "--model", str(policy), "--raw", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "1+1=\n"
    assert cli.main(["generate", "--json", "--model", str(policy), "--raw", "--max-tokens", "1", "ab", "cd"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["completions"][0]["text"] for line in lines] == ["b", "d"]


def test_wrong_input_is_named(
    policy: Path, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert cli.main(["generate", "--model", str(policy)]) == 2
    assert "standard input is not in the encoding utf-8" in capsys.readouterr().err
    for value in ("0", "1.5"):
        assert cli.main(["generate", "--model", str(policy), "--top-p", value, "a"]) == 2
        assert f"--top-p {value}: give a number above 0 and at most 1" in capsys.readouterr().err


def test_images_stand_before_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = IMAGE_FAMILIES["idefics3"].write(tmp_path / "model")
    (tmp_path / "one.png").write_bytes(picture(20, 20))
    capsys.readouterr()  # drop what libraries printed while the model was made
    arguments = ["generate", "--model", str(folder), "--engine", "hf", "--dtype", "float32", "--max-tokens", "3"]
    assert cli.main([*arguments, "--image", str(tmp_path / "one.png"), "--json", "the cat"]) == 0
    (completion,) = json.loads(capsys.readouterr().out)["completions"]
    assert completion["num_tokens"] == 3
    assert cli.main([*arguments, "--image", str(tmp_path / "two.png"), "the cat"]) == 2
    assert "image 1 can't be read (FileNotFoundError" in capsys.readouterr().err
    assert cli.main([*arguments, "--image", str(tmp_path / "one.png"), "--raw", "the cat"]) == 2
    assert "--image needs the chat template: leave --raw out" in capsys.readouterr().err
