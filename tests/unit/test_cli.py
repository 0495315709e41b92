from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from ledger_cases import Run

import rlpipe
from rlpipe import cli
from rlpipe.algorithms.surrogates import SURROGATES
from rlpipe.commands import runs
from rlpipe.common.atomic_io import file_digest
from rlpipe.common.run_files import LEDGER
from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.errors import ConfigError, InputError, RunError
from rlpipe.tracking.phases import Phases
from rlpipe.tracking.progress import open_progress, print_summary

BASE = ("model.path=org/policy", "data=reasoning_gym", "data.task=basic_arithmetic", "scoring.rewards.right.path=m:f")
CONSTANT = ("--generate", "constant:1", "--train", "constant:1")
COMMANDS = [
    "",
    "train",
    "eval",
    "config",
    "data",
    "data preview",
    "data stats",
    "data prepare",
    "plan",
    "simulate",
    "audit",
    "inspect",
    "generate",
    "episode",
]
TIMES = ("--generate", "constant:2", "--train", "constant:1")
SIGNALLED = """
import os, signal, sys
from rlpipe import cli
from rlpipe.commands import runs

def run_train(arguments):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # `timeout` signals the process, and then its group
        print("cleaned up")

runs.run_train = run_train
sys.exit(cli.main(["train"]))
"""
HEAVY = "{'torch', 'ray', 'hydra', 'transformers', 'vllm', 'numpy', 'omegaconf'}"


def loaded_after(code: str) -> str:
    """Return the heavy modules that a fresh interpreter has imported after running ``code``."""
    script = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint('LOADED', sorted({HEAVY} & set(sys.modules)))"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that wrong input leaves on standard error."""
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = int(str(error.code))
    streams = capsys.readouterr()
    assert code == 2
    assert streams.err.count("\n") == 1
    assert streams.err.startswith("rlpipe: error: ")
    return streams.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_light(command: str) -> None:
    output = loaded_after(f"from rlpipe.cli import main; main([*'{command}'.split(), '--help'])")
    assert "usage: rlpipe" in output
    assert output.endswith("LOADED []\n")


def test_a_folder_of_other_users_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/root/rows.jsonl")

    monkeypatch.setattr(runs, "run_config", refuse)
    assert cli.main(["config"]) == 2
    assert capsys.readouterr().err == "rlpipe: error: /root/rows.jsonl: this user may not read or write it\n"


def test_the_folder_of_simulated_times_must_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--from", "nowhere"]) == 2
    assert "--from needs the folder of a run; there is no nowhere" in capsys.readouterr().err


def test_importing_the_package_is_light() -> None:
    assert loaded_after("import rlpipe; rlpipe.__version__; rlpipe.ConfigError") == "LOADED []\n"


def test_public_names_resolve() -> None:
    assert rlpipe.ConfigError is ConfigError
    assert callable(rlpipe.load_config)
    assert rlpipe.RolloutGroup.__name__ == "RolloutGroup"
    assert set(rlpipe.__all__) <= set(dir(rlpipe))
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        rlpipe.trane  # noqa: B018


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rlpipe {rlpipe.__version__}\n"


def test_overrides_and_options_may_be_mixed() -> None:
    arguments = cli.parse_arguments(
        ["train", "experiment=quickstart", "--config", "my.yaml", "algorithm.loss.clip_high=0.28", "~scoring.rewards.x"]
    )
    assert arguments.config == "my.yaml"
    assert arguments.overrides == ["experiment=quickstart", "algorithm.loss.clip_high=0.28", "~scoring.rewards.x"]
    assert cli.parse_arguments(["train", "a=1"]).overrides == ["a=1"]
    assert cli.parse_arguments(["train"]).overrides == []
    generate = cli.parse_arguments(["generate", "one", "--model", "m", "two", "--num", "3"])
    assert (generate.prompts, generate.num) == (["one", "two"], 3)


def test_config_prints_a_tree_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", *BASE, "algorithm.loss.clip_high=0.28"]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "config.yaml"
    file.write_text(printed)
    assert cli.main(["config", "--config", str(file)]) == 0
    assert capsys.readouterr().out == printed
    assert "clip_high: 0.28" in printed


def test_config_shows_an_incomplete_tree_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == 2
    streams = capsys.readouterr()
    assert "path: ???" in streams.out
    assert streams.err.startswith("rlpipe: error: model.path is required")


