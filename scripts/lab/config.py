"""The numbers of the laboratory; their defaults are the full experiment (preset minimum)."""

import math
from dataclasses import dataclass, field
from typing import Any

# The source experiment's model, and what must be true of it.
SOURCE_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SOURCE_REVISION = "7ae557604adf67be50417f59c2c2f167def9a775"
SOURCE_PARAMETERS = 494_032_768  # embedding and head are one matrix, counted once
SOURCE_EOS = 151645

TINY_MODEL = "tiny"


def _option(default: Any, text: str) -> Any:
    made = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**made, metadata={"help": text})


@dataclass
class LabConfig:
    """What decides the numbers of a laboratory run, folders left out."""

    model: str = _option(SOURCE_MODEL, "Folder or Hub name of a causal chat model; 'tiny' makes a random one.")
    revision: str | None = _option(None, "Revision on the Hub; the pinned one for the source experiment's model.")
    seed: int = _option(0, "Seed of problems, order and sampling noise.")
    threads: int | None = _option(None, "CPU threads of torch; torch's own choice when left out.")

    batch_size: int = _option(8, "Examples of a supervised update.")
    micro_batch_size: int = _option(8, "Examples of one forward and backward pass; a divisor of batch_size.")
    warm_start_epochs: int = _option(3, "Epochs over the 128 examples of the warm start, >= 2.")
    sft_epochs: int = _option(2, "Epochs of further supervised training, >= 2.")
    sft_rows: int = _option(872, "The first so many of the 872 further examples are used, 1 to 872.")
    sft_learning_rate: float = _option(2e-5, "Peak learning rate of both supervised stages.")

    grpo_iterations: int = _option(100, "Rollouts of the main GRPO branch.")
    grpo_interrupt: int = _option(40, "The interrupted branch stops after so many iterations.")
    prompts: int = _option(4, "Prompts of a rollout.")
    generations: int = _option(4, "Responses to a prompt in the main branch.")
    updates_per_rollout: int = _option(2, "Updates on a rollout, each over all its responses.")
    grpo_learning_rate: float = _option(1e-6, "Peak learning rate of GRPO.")
    beta: float = _option(0.02, "Weight of the exact KL(current || reference).")
    exercise_generations: list[int] = _option([2, 8], "Group sizes of the exercise.")
    exercise_iterations: int = _option(20, "Rollouts of each branch of the exercise.")
    exercise_interrupt: int = _option(8, "The exercise's interrupted branches stop after so many iterations.")

    warmup: float = _option(0.1, "Share of the updates in which the learning rate rises to its peak.")
    final: float = _option(0.1, "Learning rate of the last update, as a share of the peak.")
    weight_decay: float = _option(0.01, "AdamW's weight decay, on every parameter.")
    max_grad_norm: float = _option(1.0, "The gradient is clipped to this norm.")
    max_prompt_length: int = _option(256, "Longest prompt in tokens; none is cut.")
    max_completion_length: int = _option(64, "Tokens of a response at most.")
    draws: int = _option(4, "Sampled responses to every test problem, beside the greedy one.")
    validation_rows: int = _option(200, "The first so many of the 200 validation problems are measured.")
    test_rows: int = _option(200, "The first so many of the 200 test problems are asked, half of them OOD100; even.")
    probe_rows: int = _option(16, "The answers of so many validation problems are the prefixes of the probes.")
    save_every: int = _option(50, "Updates between checkpoints that a killed stage goes on from.")

    def __post_init__(self) -> None:
        if self.model == SOURCE_MODEL and self.revision is None:
            self.revision = SOURCE_REVISION
        for name in (
            "batch_size micro_batch_size prompts updates_per_rollout draws probe_rows save_every max_prompt_length "
            "max_completion_length"
        ).split():
            self._require(getattr(self, name) >= 1, name, "1 or more")
        for name in ("warmup", "final"):
            self._require(0 <= getattr(self, name) <= 1, name, "a share, 0 to 1")
        for name in ("sft_learning_rate", "grpo_learning_rate"):
            self._require(0 < getattr(self, name) < math.inf, name, "a positive number")
        self._require(self.batch_size % self.micro_batch_size == 0, "micro_batch_size", "a divisor of batch_size")
        self._require(1 <= self.sft_rows <= 872, "sft_rows", "1 to 872")
        self._require(1 <= self.validation_rows <= 200, "validation_rows", "1 to 200")
        self._require(2 <= self.test_rows <= 200 and self.test_rows % 2 == 0, "test_rows", "an even number, 2 to 200")
        for name in ("warm_start_epochs", "sft_epochs"):
            self._require(getattr(self, name) >= 2, name, "2 or more (the interrupted branch stops after one)")
        for name in ("grpo", "exercise"):
            iterations = getattr(self, f"{name}_iterations")
            fits = 0 < getattr(self, f"{name}_interrupt") < iterations
            self._require(fits, f"{name}_interrupt", f"1 to {name}_iterations - 1 = {iterations - 1}")
        sizes = [self.generations, *self.exercise_generations]
        several = "2 or more responses (a group of one has no baseline)"
        self._require(self.generations >= 2, "generations", several)
        self._require(min(sizes) >= 2, "exercise_generations", several)
        others = f"sizes that differ from each other and from --generations {self.generations}"
        self._require(len(set(sizes)) == len(sizes), "exercise_generations", others)

    def _require(self, fits: bool, name: str, expected: str) -> None:
        if not fits:
            raise ValueError(f"--{name} is {getattr(self, name)!r}: expected {expected}")
