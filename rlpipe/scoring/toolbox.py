"""Reward functions for exact, numeric and mathematical answers, reasoning-gym's graders, GSM8K, formats and lengths.

A config names a function as ``rlpipe.scoring.toolbox:<function>``; parameters that are not data-set columns are set in
the reward's ``kwargs``. Each function returns one value per completion.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rlpipe.scoring.validation import strict_json

Completion = str | list[dict[str, Any]]

SIGN = r"(?:(?<![\w.)])[-+])?"  # a sign after a word or a bracket is an operator
NUMBER = re.compile(SIGN + r"\$?(?:\d{1,3}(?:,\d{3})+\b|\d+|(?<!\w)(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?")


def completion_text(completion: Completion) -> str:
    """Return the text of a completion: the completion itself, or its last message by the assistant that has a text."""
    if isinstance(completion, str):
        return completion
    index = last_answer(completion)
    return "" if index is None else completion[index]["content"]


def last_answer(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the assistant's last message that has a text, or None."""
    indices = reversed(range(len(messages)))
    answers = (index for index in indices if messages[index].get("role", "assistant") == "assistant")
    return next((index for index in answers if messages[index].get("content")), None)


def extract_tag(text: str, tag: str) -> str | None:
    """Return the stripped content of a text's last ``<tag>...</tag>``, or None if there is none."""
    head, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = head.rpartition(f"<{tag}>")
    return inside.strip() if opening and closing else None


def last_number(text: str) -> float | None:
    """Return the last number in a text, with sign, thousands separators, decimals and exponent, or None."""
    numbers = NUMBER.findall(text.replace("−", "-"))
    return _to_float(numbers[-1]) if numbers else None


def _to_float(digits: str) -> float:
    return float(digits.replace(",", "").replace("$", ""))


def _gold_number(value: Any) -> float:
    """Return the number that a data row gives as its answer; raise ``ValueError`` if it is none."""
    text = str(value).strip().replace("−", "-")
    if not NUMBER.fullmatch(text):
        raise ValueError(f"the row's answer {value!r} is not a number")
    return _to_float(text)


def _answers(completions: Sequence[Completion], answer_tag: str | None) -> list[str | None]:
    """Return the stripped texts, or the contents of their last answer tag."""
    texts = [completion_text(completion) for completion in completions]
    return [text.strip() if answer_tag is None else extract_tag(text, answer_tag) for text in texts]


def _require_answers(answer: Sequence[Any]) -> Sequence[Any]:
    if any(gold is None for gold in answer):
        raise ValueError("the row's answer is null")
    return answer


def exact_match(
    completions: Sequence[Completion],
    answer: Sequence[Any],
    *,
    answer_tag: str | None = None,
    ignore_case: bool = False,
) -> list[float]:
    """Return 1 where the completion, or the content of its last ``answer_tag``, equals the answer, both stripped.

    Raises ``ValueError`` for a row whose answer is null.
    """

    def key(value: Any) -> str:
        text = str(value).strip()
        return text.casefold() if ignore_case else text

    texts = _answers(completions, answer_tag)
    return [
        float(text is not None and key(text) == key(gold))
        for text, gold in zip(texts, _require_answers(answer), strict=True)
    ]


def numeric_match(
    completions: Sequence[Completion], answer: Sequence[Any], *, answer_tag: str | None = None, tolerance: float = 1e-6
) -> list[float]:
    """Return 1 where a completion's (or its last ``answer_tag``'s) last number is within ``tolerance`` of the answer.

    Raises ``ValueError`` for a row whose answer is not a number.
    """
    return [float(miss <= tolerance) for miss in _distances(completions, answer, answer_tag)]


def numeric_closeness(
    completions: Sequence[Completion], answer: Sequence[Any], *, answer_tag: str | None = None, scale: float = 1.0
) -> list[float]:
    """Return ``scale / (scale + d)``, where ``d`` is the last number's distance from the answer; 0 without a number.

    This distinguishes wrong answers even if no sample of a group is right yet. The number is found as by
    ``numeric_match``. Raises ``ValueError`` for a row whose answer is not a number.
    """
    return [scale / (scale + distance) for distance in _distances(completions, answer, answer_tag)]


def _distances(completions: Sequence[Completion], answer: Sequence[Any], answer_tag: str | None) -> list[float]:
    """Return the distance of each completion's last number from the row's answer."""
    numbers = [None if text is None else last_number(text) for text in _answers(completions, answer_tag)]
    return [_distance(number, _gold_number(gold)) for number, gold in zip(numbers, answer, strict=True)]


def _distance(number: float | None, gold: float) -> float:
    """Return the distance of a number from the right one; infinity if there is none, or it is not finite."""
    return math.inf if number is None or not math.isfinite(number) else abs(number - gold)


