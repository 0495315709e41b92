"""A driver with a local cluster of forked workers, which prints the modules that its actors have loaded, as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import psutil
import ray

from rlpipe.preload import preloading
from rlpipe.preload.client import STAGE


class Worker:
    def look(self) -> dict[str, object]:
        is_forked = any("rlpipe.preload.server" in psutil.Process(pid).cmdline() for pid in (os.getppid(),))
        return {"forked": is_forked, "torch": "torch" in sys.modules, "pid": os.getpid()}


def start(stage: str | None) -> ray.actor.ActorHandle:
    options = {"runtime_env": {"env_vars": {STAGE: stage}}} if stage else {}
    return ray.remote(Worker).options(num_cpus=0, max_restarts=-1, max_task_retries=-1, **options).remote()


def main() -> None:
    preloading.begin_stages(["learner"])
    with preloading.used_by_ray():
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    plain, learner = start(None), start("learner")
    found = {"plain": ray.get(plain.look.remote()), "learner": ray.get(learner.look.remote())}
    os.kill(found["learner"]["pid"], signal.SIGKILL)
    found["replaced"] = ray.get(learner.look.remote())
    for process in psutil.Process().children():
        if "rlpipe.preload.server" in process.cmdline():
            for server in [*process.children(recursive=True), process]:
                if "rlpipe.preload.server" in server.cmdline():
                    server.kill()
    time.sleep(0.5)
    found["without"] = ray.get(start("learner").look.remote())
    print(json.dumps(found))
    ray.shutdown()
    preloading.end()


if __name__ == "__main__":
    main()
