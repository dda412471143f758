"""Tokenizers by name, without torch where their files say all, and the ends of text that a model declares."""

from pathlib import Path
from typing import Any

import transformers

from turngrpo.trainer.files import read_json

TOKENIZER, MODEL = "tokenizer_config.json", "config.json"


def load_tokenizer(name: str | None, revision: str = "main") -> Any:
    """Load a tokenizer with a pad token; ValueError where no model was named."""
    if name is None:
        raise ValueError("--model_name_or_path is missing: expected a model's folder or its name on the Hub")
    if not Path(name).is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ValueError(f"found no folder {name!r}: expected a model's folder or its name on the Hub")
    if not Path(name, TOKENIZER).is_file():
        from lib.adapters import weights_of  # which brings peft and torch

        name = weights_of(name)
    try:
        kind = own_class(name) or transformers.AutoTokenizer
        tokenizer = kind.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer can be loaded from {name!r}: expected a model's folder or its name on the Hub\n{error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {name!r} has no EOS token, which ends a turn: set its eos_token and save it"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def own_class(name: str) -> Any:
    """Return the tokenizer class with which AutoTokenizer, which brings torch, would load a folder; None if unsure.

    It is the one in which transformers 5 wrote the tokenizer, where no model beside it is of another family.
    """
    if not Path(name, TOKENIZER).is_file():
        return None
    told = read_json(Path(name, TOKENIZER))
    kind = getattr(transformers, told.get("tokenizer_class") or "", None)
    if kind is None or told.get("backend") != "tokenizers" or "auto_map" in told:
        return None
    family = read_json(Path(name, MODEL)).get("model_type") if Path(name, MODEL).is_file() else None
    return kind if family is None or f".models.{family}." in kind.__module__ else None


def generation_config(name: str | None) -> Any:
    """Return the generation config of a model's folder or name, where it has one: it names more ends of text."""
    if name is None:
        return None
    try:
        return transformers.GenerationConfig.from_pretrained(name)
    except (OSError, ValueError):  # no such folder or name, or none that could be one
        return None
