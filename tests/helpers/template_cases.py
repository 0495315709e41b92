"""Chat templates that installed packages ship, tokenizers made for them, and the truth about what they render.

The texts of each role are written in an alphabet of their own, which no template contains: whose a character of the
rendered conversation is, its alphabet says.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chat_families import byte_pairs
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rlpipe.types import BoolArray, ChatMessages

PACKAGES = {"trl": "chat_templates", "vllm": "transformers_utils/chat_templates"}

WORDS = {
    "assistant": ("αλφα βητα", "γαμμα δελτα", "εψιλον ζητα", "θητα ιωτα", "καππα λαμδα"),
    "user": ("альфа бета", "гамма дельта", "эпсилон дзета", "каппа лямбда"),
    "tool": ("აბგ დევ", "ზთი კლმ", "ნოპ ჟრს"),
    "system": ("աբգ դեզ",),
}
ALPHABETS = {"assistant": "[Ͱ-Ͽ]", "user": "[Ѐ-ӿ]", "tool": "[Ⴀ-ჿ]", "system": "[԰-֏]"}

TRAINED_ON = (*(text for texts in WORDS.values() for text in texts), "\n\n \n\n\n", "user assistant system tool model")

MARKER = re.compile(
    r"<\|[^<>|{}\s'\"]+\|?>|<[^<>|{}\s'\"/=]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_\w+>"
    r"|</?s>|<[be]os>|<pad>|<image>|</?think>|</?tool_(?:call|response)>"
)
NAME = re.compile("assistant|model|CHATBOT|Assistant", re.IGNORECASE)
"""The assistant's name in the starts of its turns."""
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>"),
    *("<|return|>", "<|end|>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "</s>"),
)
"""End tokens of the templates' models, of which the first that a template contains is its tokenizer's."""


def shipped_templates() -> Iterator[tuple[str, str]]:
    """Yield name and text of each chat template in the packages' folders."""
    for package, folder in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        for path in sorted((Path(spec.origin).parent / folder).glob("*.jinja")):
            yield f"{package}/{path.stem}", path.read_text()


def made_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the template, and with its markers as special tokens."""
    markers = list(dict.fromkeys(MARKER.findall(template)))
    end = next((token for token in ENDS if token in template), "</s>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_pairs(TRAINED_ON)),
        extra_special_tokens=markers,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        bos_token=next((token for token in ("<|begin_of_text|>", "<bos>", "<s>") if token in template), "<|begin|>"),
        eos_token=end,
        pad_token="<|padding|>",
    )
    tokenizer.name_or_path = "made here"
    return tokenizer


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a place.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "description": "the place"}},
                "required": ["at"],
            },
        },
    }
]


def _call(place: str, number: int = 0) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": place}}
    return {"id": ("q8Zk3Lw7P", "t5Rm1Xc9V")[number], "type": "function", "function": function}


def _said(*roles: str) -> ChatMessages:
    """Return messages of the roles, each with the next text of its role."""
    left = {role: iter(texts) for role, texts in WORDS.items()}
    return [{"role": role, "content": next(left[role])} for role in roles]


def _with_calls(num_calls: int, content: str | None, *, is_text: bool = False) -> ChatMessages:
    user, first, *results, answer = _said("user", "assistant", *["tool"] * num_calls, "assistant")
    calls = [_call(first["content"], number) for number in range(num_calls)]
    if is_text:
        for call in calls:
            call["function"]["arguments"] = f'{{"at": "{first["content"]}"}}'
    caller = {"role": "assistant", "content": content, "tool_calls": calls}
    answered = [
        result | {"tool_call_id": call["id"], "name": "look"} for result, call in zip(results, calls, strict=True)
    ]
    return [user, caller, *answered, answer]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row's messages and tools."""

    messages: ChatMessages
    tools: Sequence[Any] | None = None


def _quoting(quoted: str) -> Case:
    """Return a conversation whose user writes the text of a turn of the assistant."""
    messages = _said("user", "assistant")
    messages[0]["content"] += f"\n{quoted}\n" + WORDS["user"][2]
    return Case(messages=messages)


