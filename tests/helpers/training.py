"""A small trainer whose random model still gives unequal trajectories and rewards that differ."""

from typing import Any

import torch
from datasets import Dataset
from tiny import tiny_model, word_tokenizer

from turngrpo.trainer import TurnGRPOConfig, TurnGRPOTrainer

PROMPTS = ["code of red", "code of blue is", "red is", "blue is 1 2 3", "memory of red", "no code"]


class ParityWorkflow:
    """Goes on while the number of sampled tokens is even, four turns at most: trajectories of unequal length."""

    strict_format = False

    def bind(self, tokenizer, config):
        self.tokenizer = tokenizer

    def start(self, row):
        return {"prompt": row["prompt"], "said": []}

    def prompt(self, state):
        return [self.tokenizer(state["prompt"])["input_ids"], state["said"] or [4]]

    def advance(self, state, turn):
        state["said"] = turn.completion_ids[-3:]
        state["turns"] = state.get("turns", 0) + 1
        return len(turn.completion_ids) % 2 == 0 and state["turns"] < 4


def token_reward(completion_ids, trajectories, **columns):
    """Any number that depends on what was sampled: the mean of token ids modulo 7."""
    return [
        sum(token % 7 for turn in trajectory.turns for token in turn.completion_ids) / 10
        for trajectory in trajectories
    ]


def length_turn_reward(trajectories, **columns):
    return [[float(len(turn.completion_ids)) for turn in trajectory.turns] for trajectory in trajectories]


def make_trainer(
    folder: Any,
    workflow: Any = None,
    dtype: torch.dtype = torch.float32,
    model: Any = None,
    dataset: Any = None,
    reward_funcs: Any = token_reward,
    turn_reward_funcs: Any = length_turn_reward,
    tokenizer: Any = None,
    eval_dataset: Any = None,
    peft_config: Any = None,
    callbacks: Any = None,
    reward_processing_classes: Any = None,
    **options: Any,
) -> TurnGRPOTrainer:
    tokenizer = tokenizer or word_tokenizer()
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "loss_type": "grpo",
        "scale_rewards": "none",
        "max_memory_tokens": 16,
        "seed": 3,
    }
    return TurnGRPOTrainer(
        tiny_model(len(tokenizer), dtype=dtype) if model is None else model,
        reward_funcs,
        TurnGRPOConfig(**(defaults | options)),
        Dataset.from_dict({"prompt": PROMPTS}) if dataset is None else dataset,
        eval_dataset,
        tokenizer,
        reward_processing_classes,
        callbacks=callbacks,
        peft_config=peft_config,
        workflow=ParityWorkflow() if workflow is None else workflow,
        turn_reward_funcs=turn_reward_funcs,
    )


def first_batch(trainer: TurnGRPOTrainer) -> list[dict[str, Any]]:
    """Return the rows of the first rollout, as the training loop would pass them."""
    return next(iter(trainer.get_train_dataloader()))


def gradients(trainer: TurnGRPOTrainer, batch: Any = None) -> dict[str, torch.Tensor]:
    """Run one optimizer step's backward passes and return every gradient; weights stay as they are."""
    trainer.model.zero_grad()
    batch = first_batch(trainer) if batch is None else batch
    accumulation = trainer.args.gradient_accumulation_steps
    for step in range(accumulation):
        trainer.accelerator.gradient_state._set_sync_gradients(step == accumulation - 1)
        trainer.training_step(trainer.model, batch, None)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def relative_gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all gradients over the norm of theirs."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[name] - theirs[name]).square().sum()) for name in ours)
    norm = sum(float(value.square().sum()) for value in theirs.values())
    assert norm > 0
    return (difference / norm) ** 0.5
