"""One rollout iteration as data: rewards of all its trajectories, advantages of all its turns, slices to train on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from turngrpo.trainer.objective.advantages import (
    STD_EPSILON,
    baseline_cells,
    merge_rounding,
    mix_advantages,
    trajectory_advantages,
    turn_advantages,
)
from turngrpo.trainer.objective.losses import token_weights
from turngrpo.trainer.reading.rollout import Trajectory, TrajectoryOutline, Turn


@dataclass(frozen=True)
class ScoredRollout:
    """B trajectories with their N turns in order, and every reward and advantage that the update will use.

    With several processes B counts those of all; this one sampled and trains `own`, and knows the others in outline.
    """

    trajectories: list[Trajectory | TrajectoryOutline]
    iteration: int
    rewards_per_func: torch.Tensor  # (B, F), NaN where a function was not applicable
    rewards: torch.Tensor  # (B,) float64, r_traj, NaN where no function was applicable
    turn_rewards_per_func: torch.Tensor  # (N, F_turn)
    turn_rewards: torch.Tensor  # (N,) float64, r_turn, NaN where no function was applicable
    strict_zero: torch.Tensor  # (B,) bool, whether strict format made the reward 0
    trajectory_ids: torch.Tensor  # (N,) index into the B trajectories
    group_ids: torch.Tensor  # (B,)
    trajectory_advantages: torch.Tensor  # (B,)
    turn_advantages: torch.Tensor  # (N,)
    advantages: torch.Tensor  # (N,) both mixed, what is trained
    own: range  # into the B trajectories

    @cached_property
    def own_turns(self) -> list[int]:
        """Which of the N turns are this process's."""
        return [i for i, owner in enumerate(self.trajectory_ids.tolist()) if owner in self.own]

    @cached_property
    def turns(self) -> list[Any]:
        """The N turns in order: a Turn for each own one, a TurnOutline for those of other processes."""
        return [turn for trajectory in self.trajectories for turn in trajectory.turns]

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """(group, member, turn) of each of the N turns, the turn counted from 0 in its trajectory."""
        return [(t.group, t.member, number) for t in self.trajectories for number in range(len(t.turns))]

    @property
    def clusters(self) -> list[tuple[int, int]]:
        """(group, turn) of each of the N turns: turns with the same one read the same chunk."""
        return [(group, number) for group, _, number in self.places]

    def turn_name(self, index: int) -> str:
        """Name one of the N turns in messages."""
        group, member, number = self.places[index]
        row = self.trajectories[int(self.trajectory_ids[index])].row
        name = f" (row {row['id']!r})" if "id" in row else ""
        return f"iteration {self.iteration}, group {group}{name}, member {member}, turn {number}"

    @cached_property
    def judged(self) -> torch.Tensor:
        """Whether any function gave each of the B trajectories, or one of its turns, a number; (B,) bool.

        One that was not judged takes part in no baseline, no denominator and no KL. Without any function all were.
        """
        if self.rewards_per_func.shape[1] + self.turn_rewards_per_func.shape[1] == 0:
            return torch.ones(len(self.trajectories), dtype=torch.bool)
        turns = (~self.turn_rewards_per_func.isnan()).any(dim=1)  # (N,)
        by_turn = torch.zeros(len(self.trajectories)).index_add(0, self.trajectory_ids, turns.float()) > 0
        return (~self.rewards_per_func.isnan()).any(dim=1) | by_turn

    def constant_groups(self) -> list[bool]:
        """Return for every group whether all its rewards are equal, so that it teaches nothing by reward."""
        flags = []
        for group in self.group_ids.unique():
            rewards = self.rewards[self.group_ids == group]
            rewards = rewards[~rewards.isnan()]
            flags.append(bool(len(rewards) == 0 or rewards.max() == rewards.min()))
        return flags