def cases(tokenizer: PreTrainedTokenizerFast) -> dict[str, Case]:
    """Return the rows that each template is tried on."""
    dialogue = _said("user", "assistant", "user", "assistant")
    leading = _said("user", "assistant", "user", "assistant")
    for message in leading[1::2]:
        message["content"] = "\n\n" + message["content"]
    reasoned = _said("user", "assistant", "user", "assistant")
    for message, thought in zip(reasoned[1::2], WORDS["assistant"][2:], strict=False):
        message["reasoning_content"] = thought
    inline = _said("user", "assistant", "user", "assistant")
    for message, thought in zip(inline[1::2], WORDS["assistant"][2:], strict=False):
        message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
    more = _said("user", "user", "assistant")[1]
    greek = WORDS["assistant"][1]
    return {
        "plain": Case(messages=dialogue[:2]),
        "system": Case(messages=_said("system", "user", "assistant")),
        "turns": Case(messages=dialogue),
        "leading breaks": Case(messages=leading),
        "reasoning": Case(messages=reasoned),
        "inline reasoning": Case(messages=inline),
        "repeated answers": Case(messages=_said("user", "assistant", "assistant", "user", "assistant")),
        "repeated questions": Case(messages=_said("user", "user", "assistant")),
        "call": Case(messages=_with_calls(1, None), tools=TOOLS),
        "call without tools": Case(messages=_with_calls(1, None)),
        "call beside an empty text": Case(messages=_with_calls(1, ""), tools=TOOLS),
        "call beside a text": Case(messages=_with_calls(1, greek), tools=TOOLS),
        "call as JSON": Case(messages=_with_calls(1, None, is_text=True), tools=TOOLS),
        "two calls": Case(messages=_with_calls(2, None), tools=TOOLS),
        "call, then a question": Case(messages=[*_with_calls(1, None), more, dialogue[3]], tools=TOOLS),
        "call at the end": Case(messages=_with_calls(1, None)[:2], tools=TOOLS),
        "quoted turns": _quoting(_rendered(tokenizer)),
        "quoted thinking": _quoting(f"<think>\n{WORDS['user'][1]}\n</think>\n\n{WORDS['user'][2]}"),
    }


def _rendered(tokenizer: PreTrainedTokenizerFast) -> str:
    turns = [{"role": "user", "content": WORDS["user"][1]}, {"role": "assistant", "content": WORDS["user"][2]}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # noqa: BLE001 - whatever a template raises
        return "<|im_end|>\n<|im_start|>assistant\n" + WORDS["user"][2]


def find_mistakes(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], mask: BoolArray) -> list[str]:
    """Return what is wrong with the mask of a conversation whose texts are ``WORDS``."""
    text = tokenizer.decode(token_ids)
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if made["input_ids"] != list(token_ids):
        return ["the tokens are not those of the text"]
    owners = np.full(len(text), "", dtype=object)
    for role, alphabet in ALPHABETS.items():
        for found in re.finditer(alphabet, text):
            owners[found.start()] = role
    mistakes = []
    of_token = [set(owners[start:end]) - {""} for start, end in made["offset_mapping"]]
    for number, (held, counts) in enumerate(zip(of_token, mask, strict=True)):
        piece = text[made["offset_mapping"][number][0] :][:12]
        if held - {"assistant"} and counts:
            mistakes.append(f"trains the text of {held} at {piece!r}")
        if held == {"assistant"} and not counts:
            mistakes.append(f"leaves out the assistant's text at {piece!r}")
    mistakes += _mistakes_between(tokenizer, token_ids, of_token, mask)
    return mistakes


def _mistakes_between(
    tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], of_token: Sequence[set[str]], mask: BoolArray
) -> list[str]:
    """Return mistakes in the template's tokens.

    Those within an answer and its end count; those right after other texts, and the start of an answer, do not.
    """
    mistakes = []
    owned = [number for number, held in enumerate(of_token) if held]
    for here, following in zip(owned, [*owned[1:], len(token_ids)], strict=True):
        between = range(here + 1, following)
        pieces = [tokenizer.decode([token_ids[number]]) for number in between]
        if of_token[here] == {"assistant"}:
            end = next((number for number in between if token_ids[number] == tokenizer.eos_token_id), None)
            if end is not None and not mask[end]:
                mistakes.append("leaves out the end of an answer")
            within = following < len(token_ids) and of_token[following] == {"assistant"}
            if within and not any(MARKER.fullmatch(piece) for piece in pieces) and not mask[here:following].all():
                mistakes.append(f"leaves out {''.join(pieces)!r} within an answer")
        elif pieces and mask[here + 1] and pieces[0].strip():
            mistakes.append(f"trains {pieces[0]!r} right after the {of_token[here]}")
        elif following < len(token_ids) and of_token[following] == {"assistant"}:
            names = [number for number, piece in zip(between, pieces, strict=True) if NAME.search(piece)]
            if any(mask[number] for number in names):
                mistakes.append(f"trains the start of an answer, {''.join(pieces)!r}")
    return mistakes
