"""The learning stages: supervised and GRPO branches, run straight, interrupted, or resumed from an archived state."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from lib.loading import load_model
from lib.output import write_json
from lib.reporting import RunLog, make_console
from lib.schedule import adamw
from lib.tokenizing import load_tokenizer
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, SFTConfig

from turngrpo.rewards import stock_reward
from turngrpo.trainer import SingleTurn, TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.warm_start import fit, target_examples

from .archive import archive_state, unpacked_state
from .config import LabConfig
from .data import read_rows
from .stages import clean

STATE, HISTORY, COSTS, ARCHIVE = "state.tar.zst", "history.json", "costs.json", "archive.json"
UPDATES = "updates.json"  # of a supervised branch: the examples of every update, and its tokens
SFT_COLUMNS = {"loss": "loss", "eval_nll": "validation NLL"}
LISTED = 20  # examples in a message
GRPO_COLUMNS = {"reward": "reward", "frac_reward_zero_std": "equal rewards", "loss": "loss"}


def optimizers(model: torch.nn.Module, peak: float, updates: int, config: LabConfig) -> tuple[Any, Any]:
    """Return the optimizer and the schedule of a branch."""
    return adamw(model, peak, updates, config.weight_decay, config.warmup, config.final)


class Checkpoints(TrainerCallback):
    """Saves every so many updates and at the end, which is after update `stop` where there is one."""

    def __init__(self, every: int, stop: int | None):
        self.every, self.stop = every, stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.stop
        ends = control.should_training_stop or state.global_step == state.max_steps
        control.should_save = ends or state.global_step % self.every == 0


def common_options(folder: Path, config: LabConfig) -> dict[str, Any]:
    """Return the config fields that supervised and GRPO branches share."""
    return {
        "output_dir": str(folder),
        "max_grad_norm": config.max_grad_norm,
        "weight_decay": config.weight_decay,
        "logging_steps": 1,
        "save_strategy": "no",  # Checkpoints decides
        "save_total_limit": 1,
        "seed": config.seed,
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }


def run_log(updates: int, columns: Mapping[str, str]) -> RunLog:
    """Return what prints a line now and then; the whole history is kept in the state."""
    return RunLog(None, make_console(), columns, every=max(1, updates // 5))


def load(path: Path) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a folder, in float32 with eager attention."""
    model = load_model(ModelConfig(model_name_or_path=str(path), dtype="float32", attn_implementation="eager"))
    return model, load_tokenizer(str(path))


@contextmanager
def starting_point(folder: Path, state: Path | None) -> Iterator[str | None]:
    """Yield the checkpoint to go on from: what this stage saved before it was killed, else `state`, else none."""
    own = get_last_checkpoint(str(folder))
    if own is not None or state is None:
        yield own
    else:
        with unpacked_state(state, folder) as checkpoint:
            yield str(checkpoint)


def finish(folder: Path, trainer: Any, costs: dict[str, float], keep_model: bool) -> None:
    """Leave the full state as an archive, the history, the costs and, where it will be used, the model."""
    checkpoint = Path(folder, f"checkpoint-{trainer.state.global_step}")
    archived = archive_state(checkpoint, folder / STATE)
    write_json(folder / ARCHIVE, archived)
    write_json(folder / HISTORY, trainer.state.log_history)
    write_json(folder / COSTS, costs | {"time/archiving": archived["seconds"]})
    if keep_model:
        trainer.save_model(str(folder / "model"))
        trainer.processing_class.save_pretrained(folder / "model")
    clean(folder, "checkpoint-*")
    clean(folder, "runs")


def check_parts(examples: Dataset, names: Sequence[str], config: LabConfig) -> None:
    """Raise ValueError naming up to 20 examples whose prompt, and 20 whose response with EOS, is over its limit."""
    responses = [sum(mask) for mask in examples["completion_mask"]]
    prompts = [len(mask) - sum(mask) for mask in examples["completion_mask"]]
    faults = [
        *too_long("prompt", prompts, names, "max_prompt_length", config.max_prompt_length),
        *too_long("response (EOS included)", responses, names, "max_completion_length", config.max_completion_length),
    ]
    if faults:
        raise ValueError("\n".join(faults))


def too_long(part: str, lengths: Sequence[int], names: Sequence[str], option: str, limit: int) -> list[str]:
    """Return a line that says how many are longer than `limit` tokens and a line for each; none where none is."""
    long = [f"  {name}: {length} tokens" for name, length in zip(names, lengths, strict=True) if length > limit]
    more = [f"  and {len(long) - LISTED} more"] if len(long) > LISTED else []
    said = f"{len(long)} examples have a {part} of more than {limit} tokens; none is truncated: raise --{option}"
    return [said, *long[:LISTED], *more] if long else []


