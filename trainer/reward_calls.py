"""Calls of users' reward functions: a failure names the function, a wrong return says what was found and expected."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl.trainer.utils import is_async_callable

from .rollout import Trajectory
from .server import gather_all, run_async


class RewardError(ValueError):
    """A reward function returned what is no reward."""


def reward_name(function: Callable[..., Any]) -> str:
    """Return the name under which a reward function is logged."""
    return getattr(function, "__name__", type(function).__name__)


def checked_reward(function: Any) -> Any:
    """Return a trajectory reward function whose numbers are checked, async where it is; a reward model as it is."""
    if isinstance(function, torch.nn.Module):
        return function
    name = reward_name(function)

    def call(**arguments: Any) -> list[float]:
        with _named(name):
            values = function(**arguments)
        return _trajectory_numbers(name, values, len(arguments["completions"]))

    async def call_async(**arguments: Any) -> list[float]:
        with _named(name):
            values = await function(**arguments)
        return _trajectory_numbers(name, values, len(arguments["completions"]))

    return call_async if is_async_callable(function) else call


def last_turns(trajectories: Sequence[Trajectory], tokenizer: Any) -> tuple[list[Any], list[Any], list[list[int]]]:
    """Return what reward functions see of the last turns, in TRL's form: prompts, completions and their ids.

    The ids are copies: the turns' own are trained on.
    """
    ids = [list(trajectory.turns[-1].completion_ids) for trajectory in trajectories]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    prompts = [trajectory.prompt for trajectory in trajectories]
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return prompts, completions, ids


def call_rewards(functions: Sequence[Callable[..., Any]], arguments: dict[str, Any]) -> list[list[float]]:
    """Call every trajectory reward function, the async ones together; returns F lists of B numbers, NaN for None."""
    return _settled([checked_reward(function)(**arguments) for function in functions])


def _settled(values: Sequence[Any]) -> list[Any]:
    """Return the values, those that async functions promised awaited together."""
    waiting = [value for value in values if inspect.isawaitable(value)]
    if not waiting:
        return list(values)
    finished = iter(run_async(gather_all(waiting)))
    return [next(finished) if inspect.isawaitable(value) else value for value in values]


def call_turn_rewards(
    functions: Sequence[Callable[..., Any]], trajectories: Sequence[Trajectory], arguments: dict[str, Any]
) -> torch.Tensor:
    """Call every turn reward function and return (N, F_turn), NaN for None; a wrong shape is a RewardError by name."""
    columns = []
    for function in functions:
        name = reward_name(function)
        with _named(name):
            (values,) = _settled([function(**arguments)])
        lists, expected = _lists(values), [len(t.turns) for t in trajectories]
        found = values if lists is None else [len(one) for one in lists]
        if lists is None or found != expected:
            raise RewardError(
                f"turn reward function {name!r} returned {'lists of lengths ' * (lists is not None)}{found!r}, "
                f"expected one list per trajectory with one number or None per turn: lengths {expected}"
            )
        columns.append([_number(name, value) for one in lists for value in one])
    turns = sum(len(t.turns) for t in trajectories)
    return torch.tensor(columns, dtype=torch.float32).reshape(len(columns), turns).T  # (N, F_turn)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Add to whatever a reward function raises which one it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by the reward function {name!r}")
        raise


def _trajectory_numbers(name: str, values: Any, count: int) -> list[float]:
    expected = f"expected {count}, one number or None for each trajectory"
    try:
        listed = list(values)
    except TypeError:
        raise RewardError(f"reward function {name!r} returned {values!r}, {expected}") from None
    if len(listed) != count:
        raise RewardError(f"reward function {name!r} returned {len(listed)} numbers, {expected}")
    return [_number(name, value) for value in listed]


def _lists(values: Any) -> list[list[Any]] | None:
    try:
        return [list(one) for one in values]
    except TypeError:
        return None


def _number(name: str, value: Any) -> float:
    """Return a number of any kind (numpy's and tensors too) as a float, NaN for None."""
    if value is None:
        return math.nan
    try:
        number = math.inf if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        number = math.inf
    if math.isinf(number):
        raise RewardError(f"reward function {name!r} returned {value!r}, expected a finite number or None")
    return number
