"""Corpora and models by name, checked."""

from pathlib import Path
from typing import Any

import torch
from lib.adapters import Adapter, adapter_config, put_on, weights_of
from peft import LoraConfig, get_peft_model
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedModel,
)
from trl import ModelConfig

from turngrpo.data_prep import load_corpus
from turngrpo.trainer.export.merge import load_base

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def read_corpus(path: str, fraction: float, seed: int, tokenizer: Any, chunk_size: int) -> Any:
    """Load a corpus split by project; ValueError where there is no such file."""
    if not Path(path).is_file():
        raise ValueError(f"--corpus is {path!r}: no such file; scripts/prepare_corpus.py makes one")
    return load_corpus(path, fraction, seed, tokenizer, chunk_size)


def sample_rows(data: Any, count: int | None, seed: int) -> Any:
    """Return `count` rows from everywhere in the split, the same ones for the same seed; all in order without one."""
    if count is None or count >= len(data):
        return data
    if count < 1:
        raise ValueError(
            f"a sample of {count} rows was asked for: expected 1 or more, or all of them by leaving it out"
        )
    return data.shuffle(seed=seed).select(range(count))


def load_model(options: ModelConfig) -> Any:
    """Load the causal model in the dtype asked for (full precision by default).

    Where an adapter's folder is named, and --use_peft says to go on with it, the model is its base with the adapter on
    it, trainable.
    """
    adapter = Adapter.find(options.model_name_or_path)
    lora_of(options)
    base = load_weights(options)
    if adapter is None:
        return base
    base.name_or_path = base.config._name_or_path = adapter.base
    return put_on(base, adapter.folder, adapter.folder, f"the weights in {adapter.weights!r}", trainable=True)


def load_weights(options: ModelConfig) -> PreTrainedModel:
    """Load the causal model as load_model does, without an adapter that lies in its folder or is the folder's all."""
    check_loading(options)
    name: Any = options.model_name_or_path
    dtype = options.dtype or "float32"
    adapter = Adapter.find(name)
    revision = options.model_revision if adapter is None else adapter.config.revision
    return load_base(
        weights_of(name),
        revision,
        dtype="auto" if dtype == "auto" else getattr(torch, dtype),
        attn_implementation=options.attn_implementation,
    )


def check_loading(options: ModelConfig) -> None:
    """Raise ValueError for ways of loading that are not honoured."""
    if options.load_in_4bit or options.load_in_8bit:
        raise ValueError(
            "--load_in_4bit and --load_in_8bit are not honoured: set --dtype bfloat16, float16 or float32"
        )
    if options.dtype not in (None, *DTYPES):
        raise ValueError(f"--dtype is {options.dtype!r}: expected one of {', '.join(DTYPES)}")


def empty_model(options: ModelConfig) -> PreTrainedModel:
    """Return the model without its weights (on the meta device), for counting."""
    name: Any = options.model_name_or_path
    adapter = Adapter.find(name)
    revision = options.model_revision if adapter is None else adapter.config.revision
    config = AutoConfig.from_pretrained(weights_of(name), revision=revision or "main")
    kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    kind = kinds.get(type(config), None)
    if kind is None:
        raise ValueError(f"--model_name_or_path is {name!r}, a {config.model_type}: expected a causal language model")
    with torch.device("meta"):
        return kind(config)  # not from_config, which under ZeRO-3 cuts up weights that are not there


def linear_modules(options: ModelConfig) -> Any:
    """Return the modules that target_modules="all-linear" stands for."""
    model: Any = get_peft_model(empty_model(options), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.peft_config["default"].target_modules


def lora_of(options: ModelConfig) -> Any:
    """Return the config of the adapter that is trained, a new one or that of the folder named; None without one."""
    return adapter_config(options, lambda: linear_modules(options))


def check_adapter(model: PreTrainedModel, lora: Any) -> Any:
    """Return a model with a LoRA on it, where there is one, trainable; the model, which may be empty, is changed.

    Raises ValueError for a LoRA that does not fit it.
    """
    if lora is None:
        return model
    lora.inference_mode = False  # as an adapter on disk says it
    return get_peft_model(model, lora)
