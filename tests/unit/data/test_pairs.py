"""Tests that rows of preferences, in the formats of common data sets, become pairs and labelled completions."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pair_cases import PAIR, PLACE, TOKENIZER, write_rows

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.data_config import DataConfig, HeldOutConfig
from rlpipe.configs.schema.preference_config import PreferenceConfig
from rlpipe.data.cached_rows import PreparedRow
from rlpipe.data.packing import pack_labelled, pack_step, split_padded
from rlpipe.data.pairs import PreferenceRenderer
from rlpipe.data.prompts import open_sft_rows
from rlpipe.data.render.processor import Encoded
from rlpipe.data.render_rows import _Sequences, prepare_rows
from rlpipe.data.row import RowLocation, SkipKind, UnusableRow
from rlpipe.data.row_renderer import RenderedRow
from rlpipe.errors import ConfigError, DataError
from rlpipe.types import PlacedImage, Rollout

USER = {"role": "user", "content": "2+2?"}
FOUR, FIVE, NOTHING = ({"role": "assistant", "content": answer} for answer in ("4", "five", ""))


def pair_of(row: dict[str, Any], *, max_tokens: int = 200, takes_pairs: bool = True, **options: Any) -> Rollout:
    data = DataConfig(source="jsonl", **options)
    renderer = PreferenceRenderer(TOKENIZER, data, takes_pairs=takes_pairs, max_tokens=max_tokens)
    return renderer.fit(renderer.whole(row, PLACE), PLACE)


def texts(row: dict[str, Any], **options: Any) -> tuple[str, str, str]:
    """Return the prompt and the trained tokens of both completions, after a check that they share the prompt."""
    chosen = pair_of(row, **options)
    assert chosen.rejected is not None
    prompts, trained = [], []
    for rollout in (chosen, chosen.rejected):
        first = int(np.argmax(rollout.loss_mask))
        prompts.append(str(TOKENIZER.decode(rollout.token_ids[:first])))
        trained.append(str(TOKENIZER.decode(rollout.token_ids[rollout.loss_mask])))
    assert prompts[0] == prompts[1]
    return prompts[0], *trained


IN_CHAT = texts(PAIR)


def test_a_pair_has_one_prompt_and_opposite_advantages() -> None:
    chosen = pair_of(PAIR)
    assert chosen.rejected is not None
    assert chosen.sequences == [chosen, chosen.rejected]
    assert set(chosen.advantages[chosen.loss_mask]) == {1.0}
    assert set(chosen.rejected.advantages[chosen.rejected.loss_mask]) == {-1.0}
    assert "2+2?" in IN_CHAT[0]
    assert IN_CHAT[1].startswith("4")
    assert IN_CHAT[2].startswith("five")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": [USER], "chosen": FOUR, "rejected": FIVE},
        {"chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"prompt": "something else", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},  # as in UltraFeedback
        {"prompt": None, "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"prompt": "", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"prompt": " ", "question": "2+2?", "chosen": "4", "rejected": "five"},
        {"prompt": "2+2?", "chosen": "4", "rejected": "five", "messages": [USER, FOUR]},
        {"prompt": "x", "chosen": [USER, FOUR], "rejected": [USER, FIVE], "messages": [USER, FOUR]},  # UltraFeedback's
        {"messages": [USER], "chosen": FOUR, "rejected": FIVE},  # axolotl's chat_template.default
        {
            "conversations": [{"from": "human", "value": "2+2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": FIVE,
        },
        {"question": "2+2?", "chosen": "4", "rejected": "five"},  # Intel's
        {"instruction": "2+2?", "chosen_response": "4", "rejected_response": "five"},  # Argilla's
        {"input": "2+2?", "chosen": "4", "rejected": "five"},  # Intel's Orca pairs, as axolotl's chatml.icr reads them
        {"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: five"},  # HH-RLHF
    ],
)
def test_formats_of_common_data_sets_are_the_same_pair(row: dict[str, Any]) -> None:
    assert texts(row) == IN_CHAT


def test_other_columns_and_a_system_turn() -> None:
    row = {"ask": "2+2?", "good": "4", "bad": "five", "system": "Be brief."}
    options = {"prompt_column": "ask", "chosen_column": "good", "rejected_column": "bad"}
    prompt, chosen, rejected = texts(row, **options)
    assert "Be brief." in prompt
    assert (chosen, rejected) == IN_CHAT[1:]
    assert pair_of({**row, "level": 3}, **options).task == {"level": 3}


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_system_column_comes_before_messages(column: str) -> None:
    row = {column: [USER], "chosen": FOUR, "rejected": FIVE, "system": "Be brief."}
    prompt, chosen, rejected = texts(row)
    assert prompt == texts({"prompt": "2+2?", "chosen": "4", "rejected": "five", "system": "Be brief."})[0]
    assert (chosen, rejected) == IN_CHAT[1:]
    own = {"role": "system", "content": "Be long."}
    assert "Be brief." not in texts({**row, column: [own, USER]})[0]


def test_an_instruction_with_an_input_is_one_prompt() -> None:
    prompt, *_ = texts({"instruction": "Add.", "input": "2, 2", "chosen": "4", "rejected": "five"})
    assert "Add.\n2, 2" in prompt


def test_plain_texts_without_a_prompt_share_what_they_begin_with() -> None:
    row = {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = five"}
    prompt, chosen, rejected = texts(row, chat=False)
    assert prompt == "2 + 2 ="
    assert chosen.startswith(" 4")
    assert rejected.startswith(" five")


def test_later_turns_of_a_conversation_count_from_where_the_two_part() -> None:
    more = {"role": "user", "content": "sure?"}
    first = {"chosen": [USER, FOUR, more, FOUR], "rejected": [USER, FOUR, more, FIVE]}
    prompt, chosen, _ = texts(first)
    assert "sure?" in prompt
    assert chosen.count("4") == 1
    _, chosen, rejected = texts({"chosen": [USER, FOUR, more, FOUR], "rejected": [USER, FIVE]})
    assert (chosen.count("4"), rejected.count("five")) == (2, 1)


def test_options_of_the_loss_mask_hold() -> None:
    _, chosen, _ = texts(PAIR, train_on_eos="none")
    assert chosen == "4"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**PAIR, "rejected": "4"}, "chosen and rejected are the same"),
        ({**PAIR, "rejected": None}, "column 'rejected' is null"),
        ({**PAIR, "rejected": ""}, "column 'rejected' is an empty text"),
        ({**PAIR, "rejected": 5}, "column 'rejected' holds a int, not a string or messages"),
        ({"chosen": [USER, FOUR], "rejected": [FIVE]}, "begin with different messages, so they hold no prompt$"),
        ({**PAIR, "chosen": [{**USER, "content": "3?"}, FOUR], "rejected": [USER, FIVE]}, "messages, so they hold no"),
        ({**PAIR, "rejected": [NOTHING]}, "the completion in column 'rejected' is empty"),
        ({**PAIR, "rejected": " "}, "the completion in column 'rejected' is empty"),
        ({"chosen": [USER, NOTHING], "rejected": [USER, FIVE]}, "the completion in column 'chosen' is empty"),
        (
            {"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant:"},
            "the completion in column 'rejected' is empty",
        ),
        ({**PAIR, "prompt": " "}, "the prompt is empty"),
        ({"prompt": "", "chosen": "I see 4", "rejected": "I see five"}, "the prompt is empty"),
        (
            {"chosen": [USER, FOUR], "rejected": [USER]},
            "chosen and rejected are the same, or one is the beginning of the other",
        ),
        ({"chosen": "4 apples", "rejected": "five"}, "chosen and rejected begin with different texts"),
        (
            {"chosen": "4 apples", "rejected": "4 apples and"},
            "chosen and rejected are the same, or one is the beginning of the other",
        ),
        ({"chosen": [USER, FOUR], "rejected": "five"}, "one of chosen and rejected is a string"),
        ({**PAIR, "chosen": [{"role": "tool", "content": "4"}]}, "it has no token in a turn of assistant"),
    ],
)
def test_unusable_pairs_are_skipped_by_name(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        pair_of(row)


def test_a_pair_has_to_fit_into_one_micro_batch() -> None:
    length = sum(len(sequence.token_ids) for sequence in pair_of(PAIR).sequences)
    assert pair_of(PAIR, max_tokens=length).rejected is not None
    with pytest.raises(UnusableRow, match="tokens together, more than learner") as caught:
        pair_of(PAIR, max_tokens=length - 1)
    assert caught.value.kind is SkipKind.TOO_LONG


def test_missing_columns_are_named() -> None:
    with pytest.raises(DataError, match=r"'rejected'.*data\.rejected_column"):
        pair_of({"prompt": "a", "chosen": "b"})
    with pytest.raises(DataError, match=r"'label'.*data\.label_column"):
        pair_of({"prompt": "a", "completion": "b"}, takes_pairs=False)


def test_a_system_column_comes_before_conversations() -> None:
    prompt, *_ = texts({"chosen": [USER, FOUR], "rejected": [USER, FIVE], "system": "Be brief."})
    assert "Be brief." in prompt
    assert prompt.count("2+2?") == 1


def test_a_null_completion_of_a_pair_is_skipped_where_labels_count() -> None:
    with pytest.raises(UnusableRow, match="column 'rejected' is null"):
        pair_of({**PAIR, "rejected": None}, takes_pairs=False)
    mixed = {**PAIR, "rejected": None, "completion": "4", "label": True}
    assert pair_of(mixed, takes_pairs=False).rejected is None
    longest = max(len(part.token_ids) for part in pair_of(PAIR).sequences)
    assert pair_of(PAIR, takes_pairs=False, max_tokens=longest).rejected is not None


@pytest.mark.parametrize(("label", "sign"), [(True, 1.0), (False, -1.0), (1, 1.0), (0, -1.0)])
def test_labelled_completions_are_good_or_bad(label: Any, sign: float) -> None:
    rollout = pair_of({"prompt": "2+2?", "completion": "4", "label": label}, takes_pairs=False)
    assert rollout.rejected is None
    assert set(rollout.advantages[rollout.loss_mask]) == {sign}


@pytest.mark.parametrize("more", [{}, {"prompt": "2+2?"}, {"prompt": "something else"}])
def test_a_labelled_conversation_has_its_own_prompt(more: dict[str, Any]) -> None:
    whole = pair_of({"completion": [USER, FOUR], "label": True, **more}, takes_pairs=False)
    apart = pair_of({"prompt": "2+2?", "completion": "4", "label": True}, takes_pairs=False)
    assert whole.token_ids.tolist() == apart.token_ids.tolist()
    assert whole.loss_mask.tolist() == apart.loss_mask.tolist()
    with pytest.raises(UnusableRow, match="without an answer of the assistant"):
        pair_of({"completion": [USER], "label": True}, takes_pairs=False)


def test_labelled_completions_that_are_empty_are_skipped() -> None:
    for completion in ([NOTHING], [USER, NOTHING]):
        with pytest.raises(UnusableRow, match="the completion in column 'completion' is empty"):
            pair_of({"prompt": "2+2?", "completion": completion, "label": True}, takes_pairs=False)
    call = {**NOTHING, "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
    rows = {"prompt": "2+2?", "completion": [call, FOUR], "label": True}
    assert pair_of(rows, takes_pairs=False).num_loss_tokens


def test_a_label_that_is_no_truth_value_is_skipped() -> None:
    with pytest.raises(UnusableRow, match="column 'label' is 'good', neither true nor false"):
        pair_of({"prompt": "2+2?", "completion": "4", "label": "good"}, takes_pairs=False)


def open_pairs(folder: Path, **options: Any) -> tuple[list[Rollout], list[Rollout]]:
    data = DataConfig(source="jsonl", path=write_rows(folder), held_out=HeldOutConfig(size=4), **options)
    source, held_out = open_sft_rows(data, TOKENIZER, seed=1, max_tokens=200, preference=PreferenceConfig())
    return source.take(20), held_out


def test_held_out_pairs_are_not_trained(tmp_path: Path) -> None:
    trained, held_out = open_pairs(tmp_path)
    assert len({rollout.prompt_id for rollout in trained} | {rollout.prompt_id for rollout in held_out}) == 24
    assert all(rollout.rejected is not None for rollout in [*trained, *held_out])


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("max_tokens", [60, 200])
def test_the_completions_of_a_pair_stay_together(tmp_path: Path, num_ranks: int, max_tokens: int) -> None:
    trained, _ = open_pairs(tmp_path)
    batches = pack_step(trained, step=0, num_ranks=num_ranks, max_tokens=max_tokens, num_minibatches=2)
    found = []
    for batch in batches:
        for mini_batch in batch.mini_batches:
            assert mini_batch.num_sequences == 10
            for micro in mini_batch.micro_batches:
                for part in split_padded(micro, 80, together=2) if micro.loss_mask.any() else []:
                    starts = part.sequence_starts
                    signs = [part.advantages[a:b][part.loss_mask[a:b]][0] for a, b in pairwise(starts)]
                    assert signs == [1.0, -1.0] * (len(signs) // 2)
                    assert (part.group_ids[::2] == part.group_ids[1::2]).all()
                    found += part.group_ids[::2].tolist()
    assert sorted(found) == sorted(rollout.group_id for rollout in trained)
    chosen = [sum(mini.num_chosen_tokens for mini in batch.mini_batches) for batch in batches]
    assert chosen == [sum(rollout.num_loss_tokens for rollout in trained)] * num_ranks


def test_labelled_completions_come_with_mismatched_ones(tmp_path: Path) -> None:
    trained, _ = open_pairs(tmp_path)
    (batch,) = pack_labelled(trained, step=0, num_ranks=1, max_tokens=200, num_minibatches=4, seed=3)
    rows = {}
    for rollout in trained:
        for sequence in rollout.sequences:
            first = int(np.argmax(sequence.loss_mask))
            rows[tuple(sequence.token_ids)] = tuple(sequence.token_ids[:first]), tuple(sequence.token_ids[first:])
    prompts, completions = {prompt for prompt, _ in rows.values()}, {completion for _, completion in rows.values()}
    for mini_batch in batch.mini_batches:
        others = mini_batch.mismatched
        assert others is not None
        assert others.num_sequences == mini_batch.num_sequences == 10
        mixed = 0
        for micro in others.micro_batches:
            for start, stop in pairwise(micro.sequence_starts):
                first = start + int(np.argmax(micro.loss_mask[start:stop]))
                assert tuple(micro.token_ids[start:first]) in prompts
                assert tuple(micro.token_ids[first:stop]) in completions
                mixed += tuple(micro.token_ids[start:stop]) not in rows
        assert mixed >= 8


def test_a_pair_that_does_not_fit_is_named() -> None:
    pair = pair_of(PAIR)
    length = sum(len(part.token_ids) for part in pair.sequences)
    with pytest.raises(ConfigError, match=f"have {length} tokens together"):
        pack_step([pair], step=0, num_ranks=1, max_tokens=length - 1)


def mismatched_of(rollouts: list[Rollout]) -> list[tuple[str, str]]:
    """Return the prompt and the completion of each mismatched sequence of a step, in the order of the step."""
    (batch,) = pack_labelled(rollouts, step=0, num_ranks=1, max_tokens=500)
    others = batch.mini_batches[0].mismatched
    assert others is not None
    found = []
    for micro in others.micro_batches:
        for start, stop in pairwise(micro.sequence_starts):
            first = start + int(np.argmax(micro.loss_mask[start:stop]))
            found.append(
                (TOKENIZER.decode(micro.token_ids[start:first]), TOKENIZER.decode(micro.token_ids[first:stop]))
            )
    assert others.num_sequences == len(found)
    return found


def test_mismatched_completions_are_those_of_other_rows() -> None:
    """A labelled row beside pairs once followed or preceded a pair's other completion, or itself."""
    options: dict[str, Any] = {"takes_pairs": False, "chat": False}
    pair = pair_of({"prompt": "p", "chosen": "a", "rejected": "b"}, **options)
    other = replace(pair_of({"prompt": "q", "completion": "c", "label": True}, **options), group_id=9)
    for rollouts in ([pair, other], [other, pair]):
        found = mismatched_of(rollouts)
        assert [prompt for prompt, _ in found].count("p") == 2
        assert all(("c" in completion) == (prompt == "p") for prompt, completion in found), found


