"""One GRPO step with LoRA as a side of a benchmark: TurnGRPOTrainer, and trl.GRPOTrainer with the same options."""

import math
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from common import make_model, make_tokenizer, model_config, random_text
from datasets import Dataset
from floor import Rates, Shape, Work, measure_rates, shape_of, step_floor
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workers import MIB, Rounds, device, run_apart, synchronize

from turngrpo.trainer import SingleTurn, TurnGRPOConfig, TurnGRPOTrainer

ENDLESS = 10**6  # steps; the benchmark ends them
KEPT = ("loss", "grad_norm", "num_tokens", "completions/min_length", "completions/max_length")


class Setting(NamedTuple):
    """One step on one group of one prompt: `prompt` tokens, `group` responses of exactly `completion` tokens."""

    model: str
    prompt: int
    completion: int
    group: int
    dtype: str = "float32"
    vocabulary: int | None = None  # in place of the random model's own
    max_tokens: int = 16384  # of a micro-batch, on both sides
    checkpointing: bool = False
    kl: str = "exact"  # ours: "exact" or "k3"

    @property
    def name(self) -> str:
        return f"P={self.prompt} C={self.completion} G={self.group}"

    @property
    def overrides(self) -> dict[str, int]:
        return {} if self.vocabulary is None else {"vocab_size": self.vocabulary}

    @property
    def rows(self) -> int:
        """Rows of trl's micro-batches: as many as the tokens allow of those that divide the group, one at least."""
        fit = self.max_tokens // (self.prompt + self.completion)
        return max(rows for rows in range(1, self.group + 1) if self.group % rows == 0 and (rows <= fit or rows == 1))

    def work(self) -> Work:
        return Work(self.prompt, self.completion, self.group)

    def shape(self) -> tuple[Shape, float]:
        """Return the model's Shape and the MiB of its weights, without making it."""
        shape, parameters = shape_of(model_config(self.model, **self.overrides), AutoModelForCausalLM)
        return shape, parameters * getattr(torch, self.dtype).itemsize / MIB

    def floor(self, rates: Rates) -> dict[str, float]:
        return step_floor(self.shape()[0], self.work(), rates, getattr(torch, self.dtype).itemsize)


class Timekeeper(TrainerCallback):
    """Makes every optimizer step, its rollout included, one round."""

    def __init__(self, rounds: Rounds):
        self.rounds = rounds

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rounds.ready()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rounds.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rounds.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        figures = {name: value for name, value in logs.items() if name in KEPT or name.startswith("time/")}
        self.rounds.report(step=state.global_step, **figures)


def token_reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
    """Reward anything that differs between random completions: the mean of their token ids modulo 7."""
    return [sum(token % 7 for token in ids) / len(ids) for ids in completion_ids]


