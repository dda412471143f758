"""Workflows and reward functions by name or dotted path."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from turngrpo.trainer import GatedMemory, MemAgent, SingleTurn
from turngrpo.trainer.reading.trial import check_shape

WORKFLOWS = ("gated", "memagent", "single_turn")
TURN_REWARDS = ("update_reward",)
GATED_REWARDS = ("answer_reward", "exit_reward", "format_reward")  # the method's
TRAJECTORY_REWARDS = (*GATED_REWARDS, "answer_contains", "answer_f1", "stock_reward")


def make_workflow(name: str, **options: Any) -> Any:
    """Return the workflow of a short name or of a dotted path; options that are None are its own.

    Raises ValueError for a name that leads nowhere, and for an option that the workflow does not take.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if "." in name:
        return _own_workflow(name, given)
    if name not in WORKFLOWS:
        raise ValueError(
            f"--workflow is {name!r}: expected one of {', '.join(WORKFLOWS)}, or a dotted path as in "
            "my_module.MyWorkflow"
        )
    if name == "memagent" and given.pop("exit_gate", False):
        raise ValueError("--exit_gate is true, but memagent has no gates and reads to the end: leave it out")
    if name == "single_turn" and given:
        names = ", ".join(f"--{option}" for option in given)
        raise ValueError(
            f"{names} belong to the workflows gated and memagent: leave them out, or set --workflow gated"
        )
    return {"gated": GatedMemory, "memagent": MemAgent, "single_turn": SingleTurn}[name](**given)


def _own_workflow(name: str, given: dict[str, Any]) -> Any:
    """Return a user's workflow: the instance that a dotted path names, or one made of the class it names."""
    expected = "expected the class or an instance of a workflow, as in my_module.MyWorkflow"
    value = _imported(
        name, "--workflow", f"{expected}; start from the folder of its module, or put that on PYTHONPATH"
    )
    if inspect.isclass(value):
        taken = inspect.signature(value).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        strange = [option for option in given if option not in taken and not takes_any]
    else:
        strange = list(given)
    if strange:
        names = ", ".join(f"--{option}" for option in strange)
        what = "the constructor of" if inspect.isclass(value) else "an instance,"
        raise ValueError(f"{names}: {what} {name} takes no such option: leave it out")
    try:
        workflow = value(**given) if inspect.isclass(value) else value
    except TypeError as error:
        raise ValueError(
            f"--workflow is {name!r}, which cannot be made ({error}{_place(error)}): expected a class whose arguments "
            "have defaults, or an instance"
        ) from error
    try:
        check_shape(workflow)
    except ValueError as error:
        raise ValueError(f"--workflow is {name!r}: {error}") from error
    return workflow


def find_rewards(names: Sequence[str] | None, known: Sequence[str], option: str) -> list[Callable[..., Any]]:
    """Return reward functions by short name (`known` ones) or dotted path, the current directory importable.

    Raises one ValueError for all names that lead nowhere, which lists what exists.
    """
    found: list[Callable[..., Any]] = []
    faults: list[str] = []
    for name in names or []:
        try:
            found.append(_find_reward(name, known, option))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    return found


def _find_reward(name: str, known: Sequence[str], option: str) -> Callable[..., Any]:
    from turngrpo import rewards  # which brings datasets

    if name in known:
        return getattr(rewards, name)
    value = _imported(name, option, f"expected {', '.join(known)}, or a dotted path as in my_module.my_reward")
    if not callable(value):
        raise ValueError(f"{option} is {name!r}, which names a {type(value).__name__}: expected a function")
    return value


def _imported(name: str, option: str, expected: str) -> Any:
    """Return what a dotted path names, the current directory importable; ValueError where there is none."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ValueError(f"{option} is {name!r}: {expected}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the user's module raises
        reason = f"{type(error).__name__}: {error}{_place(error)}"
        raise ValueError(f"{option} is {name!r}, which cannot be imported ({reason}): {expected}") from error


def _place(error: BaseException) -> str:
    """Return where in the user's files an import failed; a syntax error says so itself."""
    ours = (__file__, importlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and f.filename[0] != "<"]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
