import math

import pytest
import torch

from turngrpo.trainer.objective.advantages import mix_advantages, trajectory_advantages, turn_advantages


def check(actual, expected, dtype=torch.float64, **kwargs):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=dtype), rtol=0, atol=1e-7, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, -0.75, 1e7 + 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(dtype, value, size):
    # The rounded mean of seven float32 0.7 is not 0.7: without the max == min test the group scale gives 0.86.
    rewards = torch.full((size,), value, dtype=dtype)
    groups = torch.zeros(size, dtype=torch.long)
    for scale in ("none", "group", "batch"):
        advantages = trajectory_advantages(rewards, groups, scale)
        assert advantages.dtype == dtype and advantages.eq(0).all()
    assert turn_advantages(rewards, groups, groups).eq(0).all()


def test_constant_group_beside_a_varying_one_under_every_scale():
    rewards = torch.tensor([0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.0, 1.0])
    groups = torch.tensor([4] * 7 + [2] * 2)
    for scale in ("none", "group", "batch"):
        advantages = trajectory_advantages(rewards, groups, scale)
        assert advantages[:7].eq(0).all() and advantages[7] < 0 < advantages[8]


def test_batch_scale_divides_by_the_std_of_all_rewards():
    # Group means 1/2 and 2. All six rewards: mean 1, squared distances 0 1 0 1 4 0, variance 6/6, std 1: the centred
    # values stay. The group scale would give +-1 everywhere (group stds 1/2 and 1).
    rewards = torch.tensor([1.0, 0, 1, 0, 3, 1], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    check(trajectory_advantages(rewards, groups, "batch"), [0.5, -0.5, 0.5, -0.5, 1, -1])
    check(trajectory_advantages(rewards, groups, "group"), [1.0, -1, 1, -1, 1, -1])


def test_group_scale_is_population_std_and_epsilon_is_added():
    # [0, 3]: mean 1.5, population std 1.5 (the sample std 2.1213 would give 0.7071); epsilon 0.5: 1.5 / 2 = 0.75.
    rewards, groups = torch.tensor([0.0, 3.0], dtype=torch.float64), torch.tensor([0, 0])
    check(trajectory_advantages(rewards, groups, "group"), [-1.0, 1.0])
    check(trajectory_advantages(rewards, groups, "group", epsilon=0.5), [-0.75, 0.75])


def test_nan_reward_gets_zero_and_counts_nowhere():
    # Group 0 without its NaN: [1, 3], mean 2, std 1. With NaN as 0 the mean would be 4/3. Group 1 is NaN alone.
    rewards = torch.tensor([1.0, math.nan, 3.0, math.nan], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1])
    check(trajectory_advantages(rewards, groups), [-1.0, 0, 1, 0])
    check(trajectory_advantages(rewards, groups, "group"), [-1.0, 0, 1, 0])
    check(trajectory_advantages(rewards, groups, "batch"), [-1.0, 0, 1, 0])
    # Turns: the same, at one step.
    check(turn_advantages(rewards, groups, torch.ones_like(groups)), [-1.0, 0, 1, 0])
    check(turn_advantages(rewards, groups, torch.ones_like(groups), "batch"), [-1.0, 0, 1, 0])


def test_row_order_and_id_values_do_not_matter():
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0, 7.0], dtype=torch.float64)
    groups, steps = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([1, 1, 2, 1, 2])
    order = torch.tensor([3, 0, 4, 2, 1])
    renamed = torch.tensor([10**12, -7])[groups]
    for scale in ("none", "group", "batch"):
        expected = trajectory_advantages(rewards, groups, scale)
        assert torch.equal(trajectory_advantages(rewards[order], renamed[order], scale), expected[order])
    for baseline in ("group", "batch"):
        expected = turn_advantages(rewards, groups, steps, baseline)
        assert torch.equal(turn_advantages(rewards[order], renamed[order], steps[order], baseline), expected[order])


def test_no_gradient_and_empty_input():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    groups = torch.tensor([0, 0])
    assert not trajectory_advantages(rewards, groups, "group").requires_grad
    assert not turn_advantages(rewards, groups, groups).requires_grad
    empty = torch.empty(0)
    assert trajectory_advantages(empty, empty.long(), "batch").tolist() == []
    assert turn_advantages(empty, empty.long(), empty.long()).tolist() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, g: trajectory_advantages(r, g, "std"), "scale is 'std', expected 'none', 'group' or 'batch'"),
        (lambda r, g: trajectory_advantages(r, g[:1]), r"group_ids has shape \(1,\), expected \(2,\)"),
        (lambda r, g: trajectory_advantages(r[None], g), r"rewards has shape \(1, 2\)"),
        (lambda r, g: trajectory_advantages(g, g), "dtype torch.int64"),
        (lambda r, g: trajectory_advantages(r / 0, g), "2 infinite values"),
        (lambda r, g: trajectory_advantages(r, g, "group", 0.0), "epsilon is 0.0, expected a positive"),
        (lambda r, g: turn_advantages(r, g, g, "steps"), "baseline is 'steps', expected 'group' or 'batch'"),
        (lambda r, g: turn_advantages(r, g, g[:1]), r"steps has shape \(1,\), expected \(2,\)"),
        (lambda r, g: mix_advantages(r, r, 1.1), "alpha is 1.1, expected a number from 0 to 1"),
        (lambda r, g: mix_advantages(r, r, math.nan), "alpha is nan"),
        (lambda r, g: mix_advantages(r, r[:1], 0.5), r"turn_advantages has shape \(1,\), expected \(2,\)"),
    ],
)
def test_errors_say_what_was_found_and_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]))
