"""A tiny reader with a noisy update gate, trained by TurnGRPOTrainer from one start under several advantages.

    OMP_NUM_THREADS=1 python tests/helpers/alpha_fixture.py 0 1 2 3 4 5    # the table of test_a7_alpha_1_degenerates

A document has 4 chunks of five words, two of them evidence: a chunk names a key and a value, and is evidence where the
key is the question's. The answer is both values in their order, so every evidence chunk must be written, while a write
on an evidence-free chunk copies the memory: it changes nothing, and the trajectory reward does not see it. The reply
holds the same candidate whatever the gate says, so that no gate is shorter or easier to keep in format than the other.
"""

import copy
import functools
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import datasets
import torch
from tiny import tiny_model, word_tokenizer
from tokenizers import decoders
from transformers import PrinterCallback

from turngrpo.rewards import answer_reward, exit_reward, format_reward, update_reward
from turngrpo.trainer import GatedMemory, TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.reading.gates import INITIAL_MEMORY
from turngrpo.trainer.reading.rollout import Turn

KEYS = ["red", "blue"]
VALUES = [f"v{i}" for i in range(6)]
FILLER = [f"w{i}" for i in range(6)]
TAGS = "<section> </section> <memory> </memory> <question> </question>"
CHUNKS, EVIDENCE = 4, 2
NOISE = 0.35  # share of gold gates that the warm start sees flipped, so that both accuracies start near 0.65
WARM_ROWS, WARM_STEPS, WARM_BATCH, WARM_RATE = 3000, 400, 48, 5e-3
UPDATES, LEARNING_RATE = 50, 5e-4
TRAIN_ROWS, EVAL_ROWS = 256, 128  # an update takes 4 rows x 8 members; evaluation 128 x 2: some 300 turns of each kind


class Outcome(NamedTuple):
    """What one policy does on the held-out rows."""

    evidence_free: float
    evidence: float
    answer: float
    parsed: float


def make_row(rng: random.Random) -> dict[str, Any]:
    key = rng.choice(KEYS)
    where, values, chunks = rng.sample(range(CHUNKS), EVIDENCE), [], []
    for index in range(CHUNKS):
        evidence = index in where
        about = key if evidence else next(other for other in KEYS if other != key)
        value, filler = rng.choice(VALUES), rng.choices(FILLER, k=3)
        values += [value] if evidence else []
        at = rng.randrange(len(filler) + 1)
        chunks.append({"text": " ".join([*filler[:at], about, value, *filler[at:]]), "evidence": evidence})
    return {"question": key, "answers": [" ".join(values)], "chunks": chunks}


def make_tokenizer():
    tokenizer = word_tokenizer(" ".join([*KEYS, *VALUES, *FILLER, INITIAL_MEMORY, TAGS, "Read"]))
    # Words are decoded with a space between them, so that a written memory is read back word by word.
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


class WordMemory(GatedMemory):
    """GatedMemory that looks words up itself: the tokenizer's own ids, in a tenth of the time."""

    def bind(self, tokenizer: Any, config: Any) -> None:
        super().bind(tokenizer, config)
        vocabulary = tokenizer.get_vocab()
        self.chat.encode_text = lambda text: [vocabulary.get(word, 0) for word in text.split()]  # type: ignore


def make_workflow() -> GatedMemory:
    return WordMemory(instruction="Read")


def gold_text(state, rng: random.Random) -> str:
    """The reply of a perfect reader whose update gate flips by NOISE."""
    memory = "" if state.memory == INITIAL_MEMORY else state.memory
    if state.answering:
        return f"\\boxed{{ {memory} }}"
    chunk = state.chunks[state.chunk]
    if chunk["evidence"]:
        memory = f"{memory} {next(word for word in chunk['text'].split() if word in VALUES)}".strip()
    check = chunk["evidence"] != (rng.random() < NOISE)
    leaves = check and len(memory.split()) == EVIDENCE  # with both values in memory
    gates = "yes" if check else "no", "end" if leaves else "continue"
    return f"<check> {gates[0]} </check> <update> {memory or INITIAL_MEMORY} </update> <next> {gates[1]} </next>"