def test_config_lists_options_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--docs"]) == 0
    everything = capsys.readouterr().out
    assert "output: outputs/${name}\n    Folder of the run. (a string)" in everything
    assert "model.path: required" in everything
    assert 'algorithm.process_reward_model.separator: "\\n\\n"\n    Text after each step' in everything
    assert cli.main(["config", "--docs", "learner.optimizer"]) == 0
    part = capsys.readouterr().out
    assert "learner.optimizer.betas: [0.9, 0.999]\n    Decay of the moments. (a list of numbers)" in part
    assert "learner.num_ranks" not in part
    assert cli.main(["config", "--groups", "learner"]) == 0
    assert "learner=single: One process on the CPU." in capsys.readouterr().out


def test_functions_of_ones_own_are_listed_with_the_built_in_ones(capsys: pytest.CaptureFixture[str]) -> None:
    file = "examples/own_algorithm/run.yaml"
    assert cli.main(["config", "--config", file, "--docs", "algorithm.loss"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in SURROGATES), "a built-in loss is missing"
    digest = file_digest(Path("examples/own_algorithm/algorithms.py"))
    doc = "Return -min(ρ, bound) a l of each token, with ρ = exp(l - p) without gradient."
    assert f"algorithms.py:bounded\n    {doc} (your own function, SHA-256 {digest})" in shown
    assert "algorithms.py:ranks" not in shown
    assert cli.main(["config", "--config", file, "--docs"]) == 0
    assert "algorithm.advantage.path: " in capsys.readouterr().out.rpartition("algorithms.py:ranks")[0]


def test_functions_of_an_incomplete_file_are_listed_under_their_section_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "part.yaml"
    file.write_text("algorithm: {loss: {path: nowhere.py:f}}")
    assert cli.main(["config", "--config", str(file), "--docs", "algorithm.combine"]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    assert cli.main(["config", "--config", str(file), "--docs", "algorithm.loss.path"]) == 2
    assert "algorithm.loss.path 'nowhere.py:f' can't be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", *BASE, "algorithm.loss.clip_hi=1"], "did you mean algorithm.loss.clip_high?"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["config", "--docs", "algorithm.loss", "no.such"], "there is no option under no.such"),
        (["config", "--groups", "--config", "a.yaml"], "--groups lists the choices of groups, and reads no --config"),
        (["plan", "--calibrate", "--host-memory-gib", "64"], "--host-memory-gib is for the plan of a config"),
        (
            ["simulate", *BASE, "rollout.engine_args.max_num_seqs=auto", *CONSTANT],
            "rollout.engine_args.max_num_seqs='auto' is not a number of sequences",
        ),
        (["simulate", *BASE, "--generate", "lognormal:2,1e200"], "is not a distribution of seconds"),
        (["train", *BASE[:3]], "scoring.rewards: reinforcement learning needs a reward"),
        (["eval", *BASE, "learner.num_ranks=2"], "set fsdp2 or zero3"),
        (["train", *BASE, "algorithm=sft", "data.roles_to_train=[asistant]"], "did you mean assistant?"),
        (
            ["train", *BASE, "algorithm=sft", "data.role_boundaries=[{rol: a}]"],
            "[0]: no such key 'rol'; did you mean role?",
        ),
        (["train", *BASE, "data.assistant_only_loss=true"], "did you mean data.roles_to_train?"),
        (["train", "--lr", "3"], "there is no option --lr (options of a run are written key=value)"),
        (["trian"], "invalid choice: 'trian'"),
        ([], "required: COMMAND"),
        (["config", "--docs", "nothing"], "there is no option under nothing"),
        (["config", "--groups", "nothing"], "there is no config group nothing"),
        (
            ["simulate", *BASE, "--generate", "normal:1", "--train", "constant:1"],
            "--generate: 'normal:1' is not a distrib",
        ),
        (["simulate", *BASE, "--train", "constant:1"], "--generate is required"),
        (["simulate", *BASE, "--generate", "empirical:nowhere.txt", "--train", "constant:1"], "nowhere.txt: can't be"),
        (["simulate", *BASE, *TIMES, "--engines", "0"], "'0' is not an integer of at least 1"),
        (["simulate", *BASE, *TIMES, "--slowdown", "0.5"], "'0.5' is not a number of at least 1"),
        (["simulate", *BASE, *TIMES, "algorithm.group_sizes=3"], "did you mean algorithm.group_size?"),
        (["simulate", *BASE, "--from", "nowhere"], "--from needs the folder of a run"),
        (["generate", "hello"], "required: --model"),
        (["generate", "--model", "m", "--num", "0", "hello"], "'0' is not an integer of at least 1"),
        (["generate", "--model", "m", "--temperature", "hot", "hello"], "'hot' is not a number of at least 0"),
        (["generate", "--model", "m", ""], "the prompt is empty"),
        (["audit"], "required: RUN"),
        (["audit", "one", "two"], "only one run can be given, not also two"),
        (["audit", "nowhere"], "nowhere does not exist: specify the output folder of a reinforcement learning run"),
        (
            ["inspect", "nowhere", "--follow"],
            "nowhere does not exist: specify the output folder of a reinforcement learning run",
        ),
        (["inspect", "run", "--reward", "much"], "'much' is neither a number nor bounds such as 1..3"),
        (["inspect", "run", "--step", "3-1"], "'3-1' ends before it begins"),
        (["inspect", "run", "--step", "9" * 20], "is neither a number nor bounds"),
        (["inspect", "run", "--group", "9" * 20], "is not an integer of at least 0 and less than 2**63"),
        (["inspect", "run", "--state", "LOST"], "--state: there is no LOST; it is one of ADMITTED, GENERATED"),
        (["inspect", "run", "--sort", "age"], "--sort: there is no age; it is one of id, step"),
        (["inspect", "run", "--steps", "--epoch", "1"], "--steps show no groups: leave out --epoch"),
        (["inspect", "run", "--events", "--step", "1"], "--events shows what belongs to no step: leave out --step"),
        (
            ["inspect", "run", "--group", "1", "--events"],
            "--group shows one group in full: leave out --groups, --steps",
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(arguments, capsys)


def test_simulate_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    # Two engines with 4 slots each: the 16 groups of a step take 4 s, and are scored at once.
    arguments = ["simulate", *BASE, *TIMES, "--engines", "2", "--groups-per-engine", "4", "--score", "constant:0.5"]
    arguments += ["algorithm.groups_per_step=16", "scoring.num_processes=16"]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out
    assert "5.5 s per step" in table
    assert "%  one more engine" in table
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps_per_second"] == pytest.approx(1 / (4 + 0.5 + 1))
    assert found["setup"]["num_engines"] == 2


def test_simulate_needs_none_of_the_files_that_the_config_names(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [
        "model.path=/nowhere/policy",
        "data.path=/nowhere/rows.jsonl",
        "scoring.rewards.right.path=/nowhere/r.py:f",
    ]
    assert cli.main(["simulate", *missing, *TIMES]) == 0
    assert "steps/s" in capsys.readouterr().out


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def command(arguments: object) -> None:
        raise error

    monkeypatch.setattr(runs, "run_train", command)
    return cli.main(["train"])


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_raising(RunError("engine 3\nis gone"), monkeypatch) == 1
    assert capsys.readouterr().err == "rlpipe: error: engine 3 is gone\n"
    assert run_raising(InputError("no"), monkeypatch) == 2
    assert run_raising(KeyboardInterrupt(), monkeypatch) == 130
    with pytest.raises(ZeroDivisionError):
        run_raising(ZeroDivisionError(), monkeypatch)


def test_a_sigterm_is_an_interruption_and_several_in_a_row_are_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr) == (130, "rlpipe: interrupted\n")
    assert done.stdout == "cleaned up\n"


def test_errors_that_crossed_ray_show_their_cause_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class RemoteConfigError(ConfigError):
        cause = ConfigError("a is wrong")

    assert run_raising(RemoteConfigError("Traceback ..."), monkeypatch) == 2
    assert capsys.readouterr().err == "rlpipe: error: a is wrong\n"


def test_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m rlpipe config --docs | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "name: run\n0\n"
    assert done.stderr == ""


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_a_run_goes_on_when_nobody_reads_its_output(kind: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    tracking = TrackingConfig(progress=kind)
    with os.fdopen(writer, "w") as stream:
        phases = Phases()
        phases.show(tracking, stream=stream)
        with phases.run(), phases.phase("reading the data"):
            pass
        progress = open_progress(tracking, run_name="run", stream=stream)
        progress.start(2)
        for step in (1, 2):
            progress.update(step, {"loss": 1.0})
        progress.message("a message")
        progress.close()
        print_summary({"steps": 2}, stream)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a finished run."""
    finished = Run(tmp_path / "run")
    finished.train_all()
    finished.ledger.close()
    return tmp_path / "run"


def test_audit_prints_the_sums_and_says_with_its_exit_code_whether_they_add_up(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["audit", str(run)]) == 0
    text = capsys.readouterr().out
    assert "a finished run: 6 steps trained, the newest checkpoint after 6\n" in text
    assert "prompts    19: 10 TRAINED, 6 DISCARDED, 3 skipped\n" in text
    assert "            2  compared after the last step, not trained\n" in text
    assert "FAILS" not in text
    with sqlite3.connect(run / LEDGER) as connection:
        connection.execute("DELETE FROM groups WHERE group_id = 5")
        connection.execute("UPDATE groups SET reason = NULL WHERE group_id = 10")
    assert cli.main(["audit", str(run)]) == 3
    streams = capsys.readouterr()
    assert "FAILS  every position up to the prompt source's has a group or a skipped row\n" in streams.out
    assert "         epoch 0, position 5\n" in streams.out
    assert "         group 10, DISCARDED, without a reason\n" in streams.out
    assert streams.err.count("\n") == 1
    assert f"rlpipe: error: the ledger {run / LEDGER} is inconsistent; failed checks: every position" in streams.err
    assert cli.main(["audit", str(run), "--json"]) == 3
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [f["contradictions"] for f in findings if f["num_contradictions"]] == [
        ["epoch 0, position 5"],
        ["group 10, DISCARDED, without a reason"],
        ["step 2: 1 of 2"],
    ]


@pytest.mark.parametrize("command", ["audit", "inspect"])
def test_a_ledger_that_can_not_be_read_is_named(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{tmp_path} has no ledger.sqlite: specify the output folder of a reinforcement learning run" in fails(
        [command, str(tmp_path)], capsys
    )
    assert "nothing.sqlite does not exist" in fails([command, str(tmp_path / "nothing.sqlite")], capsys)
    content = bytearray((run / LEDGER).read_bytes())
    content[:4096] = b"\xff" * 4096
    (run / LEDGER).write_bytes(content)
    assert f"the ledger {run / LEDGER} " in fails([command, str(run)], capsys)
    (run / LEDGER).write_bytes(b"")
    assert str(run / LEDGER) in fails([command, str(run)], capsys)


@pytest.mark.parametrize("command", ["audit", "inspect"])
def test_ledgers_are_read_without_ray_or_torch(command: str, run: Path) -> None:
    output = loaded_after(f"from rlpipe.cli import main; main(['{command}', '{run}'])")
    assert "LOADED ['numpy']" in output


@pytest.mark.parametrize(
    ("library", "line"),
    [
        ("DeepSpeed", "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it."),
        ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: no kernels"),
    ],
)
def test_lines_of_libraries_that_nobody_can_act_on_are_not_shown(
    library: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main(["config", "experiment=quickstart"]) == 0
    logger = logging.getLogger(library)
    caplog.handler.records.clear()
    logger.addHandler(caplog.handler)  # DeepSpeed's logger does not propagate
    logger.warning(line)
    assert caplog.records == []
    logger.warning("something else is wrong")
    logger.removeHandler(caplog.handler)
    assert "something else is wrong" in caplog.messages


def run_shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which ``rlpipe`` stands for this checkout's."""
    program = f'"{sys.executable}" -m rlpipe'
    return subprocess.run(
        ["bash", "-c", command.replace("rlpipe", program, 1)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_for_the_output_is_one_line() -> None:
    done = run_shell("rlpipe config --docs > /dev/full")
    assert (done.returncode, done.stderr) == (1, "rlpipe: error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files_do_no_harm(closed: str) -> None:
    done = run_shell(f"rlpipe config --docs name {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout != "") == (closed in ("<&-", "2>&-"))


@pytest.mark.slow
def test_a_sandbox_works_without_standard_output() -> None:
    done = run_shell("rlpipe sandbox >&-")
    assert "honest program" not in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    done = run_shell("rlpipe config --docs | head -1; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "")


def test_characters_that_the_terminal_lacks_are_escaped() -> None:
    done = run_shell("""rlpipe config experiment=quickstart 'name="é"'""", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("name: \\xe9\n")


def test_a_home_that_does_not_exist_does_no_harm(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    done = run_shell("rlpipe config --groups", HOME=missing, XDG_CACHE_HOME=missing)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interruption_while_arguments_are_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "make_parser", MagicMock(side_effect=KeyboardInterrupt))
    assert cli.main(["config"]) == 130
    assert capsys.readouterr().err == "rlpipe: interrupted\n"
