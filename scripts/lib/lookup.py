"""Workflows and reward functions by name."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from turngrpo import rewards
from turngrpo.trainer import GatedMemory, MemAgent, SingleTurn

WORKFLOWS = ("gated", "memagent", "single_turn")
TURN_REWARDS = ("update_reward",)
GATED_REWARDS = ("answer_reward", "exit_reward", "format_reward")  # the method's
TRAJECTORY_REWARDS = (*GATED_REWARDS, "answer_contains", "answer_f1", "stock_reward")


def make_workflow(name: str, **options: Any) -> Any:
    """Return the workflow of a short name; options that are None are its own. Raises ValueError for another name."""
    given = {option: value for option, value in options.items() if value is not None}
    if name not in WORKFLOWS:
        raise ValueError(f"--workflow is {name!r}: expected one of {', '.join(WORKFLOWS)}")
    if name == "memagent" and given.pop("exit_gate", False):
        raise ValueError("--exit_gate is true, but memagent has no gates and reads to the end: leave it out")
    if name == "single_turn" and given:
        names = ", ".join(f"--{option}" for option in given)
        raise ValueError(
            f"{names} belong to the workflows gated and memagent: leave them out, or set --workflow gated"
        )
    return {"gated": GatedMemory, "memagent": MemAgent, "single_turn": SingleTurn}[name](**given)


def find_rewards(names: Sequence[str] | None, known: Sequence[str], option: str) -> list[Callable[..., Any]]:
    """Return reward functions by short name (`known` ones) or dotted path, the current directory importable.

    Raises ValueError that lists what exists for a name that leads nowhere.
    """
    found: list[Callable[..., Any]] = []
    for name in names or []:
        if name in known:
            found.append(getattr(rewards, name))
            continue
        module_name, _, function = name.rpartition(".")
        expected = f"expected {', '.join(known)}, or a dotted path as in my_module.my_reward"
        if not module_name:
            raise ValueError(f"{option} is {name!r}: {expected}")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            value = getattr(importlib.import_module(module_name), function)
        except Exception as error:  # whatever the user's module raises
            reason = f"{type(error).__name__}: {error}{_place(error)}"
            raise ValueError(f"{option} is {name!r}, which cannot be imported ({reason}): {expected}") from error
        if not callable(value):
            raise ValueError(f"{option} is {name!r}, which names a {type(value).__name__}: expected a function")
        found.append(value)
    return found


def _place(error: BaseException) -> str:
    """Return where in the user's files an import failed; a syntax error says so itself."""
    ours = (__file__, importlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and f.filename[0] != "<"]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
