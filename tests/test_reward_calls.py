"""Calls of users' reward functions: what they are given, and what is said of a wrong return or a failure."""

import asyncio

import numpy as np
import pytest
import torch

from turngrpo.trainer.reading.rollout import Trajectory, Turn
from turngrpo.trainer.reward_calls import RewardError, call_rewards, call_turn_rewards


def reading(group, member, lengths):
    """A trajectory whose turns have completions of these lengths; the last one is the answer turn."""
    steps = [*range(1, len(lengths)), None]
    return Trajectory(
        {}, group, member, [Turn(s, [5], [6] * n, [-1.0] * n, "eos", "") for s, n in zip(steps, lengths, strict=True)]
    )


TWO = {"completions": ["a", "b"]}


@pytest.mark.parametrize(
    "values",
    [
        [0.5, None],
        (value for value in (0.5, None)),
        np.array([0.5, np.nan]),
        torch.tensor([0.5, torch.nan]),
        [np.float32(0.5), torch.tensor(torch.nan)],
    ],
    ids=["list", "generator", "array", "tensor", "scalars"],
)
def test_numbers_of_any_kind_are_rewards(values):
    def score(**columns):
        return values

    (numbers,) = call_rewards([score], TWO).T
    assert numbers[0] == 0.5 and numbers[1] != numbers[1]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1.0], "1 numbers, expected 2"),
        (None, "None, expected 2, one number or None for each trajectory"),
        (1.0, "1.0, expected 2"),
        (["good", "bad"], "'good', expected a finite number"),
        (["1", "0"], "'1', expected a finite number"),  # not 1.0: a string is a mistake
        ([float("inf"), 0.0], "inf, expected a finite number"),
        (torch.ones(2, 2), r"tensor\(\[1., 1.\]\), expected a finite number"),
    ],
)
def test_what_is_no_reward_is_named(values, found):
    def score(**columns):
        return values

    async def score_async(**columns):
        return values

    with pytest.raises(RewardError, match=f"reward function 'score' returned {found}"):
        call_rewards([score], TWO)
    with pytest.raises(RewardError, match=f"reward function 'score_async' returned {found}"):
        call_rewards([score_async], TWO)


def test_a_failure_keeps_its_type_and_names_the_function():
    def broken(**columns):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        call_rewards([broken], TWO)
    assert caught.value.__notes__ == ["raised by the reward function 'broken'"]
    with pytest.raises(KeyError) as caught:
        call_turn_rewards([broken], [], {})
    assert caught.value.__notes__ == ["raised by the reward function 'broken'"]


def test_async_rewards_wait_together_also_inside_a_running_loop():
    meeting = []

    async def judge(completions, **columns):
        meeting.append(len(meeting))
        while len(meeting) < 2:  # one after the other would wait for ever
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    def plain(completions, **columns):
        return [2.0] * len(completions)

    async def notebook():
        return call_rewards([judge, plain, judge], TWO).tolist()

    assert asyncio.run(asyncio.wait_for(notebook(), 20)) == [[1.0, 2.0, 1.0], [1.0, 2.0, 1.0]]


# ---- turn reward functions ----


def test_turn_rewards_are_called_with_the_columns_and_flattened():
    trajectories = [reading(0, 0, [1, 1]), reading(0, 1, [1, 1, 1])]

    def one(trajectories, hint, **columns):
        return [[hint] + [None] * (len(t.turns) - 1) for t in trajectories]

    def two(**columns):
        return [[True, 0], [torch.tensor(0.5), -1, None]]

    table = call_turn_rewards([one, two], trajectories, {"trajectories": trajectories, "hint": 3})
    assert table.nan_to_num(-99).tolist() == [[3, 1], [-99, 0], [3, 0.5], [-99, -1], [-99, -99]]
    assert call_turn_rewards([], trajectories, {}).shape == (5, 0)


class Sparse:
    def __call__(self, **columns):
        return [[1.0], [1.0, 1.0, 1.0]]


def test_turn_rewards_of_a_wrong_shape_are_an_error_by_name():
    trajectories = [reading(0, 0, [1, 1]), reading(0, 1, [1, 1, 1])]

    def one_list(**columns):
        return [[1.0] * 5]

    with pytest.raises(RewardError, match=r"'Sparse' returned lists of lengths \[1, 3\].*per turn: lengths \[2, 3\]"):
        call_turn_rewards([Sparse()], trajectories, {})
    with pytest.raises(RewardError, match=r"'one_list' returned lists of lengths \[5\]"):
        call_turn_rewards([one_list], trajectories, {})


@pytest.mark.parametrize("value", [[1.0, 0.5], None], ids=["one number per trajectory", "nothing"])
def test_turn_rewards_that_are_no_lists_are_an_error_by_name(value):
    def flat(**columns):
        return value

    with pytest.raises(RewardError, match="'flat' returned"):
        call_turn_rewards([flat], [reading(0, 0, [1, 1]), reading(0, 1, [1])], {})


@pytest.mark.parametrize("kind", [np.ones, torch.ones])
def test_turn_rewards_may_be_arrays(kind):
    def ones(trajectories, **columns):
        return [kind(len(t.turns)) for t in trajectories]

    trajectories = [reading(0, 0, [1, 1]), reading(0, 1, [1, 1, 1])]
    assert call_turn_rewards([ones], trajectories, {"trajectories": trajectories}).tolist() == [[1.0]] * 5


def test_turn_rewards_that_are_no_numbers_are_named():
    def words(trajectories, **columns):
        return [["good"] * len(t.turns) for t in trajectories]

    trajectories = [reading(0, 0, [1, 1])]
    with pytest.raises(RewardError, match="'words' returned 'good', expected a finite number or None"):
        call_turn_rewards([words], trajectories, {"trajectories": trajectories})
