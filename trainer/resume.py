"""Exact resume: what a checkpoint must hold beside weights, optimizer and RNG, and atomic checkpoint folders."""

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import RepeatSampler

from .iteration import ScoredRollout, TrainingSlice, training_slices
from .ledger import Ledger, rollout_rows, write_rows
from .rollout import Trajectory, Turn
from .scoring import tensors_digest

STATE_FILE = "turngrpo_state_{rank}.pt"
TURN_FIELDS = ("step", "prompt_ids", "completion_ids", "behavior_logprobs", "finish_reason", "text")
ROLLOUT_TENSORS = (
    "rewards_per_func",
    "rewards",
    "turn_rewards_per_func",
    "trajectory_ids",
    "group_ids",
    "advantages",
)
# Where a run writes, what it reports and how it is served: none of it reaches a weight, so a resume may change it.
FREE_FIELDS = (
    "output_dir run_name report_to project trackio_space_id trackio_bucket_id trackio_static_space_id logging_dir "
    "logging_strategy logging_first_step logging_steps log_level log_level_replica log_on_each_node disable_tqdm "
    "save_strategy save_steps save_total_limit save_only_model save_on_each_node eval_strategy eval_steps eval_delay "
    "eval_on_start do_eval do_train do_predict load_best_model_at_end metric_for_best_model greater_is_better "
    "per_device_eval_batch_size num_generations_eval eval_temperature eval_top_p eval_seed push_to_hub hub_model_id "
    "hub_strategy hub_token hub_private_repo hub_always_push hub_revision push_to_hub_token resume_from_checkpoint "
    "log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo dataloader_num_workers "
    "dataloader_prefetch_factor dataloader_pin_memory dataloader_persistent_workers rollout_batch_tokens ledger "
    "local_rank deepspeed_plugin distributed_state _n_gpu"
).split()
LENGTH_FIELDS = ("max_steps", "num_train_epochs")  # a run may be extended; its schedule then changes


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
    }


def restore_rollout(state: dict[str, Any]) -> ScoredRollout:
    """Return the rollout of `rollout_state`, the same to the last bit in everything that an update reads."""
    trajectories = [Trajectory(**{**t, "turns": [Turn(**turn) for turn in t["turns"]]}) for t in state["trajectories"]]
    return ScoredRollout(trajectories=trajectories, iteration=state["iteration"], **state["tensors"])


