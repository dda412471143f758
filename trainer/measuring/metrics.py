"""Every logged name of a rollout, defined once; the README's table says the same in words."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.utils import nanstd

from turngrpo.rewards import answer_reward
from turngrpo.trainer.evaluation.intervals import BALANCED, RESAMPLES, SIDES, intervals, observe
from turngrpo.trainer.objective.iteration import ScoredRollout
from turngrpo.trainer.reading.rollout import Trajectory, TrajectoryOutline

COST_NAMES = (
    "tokens/generation",
    "tokens/behavior_check",
    "tokens/scoring",
    "tokens/reference",
    "tokens/optimisation",
    "time/generation",
    "time/behavior_check",
    "time/scoring",
    "time/reference",
    "time/optimisation",
    "time/rewards",
    "time/digests",
    "time/saving",
)
# One observation of these is 0 or 1, so that their mean is a share.
SHARES = (
    *SIDES,
    *(f"exit/{kind}" for kind in ("exact", "early", "late")),
    "format/parsed",
    "answer/accuracy",
    "answer/contains",
)
WITH_INTERVALS = ("reward", "turns/mean", BALANCED, *SHARES)  # in evaluations during training


def exit_kind(trajectory: Trajectory) -> str | None:
    """Return "exact", "early" or "late" against T*; None without labels, or where an unparsed one would be exact."""
    if trajectory.exit_step is None or trajectory.last_evidence is None:
        return None
    if trajectory.exit_step == trajectory.last_evidence:
        return "exact" if trajectory.parsed else None
    return "early" if trajectory.exit_step < trajectory.last_evidence else "late"


def trajectory_measures(trajectory: Trajectory) -> dict[str, list[float]]:
    """Return the observations of one trajectory by metric name; each metric is the mean of all its observations.

    `update_accuracy/*` has one per labelled chunk turn (an unparsed turn is wrong), all else one per trajectory.
    """
    labelled = [turn for turn in trajectory.turns if turn.step is not None and turn.evidence is not None]
    right = [(turn.evidence, turn.decision is not None and turn.decision.check == turn.evidence) for turn in labelled]
    measures: dict[str, list[float]] = {
        "update_accuracy/evidence": [float(ok) for evidence, ok in right if evidence],
        "update_accuracy/evidence_free": [float(ok) for evidence, ok in right if not evidence],
        "format/parsed": [float(trajectory.parsed)],
        "turns/mean": [float(sum(turn.step is not None for turn in trajectory.turns))],
        "response_tokens/mean": [float(sum(len(turn.completion_ids) for turn in trajectory.turns))],
    }
    if trajectory.memory is not None:
        measures["memory_tokens/mean"] = [float(trajectory.memory_tokens)]
        measures["memory/cut"] = [float(sum(turn.memory_cut for turn in trajectory.turns))]
    if trajectory.last_evidence is not None:
        kind = exit_kind(trajectory)
        measures |= {f"exit/{name}": [float(kind == name)] for name in ("exact", "early", "late")}
    if "answers" in trajectory.row and (trajectory.memory is not None or trajectory.answer is not None):
        reward = answer_reward([None], [None], [None], trajectories=[trajectory], answers=[trajectory.row["answers"]])
        measures["answer/accuracy"] = [float(reward[0] or 0.0)]
    return measures


def measures_of(trajectory: Trajectory | TrajectoryOutline) -> dict[str, list[float]]:
    """Return the observations of any process's trajectory."""
    return trajectory_measures(trajectory) if isinstance(trajectory, Trajectory) else trajectory.measures


def balanced(metrics: dict[str, Any]) -> dict[str, Any]:
    """Add `update_accuracy/balanced`, the mean of the two update accuracies, where both exist."""
    sides = [metrics.get(side) for side in SIDES]
    if all(side is not None for side in sides):
        metrics[BALANCED] = sum(sides) / 2  # type: ignore[arg-type]
    return metrics


