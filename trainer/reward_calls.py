"""Calls of users' reward functions: one set of arguments; a failure or a wrong return names the function."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl import apply_chat_template

from turngrpo.trainer.awaiting import gather_all, run_async
from turngrpo.trainer.reading.rollout import Trajectory

NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # which reach reward functions as plurals


class RewardError(ValueError):
    """A reward function returned what is no reward."""


def reward_name(function: Callable[..., Any]) -> str:
    """Return the name under which a reward function is logged."""
    return getattr(function, "__name__", type(function).__name__)


def reward_arguments(
    trajectories: Sequence[Trajectory],
    tokenizer: Any,
    trainer_state: Any,
    log_extra: Callable[[str, list[Any]], None],
    log_metric: Callable[[str, float], None],
) -> dict[str, Any]:
    """Return what every reward function is called with: the last turns in TRL's form, and everything else by name.

    `prompts`, `completions` and `completion_ids` are those of the last turns, without special tokens; then come the
    columns of the dataset, the `trajectories`, and TRL's three helpers. Ids are copies: the turns' own are trained on.
    """
    ids = [list(trajectory.turns[-1].completion_ids) for trajectory in trajectories]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    prompts = [trajectory.prompt for trajectory in trajectories]
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    columns = {name: [t.row[name] for t in trajectories] for name in trajectories[0].row if name not in NOT_COLUMNS}
    return columns | {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": ids,
        "trajectories": list(trajectories),
        "trainer_state": trainer_state,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


def call_rewards(functions: Sequence[Callable[..., Any]], arguments: dict[str, Any]) -> torch.Tensor:
    """Call every trajectory reward function, the async ones together; return (B, F) float32, NaN for None."""
    count = len(arguments["completions"])
    columns = [_trajectory_numbers(name, values, count) for name, values in _called(functions, arguments)]
    return torch.tensor(columns, dtype=torch.float32).reshape(len(columns), count).T


def call_turn_rewards(
    functions: Sequence[Callable[..., Any]], trajectories: Sequence[Trajectory], arguments: dict[str, Any]
) -> torch.Tensor:
    """Call every turn reward function, the async ones together; return (N, F_turn) float32, NaN for None.

    Anything but one list per trajectory with one number or None per turn is a RewardError.
    """
    expected = [len(trajectory.turns) for trajectory in trajectories]
    columns = []
    for name, values in _called(functions, arguments):
        lists = _lists(values)
        found = values if lists is None else [len(one) for one in lists]
        if lists is None or found != expected:
            raise RewardError(
                f"turn reward function {name!r} returned {'lists of lengths ' * (lists is not None)}{found!r}, "
                f"expected one list per trajectory with one number or None per turn: lengths {expected}"
            )
        columns.append([_number(name, value) for one in lists for value in one])
    return torch.tensor(columns, dtype=torch.float32).reshape(len(columns), sum(expected)).T


def reward_of_model(
    name: str, model: Any, tokenizer: Any, chat_template_kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a reward model as a reward function: its first logit for the prompt with the completion, as in TRL."""

    def model_reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        if isinstance(prompts[0], str):
            texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        else:
            pairs = [{"messages": p + c} for p, c in zip(prompts, completions, strict=True)]
            texts = [apply_chat_template(pair, tokenizer, **chat_template_kwargs)["text"] for pair in pairs]
        inputs = tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            return model(**inputs.to(next(model.parameters()).device)).logits[:, 0].tolist()

    model_reward.__name__ = name
    return model_reward


def _called(functions: Sequence[Callable[..., Any]], arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, what it returned) of every function, what async ones promised awaited together."""
    names, values = [reward_name(function) for function in functions], []
    for name, function in zip(names, functions, strict=True):
        with _named(name):
            values.append(function(**arguments))
    waiting = [index for index, value in enumerate(values) if inspect.isawaitable(value)]
    if waiting:
        finished = run_async(gather_all([_awaited(names[index], values[index]) for index in waiting]))
        for index, value in zip(waiting, finished, strict=True):
            values[index] = value
    return list(zip(names, values, strict=True))


async def _awaited(name: str, value: Any) -> Any:
    with _named(name):
        return await value


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
