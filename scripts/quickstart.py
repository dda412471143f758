"""The start of the quickstart: a needle corpus and a tiny Qwen3 model with a deliberately imperfect warm start.

    python scripts/train.py                       # calls this, then trains, evaluates and exports (two CPU cores)

Everything is made on the spot, nothing is downloaded.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import make_workflow
from sft import corpus_examples, fit
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import SFTConfig

from turngrpo.data_prep import build_needle_corpus, load_corpus, write_corpus
from turngrpo.data_prep.needle import ADJECTIVES, SHARED_KEYS, SHARED_NOUNS, VALUES, VERBS
from turngrpo.trainer.gates import ANSWER_INSTRUCTION, INITIAL_MEMORY

INSTRUCTION = "read the section . reply with check , update and next ."
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = [
    f"<{slash}{name}>" for name in "think check update next question section memory".split() for slash in ("", "/")
]
LEARNING_RATE = 5e-3
MEMORY_TOKENS = 16
VALIDATION_FRACTION = 0.2


@dataclass(frozen=True)
class StartOptions:
    """Sizes of the quickstart's start: corpus, and updates of both stages of the warm start."""

    projects: int = 12
    rows_per_project: int = 160
    chunks: int = 4
    words_per_chunk: int = 16
    reading_updates: int = 600  # at most, with clean gates: to read, compare and copy
    learnt: float = 0.015  # loss per token at which that is learnt and the stage ends
    spoiling_updates: int = 40  # with noisy gates: to be wrong often, so that there is something to learn
    gate_noise: float = 0.3
    batch_size: int = 64


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word of the needle corpus, gate tag and prompt word, else `<unk>`."""
    words = "yes no continue end user assistant \\boxed{ } the code of is what ? .".split()
    words += [*VALUES, *ADJECTIVES, *VERBS, *SHARED_KEYS, *SHARED_NOUNS]
    words += f"{INSTRUCTION} {ANSWER_INSTRUCTION} {INITIAL_MEMORY}".replace("\\boxed{}", "").split()
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["<unk>", *TAGS, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split = pre_tokenizers.Split(Regex(r"</?\w+>|\\boxed\{|\}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.WhitespaceSplit()])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(tokenizer: PreTrainedTokenizerBase, seed: int, **overrides: Any) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3 model, about 100,000 parameters in float32.

    Of a folder that holds a Qwen2 model transformers would load Qwen2's own tokenizer, whatever is saved with it.
    """
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.1,  # as wide as one over the root of so few dimensions
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(config | overrides)))


def compare_keys(row: Mapping[str, Any], chunk: Mapping[str, Any]) -> str:
    """Return the think block of a gold turn: the key that is asked for, and the key that the section tells of."""
    keys = [re.search(r"code of (\w+)", text) for text in (row["question"], chunk["text"])]
    return " ".join(match[1] for match in keys if match)


class StopWhenLearnt(TrainerCallback):
    """Ends training at the first logged loss below `loss`."""

    def __init__(self, loss: float):
        self.loss = loss

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        control.should_training_stop |= bool(logs) and logs.get("loss", math.inf) < self.loss


def sft_config(folder: Path, updates: int, learning_rate: float, batch_size: int, seed: int) -> SFTConfig:
    """Return the config of one stage of the warm start; nothing is saved on the way."""
    return SFTConfig(
        str(folder / "sft"),
        max_steps=updates,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        adam_beta2=0.98,
        weight_decay=0.01,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
    )


def prepare(folder: Path, seed: int = 0, options: StartOptions | None = None) -> tuple[Path, Path]:
    """Write the corpus and the warm-started model under `folder`; returns (model folder, corpus file)."""
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
    tokenizer = word_tokenizer()
    model = tiny_model(tokenizer, seed)
    workflow = make_workflow("gated", instruction=INSTRUCTION)
    workflow.bind(tokenizer, SimpleNamespace(chat_template_kwargs=None, max_memory_tokens=MEMORY_TOKENS))
    train = load_corpus(corpus, VALIDATION_FRACTION, seed)["train"]
    stages = (
        (options.reading_updates, 0.0, LEARNING_RATE, [StopWhenLearnt(options.learnt)]),
        (options.spoiling_updates, options.gate_noise, LEARNING_RATE / 5, None),
    )
    for updates, noise, learning_rate, callbacks in stages:
        if updates:
            examples, names = corpus_examples(train, workflow, noise, seed, think=compare_keys)
            config = sft_config(folder, updates, learning_rate, options.batch_size, seed)
            fit(model, tokenizer, examples, names, config, callbacks=callbacks)
    model.save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
    return model_folder, corpus