def rollout_metrics(trajectories: Sequence[Trajectory | TrajectoryOutline]) -> dict[str, float]:
    """Return the metrics of a set of trajectories by name; a name without any observation is left out."""
    pooled: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, values in measures_of(trajectory).items():
            pooled.setdefault(name, []).extend(values)
    return balanced({name: sum(values) / len(values) for name, values in pooled.items() if values})


def scored_metrics(
    rollouts: Sequence[ScoredRollout], reward_names: Sequence[str], turn_reward_names: Sequence[str]
) -> dict[str, float]:
    """Return everything one or several scored rollouts measure, TRL's names included; means over all observations."""
    metrics = rollout_metrics([trajectory for rollout in rollouts for trajectory in rollout.trajectories])
    per_func = torch.cat([rollout.rewards_per_func for rollout in rollouts])  # (B, F)
    per_turn = torch.cat([rollout.turn_rewards_per_func for rollout in rollouts])  # (N, F_turn)
    columns = [*zip(reward_names, per_func.T, strict=True), *zip(turn_reward_names, per_turn.T, strict=True)]
    for name, column in columns:
        metrics[f"rewards/{name}/mean"] = float(column.nanmean())
        metrics[f"rewards/{name}/std"] = float(nanstd(column))
    rewards = torch.cat([rollout.rewards for rollout in rollouts])  # (B,)
    metrics["reward"], metrics["reward_std"] = float(rewards.nanmean()), float(nanstd(rewards))
    constant = [flag for rollout in rollouts for flag in rollout.constant_groups()]
    metrics["frac_reward_zero_std"] = sum(constant) / len(constant)
    metrics["unjudged"] = float(sum(int((~rollout.judged).sum()) for rollout in rollouts))
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    lengths = [turn.completion_tokens for turn in turns]
    ended = [turn.completion_tokens for turn in turns if turn.finish_reason == "eos"] or [0]
    for kind, values in (("", lengths), ("_terminated", ended)):
        metrics[f"completions/mean{kind}_length"] = sum(values) / len(values)
        metrics[f"completions/min{kind}_length"] = float(min(values))
        metrics[f"completions/max{kind}_length"] = float(max(values))
    metrics["completions/clipped_ratio"] = sum(turn.finish_reason == "length" for turn in turns) / len(turns)
    return metrics


def evaluation_intervals(rollouts: Sequence[ScoredRollout], seed: int) -> dict[str, float]:
    """Return the bounds of the 95% intervals over rows as `interval/NAME/low` and `interval/NAME/high`."""
    trajectories = [trajectory for rollout in rollouts for trajectory in rollout.trajectories]
    rewards = [reward for rollout in rollouts for reward in rollout.rewards.tolist()]
    measures = [
        measures_of(trajectory) | {"reward": [] if math.isnan(reward) else [reward]}
        for trajectory, reward in zip(trajectories, rewards, strict=True)
    ]
    observations = observe(measures, [trajectory.group for trajectory in trajectories])
    found = intervals(observations, SHARES, RESAMPLES, seed)
    return {
        f"interval/{name}/{side}": bound
        for name in WITH_INTERVALS
        if name in found
        for side, bound in zip(("low", "high"), found[name], strict=True)
    }


class Meter:
    """Sums, counts and peaks over the micro-batches of one update, read and cleared once per update."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._peaks: dict[str, float] = {}

    def add_mean(self, name: str, total: float, count: float) -> None:
        """Add `total` over `count` observations; the value is the mean over all observations."""
        pair = self._sums.setdefault(name, [0.0, 0.0])
        pair[0] += total
        pair[1] += count

    def add_peak(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self._peaks[name] = max(value, self._peaks.get(name, value))

    def merge(self, other: "Meter") -> None:
        """Add what another meter holds."""
        for name, (total, count) in other._sums.items():
            self.add_mean(name, total, count)
        for name, value in other._peaks.items():
            self.add_peak(name, value)

    def flush(self) -> dict[str, float]:
        """Return every mean and peak by name, and start again."""
        values = {name: total / count for name, (total, count) in self._sums.items() if count} | self._peaks
        self._sums, self._peaks = {}, {}
        return values
