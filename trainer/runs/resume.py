"""What makes a resume under a workflow exact: the rollout being trained on, and the place in the order of prompts."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import RepeatSampler

from turngrpo.trainer.objective.iteration import ScoredRollout
from turngrpo.trainer.reading.rollout import Trajectory, TrajectoryOutline, Turn, TurnOutline

TURN_FIELDS = ("step", "prompt_ids", "completion_ids", "behavior_logprobs", "finish_reason", "text")
OUTLINE_FIELDS = ("step", "prompt_tokens", "completion_tokens", "finish_reason")
ROLLOUT_TENSORS = (
    "rewards_per_func",
    "rewards",
    "turn_rewards_per_func",
    "turn_rewards",
    "strict_zero",
    "trajectory_ids",
    "group_ids",
    "trajectory_advantages",
    "turn_advantages",
    "advantages",
)


class EpochSampler(RepeatSampler):
    """TRL's RepeatSampler, whose order depends on the epoch alone, so that a resume in a later epoch finds its place.

    Epoch e takes the e-th permutation of the seeded generator, as an uninterrupted run of RepeatSampler does.
    """

    def __init__(self, *args: Any, epoch: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed or 0)
            for _ in range(self.epoch()):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


def train_sampler(sampler: RepeatSampler, steps_taken: Callable[[], int]) -> EpochSampler:
    """Return TRL's sampler in a form that finds its place after a resume; `steps_taken` counts training steps.

    Raises ValueError where the dataset is too short for one rollout.
    """
    check_length(len(sampler.data_source), sampler.batch_size)
    per_epoch = len(sampler) // (sampler.mini_repeat_count * sampler.batch_size)  # training steps
    return EpochSampler(
        sampler.data_source,
        sampler.mini_repeat_count,
        sampler.batch_size,
        sampler.repeat_count,
        sampler.shuffle,
        sampler.seed,
        epoch=lambda: steps_taken() // per_epoch,
    )


def check_length(rows: int, prompts: int) -> None:
    """Raise ValueError where a dataset is too short for one rollout."""
    if rows < prompts:
        raise ValueError(
            f"the train dataset has {rows} rows, but one rollout takes {prompts} prompts (generation_batch_size / "
            "num_generations): add rows, or lower gradient_accumulation_steps, steps_per_generation or "
            "per_device_train_batch_size"
        )


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the global generators of Python, NumPy and torch as they are found, whatever runs inside draws."""
    python, numpy, cuda = random.getstate(), np.random.get_state(), torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class StreamPlace:
    """Where a run stands in a stream that has no length: which pass over it, and how many training steps of that.

    `state` of a checkpoint is taken over by the first pass; a pass that has ended counts as the next one's beginning.
    """

    def __init__(self, state: dict[str, int] | None = None):
        self.number, self.steps = (state["pass"], state["steps"]) if state else (0, 0)
        self.ended = False

    def enter(self, number: int) -> dict[str, int] | None:
        """Return what transformers' _run_epoch is told instead at pass `number`; None for one that was read before."""
        if number < self.number:
            return None
        if number > self.number:
            self.number, self.steps, self.ended = number, 0, False
            return {}
        return {"epochs_trained": number, "steps_trained_in_current_epoch": self.steps}

    def advance(self, is_last: bool) -> None:
        """Count a training step; `is_last` says that the pass has no more."""
        self.steps += 1
        self.ended = is_last

    def state(self) -> dict[str, int]:
        """Return plain numbers."""
        return {"pass": self.number + 1, "steps": 0} if self.ended else {"pass": self.number, "steps": self.steps}


def rollout_state(rollout: ScoredRollout) -> dict[str, Any]:
    """Return a rollout as plain values and tensors, all that an update needs and names in messages."""
    return {
        "iteration": rollout.iteration,
        "trajectories": [
            {
                "row": {"id": t.row["id"]} if "id" in t.row else {},
                "group": t.group,
                "member": t.member,
                "turns": [_turn_state(turn) for turn in t.turns],
            }
            for t in rollout.trajectories
        ],
        "tensors": {name: getattr(rollout, name) for name in ROLLOUT_TENSORS},
        "own": rollout.own,
    }


def _turn_state(turn: Turn | TurnOutline) -> dict[str, Any]:
    names = TURN_FIELDS if isinstance(turn, Turn) else OUTLINE_FIELDS
    return {name: getattr(turn, name) for name in names}


def _trajectory(state: dict[str, Any]) -> Trajectory | TrajectoryOutline:
    turns = [_turn(turn) for turn in state["turns"]]
    if all(isinstance(turn, Turn) for turn in turns):
        return Trajectory(**{**state, "turns": turns})
    return TrajectoryOutline(**{**state, "turns": turns}, parsed=True, measures={})  # which no update reads


def _turn(state: dict[str, Any]) -> Any:
    if isinstance(state.get("prompt_ids"), range):  # as states of version 0.1.0 hold other processes' turns
        prompt, completion = len(state["prompt_ids"]), len(state["completion_ids"])
        return TurnOutline(state["step"], prompt, completion, state["finish_reason"])
    return Turn(**state) if "text" in state else TurnOutline(**state)


def restore_rollout(state: dict[str, Any]) -> ScoredRollout:
    """Return the rollout of `rollout_state`, the same to the last bit in everything that an update reads."""
    trajectories = [_trajectory(one) for one in state["trajectories"]]
    tensors, own = state["tensors"], state["own"]
    # Of states of version 0.1.0, which kept what an update reads alone.
    unknown, turns = torch.full_like(tensors["rewards"], torch.nan), torch.full_like(tensors["advantages"], torch.nan)
    older = {"strict_zero": unknown > 0, "trajectory_advantages": unknown}
    older |= {"turn_rewards": turns, "turn_advantages": turns}
    return ScoredRollout(trajectories=trajectories, iteration=state["iteration"], own=own, **older | tensors)