def test_a_single_row_has_no_mismatched_completion() -> None:
    pair = pair_of(PAIR, takes_pairs=False)
    assert mismatched_of([pair]) == []
    assert mismatched_of([replace(pair, rejected=None)]) == []


def test_mismatched_completions_end_at_an_image() -> None:
    first, second = pair_of(PAIR), pair_of({**PAIR, "prompt": "3+3?"})
    second.group_id = first.group_id + 1
    start = int(np.argmax(second.loss_mask))
    second.images = (PlacedImage(start=start + 1, num_tokens=1, content=b"x"),)
    (batch,) = pack_labelled([first, second], step=0, num_ranks=1, max_tokens=500)
    others = batch.mini_batches[0].mismatched
    assert others is not None
    micro = others.micro_batches[0]
    assert micro.images == ()
    lengths = np.diff(micro.sequence_starts).tolist()
    assert int(np.argmax(first.loss_mask)) + 1 in lengths


def test_prepared_pairs_are_the_same_pairs(tmp_path: Path) -> None:
    plain, plain_held_out = open_pairs(tmp_path, cache=str(tmp_path / "cache"))
    config = load_config(
        [
            *("algorithm=dpo", "data.source=jsonl", f"data.path={tmp_path}/rows.jsonl", "data.held_out.size=4"),
            *("seed=1", "model.path=tiny", f"data.cache={tmp_path}/cache"),
        ],
        need_files=False,
    )
    (prepared,) = prepare_rows(config, TOKENIZER, workers=1, report=lambda done, total: None)
    assert prepared.is_new
    assert len(prepared.rows) == 24
    again, again_held_out = open_pairs(tmp_path, cache=str(tmp_path / "cache"))
    for first, second in zip([*plain, *plain_held_out], [*again, *again_held_out], strict=True):
        for mine, other in zip(first.sequences, second.sequences, strict=True):
            assert mine.token_ids.tolist() == other.token_ids.tolist()
            assert mine.advantages.tolist() == other.advantages.tolist()


