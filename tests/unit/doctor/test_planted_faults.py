"""`rlpipe doctor` before a run: each fault that is planted is found, in one line that says how to fix it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.cli import main
from rlpipe.common.atomic_io import held
from rlpipe.configs.schema.root_config import ClusterConfig, Config
from rlpipe.doctor import machine_checks, reward_calls, run_checks
from rlpipe.doctor.observations import Status
from rlpipe.hardware.dtypes import gpu_types
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.plan.report import Report
from rlpipe.run.host_probe import ClusterState, HostState

NUM_ROWS = 8
REWARDS = """
import os
import time


def right(completions, answer, **columns):
    return [float(text == answer[0]) for text in completions]


def needs_more(completions, solution):
    return [0.0 for _ in completions]


def divides(completions):
    print("printed")
    return [1 / 0 for _ in completions]


def first_word(completions):
    return [float(answer["content"].split()[0] == "1") for (answer,) in completions]


def odd(completions, answer):
    return [1 / (int(answer[0]) - 1) for _ in completions]


def hangs(completions):
    time.sleep(1000)


def leaves(completions):
    os._exit(3)


def counts(completions):
    return 0.0
"""
Plant = Callable[[pytest.MonkeyPatch, Path, list[str]], Any]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(
        tmp_path_factory.mktemp("model") / "policy", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1
    )


@pytest.fixture
def options(policy: Path, tmp_path: Path) -> list[str]:
    """Return the options of a run with which nothing is wrong."""
    rows = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return [
        f"model.path={policy}",
        "model.dtype=float32",
        "data=jsonl",
        f"data.path={tmp_path / 'rows.jsonl'}",
        "data.max_prompt_tokens=16",
        "rollout.engine=hf",
        "rollout.sampling.max_tokens=8",
        f"scoring.rewards.right.path={tmp_path / 'rewards.py'}:right",
        f"output={tmp_path / 'run'}",
    ]


def check(capsys: pytest.CaptureFixture[str], options: list[str]) -> tuple[int, list[dict[str, str]]]:
    code = main(["doctor", "--quick", "--json", *options])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_nothing_is_wrong_with_a_run_that_is_well(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = check(capsys, options)
    assert not [line for line in found if line["status"] == "PROBLEM"], found
    assert code == 0
    subjects = {line["subject"] for line in found if line["status"] in ("ok", "warning")}
    machine = {"config", "versions", "devices", "memory", "clock", "limits", "network"}
    assert subjects >= machine | {"output", "rewards", "model", "data", "reward calls", "type", "plan", "disk"}
    (called,) = (line["text"] for line in found if line["subject"] == "reward calls")
    assert called == "right gives 0 to an empty answer, 0 to one that repeats the question"
    assert not Path(options[-1].partition("=")[2]).exists(), "nothing is written"


def _nearly_full(free: int) -> Callable[[Any], Any]:
    return lambda path: SimpleNamespace(total=2**40, used=2**40 - free, free=free)


def _set_usage(patch: pytest.MonkeyPatch, path: Path, free: int) -> None:
    """Let the disk of one folder have ``free`` bytes left."""
    real = shutil.disk_usage
    patch.setattr(shutil, "disk_usage", lambda there: (_nearly_full(free) if Path(there) == path else real)(there))


def full_disk(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _set_usage(patch, folder, 2**20)


def full_temporary_disk(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "ray").mkdir()
    patch.setenv("RAY_TMPDIR", str(folder / "ray"))
    _set_usage(patch, folder / "ray", 2**20)


def small_shared_memory(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _set_usage(patch, Path("/dev/shm"), 64 * 2**20)


def no_folder(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "file").write_text("")
    options.append(f"output={folder / 'file' / 'run'}")


def no_write_access(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    options.append("output=/proc/self/run")  # not even root can make a folder there


def second_run(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> Any:
    (folder / "run").mkdir()
    return held(folder / "run")


def earlier_run(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "run" / "checkpoints" / "step_000003").mkdir(parents=True)
    options.append("resume=never")


def damaged_checkpoint(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "run" / "checkpoints" / "step_000003").mkdir(parents=True)


def too_large_model(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr("rlpipe.doctor.run_checks.host_memory_bytes", lambda: 2**30)


def busy_port(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> Any:
    server = socket.create_server(("127.0.0.1", 0))
    options.append(f"environment.port={server.getsockname()[1]}")
    return server


def slow_type(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    patch.setattr("rlpipe.hardware.dtype_speed.cpu_rates", lambda made, dtype: {"float32": 3e11, dtype: 1e11})
    options.append("model.dtype=bfloat16")


def slow_type_of_engines(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    patch.setattr("rlpipe.hardware.dtype_speed.cpu_rates", lambda made, dtype: {"float32": 3e11, dtype: 1e11})
    options += ["model.dtype=float32", "rollout.dtype=bfloat16", "algorithm.correction.mode=token_truncate"]


def unknown_type(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    patch.setattr("rlpipe.hardware.dtype_speed.cpu_rates", lambda made, dtype: {"float32": 3e11})
    options.append("model.dtype=bfloat16")


def no_model(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    options.append(f"model.path={folder / 'nowhere'}")


def short_context(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    options.append("rollout.sampling.max_tokens=8000")


def no_reward_file(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "rewards.py").unlink()


def no_package(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "rewards.py").write_text("import a_package_that_is_not_there\n")


def broken_reward(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "rewards.py").write_text("1 / 0\n")


def missing_column(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    options.append(f"scoring.rewards.right.path={folder / 'rewards.py'}:needs_more")


def _add_reward(folder: Path, options: list[str], name: str) -> None:
    options.append(f"scoring.rewards.{name}={{path: '{folder / 'rewards.py'}:{name}', timeout_s: 2}}")


def failing_reward(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _add_reward(folder, options, "divides")


def reward_that_reads_a_word(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _add_reward(folder, options, "first_word")


def gpu_in_use(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    for name, value in {"is_available": True, "device_count": 1, "get_device_name": "NVIDIA L4"}.items():
        patch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 0, GPU-1, 20000, 23034\n")
    (folder / "nvidia-smi").chmod(0o755)
    patch.setenv("PATH", str(folder), prepend=os.pathsep)


def ledger_of_another_user(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "file").write_text("")
    options.append(f"ledger.folder={folder / 'file'}")


def disk_quota(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    def refuse(**_: Any) -> Any:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    patch.setattr(machine_checks.tempfile, "NamedTemporaryFile", refuse)


def sometimes_failing_reward(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _add_reward(folder, options, "odd")
    options.append("data.shuffle=false")


def hanging_reward(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _add_reward(folder, options, "hangs")


def exiting_reward(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _add_reward(folder, options, "leaves")


def one_number(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _add_reward(folder, options, "counts")


def no_rows(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "rows.jsonl").unlink()


def unusable_rows(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    options.append("data.max_prompt_tokens=1")


def gpu_that_is_not_there(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    options.append("learner=single_gpu")


def no_cluster(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        options.append(f"cluster.address=127.0.0.1:{server.getsockname()[1]}")


def address_of_the_dashboard(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    options.append("cluster.address=http://127.0.0.1:8265")


def _with_hosts(patch: pytest.MonkeyPatch, options: list[str], other: HostState) -> None:
    own = HostState(address="10.0.0.1", ahead_s=0.0, sees_file=True)
    patch.setattr("rlpipe.run.host_probe.probe_cluster", lambda config, file: ClusterState(hosts=[own, other]))
    options.append("cluster.address=auto")


def cluster_without_gpus(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    patch.setattr("rlpipe.run.host_probe.start_on_nodes", lambda nodes, read, file: [read(file)])
    patch.setattr("rlpipe.run.host_probe.get_remote", lambda answer, *_, **__: answer)
    patch.setattr("rlpipe.run.host_probe.connect", lambda cluster, needs: False)
    node = {"NodeID": "1", "NodeManagerAddress": "10.0.0.1", "Alive": True}
    states = {"is_initialized": lambda: True, "nodes": lambda: [node], "cluster_resources": lambda: {"CPU": 64.0}}
    patch.setattr("rlpipe.run.host_probe.ray", SimpleNamespace(**states))
    options += ["learner.num_gpus=1", "learner.num_ranks=2", "learner.strategy=fsdp2", "cluster.address=auto"]


def gpu_without_bfloat16(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    patch.setattr("rlpipe.doctor.run_checks.torch.cuda.is_available", lambda: True)
    patch.setattr("rlpipe.doctor.run_checks.gpu_device_types", lambda device: gpu_types("Tesla T4", (7, 5)))
    patch.setattr("rlpipe.doctor.run_checks._on_gpu", lambda config: False)  # there is none to plan for
    patch.setattr(machine_checks, "check_devices", lambda config: iter(()))
    options += ["learner.num_gpus=1", "model.dtype=bfloat16"]


def folder_of_one_host(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _with_hosts(patch, options, HostState(address="10.0.0.2", ahead_s=0.0, sees_file=False))


def clock_of_one_host(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    _with_hosts(patch, options, HostState(address="10.0.0.2", ahead_s=-40.0, sees_file=True))


def no_loopback(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(99, "Cannot assign requested address")

    patch.setattr(machine_checks.socket, "create_server", refuse)


def unknown_option(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    options.append("algorithm.loss.epsilon=0.3")


def old_package(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    real = machine_checks.version
    patch.setattr(machine_checks, "version", lambda name: "1.13.1" if name == "ray" else real(name))


def torchvision_for_another_torch(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    (folder / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", str(folder))


def wrong_clock(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    real = machine_checks.time.time
    patch.setattr(machine_checks, "time", SimpleNamespace(time=lambda: real() - 90, gmtime=machine_checks.time.gmtime))


def unset_clock(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    own = machine_checks.time
    begin = own.gmtime(0)
    patch.setattr(machine_checks, "time", SimpleNamespace(gmtime=lambda: begin, strftime=lambda form: "1970-01-01"))


def few_files(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    patch.setattr(machine_checks.resource, "getrlimit", lambda kind: (256, 256))


@pytest.mark.parametrize(("address", "status"), [(None, Status.OK), ("auto", Status.WARNING)])
def test_a_limit_of_files_that_ray_raises_is_enough(
    address: str | None, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda kind: (1024, 65536))
    config = Config(cluster=ClusterConfig(address=address))
    assert [found.status for found in machine_checks.check_limits(config)] == [status]


def used_memory(patch: pytest.MonkeyPatch, folder: Path, options: list[str]) -> None:
    patch.setattr(machine_checks, "free_host_bytes", lambda: 2**30)


def test_a_model_that_can_not_be_traced_is_no_problem(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def untraceable(*_: object, **__: object) -> None:
        raise RuntimeError("shapes depend on values")

    monkeypatch.setattr(reward_calls, "called_rewards", lambda rewards: {})
    monkeypatch.setattr("rlpipe.plan.learner_estimate.trace_on", untraceable)
    code, found = check(capsys, options)
    (plan,) = (line for line in found if line["subject"] == "plan")
    assert plan["status"] == "skipped"
    assert "a plan can't trace" in plan["text"]
    assert code == 0


FAULTS: list[tuple[Plant, str, str, str]] = [
    (full_disk, "disk", "PROBLEM", r"1\.0 MiB are free .*; free space"),
    (full_temporary_disk, "disk", "PROBLEM", r"ray is 100% full, and Ray starts nothing .*RAY_TMPDIR"),
    (small_shared_memory, "memory", "warning", r"/dev/shm.* has .*--shm-size"),
    (no_folder, "output", "PROBLEM", r"is not a folder.*choose another output"),
    (no_write_access, "output", "PROBLEM", r"/proc/self can't be written to.*choose another output"),
    (second_run, "output", "PROBLEM", r"another run writes to output=.*wait until it ends"),
    (earlier_run, "output", "PROBLEM", r"resume=never, but .* holds an earlier run"),
    (damaged_checkpoint, "output", "PROBLEM", r"no checkpoint in .* is complete"),
    (too_large_model, "plan", "PROBLEM", r"the actors need .*, and the machine has 1\.0 GiB"),
    (slow_type, "type", "warning", r"model\.dtype=bfloat16: .* 0\.33 times as fast; set model\.dtype=auto"),
    (
        slow_type_of_engines,
        "type",
        "warning",
        r"rollout\.dtype=bfloat16: .* 0\.33 times as fast; leave rollout\.dtype out",
    ),
    (unknown_type, "type", "PROBLEM", r"does not multiply in bfloat16"),
    (gpu_without_bfloat16, "type", "warning", r"Tesla T4 .* no instructions for bfloat16; set model\.dtype=auto"),
    (no_model, "config", "PROBLEM", r"model\.path: there is no folder .*nowhere"),
    (short_context, "model", "PROBLEM", r"more than the \d+ positions .*set less"),
    (no_reward_file, "config", "PROBLEM", r"scoring\.rewards\.right\.path: there is no file"),
    (no_package, "rewards", "PROBLEM", r"a_package_that_is_not_there'; install the package .* or start in the folder"),
    (broken_reward, "rewards", "PROBLEM", r"ZeroDivisionError: .*; python \S+/rewards\.py shows where"),
    (
        missing_column,
        "data",
        "PROBLEM",
        r"needs the column solution; .*: .*answer; rename .* or set scoring\.rewards\.right\.kwargs\.solution",
    ),
    (failing_reward, "reward calls", "PROBLEM", r"divides failed .* 4 of .* 4 rows: Zero.*rewards\.py:\d+\).*None"),
    (reward_that_reads_a_word, "reward calls", "warning", r"first_word failed on empty answers to 4 of .* 4 rows"),
    (ledger_of_another_user, "output", "PROBLEM", r"ledger\.folder=.*file is not a folder; choose another"),
    (disk_quota, "output", "PROBLEM", r"nothing can be written in .*Disk quota exceeded"),
    (sometimes_failing_reward, "reward calls", "warning", r"odd failed on answers to 1 of the first 4 rows: Zero"),
    (hanging_reward, "reward calls", "PROBLEM", r"hangs: no value after 2 s \(scoring\.rewards\.hangs\.timeout_s\)"),
    (exiting_reward, "reward calls", "PROBLEM", r"leaves ended its process \(exit code 3\)"),
    (one_number, "reward calls", "PROBLEM", r"counts failed .*it returned a float; return a list"),
    (no_rows, "config", "PROBLEM", r"data\.path: there is no file .*rows\.jsonl"),
    (unusable_rows, "data", "PROBLEM", r"all 8 rows for training are skipped.*data\.max_prompt_tokens=1"),
    (gpu_that_is_not_there, "devices", "PROBLEM", r"asks for 1 GPUs, and torch .* is built for CPUs.*CUDA build"),
    (gpu_in_use, "devices", "warning", r"19\.5 GiB of the 22\.5 GiB of GPU 0 are in use; end the programs"),
    (no_cluster, "network", "PROBLEM", r"no Ray cluster answers at 127\.0\.0\.1.*ray start --head"),
    (address_of_the_dashboard, "network", "PROBLEM", r"at http://127\.0\.0\.1:8265 \(an address is HOST:6379, or auto"),
    (busy_port, "network", "PROBLEM", r"environment\.port: 127\.0\.0\.1:\d+ can't be used here .*set a free port"),
    (folder_of_one_host, "hosts", "PROBLEM", r"host 10\.0\.0\.2 does not see .*all hosts share"),
    (cluster_without_gpus, "hosts", "PROBLEM", r"the run needs 2 GPU \(learner-0 1, .* but the cluster has 0: lower"),
    (clock_of_one_host, "hosts", "PROBLEM", r"clock of host 10\.0\.0\.2 is -40 s from this machine's"),
    (no_loopback, "network", "PROBLEM", r"can't connect to each other.*ip link set lo up"),
    (unknown_option, "config", "PROBLEM", r"did you mean algorithm\.loss\.clip_low"),
    (old_package, "versions", "PROBLEM", r"ray is 1\.13\.1, and rlpipe needs >=2\.60: pip install 'ray.*'"),
    (torchvision_for_another_torch, "versions", "PROBLEM", r"nms does not exist.*pip uninstall torchvision"),
    (wrong_clock, "clock", "PROBLEM", r"is \+9\d s from this machine's clock.*NTP"),
    (unset_clock, "clock", "PROBLEM", r"it says 1970-01-01; set it"),
    (few_files, "limits", "warning", r"only 256 files may be open.*ulimit -n"),
    (used_memory, "memory", "warning", r"end other programs"),
]


SLOW = (
    *(sometimes_failing_reward, exiting_reward, one_number),  # take a process of their own
    *(full_temporary_disk, used_memory, no_folder, earlier_run, slow_type_of_engines, unknown_type),
    *(no_loopback, clock_of_one_host, unset_clock, torchvision_for_another_torch),
)
"""Variants of other faults of the same subject."""


@pytest.mark.parametrize(
    ("plant", "subject", "status", "says"),
    [
        pytest.param(*fault, id=fault[0].__name__, marks=[pytest.mark.slow] if fault[0] in SLOW else [])
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_found(
    plant: Plant,
    subject: str,
    status: str,
    says: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if subject != reward_calls.SUBJECT:  # a process of its own takes seconds
        monkeypatch.setattr(reward_calls, "called_rewards", lambda rewards: {})
    if subject not in ("plan", "disk", "memory"):  # others do not need the plan
        monkeypatch.setattr(run_checks, "make_report", lambda config, device: Report(sections=[]))
    lock = plant(monkeypatch, tmp_path, options)
    if lock is None:
        code, found = check(capsys, options)
    else:
        with lock:
            code, found = check(capsys, options)
    lines = [
        f"{line['text']}; {line['fix']}" for line in found if (line["subject"], line["status"]) == (subject, status)
    ]
    assert any(re.search(says, line) for line in lines), found
    assert code == (1 if any(line["status"] == "PROBLEM" for line in found) else 0)
    assert status == "warning" or code == 1
    assert not [
        line
        for line in found
        if line["subject"] not in (subject, "data", "plan", "trial step", "disk", "model")
        and line["status"] == "PROBLEM"
    ]
