"""Tokenizers with the markers and short chat templates of the families whose markers are built in.

A template renders texts, images, tools and reasoning as the family's own template does, and leaves out the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "the  cat sat\n\non the mat, the answer is the cat user assistant system tool model ipython",
    '{"name": "weather", "arguments": {"city": "Rome"}} <think> </think> <tool_response> response: weather value: 21',
)

PARTS = """
{%- macro say(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}{%- for part in content -%}
    {%- if part.type == 'image' -%}IMAGE{%- elif part.type == 'video' -%}VIDEO{%- else -%}{{ part.text }}{%- endif -%}
  {%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""
"""A template macro that renders a message's content, either a text or a list of parts."""


@dataclass(kw_only=True, frozen=True)
class Family:
    template: str
    special: tuple[str, ...]
    end: str
    begin: str | None = None
    pad: str | None = None
    image: str = ""
    video: str = ""

    @property
    def full_template(self) -> str:
        return PARTS.replace("IMAGE", self.image).replace("VIDEO", self.video) + self.template

    def tokenizer(self) -> PreTrainedTokenizerFast:
        named = {"bos_token": self.begin, "eos_token": self.end, "pad_token": self.pad}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(byte_pairs()),
            extra_special_tokens=[*self.special],
            chat_template=self.full_template,
            clean_up_tokenization_spaces=False,
            **{name: token for name, token in named.items() if token is not None},
        )
        tokenizer.name_or_path = "made here"
        return tokenizer


@cache
def byte_pairs(texts: tuple[str, ...] = TEXT) -> str:
    """Return the JSON of a tokenizer in which words and double line breaks are tokens, as in the families' own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts * 20, trainer)
    return tokenizer.to_str()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words include the preceding space."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_pairs()), eos_token="<|end|>", extra_special_tokens=["<think>"]
    )


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a SentencePiece-like tokenizer: a space is part of a word, and a separate token before a special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=["\n", ":", "U", "A", "▁"], show_progress=False)
    tokenizer.train_from_iterator([*TEXT, "User: Assistant: Kestrel Juniper Marigold Obsidian Tamarind"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", extra_special_tokens=["<think>"])


HEADERS = """{{ bos_token }}
{%- for message in messages -%}
START{{ 'ipython' if message.role == 'tool' else message.role }}STOP

{% if message.role == 'tool' %}{{ message.content | tojson }}{% else %}{{ say(message.content) | trim }}{% endif -%}
{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor -%}
END
{%- endfor -%}
{%- if add_generation_prompt %}STARTassistantSTOP

{% endif %}"""

FOLDED = """{{ bos_token }}
{%- if messages[0].role == 'system' -%}
  {%- set prefix, messages = say(messages[0].content) + '\\n\\n', messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('roles must alternate') }}
  {%- endif -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if loop.first %}{{ prefix }}{% endif %}{{ say(message.content) | trim }}<end_of_turn>
{% endfor -%}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

GEMMA_4 = """{{ bos_token }}
{%- set turn = namespace(goes_on=false) -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    <|tool_response>response:weather{value:<|"|>{{ message.content }}<|"|>}<tool_response|>
  {%- else -%}
    {%- if message.role != 'assistant' or not turn.goes_on -%}
<|turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% endif -%}
{{ say(message.content) | trim }}
    {%- set turn.goes_on = 'tool_calls' in message -%}
    {%- for call in message.tool_calls or [] -%}
      <|tool_call>call:weather{city:<|"|>{{ call.function.arguments.values() | first }}<|"|>}<tool_call|>
    {%- endfor -%}
    {%- if not turn.goes_on %}<turn|>
{% elif loop.last or messages[loop.index].role != 'tool' -%}
      <|tool_response>
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{% if add_generation_prompt and not turn.goes_on %}<|turn>model
{% endif %}"""

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ say(message.content) }}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN_VL = (
    """{%- if messages[0].role != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
"""
    + CHATML
)

QWEN_3 = """{%- set last = namespace(user=-1) -%}
{%- for message in messages if message.role == 'user' -%}
  {%- set last.user = messages.index(message) -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif -%}
    {{ '\n<tool_response>\n' -}}
{{ say(message.content) }}{{ '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index].role != 'tool' %}<|im_end|>
{% endif -%}
  {%- elif message.role == 'assistant' -%}
    {%- set parts = message.content.split('</think>') -%}
<|im_start|>assistant
{% if loop.index0 > last.user and (loop.last or parts | length > 1) -%}
<think>
{{ parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' }}
</think>

{% endif -%}
{{ parts[-1].lstrip('\\n') }}
    {%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
    {%- endfor %}<|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ say(message.content) }}<|im_end|>
{% endif -%}
{%- endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MISTRAL = """{{ bos_token }}
{%- if messages[0].role == 'system' -%}
  {%- set system, messages = say(messages[0].content), messages[1:] -%}
  SYSTEM
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    [INST]{% if loop.last and system and fold %}{{ system }}

{% endif %}{{ say(message.content) }}[/INST]
  {%- elif message.role == 'tool' -%}
    [TOOL_RESULTS]{"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
  {%- elif message.tool_calls -%}
    [TOOL_CALLS][{{ message.tool_calls[0].function | tojson }}]{{ eos_token }}
  {%- else -%}
    {{ say(message.content) }}{{ eos_token }}
  {%- endif -%}
{%- endfor -%}"""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<think>", "</think>")
GEMMA_4_TOOLS = ("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
MISTRAL_TOKENS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[IMG]")


def _headers(left: str, right: str, end: str, begin: str, image: str) -> Family:
    return Family(
        template=HEADERS.replace("START", left).replace("STOP", right).replace("END", end),
        special=(left, right, end, begin, image, "<|pad|>"),
        begin=begin,
        end=end,
        pad="<|pad|>",
        image=image,
    )


def _chatml(template: str) -> Family:
    return Family(
        template=template,
        special=CHATML_TOKENS,
        end="<|im_end|>",
        pad="<|endoftext|>",
        image="<|image_pad|>",
        video="<|video_pad|>",
    )


FAMILIES = {
    "chatml": _chatml(CHATML),
    "qwen2_vl": _chatml(QWEN_VL),
    "qwen3": _chatml(QWEN_3),
    "gemma3": Family(
        template=FOLDED,
        special=("<bos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>"),
        begin="<bos>",
        end="<end_of_turn>",
        pad="<pad>",
        image="<image_soft_token>",
    ),
    "gemma4": Family(
        template=GEMMA_4,
        special=("<bos>", "<pad>", "<|turn>", "<turn|>", "<|image|>", *GEMMA_4_TOOLS),
        begin="<bos>",
        end="<turn|>",
        pad="<pad>",
        image="<|image|>",
    ),
    "llama3": _headers("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>", "<|image|>"),
    "llama4": _headers("<|header_start|>", "<|header_end|>", "<|eot|>", "<|begin_of_text|>", "<|patch|>"),
    "pixtral": Family(
        template=MISTRAL.replace("SYSTEM", "{%- set fold = true -%}"),
        special=("<s>", "</s>", "<pad>", *MISTRAL_TOKENS),
        begin="<s>",
        end="</s>",
        pad="<pad>",
        image="[IMG]",
    ),
    "mistral_v7": Family(
        template=MISTRAL.replace("SYSTEM", "[SYSTEM_PROMPT]{{ system }}[/SYSTEM_PROMPT]"),
        special=("<s>", "</s>", "<pad>", *MISTRAL_TOKENS, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        begin="<s>",
        end="</s>",
        pad="<pad>",
        image="[IMG]",
    ),
}