def gsm8k_accuracy(completions: Sequence[Completion], answer: Sequence[str]) -> list[float]:
    """Return 1 where the completion's final number equals the one after ``####`` in the row's answer, as in GSM8K.

    The final number of a completion is the first after its last ``####``, or else its last. Raises ``ValueError`` for
    a row whose answer has no ``####``. Data: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems".
    """
    golds = []
    for gold in map(str, _require_answers(answer)):
        if "####" not in gold:
            raise ValueError(f"the row's answer {gold[-40:]!r} has no '####'; use numeric_match for plain answers")
        golds.append(_gold_number(gold.rsplit("####", 1)[1]))
    numbers = [_gsm8k_number(completion_text(completion)) for completion in completions]
    return [float(_distance(number, gold) <= 1e-6) for number, gold in zip(numbers, golds, strict=True)]


def _gsm8k_number(text: str) -> float | None:
    _, marker, tail = text.rpartition("####")
    marked = NUMBER.search(tail.replace("−", "-")) if marker else None
    return _to_float(marked.group()) if marked else last_number(text)


def math_answer(
    completions: Sequence[Completion], answer: Sequence[str], *, timeout_s: int = 5, plain: bool = False
) -> list[float]:
    """Return 1 where math-verify finds the completion's answer equal to the row's, as 0.5 and ``\\frac{1}{2}`` are.

    A completion's answer is what math-verify finds in LaTeX, ``\\boxed`` first, or else the last expression; ``plain``
    leaves out LaTeX. Raises ``ValueError`` for a row whose answer math-verify can't read. Parsing a completion and
    comparing it take at most ``timeout_s`` seconds each; beyond that, it scores 0. Numbers of more than ``MAX_BITS``,
    such as 9^{9^9}, are only equal if they are written in the same way.
    """
    golds = {gold: _read_gold(gold, plain, timeout_s) for gold in {str(gold) for gold in _require_answers(answer)}}
    texts = [completion_text(completion) for completion in completions]
    return [_equals(golds[str(gold)], text, plain, timeout_s) for gold, text in zip(answer, texts, strict=True)]


def _extraction(plain: bool) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    return [ExprExtractionConfig()] if plain else [LatexExtractionConfig(), ExprExtractionConfig()]


def _read_gold(gold: str, plain: bool, timeout_s: int) -> list[Any]:
    from math_verify import parse

    is_marked = re.search(r"(?<!\\)\$", gold) or "\\boxed" in gold  # \$ is an amount of dollars
    wrapped = gold if plain or is_marked else f"${gold}$"
    parsed: list[Any] = parse(wrapped, _extraction(plain), parsing_timeout=timeout_s)
    if not parsed:
        raise ValueError(
            f"the row's answer {gold[-60:]!r} is not a mathematical expression that parses within {timeout_s} s"
        )
    return parsed


def _equals(gold: list[Any], text: str, plain: bool, timeout_s: int) -> float:
    from math_verify import parse, verify

    parsed = parse(text, _extraction(plain), parsing_timeout=timeout_s)
    if any(map(_is_huge, [*gold, *parsed])):
        return float(any(one == other for one in gold for other in parsed))
    return float(verify(gold, parsed, timeout_seconds=timeout_s))


MAX_BITS = 2**20
"""Size of the largest number that is computed to compare answers, which takes well under a second."""


def _is_huge(value: Any) -> bool:
    """Return whether an expression of sympy holds powers or factorials of more than ``MAX_BITS``."""
    try:
        return not isinstance(value, str) and _num_bits(value) > MAX_BITS
    except (OverflowError, RecursionError):
        return True


def _num_bits(node: Any) -> float:
    """Return about how many bits the parts of an expression have together; raise ``OverflowError`` for far too many."""
    from sympy import Pow, Rational, factorial

    if isinstance(node, Rational):
        return max((abs(int(node.p)) - 1).bit_length(), (int(node.q) - 1).bit_length())
    parts = getattr(node, "args", ())  # a matrix that may change has none
    bits: float = sum(map(_num_bits, parts)) if parts else 1
    if isinstance(node, Pow):
        return max(bits, _num_bits(node.base) * _magnitude(node.exp))
    if isinstance(node, factorial):
        return _magnitude(node.args[0]) * bits
    return bits


def _magnitude(node: Any) -> float:
    """Return about the absolute value of an expression."""
    return abs(float(node)) if node.is_Number else 2.0 ** _num_bits(node)


EVALUATING_TASKS = (
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
)
"""Tasks whose graders evaluate a completion as Python, themselves or by sympy's parser."""


@lru_cache(maxsize=64)
def _grader(task: str, task_args: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(task_args))