def test_a_pair_that_is_padded_counts_its_longer_completion_twice() -> None:
    row = {**PAIR, "rejected": "five" * 5}
    longest = max(len(part.token_ids) for part in pair_of(row).sequences)
    asked: list[int] = []

    def fit(max_tokens: int) -> Rollout:
        data = DataConfig(source="jsonl")
        asked.append(max_tokens)
        renderer = PreferenceRenderer(
            TOKENIZER, data, takes_pairs=True, max_tokens=max_tokens, pads_pairs=lambda: asked.append(-1) is None
        )
        return renderer.fit(renderer.whole(row, PLACE), PLACE)

    assert fit(2 * longest).rejected is not None
    assert asked == [2 * longest], "a pair that fits even if it is padded does not depend on it"
    with pytest.raises(UnusableRow, match=f"have {2 * longest} tokens together, padding included") as caught:
        fit(2 * longest - 1)
    assert caught.value.kind is SkipKind.TOO_LONG


class ImageRenderer:
    """A renderer of pairs whose completions have different images."""

    def whole(self, row: Any, place: RowLocation) -> RenderedRow:
        def rendered(content: bytes, at: int) -> RenderedRow:
            images = (PlacedImage(start=at, num_tokens=1, content=content),)
            token_ids = np.array([1, 2, 3, 4], np.int32)
            return RenderedRow(encoded=Encoded(token_ids=token_ids, images=images), loss_mask=np.arange(4) > 2, task={})

        return replace(rendered(b"chosen", 1), rejected=replace(rendered(b"rejected", 2), is_good=False))


class OneRow(list[dict[str, Any]]):
    def location(self, index: int) -> str:
        return "rows.jsonl, line 1"


def test_prepared_completions_keep_their_own_images() -> None:
    recipe = _Sequences(ImageRenderer(), {"kind": "pairs", "prompts": False})  # type: ignore[arg-type]
    record = recipe.render(OneRow([{}]), 0)  # type: ignore[arg-type]
    again = PreparedRow({"kind": None, "reason": None, **record}).sequence()
    assert again.rejected is not None
    assert [image.content for image in again.encoded.images] == [b"chosen"]
    assert [(image.content, image.start) for image in again.rejected.encoded.images] == [(b"rejected", 2)]
