"""Options of the training rows and the held-out rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlpipe.configs.schema.option import MAX_STEPS, MAX_TOKENS, MAX_WEIGHT, MISSING, PROSE, Freezable, option

SET_BY_OPTIONS = {"tools": "data.tools", "chat_template": "model.chat_template"}
"""Arguments of chat templates that have options of their own."""
SET_FOR_EACH_ROW = {
    *("conversation", "conversations", "messages", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("return_assistant_tokens_mask", "return_dict", "return_tensors", "padding", "truncation", "max_length"),
    "tokenizer_kwargs",
}
"""Arguments of ``apply_chat_template`` that rendering sets."""


@dataclass(kw_only=True)
class HeldOutConfig(Freezable):
    """Options of the held-out rows and their evaluation."""

    size: int = option(
        0, "Number of rows, chosen by the seed, that are held out from training; 0: none.", minimum=0, maximum=10**9
    )
    path: str | None = option(None, "A separate file with held-out rows.")
    split: str | None = option(None, "A separate split of the data set with held-out rows (datasets).")
    every_steps: int = option(
        0, "Steps between evaluations; 0: only at the start and the end.", minimum=0, maximum=MAX_STEPS
    )
    correct_at: float = option(
        1.0,
        "A rollout whose reward is at least this counts as correct in the accuracy.",
        minimum=-MAX_WEIGHT,
        maximum=MAX_WEIGHT,
    )
    correct_by: str | None = option(None, "Name of the reward that correct_at applies to; null: the sum.")


@dataclass(kw_only=True)
class DataConfig(Freezable):
    """Options of the training rows: their source, format and order."""

    source: str = option(
        MISSING,
        "Where rows come from; mix: from all of data.sources.",
        choices=("jsonl", "parquet", "datasets", "reasoning_gym", "mix"),
    )
    sources: dict[str, Any] = option(
        {}, "Sources of a mix by name, each with its own source, weight (default: 1) and options of data."
    )
    path: str | None = option(
        None, "File, folder of files, or pattern such as rows/*.jsonl (jsonl, parquet); folder or hub id (datasets)."
    )
    name: str | None = option(None, "Configuration of the data set (datasets).")
    split: str = option("train", "Split of the data set (datasets).")
    task: str | None = option(None, "Name of the task (reasoning_gym).")
    task_args: dict[str, Any] = option({}, "Arguments of the task (reasoning_gym), such as size and seed.")
    prompt_column: str = option("prompt", "Column with the prompt: a string or chat messages.")
    transform: str | None = option(None, "module:function that returns (map_fn, {'remove_columns': [...]}).")
    transform_args: dict[str, Any] = option(
        {}, "Further entries of the transform's cfg, which also contains the options of data."
    )
    chat: bool = option(True, "Render text prompts through the chat template, as one user turn.")
    system_prompt: str | None = option(None, "A system turn before every chat prompt that has none.", text=PROSE)
    chat_template_kwargs: dict[str, Any] = option({}, "Further arguments of the chat template.")
    tools: list[Any] = option([], "Tool schemas for the chat template, for rows without their own.")
    tools_column: str | None = option("tools", "Column with a row's own tool schemas, or their JSON; null: no column.")
    completion_column: str = option("completion", "Column with the answer, for plain SFT rows.")
    chosen_column: str = option("chosen", "Column with the better answer, or the conversation with it (preferences).")
    rejected_column: str = option(
        "rejected", "Column with the worse answer, or the conversation with it (preferences)."
    )
    label_column: str = option("label", "Column that says whether the answer is good (algorithm=kto).")
    messages_column: str = option("messages", "Column with the conversation, for chat SFT rows.")
    images_column: str = option("images", "Column with a prompt's or a conversation's images: one, or a list.")
    images_folder: str | None = option(
        None, "Folder that relative image paths start from; null: the folder of data.path."
    )
    text_column: str | None = option(None, "Column with raw text; all of its tokens are trained (SFT, ebft_strided).")
    long_texts: str = option(
        "window",
        "Texts longer than a sequence: train another window in each epoch, or all of it in chunks.",
        choices=("window", "chunks"),
    )
    loss_mask: str = option(
        "roles", "Tokens of conversations that are trained (SFT): chosen by role, or all.", choices=("roles", "all")
    )
    roles_to_train: list[str] = option(["assistant"], "Roles whose turns are trained; [] trains none.")
    train_on_inputs: bool = option(False, "Train the turns of all roles, and the text between them.")
    train_on_eos: str = option(
        "turn",
        "End markers that are trained: those of trained turns, of all turns, none, or that of the last trained turn.",
        choices=("turn", "all", "none", "last"),
    )
    role_boundaries: list[Any] | None = option(
        None,
        "Markers of turns: {role, start, end, include_start, include_end, interrupts, shares_end}; null: "
        "found automatically.",
    )
    max_prompt_tokens: int = option(1024, "Longer prompts are skipped and counted.", minimum=1, maximum=MAX_TOKENS)
    cache: str | None = option(
        None, "Folder of the rows that rlpipe data prepare writes; null: in the user's cache folder."
    )
    shuffle: bool = option(True, "Shuffle the rows again in each epoch, by the seed.")
    streaming: bool = option(False, "Read rows during the run, instead of opening all of them at the start.")
    shuffle_rows: int = option(
        10_000, "Consecutive rows that are held in memory and shuffled together (streaming).", minimum=1, maximum=10**9
    )
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
