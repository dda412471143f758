"""Calls of users' reward functions: one set of arguments; a failure or a wrong return names the function."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from trl import apply_chat_template

from turngrpo.trainer.awaiting import gather_all, run_async
from turngrpo.trainer.faults import UserFault
from turngrpo.trainer.reading.rollout import Trajectory, read_only
from turngrpo.trainer.watching import CallTimeout, call_watched

SPARE = 1000  # values that are counted beyond those expected, of a return without end
SHOWN = 200  # characters of a wrong return in a message
GRACE = 5.0  # seconds that async functions get to end in after their limit, before nobody waits for them any more
GIVEN = ("prompts", "completions", "completion_ids", "trajectories", "trainer_state", "log_extra", "log_metric")
NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # which reach reward functions as plurals


class RewardError(UserFault):
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
    columns of the dataset, the `trajectories`, and TRL's three helpers. Trajectories are read-only and all else is a
    copy, since the records themselves are trained on.
    """
    trajectories = [read_only(trajectory) for trajectory in trajectories]
    last = [trajectory.turns[-1] for trajectory in trajectories]
    ids = [list(turn.completion_ids) for turn in last]
    # The final EOS is no text, also where the tokenizer does not call it special.
    texts = tokenizer.batch_decode(
        [row[:-1] if turn.finish_reason == "eos" else row for row, turn in zip(ids, last, strict=True)],
        skip_special_tokens=True,
    )
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
        "trajectories": trajectories,
        "trainer_state": trainer_state,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


def call_rewards(
    functions: Sequence[Callable[..., Any]], arguments: dict[str, Any], timeout: float | None = None
) -> torch.Tensor:
    """Call every trajectory reward function, the async ones together; return (B, F) float64, NaN for None.

    One that takes longer than `timeout` seconds is a RewardError.
    """
    columns = [
        _within(
            timeout, name, partial(_trajectory_numbers, name, values, arguments)
        )  # it may be computed as it is read
        for name, values in _called(functions, arguments, timeout)
    ]
    return torch.tensor(columns, dtype=torch.float64).reshape(len(columns), len(arguments["completions"])).T


def call_turn_rewards(
    functions: Sequence[Callable[..., Any]],
    trajectories: Sequence[Trajectory],
    arguments: dict[str, Any],
    timeout: float | None = None,
) -> torch.Tensor:
    """Call every turn reward function, the async ones together; return (N, F_turn) float64, NaN for None.

    Anything but one list per trajectory with one number or None per turn is a RewardError, and so is one that takes
    longer than `timeout` seconds.
    """
    expected = [len(trajectory.turns) for trajectory in trajectories]
    columns = []
    for name, values in _called(functions, arguments, timeout):
        lists = _within(timeout, name, partial(_lists, values, expected))
        found = _shown(values) if lists is None else f"lists of lengths {[len(one) for one in lists]}"
        if lists is None or [len(one) for one in lists] != expected:
            raise RewardError(
                f"turn reward function {name!r} returned {found}, expected one list per trajectory with one number or "
                f"None per turn: lengths {expected}"
            )
        places = [f"{place(t, i)}, turn {n}" for i, t in enumerate(trajectories) for n in range(len(t.turns))]
        numbers = [value for one in lists for value in one]
        columns.append([_number(name, value, where) for value, where in zip(numbers, places, strict=True)])
    return torch.tensor(columns, dtype=torch.float64).reshape(len(columns), sum(expected)).T


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


def _called(
    functions: Sequence[Callable[..., Any]], arguments: dict[str, Any], timeout: float | None
) -> list[tuple[str, Any]]:
    """Return (name, what it returned) of every function, what async ones promised awaited together."""
    names, values = [reward_name(function) for function in functions], []
    check_parameters(names, functions, arguments)
    for name, function in zip(names, functions, strict=True):
        with _named(name):
            values.append(_within(timeout, name, partial(function, **arguments)))
    waiting = {index: names[index] for index, value in enumerate(values) if inspect.isawaitable(value)}
    if waiting:
        finished = _awaited({index: values[index] for index in waiting}, waiting, timeout)
        for index, value in finished.items():
            values[index] = value
    return list(zip(names, values, strict=True))


def _within(timeout: float | None, name: str, call: Callable[[], Any]) -> Any:
    """Return what a call of a function returns; RewardError where it takes too long."""
    try:
        return call_watched(lambda: f"the reward function {name!r}", timeout, call)
    except CallTimeout as error:
        raise _too_long(name, timeout) from error


