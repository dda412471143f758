"""The start of the quickstart: a needle corpus, a tiny Qwen2 model of its words, and a deliberately imperfect warm start.

    python scripts/train.py                       # calls this, then trains, evaluates and exports (two CPU cores)
    python scripts/quickstart.py --output_dir outputs/quickstart/start --seed 1

Everything is made on the spot, nothing is downloaded.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from sft import SftArguments, corpus_examples, fit
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig
from turngrpo.data_prep import build_needle_corpus, load_corpus, write_corpus
from turngrpo.data_prep.needle import ADJECTIVES, SHARED_KEYS, SHARED_NOUNS, VALUES, VERBS
from turngrpo.trainer.gates import ANSWER_INSTRUCTION, INITIAL_MEMORY

INSTRUCTION = "read the section . reply with check , update and next ."
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = [f"<{slash}{name}>" for name in "think check update next question section memory".split() for slash in ("", "/")]
# Gates that the warm start gets wrong on purpose, so that there is something to learn.
GATE_NOISE = 0.3


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word of the needle corpus, gate tag and prompt word; `<unk>` for others."""
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


def tiny_model(tokenizer: PreTrainedTokenizerBase, seed: int, **overrides: Any) -> Qwen2ForCausalLM:
    """Return a randomly initialised Qwen2 model, a few hundred thousand parameters in float32."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(config | overrides)))
