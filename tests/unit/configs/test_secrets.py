"""Secrets of a config reach the parts that use them, and no file, table or tracker."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from rlpipe.cli import main
from rlpipe.common.formatting import HIDDEN, without_password
from rlpipe.configs.compose import load_config
from rlpipe.configs.options import FromEnvironment, changed_options, model_of, to_tree, to_yaml
from rlpipe.configs.schema.root_config import Config, TrackingConfig
from rlpipe.errors import ConfigError
from rlpipe.tracking.trackers import open_trackers, without_secrets

SECRET = "sk-3f9a77"
REFERENCE = "${oc.env:JUDGE_KEY}"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("RUN_NAME", "night")


def config_of(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load_config(["experiment=quickstart"], file=file, need_files=False)


KWARGS = """
name: ${oc.env:RUN_NAME}
scoring:
  rewards:
    judge:
      path: rewards:judge
      kwargs:
        api_key: ${oc.env:JUDGE_KEY}
        headers: {authorization: "Bearer ${..api_key}"}
        urls: ["http://me:${oc.env:JUDGE_KEY}@127.0.0.1/v1", plain]
        place: ${oc.env:RUN_NAME}
        copy: ${scoring.rewards.judge.kwargs.headers}
        other: ${oc.env:NOT_SET_ANYWHERE,nothing}
"""


def test_the_reward_gets_the_secret_and_the_stored_config_its_reference(tmp_path: Path) -> None:
    config = config_of(tmp_path, KWARGS)
    kwargs = config.scoring.rewards["judge"].kwargs
    assert kwargs["api_key"] == SECRET
    assert kwargs["copy"] == {"authorization": f"Bearer {SECRET}"}
    assert kwargs["urls"] == [f"http://me:{SECRET}@127.0.0.1/v1", "plain"]

    stored = to_tree(config)["scoring"]["rewards"]["judge"]["kwargs"]
    assert stored["api_key"] == REFERENCE
    assert stored["copy"] == stored["headers"] == {"authorization": f"Bearer {REFERENCE}"}
    assert stored["urls"] == [f"http://me:{REFERENCE}@127.0.0.1/v1", "plain"]
    assert stored["place"] == "${oc.env:RUN_NAME}"
    assert stored["other"] == "nothing"
    assert to_tree(config)["name"] == "night", "an option of the schema that is no secret is stored as it was"
    assert SECRET not in json.dumps(to_tree(config)) + to_yaml(config)


@pytest.mark.parametrize("variable", ["APIKEY", "HFTOKEN", "DB_PASS", "GH_PAT", "pgpassword"])
def test_a_variable_whose_name_says_that_it_is_secret_stays_a_reference(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "sk-new")
    config = config_of(tmp_path, f"model: {{path: '${{oc.env:{variable}}}'}}")
    assert to_tree(config)["model"]["path"] == f"${{oc.env:{variable}}}"


@pytest.mark.parametrize("variable", ["COMPASS", "FORMAT", "MAX_TOKENS", "KEYS"])
def test_other_variables_are_resolved(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "north")
    assert to_tree(config_of(tmp_path, f"model: {{path: '${{oc.env:{variable}}}'}}"))["model"]["path"] == "north"


def test_a_secret_option_of_the_schema_is_a_reference_too(tmp_path: Path) -> None:
    config = config_of(tmp_path, "model: {path: '/models/${oc.env:JUDGE_KEY}/m'}")
    assert config.model.path == f"/models/{SECRET}/m"
    assert to_tree(config)["model"]["path"] == f"/models/{REFERENCE}/m"


def test_a_stored_config_reads_the_environment_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, KWARGS)
    monkeypatch.setenv("JUDGE_KEY", "sk-new")
    again = config_of(tmp_path, to_yaml(config))
    assert again.scoring.rewards["judge"].kwargs["headers"] == {"authorization": "Bearer sk-new"}
    assert changed_options(to_tree(config), to_tree(again)) == []


def test_a_short_value_takes_the_place_of_no_other_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_KEY", "1")
    monkeypatch.setenv("LETTER", "e")
    url = "http://h-${oc.env:RANK_KEY}:8011/${oc.env:LETTER}/${oc.env:JUDGE_KEY}"
    keys = "key: '${oc.env:RANK_KEY}', copy: 'a1-${.key}', same: '${.key}'"
    kwargs_text = f"{{url: '{url}', {keys}}}"
    text = f"scoring: {{rewards: {{judge: {{path: 'rewards:judge', kwargs: {kwargs_text}}}}}}}"
    kwargs = to_tree(config_of(tmp_path, text))["scoring"]["rewards"]["judge"]["kwargs"]
    assert kwargs["url"] == "http://h-${oc.env:RANK_KEY}:8011/${oc.env:LETTER}/${oc.env:JUDGE_KEY}"
    assert (kwargs["copy"], kwargs["same"]) == ("a1-1", "${oc.env:RANK_KEY}")


def test_a_text_from_the_environment_survives_pickle_and_hides_in_messages() -> None:
    text = pickle.loads(pickle.dumps(FromEnvironment(SECRET, REFERENCE)))
    assert (text, text.reference) == (SECRET, REFERENCE)
    assert SECRET not in f"{text!r} {[text]} { ({'key': text}) }"


def test_an_export_without_the_variable_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = to_tree(config_of(tmp_path, "model: {path: '/models/${oc.env:JUDGE_KEY}/m'}"))["model"]
    assert model_of(stored).path == f"/models/{SECRET}/m"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"^model\.path, as the run stored it: .*'JUDGE_KEY' not found.*set the"):
        model_of(stored)


def test_the_config_command_shows_references(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(KWARGS)
    assert main(["config", "experiment=quickstart", str(file)]) == 0
    shown = capsys.readouterr().out
    assert SECRET not in shown
    assert f"api_key: {REFERENCE}" in shown
    assert "name: night" in shown


def test_trackers_on_other_machines_get_no_literal_secrets(tmp_path: Path) -> None:
    tree = {
        "kwargs": {"api_key": SECRET, "api_key_env": "OPENAI_API_KEY", "judge_token": "", "max_tokens": 5, "key": None},
        "data": {"path": f"https://me:{SECRET}@host/rows.jsonl"},
        "list": [{"password": SECRET}],
    }
    assert without_secrets(tree) == {
        "kwargs": {"api_key": HIDDEN, "api_key_env": "OPENAI_API_KEY", "judge_token": "", "max_tokens": 5, "key": None},
        "data": {"path": f"https://{HIDDEN}@host/rows.jsonl"},
        "list": [{"password": HIDDEN}],
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:p@h:1/x failed", f"http://{HIDDEN}@h:1/x failed"),
        ("http://h/a@b", "http://h/a@b"),
        ("u@h and http://h", "u@h and http://h"),
    ],
)
def test_passwords_of_urls_are_hidden(text: str, shown: str) -> None:
    assert without_password(text) == shown


def test_services_get_the_config_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("wandb.init", lambda **options: given.update(options) or MagicMock())
    tracking = TrackingConfig(tensorboard=False, ray_metrics=False, wandb=True, wandb_mode="offline")
    config = {"kwargs": {"api_key": SECRET}}
    open_trackers(tracking, output=tmp_path, run_name="r", first_step=0, resolved_config=config).close()
    assert given["config"] == {"kwargs": {"api_key": HIDDEN}}
