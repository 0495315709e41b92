"""Time-limited waits for remote calls, whose errors name the call, the limit and its option, and their event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError

from rlpipe.errors import RlpipeError, RunError, WaitTimeout

Result = TypeVar("Result")


class ObjectsLost(RunError):
    """Error raised when an argument of a remote call is lost with the machine that held it."""


KILLED = "its process died or was killed"
MAX_DETAIL = 200
"""Limit on the characters of Ray's description of a death."""
SUSPENDED_S = 1.0
"""Seconds by which a wait ends late if the process was suspended, as after Ctrl-Z or in a debugger."""
CATCH_UP_S = 5.0
"""Seconds that a process has after it was suspended to read the answers that came meanwhile."""


def run_event_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end, in another thread if this one has an event loop already, as in a notebook.

    There, Ctrl-C cancels the coroutine and waits until it has cleaned up.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    tasks: list[asyncio.Task[Result]] = []

    async def cancellable() -> Result:
        tasks.append(asyncio.ensure_future(main))
        return await tasks[0]

    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(asyncio.run, cancellable())
        try:
            return ended.result()
        except KeyboardInterrupt:
            for task in [] if ended.done() else tasks:
                task.get_loop().call_soon_threadsafe(task.cancel)
            raise


async def wait_within(timeout_s: float, call: Awaitable[Result]) -> Result:
    """Return a call's answer; raise ``TimeoutError`` if there is none after ``timeout_s``, and cancel the call.

    An answer that is there counts, however late the event loop comes to it. ``asyncio.timeout`` would discard it: once
    a suspended process continues, the timer is due as well, and wins.
    """
    answer = asyncio.ensure_future(call)
    try:
        while not answer.done():
            deadline = time.monotonic() + timeout_s
            await asyncio.wait((answer,), timeout=timeout_s)
            if not answer.done() and time.monotonic() < deadline + SUSPENDED_S:
                raise TimeoutError
            timeout_s = CATCH_UP_S
        return answer.result()
    finally:
        answer.cancel()


def call_in_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Call a function in a daemon thread: unlike ``asyncio.to_thread``, a run's end does not wait until it returns."""
    answer: Future[Result] = Future()
    answer.set_running_or_notify_cancel()  # cancelling the awaited future leaves this one alone

    def run() -> None:
        try:
            answer.set_result(function())
        except SystemExit:  # Ray raises it in threads that wait for something when the driver disconnects
            pass
        except Exception as error:  # noqa: BLE001 - the thread's boundary; raised again where it is awaited
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(answer)


async def await_remote(call: ObjectRef | Awaitable[Any], what: str, *, within: float, option: str) -> Any:
    """Return the answer of a remote call.

    ``what`` reads like "the replay actor to take 8 groups"; ``option`` is the setting that ``within`` comes from.
    Raises ``WaitTimeout`` after ``within`` seconds, rlpipe's own error out of a remote one, and ``RunError`` if the
    actor is gone for good; ``ObjectsLost`` if it was given something that is lost.
    """
    try:
        return await wait_within(within, call)
    except asyncio.CancelledError:
        if isinstance(call, ObjectRef):
            ray.cancel(call, recursive=False)  # else Ray would repeat it on a new process once the actor is ended
        raise
    except TimeoutError:
        raise call_timeout(what, within, option) from None
    except RayError as error:
        check_lost(error, what)
        if isinstance(error, RayTaskError):
            raise root_cause(error, f"while waiting for {what}") from None
        raise RunError(f"the run waited for {what}: {describe_failure(error)}") from None


def check_lost(error: Exception, what: str) -> None:
    """Raise ``ObjectsLost`` if a call failed because something that it was given is lost with its machine."""
    if isinstance(getattr(error, "cause", None) or error, ObjectLostError):
        raise ObjectsLost(f"the run waited for {what}: {describe_failure(error)}") from None


def get_remote(call: ObjectRef, what: str, *, within: float, option: str) -> Any:
    """Return a remote call's answer outside an event loop; raise as ``await_remote``, without ``ObjectsLost``."""
    try:
        return ray.get(call, timeout=within)
    except GetTimeoutError:
        raise call_timeout(what, within, option) from None
    except RayTaskError as error:
        raise root_cause(error, f"while waiting for {what}") from None
    except RayError as error:
        raise RunError(f"the run waited for {what}: {describe_failure(error)}") from None


def call_timeout(what: str, within: float, option: str) -> WaitTimeout:
    return WaitTimeout(f"waited {within:g} seconds ({option}) for {what}; it has not answered")


def root_cause(error: RayTaskError, context: str) -> RlpipeError:
    """Return the ``RlpipeError`` that caused a remote error; any other becomes a ``RunError`` with the traceback."""
    if isinstance(error.cause, RlpipeError):
        return error.cause
    return RunError(f"{context}: {error}")


def describe_failure(error: Exception) -> str:
    """Return one line on why a call failed: the error, or how the process ended, without Ray's general advice."""
    cause = getattr(error, "cause", None) or error
    words = " ".join(str(cause).split()).split(" Some common causes include")[0]
    if isinstance(cause, RayActorError) or "Worker exit detail: " in words:  # Ray Train wraps these
        detail = words.partition("Worker exit detail: ")[2] or words.partition("unavailable: ")[2] or words
        return f"{KILLED} ({detail.rstrip('.')[:MAX_DETAIL]})"
    last = next((line.strip() for line in reversed(str(cause).splitlines()) if line.strip()), "")
    return last if isinstance(error, RayTaskError) and cause is error else f"{type(cause).__name__}: {last}"
