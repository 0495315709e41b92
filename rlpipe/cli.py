"""The command line: each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlpipe.errors import DataError, InputError, RlpipeError, RunError

if TYPE_CHECKING:
    from rlpipe.inspect import Question

INTERRUPTED = 130

TRAIN_EXAMPLES = """\
examples:
  rlpipe train experiment=quickstart algorithm.loss.clip_high=0.28
  rlpipe train --config my_run.yaml learner=fsdp2 learner.num_ranks=4

rlpipe config --docs lists every option, rlpipe config --groups every config group.
"""

SIMULATE_NOTES = """\
DIST is a distribution of seconds:
  constant:S            always S
  uniform:A,B           between A and B
  exponential:MEAN      exponential
  lognormal:MEAN,SIGMA  log-normal; SIGMA is the standard deviation of the logarithm
  empirical:FILE        drawn from the numbers in a text file, one a line

examples:
  rlpipe simulate experiment=gsm8k --generate lognormal:20,0.5 --score constant:0.2 --train constant:40 --minutes 60
  rlpipe simulate --from outputs/quickstart --engines 4
"""
RUN_HELP = "the output folder of a run, one of its checkpoints, or a ledger.sqlite"
INSPECT_EXAMPLES = """\
examples:
  rlpipe inspect outputs/run --step 10-12 --sort reward
  rlpipe inspect outputs/run --state DISCARDED --limit 0
  rlpipe inspect outputs/run --group 96
  rlpipe inspect outputs/run --follow
