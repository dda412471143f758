"""The start of the quickstart: a needle corpus and a tiny Qwen2 model with a deliberately imperfect warm start.

    python scripts/train.py                       # calls this, then trains, evaluates and exports (two CPU cores)

Everything is made on the spot, nothing is downloaded.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lib.lookup import make_workflow
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, TrainerCallback
from trl import SFTConfig

from turngrpo.data_prep import build_needle_corpus, load_corpus, write_corpus
from turngrpo.trainer.reading.gates import ANSWER_INSTRUCTION, BLOCKS, INITIAL_MEMORY
from turngrpo.trainer.reading.workflows import WorkflowOptions
from turngrpo.trainer.warm_start import corpus_examples, fit

INSTRUCTION = "read the section . reply with check , update and next ."
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = [
    *(f"<{slash}{name}>" for name in (*BLOCKS, "question", "section", "memory") for slash in ("", "/")),
    "\\boxed{",
]
LEARNING_RATE = 2e-3
MEMORY_TOKENS = 16
VALIDATION_FRACTION = 0.2
READ_ON = 0.3  # share of the gold readings that go on after the last evidence


@dataclass(frozen=True)
class StartOptions:
    """Sizes of the quickstart's start: corpus, and updates of both stages of the warm start."""

    projects: int = 12
    rows_per_project: int = 160
    chunks: int = 4
    words_per_chunk: int = 16
    reading_updates: int = 600  # at most, with clean gates: to read, compare and copy
    learnt: float = 0.01  # loss per token at which that is learnt and the stage ends
    spoiling_updates: int = 180  # with noisy gates: to be wrong often, so that there is something to learn
    gate_noise: float = 0.3
    batch_size: int = 32


def train_tokenizer(texts: Sequence[str]) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer of Qwen2's class on the corpus and the prompts; gate tags are single tokens.

    Its vocabulary has room for every word with and without the space before it; digits stay single, as in Qwen2.
    """
    bare = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = bare.normalizer, bare.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    prompts = [INSTRUCTION, ANSWER_INSTRUCTION, INITIAL_MEMORY, "user\n assistant\n", *"yes no continue end".split()]
    tokenizer.train_from_iterator([*texts, *prompts * 100], trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    fast = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],  # type: ignore[misc]
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.add_tokens(TAGS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(tokenizer: PreTrainedTokenizerBase, seed: int, **overrides: Any) -> Qwen2ForCausalLM:
    """Return a randomly initialised Qwen2 model, about 250,000 parameters in float32."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "initializer_range": 0.06,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(config | overrides)))


def look_up(row: Mapping[str, Any], chunk: Mapping[str, Any]) -> str:
    """Return the think block of a gold turn: the key with its code where the section tells it, else with a "?"."""
    key = re.findall(r"code of (\w+)", row["question"])[0]
    found = re.search(rf"code of ({key} is \w+)", chunk["text"])
    return f" {found[1]}" if found else f" {key} ?"


class StopWhenLearnt(TrainerCallback):
    """Ends training at the first logged loss below `loss`."""

    def __init__(self, loss: float):
        self.loss = loss

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        control.should_training_stop |= bool(logs) and logs.get("loss", math.inf) < self.loss


def sft_config(
    folder: Path, updates: int, learning_rate: float, schedule: str, batch_size: int, seed: int
) -> SFTConfig:
    """Return the config of one stage of the warm start; nothing is saved on the way."""
    return SFTConfig(
        str(folder / "sft"),
        max_steps=updates,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type=schedule,
        warmup_steps=20,
        adam_beta2=0.98,
        weight_decay=0.01,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
    )


def prepare(folder: Path, seed: int = 0, options: StartOptions | None = None) -> None:
    """Write the corpus (corpus.jsonl) and the warm-started model (model/) under `folder`."""
    options = options or StartOptions()
    folder.mkdir(parents=True, exist_ok=True)
    corpus, model_folder = folder / "corpus.jsonl", folder / "model"
    manifest, rows = build_needle_corpus(
        "multi_key",
        options.projects,
        options.rows_per_project,
        options.chunks,
        options.words_per_chunk,
        seed=seed,
        shared_keys=True,
    )
    write_corpus(corpus, manifest, rows, overwrite=True)
    tokenizer = train_tokenizer([f"{row['question']}\n{chunk['text']}" for row in rows for chunk in row["chunks"]])
    model = tiny_model(tokenizer, seed)
    workflow = make_workflow("gated", instruction=INSTRUCTION)
    workflow.bind(tokenizer, WorkflowOptions(MEMORY_TOKENS))
    train = load_corpus(corpus, VALIDATION_FRACTION, seed)["train"]
    reading = options.reading_updates, 0.0, LEARNING_RATE, "constant_with_warmup", [StopWhenLearnt(options.learnt)]
    spoiling = options.spoiling_updates, options.gate_noise, LEARNING_RATE / 2, "linear", None
    for updates, noise, learning_rate, schedule, callbacks in (reading, spoiling):
        if updates:
            examples, names = corpus_examples(train, workflow, noise, seed, think=look_up, read_on=READ_ON)
            config = sft_config(folder, updates, learning_rate, schedule, options.batch_size, seed)
            fit(model, tokenizer, examples, names, config, callbacks=callbacks)
    model.save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
