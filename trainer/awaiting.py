"""Coroutines run from code that is none: all at once, and to their end."""

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Value = TypeVar("Value")


async def gather_all(coroutines: Sequence[Awaitable[Value]]) -> list[Value]:
    """Run everything at once and return the results in order; the first error cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_async(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine to its end on one loop that lives as long as the process, in a thread of its own.

    It works in a notebook, whose own loop is taken, and a client that belongs to the loop can be kept between calls.
    """
    loop, thread = _loop(os.getpid())
    if threading.current_thread() is thread:  # a coroutine called what runs coroutines: the loop is taken
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(asyncio.run, coroutine).result()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:  # Ctrl-C too
        future.cancel()
        raise


@functools.cache
def _loop(process: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """Return the loop of a process and its thread; a fork has none of its parent's threads."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="turngrpo-awaiting", daemon=True)
    thread.start()
    return loop, thread
