"""Judges and NeMo Gym's verifiers against a local server: their requests, their parsing, and servers that misbehave."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_cases import Reply, Server, in_turn, serving

from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.errors import ConfigError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.scoring import http
from rlpipe.scoring.http import RequestFailed
from rlpipe.scoring.judge import AnswerCache, Judge, NumberJudge, PairwiseJudge, RubricJudge
from rlpipe.scoring.nemo_gym import NemoGym
from rlpipe.scoring.rewards import RewardActor
from rlpipe.types import Prompt, Rollout, RolloutGroup

TOKENIZER = make_tokenizer()
TEMPLATE = "Question: {{ question }}\nAnswer: {{ completion }}\nHow good is it?"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def make_group(*texts: str, chat: bool = True, **task: Any) -> RolloutGroup:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
    prompt = Prompt(
        prompt_id=0,
        epoch=0,
        token_ids=np.array([7, 8], np.int32),
        prompt=messages if chat else "What is 2 + 2?",
        task={"question": "2 + 2", **task},
    )
    rollouts = []
    for index, text in enumerate(texts):
        completion = TOKENIZER(text)["input_ids"]
        mask = np.r_[np.zeros(2, bool), np.ones(len(completion), bool)]
        rollouts.append(
            Rollout(
                group_id=5,
                sample_index=index,
                prompt_id=0,
                task=prompt.task,
                token_ids=np.r_[7, 8, completion].astype(np.int32),
                loss_mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return RolloutGroup(group_id=5, prompt=prompt, rollouts=rollouts)


def saying(text: str) -> Reply:
    return Reply(body={"choices": [{"message": {"role": "assistant", "content": text}}]})


def scores(actor: RewardActor, group: RolloutGroup) -> list[float | None]:
    actor.tokenizer = TOKENIZER
    actor.setup()
    return asyncio.run(actor.score(group))  # type: ignore[arg-type]


def number_judge(server: Server, **options: Any) -> NumberJudge:
    return NumberJudge(**{"url": f"{server.url}/v1", "model": "m", "template": TEMPLATE, **options})


def question(body: Any) -> str:
    return str(body["messages"][-1]["content"])


# What is asked, and how answers are read ------------------------------------------------------------------------------


def test_the_template_is_filled_and_the_last_number_counts() -> None:
    def answer(path: str, body: Any) -> Reply:
        return saying("Between 0 and 10, I give 10." if "four" in question(body) else "It deserves a 2.5")

    with serving(answer) as server:
        judge = number_judge(server, system="You grade.", request={"seed": 3})
        assert scores(judge, make_group("four", "five")) == [1.0, 0.25]
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert {name: body[name] for name in ("model", "temperature", "max_tokens", "seed")} == {
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 1024,
        "seed": 3,
    }
    assert body["messages"][0] == {"role": "system", "content": "You grade."}
    assert sorted(question(body) for _, body in server.requests) == [
        f"Question: 2 + 2\nAnswer: {text}\nHow good is it?" for text in ("five", "four")
    ]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("Score: 2/10", 0.2),
        ("7 / 10.", 0.7),
        ("3 out of 10", 0.3),
        ("**2**/10", 0.2),
        ("10/10", 1.0),
        ("**7** out of **10**", 0.7),
        ("`7`/10", 0.7),
        ("$7$/10", 0.7),
        ('"7"/10', 0.7),
        ("_7_/10", 0.7),
        ("7 (out of 10)", 0.7),
        ("7 Out of 10", 0.7),
        ("7 of 10", 0.7),
        ("2.5/10.0, I think", 0.25),
        ("Out of 10, I give 4", 0.4),
        ("1/100 of it is right: 1", 0.1),
    ],
)
def test_the_maximum_beside_a_mark_is_no_mark(answer: str, value: float) -> None:
    judge = NumberJudge(template="", url="http://127.0.0.1:1", model="m")
    assert judge.parse(answer) == pytest.approx(value)


@pytest.mark.parametrize("chat", [True, False])
def test_the_template_sees_the_prompt(chat: bool) -> None:
    with serving(in_turn(saying("7"))) as server:
        judge = number_judge(server, template="{{ prompt }} {{ messages | length }}")
        scores(judge, make_group("x", chat=chat))
    assert question(server.requests[0][1]) == f"What is 2 + 2? {2 if chat else 0}"


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serving(in_turn(saying("7"))) as server:
        scores(number_judge(server, api_key_env="JUDGE_KEY"), make_group("x"))
        scores(number_judge(server), make_group("x"))
    assert [headers.get("authorization") for headers in server.headers] == ["Bearer secret", None]


def test_a_key_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match=r"^api_key_env: the environment variable JUDGE_KEY is not set; export it"):
        NumberJudge(url="http://127.0.0.1:1/v1", model="m", template=TEMPLATE, api_key_env="JUDGE_KEY")


def test_a_pattern_finds_the_number() -> None:
    with serving(in_turn(saying("SCORE: 3\nSCORE: 4/5, as 9 of 10 would say"))) as server:
        judge = number_judge(server, minimum=1, maximum=5, pattern=r"SCORE:\s*(\d+)")
        assert scores(judge, make_group("x")) == [0.75]


def test_a_rubric_is_the_weighted_mean_of_its_marks() -> None:
    marks = 'Well. ```json\n{"correct": 10, "brief": 5}\n```'
    with serving(in_turn(saying(marks), saying('So {"correct": 0, "brief": 10} it is'))) as server:
        judge = RubricJudge(
            url=server.url,
            model="m",
            template="{{ completion }}: {{ criteria | join(', ') }}",
            criteria={"correct": 3, "brief": 1},
            concurrency=1,
        )
        assert scores(judge, make_group("a", "b")) == [pytest.approx(0.875), pytest.approx(0.25)]
    assert [question(body) for _, body in server.requests] == ["a: correct, brief", "b: correct, brief"]


def pairwise_judge(server: Server, **options: Any) -> PairwiseJudge:
    return PairwiseJudge(url=server.url, model="m", template="{{ completion_a }}|{{ completion_b }}", **options)


def longer_wins(path: str, body: Any) -> Reply:
    first, second = question(body).split("|")
    return saying("A draw: TIE" if len(first) == len(second) else f"A or B? {'A' if len(first) > len(second) else 'B'}")


def test_pairs_are_compared_in_both_orders() -> None:
    with serving(longer_wins) as server:
        assert scores(pairwise_judge(server), make_group("a", "bbb", "cc", "dd")) == [
            0,
            1,
            pytest.approx(0.5),
            pytest.approx(0.5),
        ]
    assert len(server.requests) == 12


def test_a_judge_that_favours_a_position_favours_nobody() -> None:
    with serving(in_turn(saying("A"))) as server:
        assert scores(pairwise_judge(server), make_group("a", "bbb", "cc")) == [0.5, 0.5, 0.5]


def test_opponents_bound_the_pairs_and_everyone_meets_somebody() -> None:
    with serving(longer_wins) as server:
        judge = pairwise_judge(server, opponents=1)
        assert scores(judge, make_group("a", "bb", "ccc", "dddd")) == [0, 0.5, 0.5, 1]
    assert len(server.requests) == 8


def test_a_completion_alone_has_no_comparison() -> None:
    with serving(longer_wins) as server:
        assert scores(pairwise_judge(server), make_group("a")) == [None]
    assert server.requests == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{{ completion"}, "template is not a Jinja template"),
        ({"minimum": 5, "maximum": 5}, "minimum 5 is not below maximum 5"),
    ],
)
def test_options_that_make_no_judge_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NumberJudge(**{"url": "http://127.0.0.1:1", "model": "m", "template": TEMPLATE, **options})


def test_a_column_that_is_not_there_is_named() -> None:
    with serving(in_turn(saying("7"))) as server, pytest.raises(Exception, match="'solution' is undefined"):
        scores(number_judge(server, template="{{ solution }}"), make_group("x"))


# Cache and concurrency ------------------------------------------------------------------------------------------------


def test_equal_questions_are_asked_once(tmp_path: Path) -> None:
    path = str(tmp_path / "cache" / "judge.sqlite")
    with serving(in_turn(saying("7"), saying("8"))) as server:
        judge = number_judge(server, cache=path)
        assert scores(judge, make_group("x")) == [0.7]
        assert scores(judge, make_group("x")) == [0.7]
        assert scores(number_judge(server, cache=path), make_group("x")) == [0.7]
        assert len(server.requests) == 1
        assert scores(number_judge(server, cache=path, temperature=0.5), make_group("x")) == [0.8]
        assert len(server.requests) == 2


def test_a_cache_may_be_made_in_another_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "judge.sqlite")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(AnswerCache(path).put, "question", "7").result()
    assert AnswerCache(path).get("question") == "7"
    assert not caplog.records


@pytest.mark.parametrize(("timeout_s", "mode"), [(5.0, "wal"), (0.0, "delete")])
def test_a_new_cache_file_that_another_process_has_locked_is_used_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float, mode: str
) -> None:
    path = tmp_path / "judge.sqlite"
    connect = sqlite3.connect
    with closing(connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        released = threading.Timer(0.2, other.execute, ("COMMIT",))
        released.start()
        monkeypatch.setattr("rlpipe.scoring.judge.BUSY_TIMEOUT_S", timeout_s)
        # The statements after the change of the mode wait in SQLite, by the connection's own timeout.
        monkeypatch.setattr(sqlite3, "connect", lambda path, **options: connect(path, **{**options, "timeout": 5.0}))
        cache = AnswerCache(str(path))
        released.join()
    assert cache._database is not None
    assert cache._database.execute("PRAGMA journal_mode").fetchone() == (mode,)
    cache.put("question", "7")
    assert AnswerCache(str(path)).get("question") == "7"


def test_the_cache_forgets_what_was_not_used_for_long() -> None:
    cache = AnswerCache(None, max_in_memory=2)
    for key in "ab":
        cache.put(key, key)
    assert cache.get("a") == "a"
    cache.put("c", "c")
    assert [cache.get(key) for key in "abc"] == ["a", None, "c"]


def test_a_broken_cache_file_costs_questions_not_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = AnswerCache(str(tmp_path / "judge.sqlite"))
    assert cache._database is not None
    cache._database.execute("DROP TABLE answers")
    cache.put("a", "1")
    assert cache.get("a") == "1"
    assert cache.get("b") is None
    assert "the judge's cache can't be used any more: no such table" in caplog.text


def test_no_more_requests_run_at_one_time_than_allowed() -> None:
    with serving(lambda path, body: Reply(body=saying("7").body, delay_s=0.05)) as server:
        scores(number_judge(server, concurrency=3), make_group(*"abcdefghij"))
    assert server.most_at_one_time == 3


# Servers that misbehave -----------------------------------------------------------------------------------------------

GOOD = saying("7")
PASSING = {
    "busy": Reply(status=429, body={"error": "slow down"}),
    "broken": Reply(status=500, body=b"<html>oops</html>"),
    "starting": Reply(status=503),
    "hanging up": Reply(hang_up=True),
    "no JSON": Reply(body=b'{"choices": [{"mess'),
    "another JSON": Reply(body={"message": "hello"}),
    "no text": Reply(body={"choices": [{"message": {"content": None}}]}),
    "no number": saying("I'd rather not say"),
    "a number outside": saying("11"),
    "slow": Reply(body=GOOD.body, delay_s=1.0),
}


@pytest.mark.parametrize("reply", PASSING.values(), ids=PASSING)
def test_a_request_is_made_again_until_its_answer_can_be_used(reply: Reply) -> None:
    with serving(in_turn(reply, reply, GOOD)) as server:
        assert scores(number_judge(server, timeout_s=0.3), make_group("x")) == [0.7]
    assert len(server.requests) == 3


LASTING = {
    "busy": "it answered 429",
    "broken": "it answered 500 .<html>oops</html>",
    "starting": "it answered 503",
    "hanging up": "RemoteProtocolError",
    "no JSON": "its answer is not JSON",
    "another JSON": "its answer is not a chat completion",
    "no text": "its answer has no text",
    "no number": 'gave no number from 0 to 10: "I\'d rather not say"',
    "a number outside": "gave no number from 0 to 10: '11'",
    "slow": "no answer within 0.3 seconds",
}


@pytest.mark.parametrize("kind", LASTING)
def test_what_stays_wrong_is_said(kind: str) -> None:
    with serving(in_turn(PASSING[kind])) as server, pytest.raises(RequestFailed, match=LASTING[kind]) as raised:
        scores(number_judge(server, timeout_s=0.3, retries=1), make_group("x"))
    assert str(raised.value).startswith(f"{server.url}/v1/chat/completions: ")
    assert str(raised.value).endswith("at the last of 2 attempts")
    assert len(server.requests) == 2


def test_what_will_not_change_is_not_asked_again() -> None:
    with (
        serving(in_turn(Reply(status=404, body={"error": "no model m"}))) as server,
        pytest.raises(RequestFailed, match="it answered 404"),
    ):
        scores(number_judge(server), make_group("x"))
    assert len(server.requests) == 1


def test_a_server_that_is_not_there_is_named() -> None:
    judge = NumberJudge(url="http://127.0.0.1:9", model="m", template=TEMPLATE, retries=1)
    with pytest.raises(RequestFailed, match=r"127\.0\.0\.1:9/chat/completions: ConnectError"):
        scores(judge, make_group("x"))


def test_the_server_says_how_long_to_wait() -> None:
    busy = Reply(status=429, headers={"retry-after": "0.4"})
    with serving(in_turn(busy, GOOD)) as server:
        started = time.monotonic()
        assert scores(number_judge(server), make_group("x")) == [0.7]
    assert time.monotonic() - started >= 0.4


def test_one_failure_breaks_the_groups_other_requests_off() -> None:
    def answer(path: str, body: Any) -> Reply:
        return Reply(status=404) if "bad" in question(body) else Reply(body=GOOD.body, delay_s=5.0)

    with serving(answer) as server:
        started = time.monotonic()
        with pytest.raises(RequestFailed, match="404"):
            scores(number_judge(server), make_group("fine", "bad"))
        assert time.monotonic() - started < 4


# NeMo Gym -------------------------------------------------------------------------------------------------------------


def test_nemo_gym_is_sent_the_row_and_the_answer() -> None:
    def answer(path: str, body: Any) -> Reply:
        text = body["response"]["output"][0]["content"][0]["text"]
        return Reply(body={**body, "reward": float(text == body["expected"])})

    with serving(answer) as server:
        assert scores(NemoGym(url=server.url), make_group("four", "five", expected="four")) == [1.0, 0.0]
    path, body = server.requests[0]
    assert path == "/verify"
    assert body["question"] == "2 + 2"
    assert [turn["role"] for turn in body["responses_create_params"]["input"]] == ["system", "user"]
    response = body["response"]
    assert response["object"] == "response"
    assert response["output"][0]["type"] == "message"
    assert response["output"][0]["content"][0]["type"] == "output_text"


def test_nemo_gym_keeps_the_rows_own_parameters() -> None:
    params = {"input": [{"role": "user", "content": "hi"}], "tools": []}
    with serving(in_turn(Reply(body={"reward": 0.5}))) as server:
        assert scores(NemoGym(url=server.url), make_group("x", chat=False, responses_create_params=params)) == [0.5]
    assert server.requests[0][1]["responses_create_params"] == params


def test_nemo_gym_reads_one_of_several_rewards() -> None:
    reply = Reply(body={"reward": 1.0, "reward_components": {"style": 0.25}})
    with serving(in_turn(reply)) as server:
        assert scores(NemoGym(url=server.url, component="style"), make_group("x")) == [0.25]


WRONG_VERDICTS: dict[str, Callable[[], Reply]] = {
    "its reward is None, not a finite number": lambda: Reply(body={}),
    "its reward is 'good', not a finite number": lambda: Reply(body={"reward": "good"}),
    "its answer is not JSON .*NaN": lambda: Reply(body=b'{"reward": NaN}'),
    "its answer is not JSON": lambda: Reply(body=b"reward: 1"),
    "it answered 500": lambda: Reply(status=500),
    "it answered 429": lambda: Reply(status=429),
    "no answer within 0.3 seconds": lambda: Reply(body={"reward": 1.0}, delay_s=1.0),
}


@pytest.mark.parametrize("reason", WRONG_VERDICTS)
def test_nemo_gym_asks_again_and_then_says_what_is_wrong(reason: str) -> None:
    wrong = WRONG_VERDICTS[reason]()
    with serving(in_turn(wrong, Reply(body={"reward": 1}))) as server:
        assert scores(NemoGym(url=server.url, timeout_s=0.3), make_group("x")) == [1.0]
    with serving(in_turn(wrong)) as server, pytest.raises(RequestFailed, match=reason):
        scores(NemoGym(url=server.url, timeout_s=0.3, retries=1), make_group("x"))


# The run's engines as judge -------------------------------------------------------------------------------------------


class FakeChat:
    """A chat that always gives the same answer, and records its requests."""

    name = "/models/m"

    def __init__(self, text: str = "I give 7.5") -> None:
        self._text = text
        self.asked: list[dict[str, Any]] = []

    async def answer(self, messages: Any, **options: Any) -> str:
        self.asked.append({"messages": messages, **options})
        return self._text


def engine_judge(chat: FakeChat, engine: str = "base", **options: Any) -> NumberJudge:
    judge = NumberJudge(engine=engine, template=TEMPLATE, **options)
    judge.chat = chat  # type: ignore[assignment]
    return judge


def test_the_engines_are_asked_what_a_server_would_be() -> None:
    chat = FakeChat()
    judge = engine_judge(chat, system="You grade.", max_tokens=5, request={"top_p": 0.9})
    assert scores(judge, make_group("four")) == [0.75]
    (asked,) = chat.asked
    assert asked["messages"] == [
        {"role": "system", "content": "You grade."},
        {"role": "user", "content": "Question: 2 + 2\nAnswer: four\nHow good is it?"},
    ]
    assert {name: asked[name] for name in ("weights", "temperature", "max_tokens", "timeout_s", "options")} == {
        "weights": "base",
        "temperature": 0.0,
        "max_tokens": 5,
        "timeout_s": 60.0,
        "options": {"top_p": 0.9},
    }


def test_the_base_is_asked_once_and_the_policy_each_time(tmp_path: Path) -> None:
    group = make_group("four", "four", "five")
    for engine, count in (("base", 2), ("policy", 6)):
        chat = FakeChat()
        judge = engine_judge(chat, engine, concurrency=1)
        for _ in range(2):
            assert scores(judge, group) == [0.75] * 3
        assert len(chat.asked) == count
    file = str(tmp_path / "answers.sqlite")
    for name, count in (("a", 1), ("a", 0), ("b", 1)):
        chat = FakeChat()
        chat.name = name
        scores(engine_judge(chat, cache=file), make_group("four"))
        assert len(chat.asked) == count, "a cache knows whose answers it has"


def test_equal_questions_have_equal_seeds_and_others_have_others() -> None:
    chat = FakeChat()
    scores(engine_judge(chat, "policy", temperature=1.0), make_group("four", "four", "five"))
    first, again, other = sorted(chat.asked, key=lambda asked: question(asked) == "five")
    seeds = {question(asked): asked["seed"] for asked in (first, again, other)}
    assert len(seeds) == len(set(seeds.values())) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"either url \(a server\) or engine \(base or policy\), found neither"),
        ({"url": "http://x", "engine": "base"}, "either url.* or engine.*, found both"),
        ({"engine": "learner"}, "engine is 'learner'; set base or policy"),
        ({"engine": "base", "model": "m"}, "model needs url"),
        ({"url": "http://x"}, "model needs url"),
        ({"engine": "policy", "cache": "x.sqlite"}, "cache: the policy's answers change with every version"),
    ],
)
def test_a_judge_has_a_server_or_the_engines(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NumberJudge(template="x", **options)


def test_the_engines_of_no_run_can_not_be_asked() -> None:
    with pytest.raises(ValueError, match="engine=base uses the engines of a run, and there are none here: set a url"):
        NumberJudge(template="x", engine="base").setup()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"kind": "none"}, r"the run has model\.adapter\.kind=none: train a LoRA adapter"),
        ({"kind": "lora", "merge": True}, "the run merges its adapter"),
        ({"kind": "lora", "use_dora": True}, "the run merges its adapter"),
    ],
)
def test_a_base_judge_needs_engines_that_serve_an_adapter(adapter: dict[str, Any], message: str) -> None:
    model = ModelConfig(path="m", adapter=AdapterConfig(**adapter))
    with pytest.raises(ConfigError, match=f"engine=base needs engines that serve the adapter separately.*{message}"):
        NumberJudge.check_run(model, {"engine": "base", "template": "x"})
    NumberJudge.check_run(model, {"engine": "policy", "template": "x"})
    NumberJudge.check_run(model, {"url": "http://x", "model": "m", "template": "x"})
    with pytest.raises(ConfigError, match="engines have no option n"):
        NumberJudge.check_run(ModelConfig(path="m"), {"engine": "base", "request": {"n": 1}})


def test_judges_are_reward_actors() -> None:
    assert all(issubclass(kind, RewardActor) for kind in (Judge, NumberJudge, RubricJudge, PairwiseJudge, NemoGym))