def train_sft(
    folder: Path,
    config: LabConfig,
    *,
    model: Path,
    examples: Path,
    validation: Path,
    epochs: int,
    stop_epoch: int | None = None,
    state: Path | None = None,
    keep_model: bool = False,
) -> None:
    """Imitate the targets of `examples` for some epochs; `validation` is measured after each and chooses nothing."""
    policy, tokenizer = load(model)
    data, names = target_examples(str(examples), tokenizer)
    held_out, held_out_names = target_examples(str(validation), tokenizer)
    check_parts(data, names, config)
    check_parts(held_out, held_out_names, config)
    per_epoch = -(-len(data) // config.batch_size)
    updates = per_epoch * epochs
    stop = None if stop_epoch is None else stop_epoch * per_epoch
    with starting_point(folder, state) as checkpoint:
        trainer = fit(
            policy,
            tokenizer,
            data,
            names,
            SFTConfig(
                **common_options(folder, config),
                num_train_epochs=epochs,
                per_device_train_batch_size=config.micro_batch_size,
                gradient_accumulation_steps=config.batch_size // config.micro_batch_size,
                learning_rate=config.sft_learning_rate,
                max_length=config.max_prompt_length + config.max_completion_length,
                resume_from_checkpoint=checkpoint,
            ),
            callbacks=[Checkpoints(config.save_every, stop)],
            validation=held_out,
            optimizers=optimizers(policy, config.sft_learning_rate, updates, config),
            log=run_log(updates, SFT_COLUMNS),
        )
    costs = {f"time/{purpose}": seconds for purpose, seconds in trainer.seconds.items()}
    ids = [row["id"] for row in read_rows(examples)]
    updates_made = [one | {"examples": [ids[place] for place in one["examples"]]} for one in trainer.updates]
    write_json(folder / UPDATES, updates_made)
    finish(folder, trainer, costs, keep_model)


def train_grpo(
    folder: Path,
    config: LabConfig,
    *,
    model: Path,
    prompts: Path,
    generations: int,
    iterations: int,
    stop_iteration: int | None = None,
    state: Path | None = None,
    rollouts: Path | None = None,
    keep_model: bool = False,
) -> None:
    """Train by GRPO on the verifier's rewards; a resumed branch goes on with the interrupted one's ledger."""
    policy, tokenizer = load(model)
    updates = iterations * config.updates_per_rollout
    stop = None if stop_iteration is None else stop_iteration * config.updates_per_rollout
    trainer = TurnGRPOTrainer(
        policy,
        stock_reward,
        TurnGRPOConfig(
            **common_options(folder, config),
            max_steps=updates,
            per_device_train_batch_size=config.prompts * generations,
            num_generations=generations,
            num_iterations=config.updates_per_rollout,
            learning_rate=config.grpo_learning_rate,
            beta=config.beta,
            alpha=1.0,
            loss_type="grpo",
            scale_rewards="group",
            behavior_check="all",
            ledger="full",  # every response's own record
            max_prompt_length=config.max_prompt_length,
            max_completion_length=config.max_completion_length,
        ),
        Dataset.from_json(str(prompts)),
        processing_class=tokenizer,
        callbacks=[Checkpoints(config.save_every, stop), run_log(updates, GRPO_COLUMNS)],
        optimizers=optimizers(policy, config.grpo_learning_rate, updates, config),
        workflow=SingleTurn(),
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    if rollouts is not None and not (folder / "rollouts").exists():
        partial = folder / "rollouts.partial"  # a kill in the middle leaves no part of a ledger
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(rollouts, partial, copy_function=shutil.copyfile)
        partial.rename(folder / "rollouts")
    with starting_point(folder, state) as checkpoint:
        first = 0 if checkpoint is None else int(checkpoint.rpartition("-")[2])
        trainer.train(resume_from_checkpoint=checkpoint)
    finish(folder, trainer, process_costs(trainer, first), keep_model)


def process_costs(trainer: TurnGRPOTrainer, first: int) -> dict[str, float]:
    """Return the sums of time/* and tokens/* over this process's updates, those after update `first`."""
    costs = dict(trainer.update_log.pending_costs)
    for log in trainer.state.log_history:
        if log["step"] > first:
            for name in costs:
                costs[name] += log.get(name, 0.0)
    return costs
