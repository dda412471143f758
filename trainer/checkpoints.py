"""Exact checkpoints of any trl trainer: whole folders or none, complete state, and a fingerprint of the run."""

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .processes import whole_weights
from .scoring import tensors_digest

STATE_FILE = "turngrpo_state_{rank}.pt"
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
    "vllm_base_url vllm_server_base_url vllm_server_timeout vllm_adapter_dir vllm_request_timeout "
    "vllm_concurrent_requests local_rank deepspeed_plugin distributed_state _n_gpu"
).split()
LENGTH_FIELDS = ("max_steps", "num_train_epochs")  # a run may be extended; its schedule then changes


class ResumeError(ValueError):
    """A checkpoint that this run cannot go on from."""


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

    Raises ResumeError that names every difference; a changed length of the run is a warning.
    """
    faults = [
        f"{name}: the checkpoint's is {saved['config'].get(name)}, this run's {value}"
        for name, value in found["config"].items()
        if saved["config"].get(name) != value
    ]
    lengths = [fault for fault in faults if fault.startswith(LENGTH_FIELDS)]
    faults = [fault for fault in faults if fault not in lengths]
    if saved["processes"] != found["processes"]:
        faults.append(f"processes: the checkpoint's run had {saved['processes']}, this one has {found['processes']}")
    for name, meaning in (("corpus", "rows"), ("initial_model", "initial weights"), ("reference", "reference")):
        if saved[name] != found[name]:
            faults.append(f"{name}: other {meaning} (SHA-256 {saved[name]} in the checkpoint, {found[name]} here)")
    if faults:
        raise ResumeError(f"{checkpoint} cannot be resumed exactly:\n  " + "\n  ".join(faults))
    if lengths:
        warnings.warn(f"{checkpoint} goes on with another schedule: {'; '.join(lengths)}", stacklevel=3)


@contextmanager
def atomic_checkpoint(trainer: Any, final: Path) -> Iterator[None]:
    """Collect everything that transformers saves under `final` in a folder beside it, renamed when it is whole.

    transformers writes trainer_state.json last and then pushes and rotates; the renaming happens in between, so that a
    kill at any moment leaves either the whole checkpoint or none that a resume could pick. All processes write into
    the folder; the one that writes trainer_state.json makes and renames it.
    """
    partial = final.with_name(f"partial-{final.name}")
    if trainer.args.should_save:
        shutil.rmtree(partial, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
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
    trainer.accelerator.wait_for_everyone()


class ExactCheckpoints:
    """Mixin before a trl trainer: atomic checkpoints that hold everything the next update and the next log depend on.

    Beside what transformers saves, the state holds TRL's pending metrics, the running loss and the run's fingerprint;
    a resume under another config, corpus, initial model or reference raises ResumeError. A subclass adds to
    `_complete_state` and `_restore` what it keeps itself.
    """

    args: Any
    state: Any
    control: Any
    accelerator: Any
    model: Any
    train_dataset: Any
    fingerprint: dict[str, Any]
    checkpoint_folder: Path | None = None
    exact = True  # False: the trainer's own checkpoints, unchanged
    _timed: Callable[[str], Any] = staticmethod(lambda name: nullcontext())
    _metrics: Any
    _tr_loss: Any
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _get_output_dir: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer below does, on a run that its fingerprint describes."""
        if self.exact:
            self.fingerprint = self._fingerprint()
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def check_resume(self, checkpoint: str) -> None:
        """Raise ResumeError where `train` could not go on from a checkpoint: sooner than `train`, which asks too."""
        self.fingerprint = self._fingerprint()
        self._read_state(checkpoint)

    def _fingerprint(self) -> dict[str, Any]:
        with whole_weights(self.model):
            initial_model = tensors_digest(self.model.named_parameters())
        return {
            "config": config_values(self.args),
            "processes": self.accelerator.num_processes,
            "corpus": dataset_digest(self.train_dataset),
            "initial_model": initial_model,
            "reference": None,
        }

    # ---- what transformers' Trainer calls (transformers 5.24) ----

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train nothing where the checkpoint is the run's end; transformers would add an update."""
        if self.exact and self.state.global_step >= self.state.max_steps:
            self._load_rng_state(kwargs["resume_from_checkpoint"])
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.exact:
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
        if self.exact:
            torch.save(self._complete_state(), self._state_file(str(folder)))
            self.accelerator.wait_for_everyone()  # the folder is whole

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if self.exact and checkpoint is not None:
            self._restore(self._read_state(checkpoint))

    def _read_state(self, checkpoint: str) -> dict[str, Any]:
        path = self._state_file(checkpoint)
        if not path.exists():
            raise ResumeError(
                f"{checkpoint} has no {path.name}: saved with save_only_model, by another trainer, or by fewer "
                f"processes than this run's {self.accelerator.num_processes}"
            )
        with torch.serialization.safe_globals([range]):  # lengths of other processes' turns
            state = torch.load(path, weights_only=True, map_location="cpu")
        check_fingerprint(state["fingerprint"], self.fingerprint, checkpoint)
        return state

    def _place(self, output_dir: str | None) -> str | None:
        """Return the folder to write to: the partial one while a checkpoint is being collected."""
        return output_dir if self.checkpoint_folder is None else str(self.checkpoint_folder)

    def _state_file(self, folder: str) -> Path:
        return Path(folder) / STATE_FILE.format(rank=self.accelerator.process_index)

    # ---- the state itself: plain values and tensors ----

    def _complete_state(self) -> dict[str, Any]:
        return {
            "metrics": {mode: dict(values) for mode, values in self._metrics.items()},
            "running_loss": (self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged),
            "fingerprint": self.fingerprint,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        for mode, values in state["metrics"].items():
            self._metrics[mode].update(values)
        loss, self._total_loss_scalar, self._globalstep_last_logged = state["running_loss"]
        self._tr_loss = loss.to(self.args.device)