def reasoning_gym(
    completions: Sequence[Completion],
    entry: Sequence[Mapping[str, Any]],
    reasoning_gym_task: Sequence[str],
    *,
    answer_tag: str | None = None,
    task_args: Mapping[str, Any] | None = None,
) -> list[float]:
    """Return the score, 0 to 1, of the task's own grader for the completion or the content of its last ``answer_tag``.

    ``task_args`` are the data source's, for the few tasks whose grader reads them. A completion without the tag, or
    one that makes the grader raise, scores 0; an entry that the grader can't use raises. ``EVALUATING_TASKS`` need the
    reward's ``isolation`` to be ``sandbox``.
    """
    arguments = json.dumps(dict(task_args or {}), sort_keys=True)
    texts = _answers(completions, answer_tag)
    graders = [_grader(task, arguments) for task in reasoning_gym_task]
    return [_grade(*item) for item in zip(graders, texts, entry, strict=True)]


reasoning_gym.sandboxed_tasks = EVALUATING_TASKS  # type: ignore[attr-defined]
reasoning_gym.imports = ("reasoning_gym",)  # type: ignore[attr-defined]


def _grade(grader: Any, text: str | None, entry: Mapping[str, Any]) -> float:
    if text is None:
        return 0.0
    try:
        return float(grader.score_answer(text, entry))
    except Exception:  # noqa: BLE001 - graders raise whatever their parser raises
        # Some graders raise on an answer that they can't parse; on the entry's own answer they only raise if it is bad.
        grader.score_answer(entry["answer"], entry)
        return 0.0


def format_tags(completions: Sequence[Completion], *, tags: Sequence[str] = ("think", "answer")) -> list[float]:
    """Return 1 where the completion is ``<think>...</think><answer>...</answer>``: each once, in order, alone."""
    names = [re.escape(tag) for tag in tags]
    inside = rf"(?:(?!</?(?:{'|'.join(names)})>).)*"
    blocks = [f"<{name}>{inside}</{name}>" for name in names]
    pattern = re.compile(r"\s*" + r"\s*".join(blocks) + r"\s*", flags=re.DOTALL)
    return [float(pattern.fullmatch(completion_text(completion)) is not None) for completion in completions]


def format_regex(completions: Sequence[Completion], *, pattern: str) -> list[float]:
    """Return 1 where the whole completion, stripped, matches the regex; ``.`` matches newlines, too."""
    compiled = re.compile(pattern, flags=re.DOTALL)
    return [float(compiled.fullmatch(completion_text(completion).strip()) is not None) for completion in completions]


FENCE = re.compile(r"```[^\n`]*\n(.*?)```", flags=re.DOTALL)


def last_fenced(text: str) -> str | None:
    """Return the content of a text's last fenced block, or None if there is none."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else None


def json_schema(
    completions: Sequence[Completion], *, schema: Mapping[str, Any], answer_tag: str | None = None
) -> list[float]:
    """Return 1 where the completion, its last fenced block, or that of its last tag, is JSON that the schema allows.

    Raises ``ValueError`` if ``schema`` is not a JSON schema.
    """
    from jsonschema import SchemaError
    from jsonschema.validators import extend, validator_for

    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"schema is not a JSON schema: {error.message}") from None
    validator = extend(kind, {"uniqueItems": _find_repeated})(schema)
    return [float(_is_valid(text, validator)) for text in _answers(completions, answer_tag)]


def _find_repeated(validator: Any, is_unique: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Yield an error if items repeat, in linear time; jsonschema compares all pairs of objects."""
    from jsonschema import ValidationError

    if is_unique and validator.is_type(instance, "array") and len(set(map(_json_key, instance))) < len(instance):
        yield ValidationError("it has items that are not unique")


def _json_key(value: Any) -> Any:
    """Return a hashable value, equal for equal JSON: 1 is 1.0, but not true."""
    if isinstance(value, dict):
        return "object", frozenset((name, _json_key(entry)) for name, entry in value.items())
    if isinstance(value, list):
        return "array", *map(_json_key, value)
    return ("boolean", value) if isinstance(value, bool) else value


def _is_valid(text: str | None, validator: Any) -> bool:
    if text is None:
        return False
    try:
        return bool(validator.is_valid(strict_json(last_fenced(text) or text)))
    except (ArithmeticError, ValueError, RecursionError):  # 1e999 is no multiple of anything
        return False


def length_penalty(completion_ids: Sequence[Sequence[int]], *, max_tokens: int) -> list[float]:
    """Return 0 for an empty completion, linearly down to -1 at ``max_tokens`` and more; scale it by the weight."""
    return [max(-len(ids) / max_tokens, -1.0) for ids in completion_ids]


def soft_overlong(completion_ids: Sequence[Sequence[int]], *, max_tokens: int, cache_tokens: int) -> list[float]:
    """Return 0 up to ``max_tokens - cache_tokens``, then linearly down to -1 at ``max_tokens``, and -1 beyond.

    Equation 13 of Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale".
    """
    limit = max_tokens - cache_tokens

    def punish(length: int) -> float:
        if length <= limit:
            return 0.0
        return -1.0 if length > max_tokens else (limit - length) / cache_tokens

    return [punish(len(ids)) for ids in completion_ids]
