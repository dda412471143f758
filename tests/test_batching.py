"""Padded batches by hand, and the invariants of the micro-batch plan."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turngrpo.trainer.batching import collate_turns, plan_microbatches
from turngrpo.trainer.rollout import Turn


def test_plan_by_hand():
    # Longest first: 9 alone (2 x 9 > 12), 6+6 (2 x 6 = 12), 5+4 (2 x 5), 3; equals keep their order.
    assert plan_microbatches([4, 6, 9, 3, 6, 5], 12) == [[2], [1, 4], [5, 0], [3]]
    # Padded tokens count, not real ones: 8 + 1 real tokens fit in 12, 2 x 8 padded do not.
    assert plan_microbatches([1, 8], 12) == [[1], [0]]
    assert plan_microbatches([20, 1, 1], 4) == [[0], [1, 2]]  # longer than the budget: alone
    assert plan_microbatches([2, 2, 2], 6) == [[0, 1, 2]]
    assert plan_microbatches([2, 2, 2], 1) == [[0], [1], [2]]
    assert plan_microbatches([], 5) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_plan_holds_every_row_once_within_the_budget(lengths, budget):
    plan = plan_microbatches(lengths, budget)
    assert sorted(row for batch in plan for row in batch) == list(range(len(lengths)))
    for batch in plan:
        assert batch and (len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget)
    assert plan == plan_microbatches(list(lengths), budget)
    # No two batches in a row would have fitted together.
    for first, second in zip(plan, plan[1:], strict=False):
        assert (len(first) + 1) * max(lengths[row] for row in first + second[:1]) > budget


TURNS = [
    Turn(1, [11, 12, 13], [21, 2], [-0.5, -0.25], "eos", ""),
    Turn(None, [14], [2, 22, 23], [-1.0, -2.0, -3.0], "length", ""),
    Turn(2, [15, 16], [24], [-4.0], "length", ""),
]


@pytest.mark.parametrize("pad", [0, 2])  # 2 is also the EOS that stands inside the responses
def test_collate_by_hand(pad):
    batch = collate_turns(TURNS, pad, "cpu", torch.float64)
    p = pad
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 2], [14, 2, 22, 23, p], [15, 16, 24, p, p]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert batch.mask.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    # A token is predicted one place before it: row 0 by places 2, 3; row 1 by 0, 1, 2 (+5); row 2 by 1 (+10).
    # Its own places would be [3, 4, 6, 7, 8, 12].
    assert batch.positions.tolist() == [2, 3, 5, 6, 7, 11]
    assert batch.targets.tolist() == [21, 2, 2, 22, 23, 24]
    assert batch.input_ids.flatten()[batch.positions + 1].tolist() == batch.targets.tolist()
    assert batch.behavior_logprobs.tolist() == [[-0.5, -0.25, 0.0], [-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]
    assert batch.behavior_logprobs.dtype == torch.float64 and batch.tokens == 12


def test_unflatten_puts_values_back_and_keeps_gradients():
    batch = collate_turns(TURNS, 0, "cpu", torch.float32)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)
    table = batch.unflatten(values)
    assert table.tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [6.0, 0.0, 0.0]]
    (table * torch.tensor([[10.0, 20.0, 99.0], [30.0, 40.0, 50.0], [60.0, 99.0, 99.0]])).sum().backward()
    assert values.grad.tolist() == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


def test_one_turn():
    batch = collate_turns(TURNS[1:2], 0, "cpu", torch.float32)
    assert batch.input_ids.tolist() == [[14, 2, 22, 23]] and batch.positions.tolist() == [0, 1, 2]
