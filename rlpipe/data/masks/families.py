"""The built-in markers of known families of chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlpipe.configs.role_boundaries import RoleMarkers


def _alike(names: Mapping[str, str], start: str, end: str) -> list[RoleMarkers]:
    """Return the markers of roles whose start markers differ only in a name."""
    return [RoleMarkers(role=role, start=start.format(name), end=end) for role, name in names.items()]


MISTRAL = [
    # The end of a user turn is the start of the assistant's, as is the end of a tool result unless another one follows.
    RoleMarkers(role="user", start="[INST]", end="[/INST]", include_end=False),
    RoleMarkers(role="assistant", start="[/INST]", end="</s>"),
    RoleMarkers(role="tool", start="[TOOL_RESULTS]", end="[/TOOL_RESULTS]", include_end=False),
    RoleMarkers(role="tool", start="[/TOOL_RESULTS][TOOL_RESULTS]", end="[/TOOL_RESULTS]", include_end=False),
    RoleMarkers(role="assistant", start="[/TOOL_RESULTS]", end="</s>"),
]
SAME = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

FAMILIES: Mapping[str, Sequence[RoleMarkers]] = {
    "ChatML, Qwen": _alike(SAME, "<|im_start|>{}\n", "<|im_end|>"),
    # The template writes the system message into the user's first turn.
    "Gemma 2, 3, 3n": _alike({"user": "user", "assistant": "model"}, "<start_of_turn>{}\n", "<end_of_turn>"),
    "Gemma 4": [
        *_alike(SAME | {"assistant": "model"}, "<|turn>{}\n", "<turn|>"),
        # The model asks for a tool result by writing its start marker, and continues after the result.
        RoleMarkers(role="tool", start="<|tool_response>", end="<tool_response|>", interrupts=True),
    ],
    "Llama 3": _alike(SAME | {"tool": "ipython"}, "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "Llama 4": _alike(SAME | {"tool": "ipython"}, "<|header_start|>{}<|header_end|>\n\n", "<|eot|>"),
    "Mistral V7 Tekken": [
        RoleMarkers(role="system", start="[SYSTEM_PROMPT]", end="[/SYSTEM_PROMPT]"),
        *MISTRAL,
    ],
    "Pixtral, Mistral V3": MISTRAL,
}
"""Families by name; the first one is used whose markers the tokenizer has and the rendered template contains."""
