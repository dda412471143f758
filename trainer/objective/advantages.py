"""Advantages from rewards: the trajectory baseline, the turn baseline at the same step, and their mix."""

import torch
from torch import Tensor

# Keeps the division defined where a group's rewards nearly agree; groups that agree exactly are set to 0 before.
STD_EPSILON = 1e-8


def _centre(values: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values - mean of their cell, population std of their cell), both (N,) float64 on the CPU.

    A NaN value belongs to no cell and gets 0, and so does every value of a constant cell: rounding of the mean must
    not invent a winner. On the CPU the order of additions is fixed, which GPU atomics do not promise.
    """
    values = values.detach().to("cpu", torch.float64)  # (N,)
    valid = ~values.isnan()  # (N,)
    unique, cell = torch.unique(cells.cpu(), dim=0, return_inverse=True)  # (C,), (N,)
    zeros = torch.zeros(len(unique), dtype=values.dtype)  # (C,)
    count = zeros.index_add(0, cell, valid.double()).clamp(min=1)  # valid rows of each cell; an empty one divides 0
    mean = zeros.index_add(0, cell, values.where(valid, 0.0)) / count
    lowest = (zeros + torch.inf).scatter_reduce(0, cell, values.where(valid, torch.inf), "amin")
    highest = (zeros - torch.inf).scatter_reduce(0, cell, values.where(valid, -torch.inf), "amax")
    varies = valid & (lowest < highest)[cell]  # (N,)
    centred = (values - mean[cell]).where(varies, 0.0)  # (N,)
    std = (zeros.index_add(0, cell, centred.square()) / count).sqrt()  # correction 0
    return centred, std[cell]


def merge_rounding(values: Tensor, rounding: Tensor, cells: Tensor) -> Tensor:
    """Give the values of a cell that differ by no more than their rounding one value: such a cell is constant.

    Rewards are sums of terms, and 0.1 + 0.6 and 0.0 + 0.7 are one reward. `rounding` bounds the error of each value.

    values and rounding (N,), cells (N,) or (N, k) as in the baselines -> (N,); a NaN stays and belongs to no cell.

    >>> merge_rounding(torch.tensor([1.5, 1.25]), torch.tensor([0.5, 0.5]), torch.tensor([0, 0])).tolist()
    [1.25, 1.25]
    """
    valid = ~values.isnan()  # (N,)
    unique, cell = torch.unique(cells, dim=0, return_inverse=True)  # (C,), (N,)
    zeros = torch.zeros(len(unique), dtype=values.dtype)  # (C,)
    lowest = (zeros + torch.inf).scatter_reduce(0, cell, values.where(valid, torch.inf), "amin")
    highest = (zeros - torch.inf).scatter_reduce(0, cell, values.where(valid, -torch.inf), "amax")
    allowed = zeros.scatter_reduce(0, cell, rounding.to(values.dtype).where(valid, 0.0), "amax")
    return lowest[cell].where(valid & (highest - lowest <= allowed)[cell], values)


def _check(values: Tensor, name: str, **others: Tensor) -> None:
    if values.dim() != 1 or not values.is_floating_point() or values.isinf().any():
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, dtype {values.dtype} and {int(values.isinf().sum())} infinite "
            "values, expected one finite floating number (or NaN: not applicable) per row: check the reward functions"
        )
    for other, tensor in others.items():
        if tensor.shape != values.shape:
            raise ValueError(
                f"{other} has shape {tuple(tensor.shape)}, expected {tuple(values.shape)} as {name}: give one per row"
            )


def trajectory_advantages(
    rewards: Tensor, group_ids: Tensor, scale: str = "none", epsilon: float = STD_EPSILON
) -> Tensor:
    """Advantage of every trajectory over its group (GRU-Mem, arXiv 2602.10560; the scaling is GRPO's, 2402.03300).

    A[i] = r[i] - mean of r over i's group, with `scale` "group" divided by (population std of the group + epsilon),
    with "batch" by (population std of all rewards + epsilon).

    rewards and group_ids (B,) -> (B,), detached; ids are any integers in any order. A constant group gives exactly 0.
    A NaN reward (no reward function applied) gives 0 and counts nowhere.
    """
    _check(rewards, "rewards", group_ids=group_ids)
    if scale not in ("none", "group", "batch"):
        raise ValueError(f"scale is {scale!r}, expected 'none', 'group' or 'batch': set scale_rewards to one of them")
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}, expected a positive number: it guards the division by the std")
    advantages, std = _centre(rewards, group_ids)  # (B,)
    if scale == "batch":
        _, std = _centre(rewards, torch.zeros_like(group_ids))
    if scale != "none":
        advantages = advantages / (std + epsilon)
    return advantages.to(rewards)


def turn_advantages(turn_rewards: Tensor, group_ids: Tensor, steps: Tensor, baseline: str = "group") -> Tensor:
    """Advantage of every turn over the turns at the same step (GRU-Mem, arXiv 2602.10560).

    A[i,t] = r[i,t] - mean of r[.,t] over the trajectories of i's group that have a turn at step t; with `baseline`
    "batch" over those of every group. Never over different steps.

    turn_rewards, group_ids and steps (N,), one row per turn in any order -> (N,), detached. A cell of equal rewards,
    also of one turn alone, gives exactly 0. A NaN reward (such as the answer turn's, whose step may be any integer)
    gives 0 and counts nowhere.
    """
    _check(turn_rewards, "turn_rewards", group_ids=group_ids, steps=steps)
    return _centre(turn_rewards, baseline_cells(group_ids, steps, baseline))[0].to(turn_rewards)


def baseline_cells(group_ids: Tensor, steps: Tensor, baseline: str) -> Tensor:
    """Return which turns are compared: (group, step) of each (N, 2) for "group", its step (N,) for "batch"."""
    if baseline not in ("group", "batch"):
        raise ValueError(f"baseline is {baseline!r}, expected 'group' or 'batch': set turn_baseline to one of them")
    return torch.stack([group_ids, steps], dim=1) if baseline == "group" else steps


def mix_advantages(trajectory_advantages: Tensor, turn_advantages: Tensor, alpha: float) -> Tensor:
    """Advantage of every turn: A[i,t] = alpha * A_traj[i] + (1 - alpha) * A_turn[i,t] (GRU-Mem, arXiv 2602.10560).

    Both (N,), the trajectory's repeated for each of its turns -> (N,). alpha=1 leaves the trajectory's, 0 the turn's.
    """
    _check(trajectory_advantages, "trajectory_advantages", turn_advantages=turn_advantages)
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}, expected a number from 0 to 1 (the paper's is 0.9)")
    return alpha * trajectory_advantages + (1 - alpha) * turn_advantages
