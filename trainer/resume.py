"""Exact resume under a workflow: the rollout being trained on, the iteration counter, and the ledger's position."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler

from .checkpoints import ExactCheckpoints
from .iteration import ScoredRollout, TrainingSlice, training_slices
from .ledger import Ledger, process_suffix, rollout_rows, write_rows
from .rollout import Trajectory, Turn
from .scoring import tensors_digest

TURN_FIELDS = ("step", "prompt_ids", "completion_ids", "behavior_logprobs", "finish_reason", "text")
ROLLOUT_TENSORS = (
    "rewards_per_func",
    "rewards",
    "turn_rewards_per_func",
    "trajectory_ids",
    "group_ids",
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


def rollout_state(rollout: ScoredRollout) -> dict[str, Any]:
    """Return a rollout as plain values and tensors, all that an update needs and names in messages."""
    return {
        "iteration": rollout.iteration,
        "trajectories": [
            {
                "row": {"id": t.row["id"]} if "id" in t.row else {},
                "group": t.group,
                "member": t.member,
                "turns": [{name: getattr(turn, name) for name in TURN_FIELDS} for turn in t.turns],
            }
            for t in rollout.trajectories
        ],
        "tensors": {name: getattr(rollout, name) for name in ROLLOUT_TENSORS},
        "own": rollout.own,
    }


def restore_rollout(state: dict[str, Any]) -> ScoredRollout:
    """Return the rollout of `rollout_state`, the same to the last bit in everything that an update reads."""
    trajectories = [Trajectory(**{**t, "turns": [Turn(**turn) for turn in t["turns"]]}) for t in state["trajectories"]]
    tensors, own = state["tensors"], state["own"]
    return ScoredRollout(trajectories=trajectories, iteration=state["iteration"], own=own, **tensors)


class Resumable(ExactCheckpoints):
    """The part of TurnGRPOTrainer that saves and restores what its iterations need."""

    workflow: Any
    loss_type: str
    num_iterations: int
    _buffered_inputs: Any
    _step: int
    _logs: Any
    reference: Any
    _ledger: Ledger | None = None
    reward_func_names: list[str]
    _turn_reward_names: list[str]
    _costs: dict[str, float]
    whole_weights: Any

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.workflow is not None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as GRPOTrainer does; the reference must be the same at the end, to the last bit."""
        if self.workflow is None:
            return super().train(*args, **kwargs)
        self._step, self._buffered_inputs, self._ledger = 0, None, None
        output = super().train(*args, **kwargs)
        with self.whole_weights():
            if self.reference is not None and self.reference.digest() != self.fingerprint["reference"]:
                raise RuntimeError("the reference policy changed during training: KL had a moving target")
        return output

    def _fingerprint(self) -> dict[str, Any]:
        with self.whole_weights():
            reference = None if self.reference is None else self.reference.digest()
        return super()._fingerprint() | {"reference": reference}

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)  # type: ignore[misc]
        if self.workflow is None or type(sampler) is not RepeatSampler:
            return sampler
        arguments = (sampler.data_source, sampler.mini_repeat_count, sampler.batch_size, sampler.repeat_count)
        per_epoch = len(sampler) // (sampler.mini_repeat_count * sampler.batch_size)  # training steps
        if per_epoch == 0:
            raise ValueError(
                f"the train dataset has {len(sampler.data_source)} rows, but one rollout takes {sampler.batch_size} "
                "prompts (generation_batch_size / num_generations): add rows, or lower gradient_accumulation_steps, "
                "steps_per_generation or per_device_train_batch_size"
            )
        accumulation = self.args.gradient_accumulation_steps
        return EpochSampler(
            *arguments,
            sampler.shuffle,
            sampler.seed,
            epoch=lambda: self.state.global_step * accumulation // per_epoch,
        )

    # ---- the state itself ----

    def _complete_state(self) -> dict[str, Any]:
        slices: list[TrainingSlice] | None = self._buffered_inputs
        consumed = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return super()._complete_state() | {
            "step": self._step,
            "ledger_position": 0 if self._ledger is None else self._ledger.position,
            "rollout": None if slices is None or consumed else rollout_state(slices[0].rollout),
            "logs": {name: list(self._logs[name]) for name in ("prompt", "completion", "advantages")}
            | {name: {k: list(v) for k, v in self._logs[name].items()} for name in ("rewards", "extra")},
        }

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._step = state["step"]
        self._open_ledger(state["ledger_position"])
        if state["rollout"] is not None:
            self._buffered_inputs = self._slices(restore_rollout(state["rollout"]))
        for name, values in state["logs"].items():
            self._logs[name].clear()
            (self._logs[name].update if isinstance(values, dict) else self._logs[name].extend)(values)

    # ---- the ledger ----

    def _open_ledger(self, position: int) -> Ledger | None:
        if self.args.ledger:
            process = self.accelerator.process_index
            self._ledger = Ledger(Path(self.args.output_dir) / "rollouts", position, process)
            self.accelerator.wait_for_everyone()
        return self._ledger

    def _write_down(self, rollout: ScoredRollout) -> None:
        """Put a fresh rollout on disk before it is trained on."""
        ledger = self._ledger or self._open_ledger(0)
        if ledger is not None:
            trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            extra = {"policy_digest": tensors_digest(trained), "seconds": self._costs["time/generation"]}
            with self._timed("saving"):
                ledger.record(rollout.iteration, self._rows(rollout, **extra))

    def _rows(self, rollout: ScoredRollout, **columns: Any) -> list[dict[str, Any]]:
        return rollout_rows(rollout, self.reward_func_names, self._turn_reward_names, **columns)

    def _save_rollout(self, rollout: ScoredRollout) -> Path:
        """Write a rollout whose numbers are not finite where an error message can point to it."""
        name = f"rollout_{rollout.iteration:05d}{process_suffix(self.accelerator.process_index)}.parquet"
        return write_rows(self._rows(rollout), Path(self.args.output_dir) / "nonfinite" / name)

    def _stop_at_gradient(self, norm: Any) -> None:
        rollout = self._buffered_inputs[0].rollout
        groups = sorted({trajectory.group for trajectory in rollout.trajectories})
        path = self._save_rollout(rollout)
        raise FloatingPointError(
            f"the gradient of update {self.state.global_step + 1} is not finite ({norm}); rollouts: iteration "
            f"{rollout.iteration}, groups {groups}, written to {path}"
        )

    def _slices(self, rollout: ScoredRollout) -> list[TrainingSlice]:
        size, per_update = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
        return training_slices(rollout, size, per_update, self.loss_type)