def common_options(setting: Setting, folder: str) -> dict[str, Any]:
    """Return the config fields of both sides."""
    return {
        "output_dir": folder,
        "max_steps": ENDLESS,
        "per_device_train_batch_size": setting.group,
        "num_generations": setting.group,
        "max_completion_length": setting.completion,
        "beta": 0.02,
        "loss_type": "grpo",
        "scale_rewards": "none",
        "bf16": setting.dtype == "bfloat16",
        "gradient_checkpointing": setting.checkpointing,
        "use_cpu": device().type == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def prepare(trainer: Any) -> Any:
    """Move the adapter off its start, where the KL and half of all gradients are 0, and keep the trainer quiet."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    return trainer


def never_ends(model: Any) -> list[int]:
    """Return stop tokens that no sampler draws, so that every completion has its full length."""
    return [model.config.get_text_config().vocab_size]


def our_trainer(
    setting: Setting, folder: str, rows: Sequence[dict[str, Any]], tokenizer: Any, workflow: Any, **more: Any
) -> TurnGRPOTrainer:
    """Return our trainer with LoRA of rank 16 on all linear layers, whose completions never end by themselves."""
    callbacks = more.pop("callbacks", None)
    own = {"alpha": 1.0, "max_tokens_per_microbatch": setting.max_tokens}
    model = make_model(setting.model, getattr(torch, setting.dtype), **setting.overrides)
    trainer = TurnGRPOTrainer(
        model,
        token_reward,
        TurnGRPOConfig(**common_options(setting, folder) | own | more),
        Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=callbacks,
        workflow=workflow,
    )
    engine: Any = trainer.engine
    engine.eos_ids = never_ends(model)
    return prepare(trainer)


def single_turn(setting: Setting) -> tuple[Any, list[dict[str, str]]]:
    """Return the tokenizer and the one row of a prompt of exactly that many tokens."""
    tokenizer = make_tokenizer(setting.model, model_config(setting.model, **setting.overrides).vocab_size)
    return tokenizer, [{"prompt": random_text(tokenizer, setting.prompt)}]


def ours(rounds: Rounds, setting: Setting) -> None:
    """One step of TurnGRPOTrainer, whose engine records behavior log-probabilities."""
    tokenizer, rows = single_turn(setting)
    with tempfile.TemporaryDirectory() as folder:
        our_trainer(
            setting,
            folder,
            rows,
            tokenizer,
            SingleTurn(),
            max_prompt_length=setting.prompt,
            kl=setting.kl,
            callbacks=[Timekeeper(rounds)],
        ).train()


def trl(rounds: Rounds, setting: Setting) -> None:
    """One step of trl.GRPOTrainer with its fused head and k3: on-policy, so it computes no old log-probabilities."""
    tokenizer, rows = single_turn(setting)
    model = make_model(setting.model, getattr(torch, setting.dtype), **setting.overrides)
    with tempfile.TemporaryDirectory() as folder:
        micro_batches = {
            "per_device_train_batch_size": setting.rows,
            "gradient_accumulation_steps": setting.group // setting.rows,
        }
        trainer = GRPOTrainer(
            model,
            token_reward,
            GRPOConfig(
                **common_options(setting, folder) | micro_batches,
                generation_kwargs={"eos_token_id": never_ends(model)},
            ),
            Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
            callbacks=[Timekeeper(rounds)],
        )
        trainer.eos_token_ids = never_ends(model)
        prepare(trainer).train()


def check_finite(rounds: Sequence[dict[str, Any]], completion: int, name: str) -> None:
    """Raise ValueError where a round's completions have another length, or its numbers are not finite."""
    for one in rounds:
        lengths = {one["completions/min_length"], one["completions/max_length"]}
        if lengths != {completion}:
            raise ValueError(f"{name}: completions of {sorted(lengths)} tokens, expected {completion}")
        if not math.isfinite(one["loss"]) or not math.isfinite(one["grad_norm"]):
            raise ValueError(f"{name}: loss {one['loss']}, gradient norm {one['grad_norm']}")


def check_rounds(rounds: Sequence[dict[str, Any]], setting: Setting, side: str) -> None:
    """Raise ValueError where a round did other work than the setting's."""
    check_finite(rounds, setting.completion, f"{side}, {setting}")
    expected = setting.group * (setting.prompt + setting.completion)
    for one in rounds:
        if one["num_tokens"] != one["step"] * expected:
            raise ValueError(
                f"{side}, {setting}: {one['num_tokens']} tokens in {one['step']} steps, expected {expected} in each"
            )


def _rates(rounds: Rounds, dtype: str, size: int) -> None:
    rounds.ready()
    rounds.begin()
    found = measure_rates(device(), getattr(torch, dtype), synchronize, size)
    rounds.stop()
    rounds.report(**found._asdict())


def machine_rates(given: Any, dtype: str = "float32") -> Rates:
    """Return this machine's rates under the options' threads, measured in a process of its own."""
    found = run_apart(_rates, dtype, 512 if given.quick else 2048, threads=given.threads)
    return Rates(found["flops"], found["bandwidth"])
