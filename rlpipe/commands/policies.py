"""``rlpipe generate``, ``export`` and ``merge``: what takes a policy that a run has trained."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlpipe.commands.arguments import Commands, add_command, add_trust_argument, at_least
from rlpipe.common.formatting import printable
from rlpipe.configs.schema.option import DTYPES
from rlpipe.errors import InputError

DTYPE_HELP = "auto: bfloat16 if the device is faster in it, else float32"
EXPORT_NOTES = """\
Writes the same files as a run does to policy/ at its end: a PEFT adapter, or the whole model for transformers. It needs
no GPU, even if the run has one, and can be used while the run continues.

examples:
  rlpipe export outputs/run/checkpoints/step_000300 at_300
  rlpipe export outputs/run/checkpoints/step_000300 at_300 --base models/base
"""
MERGE_NOTES = """\
A QLoRA adapter is trained on its base in NF4. It can be merged into the original base, or into the base as rounded to
NF4; the command measures how far the log-probs of each are from the adapter's own, and keeps the closer one.

An interrupted merge continues where it stopped.

examples:
  rlpipe merge outputs/quickstart/policy merged
  rlpipe merge outputs/run/policy merged --base models/base --text held_out.txt
"""


def add_generate(commands: Commands) -> None:
    parser = add_command(
        commands, "generate", run_generate, "sample from a model, optionally with an adapter, without Ray"
    )
    parser.add_argument("--model", required=True, metavar="PATH", help="folder or hub id of the model")
    parser.add_argument("--adapter", metavar="FOLDER", help="a PEFT adapter on top of it")
    parser.add_argument("--engine", choices=("auto", "vllm", "hf"), default="auto", help="auto: vllm if installed")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help=DTYPE_HELP)
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
    add_trust_argument(parser, "run the code that comes with the model")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, each on its own line")
    parser.add_argument("prompts", nargs="*", default=[], metavar="PROMPT", help="default: read from standard input")


def run_generate(arguments: argparse.Namespace) -> None:
    try:
        prompts = arguments.prompts or [sys.stdin.read().removesuffix("\n")]
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not in the encoding {error.encoding}: {error.reason}") from None
    if not 0 < arguments.top_p <= 1:
        raise InputError(f"--top-p {arguments.top_p:g}: give a number above 0 and at most 1")
    if not all(prompts):
        raise InputError("the prompt is empty; give one as an argument or on standard input")
    from rlpipe.commands.sample_texts import SamplingRequest, sample_texts, sampling_dtype

    dtype, line = sampling_dtype(arguments.model, arguments.dtype)
    if line is not None:
        print(line, file=sys.stderr)
    request = SamplingRequest(
        model=arguments.model,
        adapter=arguments.adapter,
        trust_remote_code=arguments.trust_remote_code,
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


def add_export(commands: Commands) -> None:
    parser = add_command(commands, "export", run_export, "export the policy of a checkpoint", epilog=EXPORT_NOTES)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a step_... folder")
    parser.add_argument("output", metavar="OUTPUT", help="folder to create for the policy")
    parser.add_argument(
        "--base", metavar="PATH", help="folder or hub id of the model that was trained; default: the run's model.path"
    )
    add_trust_argument(parser)


def run_export(arguments: argparse.Namespace) -> None:
    from rlpipe.learner.checkpoints import export_checkpoint

    export_checkpoint(
        Path(arguments.checkpoint), Path(arguments.output), base=arguments.base, trusted=arguments.trust_remote_code
    )
    print(f"written to {arguments.output}")


def add_merge(commands: Commands) -> None:
    parser = add_command(commands, "merge", run_merge, "merge an adapter into its base", epilog=MERGE_NOTES)
    parser.add_argument("adapter", metavar="ADAPTER", help="folder or hub id of a PEFT adapter")
    parser.add_argument("output", metavar="OUTPUT", help="folder to create for the merged model")
    parser.add_argument("--base", metavar="PATH", help="folder or hub id of the base; default: the adapter's own")
    parser.add_argument(
        "--base-precision",
        choices=("full", "nf4"),
        help="precision of the base to merge into; default: the one closer to the trained policy",
    )
    parser.add_argument(
        "--trained-on",
        choices=("full", "nf4"),
        help="precision of the base in training, for adapters that rlpipe did not train; default: full",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="file with texts to measure on, one per line; default: texts sampled from the policy, which is slower",
    )
    add_trust_argument(parser, "run the code that comes with the model")


def run_merge(arguments: argparse.Namespace) -> None:
    from rlpipe.learner.merging import MergeRequest, merge

    request = MergeRequest(
        adapter=arguments.adapter,
        output=Path(arguments.output),
        base=arguments.base,
        base_precision=arguments.base_precision,
        trained_on=arguments.trained_on,
        text=None if arguments.text is None else Path(arguments.text),
        trust_remote_code=arguments.trust_remote_code,
    )
    for line in merge(request):
        print(line, flush=True)
