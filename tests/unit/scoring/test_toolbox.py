"""The shipped reward functions on synthetic rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from reasoning_gym import create_dataset
from trl.rewards import get_soft_overlong_punishment

from rlpipe.scoring.toolbox import (
    completion_text,
    exact_match,
    format_regex,
    format_tags,
    gsm8k_accuracy,
    json_schema,
    last_number,
    length_penalty,
    math_answer,
    numeric_closeness,
    numeric_match,
    reasoning_gym,
    soft_overlong,
)


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 42.", 42),
        ("1,234,567 in all", 1234567),
        ("it costs $1,200.50", 1200.5),
        ("x = -7", -7),
        ("x = −7", -7),
        ("12-5", 5),
        ("(3)-4", 4),
        ("2.5e3 m", 2500),
        ("about .5", 0.5),
        ("1, 2, 3", 3),
        ("12,34", 34),
        ("none here", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_exact_match_compares_text_or_tag() -> None:
    assert exact_match(["Paris ", "paris", "Rome"], ["Paris"] * 3) == [1.0, 0.0, 0.0]
    assert exact_match(["Paris", "paris"], ["Paris"] * 2, ignore_case=True) == [1.0, 1.0]
    tagged = chat("so <answer>7</answer>", "<answer>1</answer> no, <answer> 7 </answer>", "7", "<answer>7")
    assert exact_match(tagged, [7] * 4, answer_tag="answer") == [1.0, 1.0, 0.0, 0.0]


def test_numeric_match_reads_the_last_number() -> None:
    assert numeric_match(["7 + 5 = 12", "12 or 13", "1.2e1", "none"], ["12", 12, 12.0, "12"]) == [1.0, 0.0, 1.0, 0.0]
    assert numeric_match(["3.14"], ["3.14159"], tolerance=0.01) == [1.0]
    assert numeric_match(["1000001"], ["1,000,000"]) == [0.0]
    assert numeric_match(["9e999"], ["1"]) == [0.0]


def test_numeric_closeness_falls_with_the_distance() -> None:
    assert numeric_closeness(["7 + 5 = 12", "13", "9", "none", "9e999"], [12] * 5) == [1.0, 0.5, 0.25, 0.0, 0.0]
    assert numeric_closeness(["<a>15</a> 1", "12"], ["12"] * 2, answer_tag="a", scale=3) == [0.5, 0.0]
    with pytest.raises(ValueError, match="'seven' is not a number"):
        numeric_closeness(["7"], ["seven"])


def test_numeric_match_refuses_a_row_without_a_number() -> None:
    with pytest.raises(ValueError, match="seven"):
        numeric_match(["7"], ["seven"])


def test_gsm8k_accuracy_on_rows_of_its_form() -> None:
    gold = "She sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 in all.\n#### 72"
    texts = chat("In all 48 + 24 = 72.", "#### 72\nChecked in 2 ways", "She sold 24", "It is $72.00", "no number")
    assert gsm8k_accuracy(texts, [gold] * 5) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert gsm8k_accuracy(["1200 eggs", "-3"], ["#### 1,200", "#### -3"]) == [1.0, 1.0]


def test_gsm8k_accuracy_refuses_a_row_without_its_mark() -> None:
    with pytest.raises(ValueError, match="####"):
        gsm8k_accuracy(["72"], ["72"])


def test_reasoning_gym_uses_the_tasks_grader() -> None:
    entry = create_dataset("countdown", size=1, seed=1)[0]
    swapped = "94*4 - 6 - 61"
    assert swapped != entry["answer"]
    texts = [entry["answer"], swapped, "94 + 4"]
    assert reasoning_gym(texts, [entry] * 3, ["countdown"] * 3)[:2] == [1.0, 1.0]
    assert reasoning_gym(texts, [entry] * 3, ["countdown"] * 3)[2] < 0.1


def test_reasoning_gym_reads_the_answer_tag_of_chat_completions() -> None:
    entry = create_dataset("basic_arithmetic", size=1, seed=1)[0]
    texts = chat(f"well, <answer>{entry['answer']}</answer>", entry["answer"])
    assert reasoning_gym(texts, [entry] * 2, ["basic_arithmetic"] * 2, answer_tag="answer") == [1.0, 0.0]


def test_reasoning_gym_answer_that_the_grader_cannot_read_is_wrong() -> None:
    entry = create_dataset("prime_factorization", size=1, seed=1)[0]
    texts = ["I do not know", entry["answer"]]
    assert reasoning_gym(texts, [entry] * 2, ["prime_factorization"] * 2) == [0.0, 1.0]


def test_reasoning_gym_entry_that_the_grader_cannot_read_raises() -> None:
    with pytest.raises(KeyError, match="answer"):
        reasoning_gym(["2"], [{"question": "1 + 1"}], ["chain_sum"])
    with pytest.raises(ValueError, match="no_such_task"):
        reasoning_gym(["2"], [{"question": "?", "answer": "2"}], ["no_such_task"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>2+2</think><answer>4</answer>", 1.0),
        ("\n<think>\n2+2\n</think>\n\n<answer>4</answer>\n", 1.0),
        ("<answer>4</answer><think>2+2</think>", 0.0),
        ("<think>2+2</think><answer>4</answer> Done.", 0.0),
        ("<think>2<think>+2</think><answer>4</answer>", 0.0),
        ("<think>2+2</think>", 0.0),
    ],
)
def test_format_tags(text: str, value: float) -> None:
    assert format_tags([text]) == format_tags(chat(text)) == [value]


def test_length_penalty_falls_to_its_floor() -> None:
    assert length_penalty([[], [1] * 5, [1] * 10, [1] * 30], max_tokens=10) == [0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("cache_tokens", [0, 20, 100])
def test_soft_overlong_equals_trls(cache_tokens: int) -> None:
    lengths = [[1] * length for length in range(0, 121, 5)]
    theirs = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=cache_tokens)
    assert soft_overlong(lengths, max_tokens=100, cache_tokens=cache_tokens) == theirs(completion_ids=lengths)


@pytest.mark.parametrize(
    ("gold", "completion", "score"),
    [
        ("\\frac{1}{2}", "so it is $\\boxed{0.5}$", 1),
        ("1/2", "$\\frac{2}{4}$", 1),
        ("$x^2 + 2x + 1$", "Expanding, $\\boxed{(x+1)^2}$.", 1),
        ("\\{1, 2\\}", "the set $\\{2, 1\\}$", 1),
        ("3\\sqrt{2}", "$\\boxed{\\sqrt{18}}$", 1),
        ("42", "I think the answer is 42", 1),
        ("\\$18.90", "$\\boxed{18.90}$", 1),
        ("\\$32,\\!348", "$\\boxed{32348}$", 1),
        ("42", "first $\\boxed{42}$, no, $\\boxed{43}$", 0),
        ("\\frac{1}{2}", "$\\boxed{0.51}$", 0),
        ("42", "no idea", 0),
        ("42", "$\\boxed{$", 0),
    ],
)
def test_math_answers_are_compared_by_value(gold: str, completion: str, score: float) -> None:
    assert math_answer(chat(completion), [gold]) == [score]


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        ("4", "9^{9^9}", 0),
        ("4", "((5!)!)!", 0),
        ("4", "9^{-9^9}", 0),
        ("4", "100000000!", 0),
        ("10^{10^{10}}", "10^{10^{10}}", 1),
        ("10^{10^{10}}", "10^{10^{11}}", 0),
        ("2^{2023}-1", "2 \\cdot 2^{2022} - 1", 1),
        ("100!", "100 \\cdot 99!", 1),
        ("1^{9^9}", "1", 1),
    ],
)
def test_numbers_that_are_too_large_to_compute_are_compared_as_they_are_written(
    gold: str, answer: str, score: float
) -> None:
    started = time.process_time()
    assert math_answer([f"\\boxed{{{answer}}}"], [gold], timeout_s=60) == [score]
    assert time.process_time() - started < 5


def test_a_row_whose_answer_is_no_mathematics_is_refused() -> None:
    with pytest.raises(ValueError, match="'see above' is not a mathematical expression"):
        math_answer(["1"], ["see above"], plain=True)


def test_format_regex_matches_the_whole_completion() -> None:
    pattern = r"Plan:.*Answer: \d+"
    assert format_regex(["Plan: add\nAnswer: 12\n", "Answer: 12", "Plan: Answer: 1 or so"], pattern=pattern) == [
        1,
        0,
        0,
    ]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def test_json_schema_takes_json_fenced_or_not() -> None:
    valid = ['{"name": "a"}', 'Here:\n```json\n{"name": "a", "age": 3}\n```', '```\n[]\n```\n```\n{"name": "b"}\n```']
    invalid = ["", "name: a", '{"age": 3}', '{"name": "a", "age": -1}', '{"name": "a", "b": 1}', '{"name": "a"} or so']
    assert json_schema(chat(*valid), schema=SCHEMA) == [1, 1, 1]
    assert json_schema(invalid, schema=SCHEMA) == [0] * 6
    assert json_schema(["[" * 100_000], schema=SCHEMA) == [0], "Python's parser raises RecursionError"
    assert json_schema(['<json>{"name": "a"}</json>', '{"name": "a"}'], schema=SCHEMA, answer_tag="json") == [1, 0]


def test_json_schema_takes_no_json_that_is_against_the_standard() -> None:
    numbers = {"type": "object", "additionalProperties": {"type": "number", "multipleOf": 0.5}}
    texts = ['{"a": 1.5}', '{"a": NaN}', '{"a": Infinity}', '{"a": 1e999}', '{"a": "x", "a": 1}', '{"a": 1e300}']
    assert json_schema(texts, schema=numbers) == [1, 0, 0, 0, 0, 1]
    assert json_schema(['{"a": 1e308}'], schema={"additionalProperties": {"multipleOf": 1e-300}}) == [0]


def test_json_schema_finds_items_that_are_not_unique_in_linear_time() -> None:
    unique = {"uniqueItems": True}
    texts = ['[{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]', "[1, true, [1], [true], {}]", "[0, 1, 1]", '["1", 1]', "{}"]
    assert json_schema(texts, schema=unique) == [0, 1, 0, 1, 1]
    many = json.dumps([{"number": number} for number in range(10_000)])
    started = time.process_time()
    assert json_schema([many], schema={"$defs": {"rows": unique}, "$ref": "#/$defs/rows"}) == [1]
    assert time.process_time() - started < 5


def test_json_schema_refuses_a_schema_that_is_none() -> None:
    with pytest.raises(ValueError, match="schema is not a JSON schema: 'text' is not valid"):
        json_schema(["{}"], schema={"type": "text"})


def test_a_rows_answer_parses_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def parse(text: str, extraction: object, parsing_timeout: int = 5) -> list[str]:
        limits.append(parsing_timeout)
        return []

    from rlpipe.scoring.toolbox import _read_gold

    monkeypatch.setattr("math_verify.parse", parse)
    with pytest.raises(ValueError, match="parses within 2 s"):
        _read_gold("1", plain=True, timeout_s=2)
    assert limits == [2]


@pytest.mark.parametrize("reward", [exact_match, numeric_match, gsm8k_accuracy, math_answer])
def test_a_null_answer_scores_no_completion(reward: Callable[..., list[float]]) -> None:
    with pytest.raises(ValueError, match=r"^the row's answer (is null|None is not a number)$"):
        reward(["None", "null"], answer=["None", None] if reward is exact_match else [None, None])


def test_only_the_last_answer_of_a_conversation_is_read() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    conversation = [
        {"role": "assistant", "content": "I call it 1."},
        call,
        {"role": "tool", "content": "56"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "are you sure about 8?"},
        call,
    ]
    assert completion_text(conversation) == "7"
    assert numeric_match([conversation, conversation[:3]], [7, 56]) == [1.0, 0.0]
    assert completion_text([call, {"role": "tool", "content": "56"}]) == ""
