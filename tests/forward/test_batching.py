"""Batches and passes by hand, and the invariants of their plans."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turngrpo.trainer.forward.batching import collate_turns, fed_length, pad_turns, plan_microbatches, plan_passes
from turngrpo.trainer.reading.rollout import Turn


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
def test_padding_by_hand(pad):
    input_ids, attention_mask, positions = pad_turns(TURNS, pad, "cpu")
    p = pad
    # The last token of a row predicts nothing that is scored, and is not read.
    assert input_ids.tolist() == [[11, 12, 13, 21], [14, 2, 22, p], [15, 16, p, p]]
    assert attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]
    # A token is predicted one place before it: row 0 by places 2, 3; row 1 by 0, 1, 2 (+4); row 2 by 1 (+8).
    assert positions.tolist() == [2, 3, 4, 5, 6, 9]
    assert [fed_length(turn) for turn in TURNS] == [4, 3, 2]


def test_collate_by_hand():
    batch = collate_turns(TURNS, "cpu", torch.float64)
    assert batch.mask.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert batch.targets.tolist() == [21, 2, 2, 22, 23, 24]
    assert batch.behavior_logprobs.tolist() == [[-0.5, -0.25, 0.0], [-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]
    assert batch.behavior_logprobs.dtype == torch.float64


def test_unflatten_puts_values_back_and_keeps_gradients():
    batch = collate_turns(TURNS, "cpu", torch.float32)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)
    table = batch.unflatten(values)
    assert table.tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [6.0, 0.0, 0.0]]
    (table * torch.tensor([[10.0, 20.0, 99.0], [30.0, 40.0, 50.0], [60.0, 99.0, 99.0]])).sum().backward()
    assert values.grad.tolist() == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


# ---- passes ----


def turn(prompt, completion):
    return Turn(1, prompt, [7] * completion, [0.0] * completion, "eos", "")


def test_passes_by_hand():
    # Cluster "a" shares [1, 2, 3] and reads 1 + 2, 2 + 1, 1 + 0 more (a last token is not read): 3 + 7 = 10 tokens.
    # "b" has one member: no prefix, 2 + 3 = 5 tokens. "c" shares [9]: 1 + (1 + 0) + (1 + 1) = 4.
    turns = [
        turn([1, 2, 3, 4], 3), turn([9, 5], 1), turn([1, 2, 3, 5, 6], 2), turn([8, 8], 4), turn([1, 2, 3, 6], 1),
        turn([9, 6], 2),
    ]  # fmt: skip
    keys = ["a", "c", "a", "b", "a", "c"]
    (whole,) = plan_passes(turns, range(6), keys, 19, share=True)
    assert [(c.members, c.shared) for c in whole.clusters] == [([0, 2, 4], 3), ([3], 0), ([1, 5], 1)]
    assert whole.microbatches == [[0, 2, 4, 3, 1, 5]]  # within a cluster as cut, else as they come
    first, second = plan_passes(turns, range(6), keys, 18, share=True)  # 10 + 5 = 15, with 4 more 19 > 18
    assert [c.shared for c in first.clusters] == [3, 0] and second.microbatches == [[5, 1]]
    # A budget of 8 cuts "a": beside its prefix there is room for 5: 3 and then 3 + 1; the others do not fit together.
    plan = plan_passes(turns, range(6), keys, 8, share=True)
    assert [part.microbatches for part in plan] == [[[0], [2, 4]], [[3]], [[5, 1]]]
    assert plan[0].clusters[0].shared == 3
    plan = plan_passes(turns, [2, 3, 5], keys, 100, share=True)  # of the chosen turns alone: nothing to share
    assert [c.shared for c in plan[0].clusters] == [0, 0, 0]
    padded = plan_passes(turns, [2, 3, 5], keys, 12, share=False)
    assert [(p.clusters, p.microbatches) for p in padded] == [([], [[2, 3]]), ([], [[5]])]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 80),
)
def test_passes_hold_every_turn_once_within_the_budget(shapes, budget):
    turns = [turn([key] * 4 + [n] * n, completion) for n, (key, _, completion) in enumerate(shapes, start=1)]
    keys = [key for key, _, _ in shapes]
    plan = plan_passes(turns, range(len(turns)), keys, budget, share=True)
    assert sorted(row for p in plan for rows in p.microbatches for row in rows) == list(range(len(turns)))
    for part in plan:
        shared = {i: c.shared for c in part.clusters for i in c.members}
        prefixes = sum(c.shared for c in part.clusters)
        for rows in part.microbatches:
            size = prefixes + sum(fed_length(turns[i]) - shared[i] for i in rows)
            assert size <= budget or len(rows) == 1
        assert len(part.microbatches) == 1 or len(part.clusters) == 1
        for cluster in part.clusters:
            heads = {tuple(turns[i].prompt_ids[: cluster.shared]) for i in cluster.members}
            assert len(heads) == 1 and len({keys[i] for i in cluster.members}) == 1
