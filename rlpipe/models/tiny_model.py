"""The tiny policy of the quickstart, the tests and the benchmarks: random weights, a character tokenizer."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from transformers.utils import logging

from rlpipe.common.atomic_io import whole_folder

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endgeneration %}"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|unknown|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def make_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Create a tokenizer with a token for every printable ASCII character and chat role, and for each of ``words``."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *string.printable, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    pieces = [*map(re.escape, sorted(words, key=len, reverse=True)), r"[\s\S]"]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(pieces)), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unknown|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_policy(
    folder: str | Path,
    *,
    hidden_size: int = 256,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 768,
    max_positions: int = 1024,
    words: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write a Qwen3-architecture model and its tokenizer to ``folder``, in fp32; the defaults make 3.2M parameters.

    Each of ``words`` is one token, beside the characters.
    """
    tokenizer = make_tokenizer(words)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    set_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    logging.disable_progress_bar()
    with whole_folder(Path(folder)) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return Path(folder)
