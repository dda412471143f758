"""Sides of a benchmark in processes of their own, and what they measure: seconds and peak memory."""

import contextlib
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
GRACE = 10.0  # seconds that a process has to leave by itself


# ---- machine ----


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_resident() -> int:
    """Return the most resident bytes that this process has held so far (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def peak_memory() -> int:
    """Return the most bytes held since the last reset: allocated on a GPU, else resident."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_resident()


def reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # a sandbox may refuse; the peak then counts set-up too
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


# ---- sides that take turns ----


class SideFailed(RuntimeError):
    """A side's process raised, ended or gave no answer in time; the message holds its traceback."""


class Rounds:
    """A side's end of the pipe: `ready` once set up, then `begin`, `stop` and `report` for every round."""

    def __init__(self, connection: Any):
        self._connection = connection
        self._started, self._seconds, self._set_up = 0.0, 0.0, 0

    def ready(self) -> None:
        """Say that set-up is over, and forget what it held at its peak."""
        reset_peak_memory()
        self._set_up = peak_memory()
        self._connection.send({})

    def begin(self) -> None:
        """Wait until a round is asked for and start the clock; leave the process where none is wanted any more."""
        if not self._connection.recv():
            sys.exit()
        synchronize()
        self._started = time.perf_counter()

    def stop(self) -> None:
        synchronize()
        self._seconds = time.perf_counter() - self._started

    def report(self, **figures: Any) -> None:
        """Send the seconds from `begin` to `stop`, the peak memory so far and anything else."""
        peak = peak_memory()
        memory = {"peak_mib": peak / MIB, "over_set_up_mib": (peak - self._set_up) / MIB}
        self._connection.send({"seconds": self._seconds, **memory, **figures})


def _serve(side: Callable[..., None], arguments: Sequence[Any], threads: int, connection: Any) -> None:
    torch.set_num_threads(threads)
    try:
        side(Rounds(connection), *arguments)
    except Exception:
        connection.send({"error": traceback.format_exc()})


class Worker:
    """The process of one side, called as `side(rounds, *arguments)`.

    A forked one needs a parent that has not computed anything; a spawned one a side that can be imported.
    """

    def __init__(self, side: Callable[..., None], arguments: Sequence[Any], threads: int, start: str = "fork"):
        context: Any = multiprocessing.get_context(start)
        self._grace = GRACE
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(side, arguments, threads, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the next message; SideFailed where there is none within `timeout` seconds, or an error."""
        if not self._connection.poll(timeout):
            self._grace = 0.0
            raise SideFailed(f"no answer within {timeout:.0f} seconds")
        try:
            message = self._connection.recv()
        except EOFError:
            raise SideFailed("its process ended") from None
        if "error" in message:
            raise SideFailed(message["error"])
        return message

    def round(self, timeout: float | None = None) -> dict[str, Any]:
        """Ask for one round and return what was reported."""
        self._connection.send(True)
        return self.hear(timeout)

    def close(self) -> None:
        """Let the process leave, or end it."""
        with contextlib.suppress(OSError):
            self._connection.send(False)
        self._process.join(self._grace)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


Sides = Mapping[str, tuple[Callable[..., None], Sequence[Any]]]  # by name: the side and its arguments


def take_turns(sides: Sides, repeats: int, threads: int) -> dict[str, list[dict[str, Any]]]:
    """Return what every side reported in `repeats` rounds in turn, after one of each that is not counted."""
    workers: dict[str, Worker] = {}
    try:
        for name, (side, arguments) in sides.items():
            workers[name] = Worker(side, arguments, threads)
        for worker in workers.values():
            worker.hear()
        rounds = [{name: worker.round() for name, worker in workers.items()} for _ in range(repeats + 1)]
        return {name: [one[name] for one in rounds[1:]] for name in sides}
    finally:
        for worker in workers.values():
            worker.close()


def run_apart(side: Callable[..., None], *arguments: Any, threads: int) -> dict[str, Any]:
    """Return what a side reports in its one round, without a warm-up."""
    worker = Worker(side, arguments, threads)
    try:
        worker.hear()
        return worker.round()
    finally:
        worker.close()
