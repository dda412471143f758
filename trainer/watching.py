"""How long a call takes: a line about one that goes on and on, and a limit that ends it."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Value = TypeVar("Value")

FIRST_LINE = 30.0  # seconds: a judge behind a server takes a few, and whoever watches begins to wonder
GROWTH = 2.0  # every silence is so many times the one before: a night is ten lines, not a thousand
SIGNAL: Any = getattr(signal, "SIGVTALRM", None)  # users' code has SIGALRM, schedulers SIGUSR1; Windows has none

logger = logging.getLogger(__name__)


class CallTimeout(BaseException):
    """A call reached its limit; no Exception, so that a retry around a broad except does not take it for its own."""


def line_times() -> Iterator[float]:
    """Yield the seconds after which a line is due: at first FIRST_LINE, and ever later."""
    passed, silence = 0.0, FIRST_LINE
    while True:
        passed += silence
        yield passed
        silence *= GROWTH


def call_watched(describe: Callable[[], str], limit: float | None, function: Callable[[], Value]) -> Value:
    """Return what a function returns; a line says of one that takes long what `describe` calls it.

    The lines come after FIRST_LINE seconds and then ever less often. After `limit` seconds a CallTimeout is raised
    where the function is, if that is the main thread: sleep, locks and sockets end at once, a library's own code when
    it comes back to Python. In another thread and on Windows nothing can end it, and the CallTimeout comes after it.
    """
    started, over, running = time.monotonic(), threading.Event(), True
    caller, is_main = threading.get_ident(), threading.current_thread() is threading.main_thread()
    interrupts = limit is not None and is_main and SIGNAL is not None

    def interrupt(*_: Any) -> None:
        nonlocal running
        if running:
            running = False
            raise CallTimeout

    def watch() -> None:
        lines, left = line_times(), limit if interrupts else None
        line = next(lines)
        while not over.wait(max(started + min(line, left or line) - time.monotonic(), 0)):
            passed = time.monotonic() - started
            if left is not None and passed >= left:
                left = None
                signal.pthread_kill(caller, SIGNAL)
            if passed >= line:
                logger.warning("%s has been running for %.0f seconds", describe(), passed)
                line = next(lines)

    watcher = threading.Thread(target=watch, name="turngrpo-watching", daemon=True)
    before = signal.signal(SIGNAL, interrupt) if interrupts else None
    try:
        watcher.start()
        try:
            value = function()
        finally:
            running = False
    finally:
        over.set()
        watcher.join()
        if interrupts:
            signal.signal(SIGNAL, before)
    if limit is not None and time.monotonic() - started > limit:
        raise CallTimeout
    return value