"""
NUM_SHOWN = 20
GROUP_FILTERS = ("reward", "state", "epoch", "prompt_id", "sort", "reverse")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 the run failed, 2 wrong input, 130 interrupted."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
        sys.stdout.flush()
    except RlpipeError as error:
        print(f"rlpipe: error: {describe_error(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rlpipe: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def describe_error(error: RlpipeError) -> str:
    """The message in one line; an error that crossed Ray has the remote traceback in its text, but not in its cause."""
    cause = getattr(error, "cause", None)
    return " ".join(str(cause if isinstance(cause, RlpipeError) else error).split())


def run_train(arguments: argparse.Namespace) -> None:
    from rlpipe.configs.compose import load_config
    from rlpipe.configs.validate import require_rewards

    config = load_config(arguments.overrides, file=arguments.config)
    require_rewards(config)
    from rlpipe.pipeline import train

    train(config)


def run_eval(arguments: argparse.Namespace) -> None:
    from rlpipe.configs.compose import load_config
    from rlpipe.configs.validate import require_rewards

    config = load_config(arguments.overrides, file=arguments.config)
    require_rewards(config)
    from rlpipe.pipeline import evaluate

    metrics = evaluate(config, adapter=arguments.adapter)
    print(json.dumps(metrics, indent=2) if arguments.json else "\n".join(f"{k}: {v:.6g}" for k, v in metrics.items()))


def run_config(arguments: argparse.Namespace) -> None:
    if arguments.docs:
        print("\n".join(document_options(arguments.overrides)))
    elif arguments.groups:
        print("\n".join(document_groups(arguments.overrides)))
    else:
        print_tree(arguments)


def print_tree(arguments: argparse.Namespace) -> None:
    """The tree is shown even where it is incomplete or contradictory; the exit code then says so."""
    from rlpipe.configs.compose import build_config, compose_tree, show_tree
    from rlpipe.configs.validate import require_rewards

    tree = compose_tree(arguments.overrides, file=arguments.config)
    print(show_tree(tree), end="", flush=True)
    require_rewards(build_config(tree))


def document_options(prefixes: Sequence[str]) -> Iterator[str]:
    """Every option under one of the prefixes, or all: its default, its type, its range and what it does."""
    from rlpipe.configs.options import describe_default, options

    found = [option for option in options() if not prefixes or any(covers(prefix, option.name) for prefix in prefixes)]
    if not found:
        raise InputError(f"there is no option under {', '.join(prefixes)}; see rlpipe config --docs")
    for option in found:
        allowed = f", {option.allowed}" if option.allowed else ""
        yield f"{option.name}: {describe_default(option)}\n    {option.doc} ({option.type}{allowed})"


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def document_groups(groups: Sequence[str]) -> Iterator[str]:
    """The choices of the config groups, or of all, and what each is for."""
    from rlpipe.configs.groups import describe_choice, list_groups

    for group in groups:
        if group not in list_groups():
            raise InputError(f"there is no config group {group}; the groups are {', '.join(list_groups())}")
    for group in groups or list_groups():
        yield group
        yield from (f"    {group}={name}: {describe_choice(group, name)}" for name in list_groups()[group])


def run_generate(arguments: argparse.Namespace) -> None:
    prompts = arguments.prompts or [sys.stdin.read().removesuffix("\n")]
    if not all(prompts):
        raise InputError("the prompt is empty; give one as an argument or on standard input")
    from rlpipe.generate import SamplingRequest, sample_texts

    request = SamplingRequest(
        model=arguments.model,
        adapter=arguments.adapter,
        engine=arguments.engine,
        dtype=arguments.dtype,
        tensor_parallel_size=arguments.tensor_parallel,
        system_prompt=arguments.system,
        chat=not arguments.raw,
        num=arguments.num,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    for sampled in sample_texts(prompts, request):
        print(sampled.to_json() if arguments.json else sampled.to_text(), flush=True)


def run_simulate(arguments: argparse.Namespace) -> None:
    from rlpipe.configs.compose import load_config
    from rlpipe.simulation.setup import read_setup
    from rlpipe.simulation.study import study
    from rlpipe.simulation.times import GivenTimes, read_times

    run = Path(arguments.run) if arguments.run else None
    file = arguments.config
    if file is None and run is not None and (run / "config.yaml").is_file():
        file = run / "config.yaml"
    engines = [f"rollout.num_engines={arguments.engines}"] if arguments.engines else []
    config = load_config([*arguments.overrides, *engines], file=file, need_files=False)
    given = GivenTimes(
        generate=arguments.generate, score=arguments.score, train=arguments.train, sync=arguments.sync, run=run
    )
    times = read_times(config, given, slowdown=arguments.slowdown)
    setup = read_setup(config, times, groups_per_engine=arguments.places, slowdown=arguments.slowdown)
    result = study(setup, seed=arguments.seed, minutes=arguments.minutes, add=arguments.add)
    print(result.to_json() if arguments.json else result.to_text())


def run_audit(arguments: argparse.Namespace) -> None:
    from rlpipe.replay.audit import audit, describe
    from rlpipe.replay.ledger import damage
    from rlpipe.replay.location import find_ledger, reading

    path = find_ledger(Path(arguments.run))
    if (problem := damage(path)) is not None:
        raise DataError(f"the ledger {path} is damaged: {problem}")
    with reading(path) as ledger:
        result = audit(ledger)
    print(json.dumps(asdict(result), ensure_ascii=False) if arguments.json else "\n".join(describe(result)), flush=True)
    if result.problems:
        claims = "; ".join(finding.claim for finding in result.problems)
        raise RunError(f"the accounts in {path} do not add up: it does not hold that {claims}")


def run_inspect(arguments: argparse.Namespace) -> None:
    from rlpipe.inspect import follow, inspect, inspect_group

    run, as_json = Path(arguments.run), arguments.json
    if arguments.group is not None:
        refuse(arguments, "shows one group whole", "--group", [*GROUP_FILTERS, "step", "limit", "subjects", "follow"])
        inspect_group(run, arguments.group, as_json=as_json)
    elif arguments.follow:
        with suppress(KeyboardInterrupt):  # how people leave it
            follow(run, make_question(arguments), as_json=as_json)
    else:
        inspect(run, make_question(arguments), as_json=as_json)


def make_question(arguments: argparse.Namespace) -> Question:
    """What the arguments ask of a ledger; raises ``InputError`` where they do not fit together."""
    from rlpipe.inspect import Question
    from rlpipe.replay.ledger import GroupState
    from rlpipe.replay.query import SORT_KEYS, GroupFilter

    subjects = arguments.subjects or (["groups", "steps", "events"] if arguments.follow else ["groups"])
    if "groups" not in subjects:
        refuse(arguments, "show no groups", " and ".join(f"--{name}" for name in subjects), GROUP_FILTERS)
    sort = arguments.sort or "id"
    states = [name.upper() for text in arguments.state or () for name in text.split(",")]
    for state in states:
        check_choice("--state", state, list(GroupState))
    check_choice("--sort", sort, list(SORT_KEYS))
    first_step, last_step = arguments.step or (None, None)
    least_reward, most_reward = arguments.reward or (None, None)
    wanted = GroupFilter(
        first_step=first_step,
        last_step=last_step,
        least_reward=least_reward,
        most_reward=most_reward,
        states=tuple(states),
        epoch=arguments.epoch,
        prompt_id=arguments.prompt_id,
    )
    default_limit = 0 if arguments.follow else NUM_SHOWN
    limit = default_limit if arguments.limit is None else arguments.limit or None
    return Question(subjects=tuple(subjects), wanted=wanted, sort=sort, ascending=arguments.reverse, limit=limit)


def check_choice(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(f"{option}: there is no {value}; it is one of {', '.join(known)}")


def refuse(arguments: argparse.Namespace, why: str, because: str, others: Sequence[str]) -> None:
    """Raises ``InputError`` if one of the ``others`` is given, which have no effect then."""
    for name in others:
        if getattr(arguments, name) not in (None, False):
            option = "--groups, --steps and --events" if name == "subjects" else f"--{name.replace('_', '-')}"
            raise InputError(f"{because} {why}: leave out {option}")


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(InputError.exit_code, f"rlpipe: error: {message}; see {self.prog} --help\n")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Positional arguments may stand between the options, which argparse alone refuses."""
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    for text in rest:
        if text.startswith("-"):
            parser.error(f"there is no option {text} (settings of a run are written key=value)")
    if rest and arguments.command in (run_audit, run_inspect):
        parser.error(f"one run at a time, not also {rest[0]}")
    if rest:
        positional = arguments.prompts if arguments.command is run_generate else arguments.overrides
        positional.extend(rest)
    return arguments


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="rlpipe", description="Trains language models with reinforcement learning on Ray.")
    parser.add_argument("--version", action="version", version=f"rlpipe {version('rlpipe')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    train = add_command(commands, "train", run_train, "train a policy", epilog=TRAIN_EXAMPLES)
    add_run_arguments(train)
    evaluate = add_command(commands, "eval", run_eval, "evaluate a policy, and an adapter, on held-out prompts")
    add_run_arguments(evaluate)
    evaluate.add_argument("--adapter", metavar="FOLDER", help="a PEFT adapter to evaluate")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    config = add_command(commands, "config", run_config, "print the resolved config of a run, or list the options")
    add_run_arguments(config)
    shown = config.add_mutually_exclusive_group()
    shown.add_argument("--docs", action="store_true", help="list every option, or those under the named sections")
    shown.add_argument(
        "--groups", action="store_true", help="list the config groups, or the named ones, and their choices"
    )
    add_simulate_arguments(
        add_command(commands, "simulate", run_simulate, "simulate a run in virtual time", epilog=SIMULATE_NOTES)
    )
    audited = add_command(commands, "audit", run_audit, "check that every prompt of a run is accounted for")
    audited.add_argument("run", metavar="RUN", help=RUN_HELP)
    audited.add_argument("--json", action="store_true", help="print one JSON object")
    add_inspect_arguments(
        add_command(commands, "inspect", run_inspect, "look at the groups of a run", epilog=INSPECT_EXAMPLES)
    )
    add_generate_arguments(
        add_command(commands, "generate", run_generate, "sample from a policy and adapter, without Ray")
    )
    return parser


def add_inspect_arguments(parser: OneLineParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--group", type=at_least(int, 0), metavar="ID", help="one group whole, with its completions")
    for subject, summary in (
        ("groups", "the groups (default)"),
        ("steps", "the steps that were trained"),
        ("events", "deaths, recoveries and other events"),
    ):
        parser.add_argument(f"--{subject}", dest="subjects", action="append_const", const=subject, help=summary)
    parser.add_argument("--step", type=span(int, "-"), metavar="N or A-B", help="groups of these steps, from 0")
    parser.add_argument(
        "--reward",
        type=span(float, ".."),
        metavar="A..B",
        help="groups with such a mean reward; A.. and ..B are open, --reward=-1..0 begins below 0",
    )
    parser.add_argument("--state", action="append", metavar="STATE", help="groups in this state, or several: A,B")
    parser.add_argument("--epoch", type=at_least(int, 0), metavar="N", help="groups of this epoch, from 0")
    parser.add_argument("--prompt-id", type=at_least(int, 0), metavar="ROW", help="groups of this row, from 0")
    parser.add_argument(
        "--sort",
        metavar="KEY",
        help="id (default), step, prompt, reward, std, best, staleness, tokens, generate or score; the largest first",
    )
    parser.add_argument("--reverse", action="store_true", help="the smallest first")
    parser.add_argument("--limit", type=at_least(int, 0), metavar="N", help=f"rows shown ({NUM_SHOWN}); 0: all")
    parser.add_argument("--follow", action="store_true", help="go on with what comes, until the run has ended")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def span(kind: type[int] | type[float], between: str) -> Callable[[str], tuple[Any, Any]]:
    """Parses one value, or two bounds, either of which may be left out."""

    def parse(text: str) -> tuple[Any, Any]:
        first, found, last = text.partition(between)
        try:
            lower, upper = (kind(bound) if bound else None for bound in (first, last if found else first))
        except ValueError:
            lower = upper = None
        if lower is None and upper is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number, or bounds such as 1{between}3")
        if lower is not None and upper is not None and lower > upper:
            raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
        return lower, upper

    return parse


def add_command(
    commands: argparse._SubParsersAction[OneLineParser],
    name: str,
    command: Callable[[argparse.Namespace], None],
    summary: str,
    *,
    epilog: str | None = None,
) -> OneLineParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command)
    return parser


def add_run_arguments(parser: OneLineParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="a YAML file with options and group choices")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="options and group choices")