def _awaited(promises: Mapping[int, Any], names: Mapping[int, str], timeout: float | None) -> dict[int, Any]:
    """Return what async functions return, all at once; RewardError where one takes too long, which is cancelled."""
    left = dict(names)

    async def one(index: int) -> Any:
        with _named(names[index]):
            try:
                async with asyncio.timeout(timeout) as scope:
                    value = await promises[index]
            except TimeoutError as error:
                if scope.expired():
                    raise _too_long(names[index], timeout) from error
                raise
        del left[index]
        return value

    def shown() -> str:
        return "the reward function " + " and ".join(map(repr, left.values()))

    limit = None if timeout is None else timeout + GRACE  # of one that cannot be cancelled, since it does not wait
    try:
        found = call_watched(shown, limit, lambda: run_async(gather_all([one(index) for index in promises])))
    except CallTimeout as error:
        raise _too_long(" and ".join(left.values()), timeout) from error
    return dict(zip(promises, found, strict=True))


def _too_long(name: str, timeout: float | None) -> RewardError:
    return RewardError(
        f"reward function {name!r} took longer than reward_timeout, {timeout:g} seconds: make it quicker, give what "
        "it asks a limit, or raise reward_timeout"
    )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Add to whatever a reward function raises which one it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by the reward function {name!r}")
        raise


def place(trajectory: Trajectory, index: int) -> str:
    """Name a trajectory in messages: its number in the call, its row where that has an id, its group and member."""
    row = f"row {trajectory.row['id']!r}, " if "id" in trajectory.row else ""
    return f"trajectory {index} ({row}group {trajectory.group}, member {trajectory.member})"


def _trajectory_numbers(name: str, values: Any, arguments: Mapping[str, Any]) -> list[float]:
    count = len(arguments["completions"])
    expected = f"expected {count}, one number or None for each trajectory"
    listed = _list(values, count)
    if listed is None:
        raise RewardError(f"reward function {name!r} returned {_shown(values)}, {expected}")
    if len(listed) != count:
        more = " or more" if len(listed) == count + SPARE else ""
        raise RewardError(f"reward function {name!r} returned {len(listed)}{more} numbers, {expected}")
    trajectories = arguments.get("trajectories")
    places = [place(trajectories[i], i) if trajectories else f"completion {i}" for i in range(count)]
    return [_number(name, value, where) for value, where in zip(listed, places, strict=True)]


def _list(values: Any, count: int) -> list[Any] | None:
    """Return a list of `count` values and some more where there are more, without end perhaps; None for no list."""
    if isinstance(values, Mapping | str | bytes | Set):
        return None
    try:
        return list(islice(values, count + SPARE))
    except TypeError:
        return None


def _lists(values: Any, lengths: Sequence[int]) -> list[list[Any]] | None:
    outer = _list(values, len(lengths))
    if outer is None:
        return None
    inner = [_list(one, max(lengths, default=0)) for one in outer]
    return None if any(one is None for one in inner) else [one for one in inner if one is not None]


def _shown(value: Any) -> str:
    """Return a value as text of a sane length."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _number(name: str, value: Any, where: str) -> float:
    """Return a number of any kind (numpy's and tensors too) as a float, NaN for None, which alone means so."""
    if value is None:
        return math.nan
    with _named(name):
        try:
            number = math.inf if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several numbers
            number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"reward function {name!r} returned {_shown(value)} for {where}, expected a finite number or None"
        )
    return number


def check_parameters(names: Sequence[str], functions: Sequence[Callable[..., Any]], given: Mapping[str, Any]) -> None:
    """Raise RewardError for a function that asks for a column which is not there, or takes less than it is given."""
    columns = ", ".join(name for name in given if name not in GIVEN) or "none"
    for name, function in zip(names, functions, strict=True):
        try:
            parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
        except (TypeError, ValueError):  # of a callable that is written in C
            continue
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        absent = [p.name for p in named if p.default is p.empty and p.name not in given]
        if absent:
            raise RewardError(
                f"reward function {name!r} asks for {', '.join(absent)}, expected columns of the rows ({columns}) or "
                f"one of {', '.join(n for n in GIVEN if n in given)}"
            )
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            untaken = sorted(set(given) - {p.name for p in named})
            if untaken:
                raise RewardError(
                    f"reward function {name!r} takes no {', '.join(untaken)}, which every reward function is given: "
                    "end its parameters with **columns"
                )
