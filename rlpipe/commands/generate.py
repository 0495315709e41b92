"""``rlpipe generate``: sample from a model, optionally with an adapter, without Ray."""

from __future__ import annotations

import argparse
import sys

from rlpipe.commands.arguments import Commands, add_command, at_least
from rlpipe.common.formatting import printable
from rlpipe.errors import InputError

DTYPE_HELP = "auto: bfloat16 if the device is faster in it, else float32"


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "generate", run_generate, "sample from a model, optionally with an adapter, without Ray"
    )
    parser.add_argument("--model", required=True, metavar="PATH", help="folder or hub id of the model")
    parser.add_argument("--adapter", metavar="FOLDER", help="a PEFT adapter on top of it")
    parser.add_argument("--engine", choices=("auto", "vllm", "hf"), default="auto", help="auto: vllm if installed")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help=DTYPE_HELP)
    parser.add_argument(
        "--tensor-parallel", type=at_least(int, 1), default=1, metavar="N", help="GPUs that share the model (vllm)"
    )
    parser.add_argument("--num", type=at_least(int, 1), default=1, metavar="N", help="completions per prompt")
    parser.add_argument(
        "--max-tokens", type=at_least(int, 1), default=256, metavar="N", help="maximum number of tokens of a completion"
    )
    parser.add_argument("--temperature", type=at_least(float, 0), default=1.0, metavar="T", help="0: greedy")
    parser.add_argument("--top-p", type=at_least(float, 0), default=1.0, metavar="P", help="nucleus sampling")
    parser.add_argument("--seed", type=at_least(int, 0), default=0, metavar="N", help="random seed")
    parser.add_argument("--system", metavar="TEXT", help="a system turn before the prompt")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="an image before each prompt; may be repeated"
    )
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, each on its own line")
    parser.add_argument("prompts", nargs="*", default=[], metavar="PROMPT", help="default: read from standard input")


def run_generate(arguments: argparse.Namespace) -> None:
    prompts = arguments.prompts or [sys.stdin.read().removesuffix("\n")]
    if not all(prompts):
        raise InputError("the prompt is empty; give one as an argument or on standard input")
    from rlpipe.commands.sample_texts import SamplingRequest, resolve_dtype, sample_texts

    dtype, line = resolve_dtype(arguments.model, arguments.dtype)
    if line is not None:
        print(line, file=sys.stderr)
    request = SamplingRequest(
        model=arguments.model,
        adapter=arguments.adapter,
        engine=arguments.engine,
        dtype=dtype,
        tensor_parallel_size=arguments.tensor_parallel,
        system_prompt=arguments.system,
        chat=not arguments.raw,
        images=arguments.image,
        num=arguments.num,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    for sampled in sample_texts(prompts, request):
        text = sampled.to_json() if arguments.json else sampled.to_text()
        print(printable(text) if sys.stdout.isatty() else text, flush=True)