def config_values(config: Any) -> dict[str, str]:
    """Return the fields that decide a run's numbers, as text."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in FREE_FIELDS]
    return {name: repr(getattr(config, name)) for name in names}


def dataset_digest(dataset: Any) -> str | None:
    """Return the SHA-256 over all rows in order, None for a stream."""
    if not hasattr(dataset, "__len__"):
        return None
    digest = hashlib.sha256()
    for row in dataset:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
    return digest.hexdigest()


def check_fingerprint(saved: dict[str, Any], found: dict[str, Any], checkpoint: str) -> None:
    """Refuse to go on under another config, corpus, initial model or reference than the checkpoint's.

    Raises ValueError that names every difference; a changed length of the run is a warning.
    """
    faults = [
        f"{name}: the checkpoint's is {saved['config'].get(name)}, this run's {value}"
        for name, value in found["config"].items()
        if saved["config"].get(name) != value
    ]
    lengths = [fault for fault in faults if fault.startswith(LENGTH_FIELDS)]
    faults = [fault for fault in faults if fault not in lengths]
    for name, meaning in (("corpus", "rows"), ("initial_model", "initial weights"), ("reference", "reference")):
        if saved[name] != found[name]:
            faults.append(f"{name}: other {meaning} (SHA-256 {saved[name]} in the checkpoint, {found[name]} here)")
    if faults:
        raise ValueError(f"{checkpoint} cannot be resumed exactly:\n  " + "\n  ".join(faults))
    if lengths:
        warnings.warn(f"{checkpoint} goes on with another schedule: {'; '.join(lengths)}", stacklevel=3)


@contextmanager
def atomic_checkpoint(trainer: Any, final: Path) -> Iterator[None]:
    """Collect everything that transformers saves under `final` in a folder beside it, renamed when it is whole.

    transformers writes trainer_state.json last and then pushes and rotates; the renaming happens in between, so that a
    kill at any moment leaves either the whole checkpoint or none that a resume could pick.
    """
    partial = final.with_name(f"partial-{final.name}")
    shutil.rmtree(partial, ignore_errors=True)
    state = trainer.state
    write = type(state).save_to_json

    def finish(path: str) -> None:
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(final)
        write(state, os.path.join(partial, os.path.basename(path)))
        replaced = final.with_name(f"replaced-{final.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            os.replace(final, replaced)
        os.replace(partial, final)
        shutil.rmtree(replaced, ignore_errors=True)

    trainer.checkpoint_folder, state.save_to_json = partial, finish
    try:
        yield
    finally:
        trainer.checkpoint_folder = None
        del state.save_to_json


class Resumable:
    """The part of TurnGRPOTrainer that saves and restores what transformers and TRL leave out."""

    args: Any
    state: Any
    accelerator: Any
    workflow: Any
    loss_type: str
    num_iterations: int
    _buffered_inputs: Any
    _step: int
    _metrics: Any
    _logs: Any
    _tr_loss: Any
    fingerprint: dict[str, Any]
    model: Any
    train_dataset: Any
    reference: Any
    checkpoint_folder: Path | None = None
    _ledger: Ledger | None = None
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _get_output_dir: Any
    _timed: Any
    reward_func_names: list[str]
    _turn_reward_names: list[str]
    _costs: dict[str, float]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as GRPOTrainer does; the reference must be the same at the end, to the last bit."""
        if self.workflow is None:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        reference = None if self.reference is None else self.reference.digest()
        self.fingerprint = {
            "config": config_values(self.args),
            "corpus": dataset_digest(self.train_dataset),
            "initial_model": tensors_digest(self.model.named_parameters()),
            "reference": reference,
        }
        self._step, self._buffered_inputs, self._ledger = 0, None, None
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        if self.reference is not None and self.reference.digest() != reference:
            raise RuntimeError("the reference policy changed during training: KL was measured against a moving target")
        return output

    # ---- what GRPOTrainer and transformers' Trainer call (trl 1.16, transformers 5.24) ----

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)  # type: ignore[misc]
        if self.workflow is None or type(sampler) is not RepeatSampler:
            return sampler
        arguments = (sampler.data_source, sampler.mini_repeat_count, sampler.batch_size, sampler.repeat_count)
        per_epoch = len(sampler) // (sampler.mini_repeat_count * sampler.batch_size)  # training steps
        accumulation = self.args.gradient_accumulation_steps
        return EpochSampler(
            *arguments,
            sampler.shuffle,
            sampler.seed,
            epoch=lambda: self.state.global_step * accumulation // per_epoch,
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.workflow is None:
            return super()._save_checkpoint(model, trial)  # type: ignore[misc]
        final = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self._timed("saving"), atomic_checkpoint(self, final):
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(self._place(output_dir), _internal_call)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(self._place(output_dir))  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(self._place(output_dir))  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        folder = self._place(output_dir)
        super()._save_rng_state(folder)  # type: ignore[misc]
        if self.workflow is not None:
            torch.save(self._complete_state(), self._state_file(str(folder)))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if self.workflow is not None and checkpoint is not None:
            self._restore(checkpoint)

    def _place(self, output_dir: str | None) -> str | None:
        """Return the folder to write to: the partial one while a checkpoint is being collected."""
        return output_dir if self.checkpoint_folder is None else str(self.checkpoint_folder)

    # ---- the state itself ----

    def _state_file(self, folder: str) -> Path:
        return Path(folder) / STATE_FILE.format(rank=self.accelerator.process_index)

    def _complete_state(self) -> dict[str, Any]:
        """Return everything that the next update depends on and nothing else saves; plain values and tensors."""
        slices: list[TrainingSlice] | None = self._buffered_inputs
        consumed = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return {
            "step": self._step,
            "ledger_position": 0 if self._ledger is None else self._ledger.position,
            "rollout": None if slices is None or consumed else rollout_state(slices[0].rollout),
            "metrics": {mode: dict(values) for mode, values in self._metrics.items()},
            "logs": {name: list(self._logs[name]) for name in ("prompt", "completion", "advantages")}
            | {name: {k: list(v) for k, v in self._logs[name].items()} for name in ("rewards", "extra")},
            "running_loss": (self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged),
            "fingerprint": self.fingerprint,
        }

    def _restore(self, checkpoint: str) -> None:
        path = self._state_file(checkpoint)
        if not path.exists():
            raise ValueError(f"{checkpoint} has no {path.name}: saved with save_only_model, or by another trainer")
        state = torch.load(path, weights_only=True, map_location="cpu")
        check_fingerprint(state["fingerprint"], self.fingerprint, checkpoint)
        self._step = state["step"]
        self._open_ledger(state["ledger_position"])
        if state["rollout"] is not None:
            self._buffered_inputs = self._slices(restore_rollout(state["rollout"]))
        for mode, values in state["metrics"].items():
            self._metrics[mode].update(values)
        for name, values in state["logs"].items():
            self._logs[name].clear()
            (self._logs[name].update if isinstance(values, dict) else self._logs[name].extend)(values)
        loss, self._total_loss_scalar, self._globalstep_last_logged = state["running_loss"]
        self._tr_loss = loss.to(self.args.device)

    # ---- the ledger ----

    def _open_ledger(self, position: int) -> Ledger | None:
        self._ledger = Ledger(Path(self.args.output_dir) / "rollouts", position) if self.args.ledger else None
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
        name = f"rollout_{rollout.iteration:05d}.parquet"
        return write_rows(self._rows(rollout), Path(self.args.output_dir) / "nonfinite" / name)

    def _slices(self, rollout: ScoredRollout) -> list[TrainingSlice]:
        size, per_update = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
        return training_slices(rollout, size, per_update, self.loss_type)
