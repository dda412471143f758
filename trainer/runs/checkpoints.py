"""Exact checkpoints of any trl trainer: whole folders or none, complete state, and a fingerprint of the run."""

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from turngrpo.trainer.forward.policy import tensors_digest
from turngrpo.trainer.forward.whole_weights import whole_weights

STATE_FILE = "turngrpo_state_{rank}.pt"
# Where a run writes, what it reports and how it is served: none of it reaches a weight, so a resume may change it.
FREE_FIELDS = (
    "output_dir run_name report_to project trackio_space_id trackio_bucket_id trackio_static_space_id "
    "logging_strategy logging_first_step logging_steps log_level log_level_replica log_on_each_node disable_tqdm "
    "save_strategy save_steps save_total_limit save_only_model save_on_each_node eval_strategy eval_steps eval_delay "
    "eval_on_start do_eval do_train do_predict load_best_model_at_end metric_for_best_model greater_is_better "
    "per_device_eval_batch_size num_generations_eval eval_temperature eval_top_p eval_seed push_to_hub hub_model_id "
    "hub_strategy hub_token hub_private_repo hub_always_push hub_revision resume_from_checkpoint "
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
        faults.append(
            f"processes: the checkpoint's run had {saved['processes']}, this one has {found['processes']}: start as "
            "many"
        )
    for name, meaning in (("corpus", "rows"), ("initial_model", "initial weights"), ("reference", "reference")):
        if saved[name] != found[name]:
            faults.append(f"{name}: other {meaning} (SHA-256 {saved[name]} in the checkpoint, {found[name]} here)")
    if faults:
        raise ResumeError(f"{checkpoint} cannot be resumed exactly:\n  " + "\n  ".join(faults))
    if lengths:
        warnings.warn(f"{checkpoint} goes on with another schedule: {'; '.join(lengths)}", stacklevel=3)


class ExactCheckpoints:
    """Whole checkpoints of a trl trainer that hold everything its next update and its next log depend on.

    Beside what transformers saves, every process adds TRL's pending metrics, the running loss, the run's fingerprint,
    and what `state` returns; `restore` gets that back. `facts` adds to the fingerprint what decides the run's numbers.
    The trainer calls `begin`, `saving`, `load` and `is_finished` where transformers calls its train, _save_checkpoint,
    _load_rng_state and _run_epoch (transformers 5.24).
    """

    def __init__(
        self,
        trainer: Any,
        state: Callable[[], dict[str, Any]],
        restore: Callable[[dict[str, Any]], None],
        facts: Callable[[], dict[str, Any]] = dict,
    ):
        self.trainer, self.state, self.restore, self.facts = trainer, state, restore, facts
        self.fingerprint: dict[str, Any] = {}

    def begin(self) -> None:
        """Take the fingerprint of a run that starts now, or goes on."""
        with whole_weights(self.trainer.model):
            initial_model = tensors_digest(self.trainer.model.named_parameters())
        self.fingerprint = {
            "config": config_values(self.trainer.args),
            "processes": self.trainer.accelerator.num_processes,
            "corpus": dataset_digest(self.trainer.train_dataset),
            "initial_model": initial_model,
            "reference": None,
        } | self.facts()

    @contextmanager
    def saving(self, trial: Any = None) -> Iterator[None]:
        """Let transformers save into a folder apart, and make that the checkpoint when it is whole, by one rename.

        A kill at any moment leaves the whole checkpoint or none that a resume could pick. Pushing and rotating come
        after it. Every process must enter.
        """
        trainer, args, state = self.trainer, self.trainer.args, self.trainer.state
        folder, name = Path(trainer._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        apart, final = folder / f"partial-{name}", folder / name  # none is looked for in the first
        if args.should_save:
            shutil.rmtree(apart, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        trainer._get_output_dir = lambda trial: str(apart)
        trainer._push_from_checkpoint = lambda folder: None
        try:
            yield
        finally:
            del trainer._get_output_dir, trainer._push_from_checkpoint
        if state.best_model_checkpoint == str(apart / name):
            state.best_model_checkpoint = str(final)
        if not args.save_only_model:
            torch.save(self._complete_state(), self._state_file(apart / name))
        trainer.accelerator.wait_for_everyone()  # the folder is whole
        if args.should_save:
            state.save_to_json(str(apart / name / TRAINER_STATE_NAME))
            _replace(apart / name, final)
            apart.rmdir()
        trainer.accelerator.wait_for_everyone()
        if args.push_to_hub:
            trainer._push_from_checkpoint(str(final))
        if args.should_save:
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )

    def check(self, checkpoint: str) -> None:
        """Raise ResumeError where this run could not go on from a checkpoint: sooner than `load`, which asks too."""
        self.begin()
        self._read_state(checkpoint)

    def load(self, checkpoint: str) -> None:
        """Take over the state of a checkpoint."""
        trainer, state = self.trainer, self._read_state(checkpoint)
        for mode, values in state["metrics"].items():
            trainer._metrics[mode].update(values)
        loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = state["running_loss"]
        trainer._tr_loss = loss.to(trainer.args.device)
        self.restore(state)

    def is_finished(self) -> bool:
        """Whether no update is left, where transformers would add one after a resume from a run's last checkpoint."""
        return self.trainer.state.global_step >= self.trainer.state.max_steps

    def _complete_state(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        trainer = self.trainer
        return {
            "metrics": {mode: dict(values) for mode, values in trainer._metrics.items()},
            "running_loss": (trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged),
            "fingerprint": self.fingerprint,
        } | self.state()

    def _read_state(self, checkpoint: str) -> dict[str, Any]:
        path = self._state_file(Path(checkpoint))
        if not path.exists():
            raise ResumeError(
                f"{checkpoint} has no {path.name}: saved with save_only_model, by another trainer, or by fewer "
                f"processes than this run's {self.trainer.accelerator.num_processes}"
            )
        with torch.serialization.safe_globals([range]):  # which of all trajectories are this process's
            state = torch.load(path, weights_only=True, map_location="cpu")
        check_fingerprint(state["fingerprint"], self.fingerprint, checkpoint)
        return state

    def _state_file(self, folder: Path) -> Path:
        return folder / STATE_FILE.format(rank=self.trainer.accelerator.process_index)


def _replace(new: Path, final: Path) -> None:
    """Put a folder in the place of another one, or of none."""
    replaced = final.with_name(f"replaced-{final.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.replace(final, replaced)
    os.replace(new, final)
    shutil.rmtree(replaced, ignore_errors=True)
