"""Rollouts on disk, one row per turn, as Parquet."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .iteration import ScoredRollout


def write_rollout(rollout: ScoredRollout, path: str | Path) -> Path:
    """Write every turn of a rollout with its tokens, log-probabilities, reward and advantage; atomic by renaming."""
    rewards, advantages = rollout.rewards.tolist(), rollout.advantages.tolist()
    rows = []
    for index, (turn, owner) in enumerate(zip(rollout.turns, rollout.trajectory_ids.tolist(), strict=True)):
        trajectory = rollout.trajectories[owner]
        rows.append(
            {
                "iteration": rollout.iteration,
                "group": trajectory.group,
                "member": trajectory.member,
                "name": rollout.turn_name(index),
                "step": turn.step,
                "prompt_ids": turn.prompt_ids,
                "completion_ids": turn.completion_ids,
                "behavior_logprobs": turn.behavior_logprobs,
                "text": turn.text,
                "finish_reason": turn.finish_reason,
                "reward": rewards[owner],
                "advantage": advantages[index],
            }
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    os.replace(partial, path)
    return path