def gold_turns(workflow, tokenizer, rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of every turn of one noisy gold reading, with the memory that its own gates left."""
    state, goes_on, turns = workflow.start(make_row(rng)), True, []
    while goes_on:
        prompt = [token for segment in workflow.prompt(state) for token in segment]
        text = gold_text(state, rng)
        completion = [*workflow.chat.encode_text(text), tokenizer.eos_token_id]
        turns.append((prompt, completion))
        goes_on = workflow.advance(state, Turn(len(turns), prompt, completion, [], "eos", text))
    return turns


@functools.lru_cache(maxsize=1)
def warm_start(seed: int):
    """(model, tokenizer) after cross-entropy on noisy gold turns, response tokens only."""
    tokenizer, rng, workflow = make_tokenizer(), random.Random(seed), make_workflow()
    workflow.bind(tokenizer, make_config())
    turns = [turn for _ in range(WARM_ROWS) for turn in gold_turns(workflow, tokenizer, rng)]
    # With Qwen2's initial range of 0.02 a width of 64 needs several times the steps.
    model = tiny_model(len(tokenizer), seed, hidden_size=64, intermediate_size=128, initializer_range=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(WARM_STEPS):
        optimizer.param_groups[0]["lr"] = WARM_RATE * min((step + 1) / 50, 1 - step / WARM_STEPS)
        batch = rng.sample(turns, WARM_BATCH)
        width = max(len(prompt) + len(completion) for prompt, completion in batch)
        ids = torch.full((WARM_BATCH, width), tokenizer.pad_token_id)
        labels = torch.full((WARM_BATCH, width), -100)
        for row, (prompt, completion) in enumerate(batch):
            end = len(prompt) + len(completion)
            ids[row, :end] = torch.tensor([*prompt, *completion])
            labels[row, len(prompt) : end] = torch.tensor(completion)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, tokenizer


def make_config(**overrides: Any) -> TurnGRPOConfig:
    values: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),  # nothing is saved
        "max_steps": UPDATES,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 128,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "num_generations_eval": 2,
        "max_completion_length": 20,
        "max_prompt_length": 128,
        "max_memory_tokens": 8,
        "beta": 0.0,
        "loss_type": "group",
        "scale_rewards": "none",
        "eval_top_p": 1.0,  # the policy itself, not its likelier gate
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return TurnGRPOConfig(**(values | overrides))


def flipped_update_reward(*args, **kwargs) -> list[list[float | None]]:
    """update_reward with the wrong sign."""
    return [[None if value is None else -value for value in row] for row in update_reward(*args, **kwargs)]


def make_trainer(seed: int, alpha: float, turn_reward=update_reward, **overrides: Any) -> TurnGRPOTrainer:
    """A trainer on a copy of the seed's warm start; rows, order and sampling noise depend on the seed alone."""
    model, tokenizer = warm_start(seed)
    rng = random.Random(f"rows {seed}")
    rows = [make_row(rng) for _ in range(TRAIN_ROWS + EVAL_ROWS)]
    trainer = TurnGRPOTrainer(
        model=copy.deepcopy(model),
        reward_funcs=[answer_reward, exit_reward, format_reward],
        args=make_config(alpha=alpha, seed=seed, **overrides),
        train_dataset=datasets.Dataset.from_list(rows[:TRAIN_ROWS]),
        eval_dataset=datasets.Dataset.from_list(rows[TRAIN_ROWS:]),
        processing_class=tokenizer,
        workflow=make_workflow(),
        turn_reward_funcs=turn_reward,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def evaluate(trainer: TurnGRPOTrainer) -> Outcome:
    metrics = trainer.evaluate()
    names = ("update_accuracy/evidence_free", "update_accuracy/evidence", "answer/accuracy", "format/parsed")
    return Outcome(*(metrics[f"eval_{name}"] for name in names))


def outcome_at_start(seed: int) -> Outcome:
    return evaluate(make_trainer(seed, alpha=1.0))


def outcome_after_training(seed: int, alpha: float, turn_reward=update_reward) -> Outcome:
    trainer = make_trainer(seed, alpha, turn_reward)
    trainer.train()
    return evaluate(trainer)


def first_advantages(seed: int, alpha: float, turn_reward=update_reward) -> torch.Tensor:
    """(N,) advantages of the first rollout, which is the same for every alpha."""
    trainer = make_trainer(seed, alpha, turn_reward, max_steps=1)
    trainer.train()
    return trainer._buffered_inputs[0].rollout.advantages.double()


ARMS: dict[str, Callable[[int], Outcome]] = {
    "start": outcome_at_start,
    "1": functools.partial(outcome_after_training, alpha=1.0),
    "0.9": functools.partial(outcome_after_training, alpha=0.9),
    "flipped": functools.partial(outcome_after_training, alpha=0.9, turn_reward=flipped_update_reward),
}


def main(seeds: list[int]) -> None:
    print("seed arm         free evidence  answer  parsed seconds (the first arm's with the warm start)")
    for seed in seeds:
        for name, run in ARMS.items():
            started = time.perf_counter()
            numbers = " ".join(f"{value:8.3f}" for value in run(seed))
            print(f"{seed:4} {name:7} {numbers} {time.perf_counter() - started:7.1f}", flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [0])