def add_simulate_arguments(parser: OneLineParser) -> None:
    add_run_arguments(parser)
    times = parser.add_argument_group("times")
    times.add_argument("--generate", metavar="DIST", help="of a group, alone on an engine")
    times.add_argument(
        "--score",
        metavar="[POOL=]DIST",
        action="append",
        default=[],
        help="of a group, in one scoring process; with POOL= for one of several pools; default: 0",
    )
    times.add_argument("--train", metavar="DIST", help="of a step, on the config's ranks")
    times.add_argument("--sync", metavar="DIST", help="until all engines serve new weights; default: 0")
    times.add_argument(
        "--from",
        dest="run",
        metavar="RUN",
        help="a run's folder: its config, and its ledger's times where none is given",
    )
    times.add_argument(
        "--slowdown",
        type=at_least(float, 1),
        default=1.0,
        metavar="X",
        help="a full engine's time over that of one group",
    )
    parser.add_argument("--engines", type=at_least(int, 1), metavar="N", help="instead of the config's")
    parser.add_argument(
        "--places", type=at_least(int, 1), metavar="N", help="groups that an engine samples at one time"
    )
    parser.add_argument(
        "--minutes", type=at_least(float, 0), default=1.0, metavar="M", help="of training, at most; default: 1"
    )
    parser.add_argument("--seed", type=at_least(int, 0), default=0, metavar="N")
    parser.add_argument(
        "--add", type=at_least(int, 1), default=1, metavar="N", help="machines that the advice adds of each kind"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_generate_arguments(parser: OneLineParser) -> None:
    parser.add_argument("--model", required=True, metavar="PATH", help="folder or hub id of the model")
    parser.add_argument("--adapter", metavar="FOLDER", help="a PEFT adapter on top of it")
    parser.add_argument("--engine", choices=("auto", "vllm", "hf"), default="auto", help="auto: vllm where installed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--tensor-parallel", type=at_least(int, 1), default=1, metavar="N", help="GPUs that share the model (vllm)"
    )
    parser.add_argument("--num", type=at_least(int, 1), default=1, metavar="N", help="completions of each prompt")
    parser.add_argument("--max-tokens", type=at_least(int, 1), default=256, metavar="N", help="longest completion")
    parser.add_argument(
        "--temperature", type=at_least(float, 0), default=1.0, metavar="T", help="0: always the likeliest"
    )
    parser.add_argument("--top-p", type=at_least(float, 0), default=1.0, metavar="P", help="nucleus sampling")
    parser.add_argument("--seed", type=at_least(int, 0), default=0, metavar="N")
    parser.add_argument("--system", metavar="TEXT", help="a system turn before the prompt")
    parser.add_argument("--raw", action="store_true", help="leave out the chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each prompt")
    parser.add_argument("prompts", nargs="*", default=[], metavar="PROMPT", help="read from standard input where none")


def at_least(kind: type[int] | type[float], minimum: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not minimum <= value < float("inf"):
            words = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {words} of at least {minimum:g}")
        return value

    return parse