def weighted_sum(values: torch.Tensor, weights: Sequence[float] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum (R, F) over F with `weights` (all 1 if None) in float64, NaN ignored; return (sum, rounding), each (R,).

    A row without any number is NaN. The rounding bounds the error of the sum by that of its terms, each of which has
    the precision of `values`; one term alone with weight 1 has none. Raises ValueError for another number of weights.
    """
    count = values.shape[1]
    if weights is not None and len(weights) != count:
        raise ValueError(f"found {len(weights)} weights for {count} reward functions: expected one for each")
    factors = torch.ones(count, dtype=torch.float64) if weights is None else torch.tensor(weights, dtype=torch.float64)
    terms = values.double() * factors  # (R, F)
    total = terms.nansum(dim=1).masked_fill(values.isnan().all(dim=1), torch.nan)
    return total, (0.0 if count < 2 else count * torch.finfo(values.dtype).eps) * terms.abs().nansum(dim=1)


def score_rollout(
    trajectories: Sequence[Trajectory | TrajectoryOutline],
    iteration: int,
    rewards_per_func: torch.Tensor,
    turn_rewards_per_func: torch.Tensor,
    *,
    alpha: float = 0.9,
    reward_weights: Sequence[float] | None = None,
    turn_reward_weights: Sequence[float] | None = None,
    turn_baseline: str = "group",
    scale_rewards: str = "none",
    advantage_epsilon: float = STD_EPSILON,
    strict_format: bool = False,
    own: range | None = None,
) -> ScoredRollout:
    """Turn rewards into advantages with both baselines; strict format sets an unparsed trajectory's reward to 0.

    A trajectory that every function answered None for was not judged: strict format leaves it so. `own` are the
    trajectories of this process, all when left out.
    """
    rewards, rounding = weighted_sum(rewards_per_func, reward_weights)  # (B,)
    unparsed = torch.tensor([strict_format and not t.parsed for t in trajectories], dtype=torch.bool)
    strict_zero = unparsed & ~rewards.isnan()
    rewards = rewards.masked_fill(strict_zero, 0.0)
    group_ids = torch.tensor([trajectory.group for trajectory in trajectories])  # (B,)
    rewards = merge_rounding(rewards, rounding, group_ids)
    lengths = torch.tensor([len(trajectory.turns) for trajectory in trajectories])
    trajectory_ids = torch.arange(len(trajectories)).repeat_interleave(lengths)  # (N,)
    steps = torch.tensor([turn.step or 0 for t in trajectories for turn in t.turns])  # (N,)
    turn_rewards, rounding = weighted_sum(turn_rewards_per_func, turn_reward_weights)  # (N,)
    # A turn outside the step count has no step to be compared at.
    turn_rewards = turn_rewards.masked_fill(steps == 0, torch.nan)
    turn_groups = group_ids[trajectory_ids]  # (N,)
    turn_rewards = merge_rounding(turn_rewards, rounding, baseline_cells(turn_groups, steps, turn_baseline))
    by_trajectory = trajectory_advantages(rewards, group_ids, scale_rewards, advantage_epsilon)
    by_turn = turn_advantages(turn_rewards, turn_groups, steps, turn_baseline)
    return ScoredRollout(
        trajectories=list(trajectories),
        iteration=iteration,
        rewards_per_func=rewards_per_func,
        rewards=rewards,
        turn_rewards_per_func=turn_rewards_per_func,
        turn_rewards=turn_rewards,
        strict_zero=strict_zero,
        trajectory_ids=trajectory_ids,
        group_ids=group_ids,
        trajectory_advantages=by_trajectory,
        turn_advantages=by_turn,
        advantages=mix_advantages(by_trajectory[trajectory_ids], by_turn, alpha),
        own=range(len(trajectories)) if own is None else own,
    )


@dataclass(frozen=True)
class TrainingSlice:
    """What one training step trains: turns of a rollout by index, and the weight of each of their tokens."""

    rollout: ScoredRollout
    indices: list[int]  # into the rollout's N turns
    weights: torch.Tensor  # (N,) weight of every response token of a turn in its optimizer step, 0 outside it
    reference_hidden: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # kept for later updates


@dataclass(frozen=True)
class MicroBatch:
    """What one call of compute_loss gets: n turns of an optimizer step, T response tokens at most, (n, T) if not said.

    Off the `mask` a tensor may hold anything. CURRENT carries the gradient, BEHAVIOR was recorded at sampling, and
    there is the exact `kl`, or under kl="k3" the REFERENCE log-probabilities, or with beta 0 neither; a full ledger
    keeps both.
    """

    turns: list[Turn]
    names: list[str]  # of the turns, for messages
    mask: torch.Tensor  # bool, from the lengths of the responses
    weights: torch.Tensor  # of every token in the whole optimizer step, 0 off the mask
    advantages: torch.Tensor  # (n,)
    behavior_logprobs: torch.Tensor
    logprobs: torch.Tensor  # CURRENT
    entropy: torch.Tensor  # of CURRENT, no gradient
    kl: torch.Tensor | None = None  # KL(current || reference) over the whole vocabulary
    reference_logprobs: torch.Tensor | None = None


def objective_weights(rollout: ScoredRollout, members: Sequence[int], loss_type: str) -> torch.Tensor:
    """Return (N,) the token weight of every turn of the trajectories `members` of one optimizer step, else 0.

    Every loss type gives all tokens of a turn the same weight, so one number per turn says it all. Trajectories that
    were not judged have weight 0 and are in no denominator.
    """
    owners = torch.isin(rollout.trajectory_ids, torch.tensor(list(members))) & rollout.judged[rollout.trajectory_ids]
    indices = owners.nonzero().squeeze(1)  # (n,)
    if not len(indices):
        return torch.zeros(len(owners), dtype=torch.float64)
    lengths = torch.tensor([rollout.turns[i].completion_tokens for i in indices.tolist()])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]  # (n, T)
    owner_ids = rollout.trajectory_ids[indices]
    weights = token_weights(mask, owner_ids, rollout.group_ids[owner_ids], loss_type, dtype=torch.float64)
    return torch.zeros(len(owners), dtype=torch.float64).index_copy(0, indices, weights[:, 0])


def training_slices(rollout: ScoredRollout, size: int, per_update: int, loss_type: str) -> list[TrainingSlice]:
    """Cut this process's trajectories into slices of `size`, `per_update` slices to the optimizer step.

    Every process holds equally many, and the slices of the same number train together.
    """
    slices, held = [], len(rollout.own)
    for start in range(0, held, size * per_update):
        firsts = range(start, len(rollout.trajectories), held)  # of every process
        members = [first + i for first in firsts for i in range(size * per_update)]
        weights = objective_weights(rollout, members, loss_type)
        for first in range(start, start + size * per_update, size):
            own = rollout.own[first : first + size]
            indices = [i for i in rollout.own_turns if int(rollout.trajectory_ids[i]) in own]
            slices.append(TrainingSlice(rollout, indices, weights))
    return slices


def evaluation_losses(rollout: ScoredRollout, kl: torch.Tensor | None, beta: float, loss_type: str) -> torch.Tensor:
    """Return the share (N,) of every own turn in the objective of one rollout at ratio 1, 0 for the other turns.

    weight * (-A * its tokens + beta * the sum of its KL), with the weights of the rollout as one optimizer step; `kl`
    (N,) holds the sums of KL(current || reference) over the tokens of own turns, None without a reference.
    """
    weights = objective_weights(rollout, range(len(rollout.trajectories)), loss_type)
    lengths = torch.tensor([turn.completion_tokens for turn in rollout.turns])
    own = torch.zeros(len(lengths), dtype=torch.float64)
    own[rollout.own_turns] = 1.0
    losses = -rollout.advantages.double() * lengths * weights * own
    return losses if kl is None else losses + beta * kl * weights
