"""Exact checkpoints of any trl trainer: whole folders or none, complete state, and a fingerprint of the run."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, get_last_checkpoint, rotate_checkpoints

from turngrpo.trainer.files import read_json, sync
from turngrpo.trainer.forward.policy import tensors_digest
from turngrpo.trainer.forward.whole_weights import whole_weights
from turngrpo.trainer.runs.fingerprint import check_fingerprint, config_values, dataset_digest
from turngrpo.trainer.runs.identity import (
    adapter_facts,
    library_versions,
    model_digest,
    optimizer_facts,
    precision,
    subclass_code,
    tokenizer_facts,
)
from turngrpo.trainer.runs.proof import PROOF, STATE_FILE, ResumeError, proof_fault, read_torch, write_proof
from turngrpo.trainer.writing import going_on, writing


class ExactCheckpoints:
    """Whole checkpoints of a trl trainer that hold everything its next update and its next log depend on.

    Beside what transformers saves, every process adds TRL's pending metrics, the running loss, the run's fingerprint,
    and what `state` returns; `restore` gets that back, and `examine` sees it before anything is loaded. `facts` adds
    to the fingerprint what decides the run's numbers; `allow_changed` names what may differ on purpose.
    The trainer calls `begin`, `saving`, `load`, `is_finished` and `finish` where transformers calls its train,
    _save_checkpoint, _load_rng_state, _run_epoch and _finalize_training (transformers 5.24).
    """

    def __init__(
        self,
        trainer: Any,
        state: Callable[[], dict[str, Any]],
        restore: Callable[[dict[str, Any]], None],
        facts: Callable[[], dict[str, Any]] = dict,
        examine: Callable[[dict[str, Any]], None] = lambda state: None,
        allow_changed: Sequence[str] | None = None,
    ):
        self.trainer, self.state, self.restore, self.facts, self.examine = trainer, state, restore, facts, examine
        self.allow_changed = allow_changed or ()
        self.fingerprint: dict[str, Any] = {}
        self.changes: list[dict[str, Any]] = []  # what resumes of this run changed on purpose, by update
        self._allowed: list[str] = []
        self._waiting: str | None = None  # a checkpoint that the run goes on from, until its state is taken over

    def begin(self, resume: str | bool | None = None) -> tuple[str | None, dict[str, Any] | None]:
        """Take the fingerprint of a run that starts now, or goes on: return its checkpoint and state after all checks.

        Raises ResumeError where this run could not go on from the checkpoint.
        """
        self._take_fingerprint()
        self.changes, self._allowed, self._waiting = [], [], None
        if resume is True:
            resume = get_last_checkpoint(self.trainer.args.output_dir)
            if resume is None:
                raise ResumeError(f"{self.trainer.args.output_dir} holds no checkpoint-N to go on from")
        if not resume:
            return None, None
        state = self._examined(str(resume))
        self._waiting = str(resume)
        self._restore_callbacks(Path(self._waiting))
        return self._waiting, state

    def check(self, checkpoint: str) -> None:
        """Raise ResumeError where this run could not go on from a checkpoint: sooner than `begin`, which asks too."""
        self._take_fingerprint()
        self._examined(checkpoint)

    def prove_best(self) -> None:
        """Raise ResumeError, on every process, where the best checkpoint is not as it was saved."""
        best = self.trainer.state.best_model_checkpoint
        fault = proof_fault(best) if self.trainer.accelerator.is_local_main_process else None
        self._agree(fault and f"the best checkpoint cannot be loaded: {fault}")

    def _callbacks(self) -> dict[str, list[Any]]:
        """Return the callbacks that keep a state, such as the patience of EarlyStoppingCallback, by their class."""
        found: dict[str, list[Any]] = {}
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback)
        return found

    def _restore_callbacks(self, checkpoint: Path) -> None:
        """Give every callback what it had counted; transformers would begin anew, or keep the old arguments too."""
        saved = read_json(checkpoint / TRAINER_STATE_NAME).get("stateful_callbacks") or {}
        for name, callbacks in self._callbacks().items():
            states = saved.get(name, [])
            states = states if isinstance(states, list) else [states]
            for callback, state in zip(callbacks, states[-len(callbacks) :], strict=False):  # each save adds to a list
                for attribute, value in state["attributes"].items():
                    setattr(callback, attribute, value)

    def _find_best(self, checkpoint: Path) -> None:
        """Name the best checkpoint as rotation does, or beside the one gone on from where the run's folder moved."""
        state = self.trainer.state
        for folder in (checkpoint.parent, Path(self.trainer.args.output_dir)):
            best = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best.is_dir():
                state.best_model_checkpoint = str(best)

    def _take_fingerprint(self) -> None:
        trainer = self.trainer
        with whole_weights(trainer.model):
            initial_model = tensors_digest(trainer.model.named_parameters())
        self.fingerprint = {
            "config": config_values(trainer.args),
            "processes": trainer.accelerator.num_processes,
            "corpus": dataset_digest(trainer.train_dataset),
            "initial_model": initial_model,
            "reference": None,
            "model_config": model_digest(trainer.model),
            "precision": precision(trainer.model),
            "adapter": adapter_facts(trainer.model),
            "tokenizer": tokenizer_facts(trainer.processing_class),
            "optimizer": optimizer_facts(trainer.optimizer, trainer.lr_scheduler),
            "trainer": subclass_code(trainer),
            "versions": library_versions(trainer.args.device),
        } | self.facts()

    def _examined(self, checkpoint: str) -> dict[str, Any]:
        """Return the state of a checkpoint that is whole and this run's; ResumeError otherwise, on every process."""
        self._agree(proof_fault(checkpoint) if self.trainer.accelerator.is_local_main_process else None)
        state: dict[str, Any] = {}
        fault: str | None = None
        try:
            state = self._read_state(checkpoint)
            self._allowed = check_fingerprint(state["fingerprint"], self.fingerprint, checkpoint, self.allow_changed)
            self.examine(state)
        except ResumeError as error:
            fault = str(error)
        self._agree(fault)
        return state

    def _agree(self, fault: str | None) -> None:
        """Raise the ResumeError of any process on all, so that none waits for one that stopped."""
        found = [text for text in gather_object([fault]) if text]
        if found:
            raise ResumeError(found[0])

    @contextmanager
    def saving(self, trial: Any = None) -> Iterator[None]:
        """Let transformers save into a folder apart, and make that the checkpoint when it is whole, by one rename.

        A kill at any moment leaves the whole checkpoint or none that a resume could pick. Pushing and rotating come
        after it. Every process must enter.
        """
        trainer, args, state = self.trainer, self.trainer.args, self.trainer.state
        for kind, callbacks in self._callbacks().items():  # which a resumed run has, and its checkpoint had not
            state.stateful_callbacks.setdefault(kind, [callback.state() for callback in callbacks])
        folder, name = Path(trainer._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        apart, final = folder / f"partial-{name}", folder / name  # none is looked for in the first
        if args.should_save:
            shutil.rmtree(apart, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        trainer._get_output_dir = lambda trial: str(apart)
        trainer._push_from_checkpoint = lambda folder: None
        with writing(str(final), going_on(folder)):
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
                write_proof(apart / name, state.global_step, trainer.accelerator.num_processes)
                sync(apart)
                _replace(apart / name, final)
                sync(folder)
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

    def load(self, checkpoint: str) -> None:
        """Take over the state of a checkpoint."""
        trainer, state = self.trainer, self._read_state(checkpoint)
        for mode, values in state["metrics"].items():
            trainer._metrics[mode].update(values)
        loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = state["running_loss"]
        trainer._tr_loss = loss.to(trainer.args.device)
        self._find_best(Path(checkpoint))
        self.restore(state)
        self._waiting, self.changes = None, list(state.get("changes", ()))
        if self._allowed:
            self.changes.append({"update": trainer.state.global_step, "changed": self._allowed})
            said: Any = {"allowed_changes": "; ".join(self._allowed)}
            Trainer.log(trainer, said)

    def is_finished(self) -> bool:
        """Whether no update is left, where transformers would go on after a resume from a run's last checkpoint."""
        out_of_patience = self._waiting is not None and any(
            isinstance(callback, EarlyStoppingCallback)
            and callback.early_stopping_patience_counter >= callback.early_stopping_patience
            for callback in self.trainer.callback_handler.callbacks
        )
        return out_of_patience or self.trainer.state.global_step >= self.trainer.state.max_steps

    def finish(self, finalize: Callable[[], TrainOutput]) -> TrainOutput:
        """End a run by transformers' `finalize`; its train_loss is the mean over all updates, resumed or not.

        A run that was resumed after its last update takes its state over here, and rewrites no table.
        """
        trainer, checkpoint = self.trainer, self._waiting
        log, shown = trainer.log, getattr(trainer, "log_completions", False)

        def log_whole(metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "train_loss" in metrics:  # transformers divides the sum, which goes on, by the updates since the resume
                metrics["train_loss"] = trainer._total_loss_scalar / max(trainer.state.global_step, 1)
            log(metrics, *args, **kwargs)

        try:
            if checkpoint is not None:
                trainer.log_completions = False
                trainer._load_rng_state(checkpoint)
            trainer.log = log_whole
            output = finalize()
        finally:
            trainer.log, trainer.log_completions = log, shown
        return output._replace(training_loss=output.metrics["train_loss"])

    def _complete_state(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        trainer = self.trainer
        return {
            "metrics": {mode: dict(values) for mode, values in trainer._metrics.items()},
            "running_loss": (trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged),
            "fingerprint": self.fingerprint,
            "changes": self.changes,
            "proof": PROOF,
        } | self.state()

    def _read_state(self, checkpoint: str) -> dict[str, Any]:
        path = self._state_file(Path(checkpoint))
        if not path.exists():
            raise ResumeError(
                f"{checkpoint} has no {path.name}: saved with save_only_model, by another trainer, or by fewer "
                f"processes than this run's {self.trainer.accelerator.num_processes}"
            )
        return read_torch(path)

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
