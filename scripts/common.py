"""What the scripts share: workflows by name, reward functions by name, corpora, models, and set-up errors."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig

from turngrpo import rewards
from turngrpo.data_prep import load_corpus
from turngrpo.trainer import GatedMemory, MemAgent, SingleTurn, TurnGRPOConfig
from turngrpo.trainer.server import Server, ServerError
from turngrpo.trainer.server_engines import served_models

WORKFLOWS = ("gated", "memagent", "single_turn")
PATIENCE = 5.0  # seconds that a script waits for a server which cannot be reached
TURN_REWARDS = ("update_reward",)
TRAJECTORY_REWARDS = tuple(n for n in rewards.__all__ if n not in (*TURN_REWARDS, "normalize_answer"))


def make_workflow(name: str, layout: str | None = None, instruction: str | None = None, **options: Any) -> Any:
    """Return the workflow of a short name; `layout` None is the workflow's own. Raises ValueError for another name."""
    if name == "single_turn":
        if layout or instruction:
            raise ValueError("--layout and --instruction belong to the workflows gated and memagent")
        return SingleTurn()
    if name not in WORKFLOWS:
        raise ValueError(f"--workflow is {name!r}: expected one of {', '.join(WORKFLOWS)}")
    given = options | {"instruction": instruction} | ({"layout": layout} if layout else {})
    return GatedMemory(**given) if name == "gated" else MemAgent(**given)


def find_rewards(names: Sequence[str] | None, known: Sequence[str], option: str) -> list[Callable[..., Any]]:
    """Return reward functions by short name (`known` ones) or dotted path, the current directory importable.

    Raises ValueError that lists what exists for a name that leads nowhere.
    """
    found: list[Callable[..., Any]] = []
    for name in names or []:
        if name in known:
            found.append(getattr(rewards, name))
            continue
        module_name, _, function = name.rpartition(".")
        expected = f"expected {', '.join(known)}, or a dotted path as in my_module.my_reward"
        if not module_name:
            raise ValueError(f"{option} is {name!r}: {expected}")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            value = getattr(importlib.import_module(module_name), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{option} is {name!r}, which cannot be imported ({error}): {expected}") from error
        if not callable(value):
            raise ValueError(f"{option} is {name!r}, a {type(value).__name__}: expected a function")
        found.append(value)
    return found


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
        raise ValueError(f"found {count} rows to evaluate on, expected 1 or more")
    return data.shuffle(seed=seed).select(range(count))


def load_tokenizer(name: str | None, revision: str = "main") -> PreTrainedTokenizerBase:
    """Load a tokenizer with a pad token; ValueError where no model was named."""
    if name is None:
        raise ValueError("--model_name_or_path is missing: expected a model's folder or its name on the Hub")
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name!r} has no EOS token: no completion could end")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(options: ModelConfig) -> PreTrainedModel:
    """Load the causal model in the dtype asked for (full precision by default), without an adapter."""
    if options.load_in_4bit or options.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are not honoured: load the model in 16 or 32 bits")
    name: Any = options.model_name_or_path
    return AutoModelForCausalLM.from_pretrained(
        name,
        revision=options.model_revision,
        dtype="auto" if options.dtype == "auto" else getattr(torch, options.dtype or "float32"),
        attn_implementation=options.attn_implementation,
    )


def empty_model(options: ModelConfig) -> PreTrainedModel:
    """Return the model without its weights (on the meta device), for counting."""
    name: Any = options.model_name_or_path
    config = AutoConfig.from_pretrained(name, revision=options.model_revision)
    kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    kind = kinds.get(type(config), None)
    if kind is None:
        raise ValueError(f"--model_name_or_path is {name!r}, a {config.model_type}: expected a causal language model")
    with torch.device("meta"):
        return kind(config)  # not from_config, which under ZeRO-3 cuts up weights that are not there


def option(default: Any, text: str) -> Any:
    """Return the dataclass field of a command-line option."""
    return field(default=default, metadata={"help": text})


@dataclass
class ReadingOptions:
    """How a served or loaded model reads; what is left out is filled in by `fill_in`."""

    layout: str | None = option(None, "chunk_first or memory_first; the workflow's own when left out.")
    instruction: str | None = option(None, "Instruction of chunk turns; the workflow's own when left out.")
    chunk_size: int | None = option(None, "Tokens per chunk of a whole document; 5000.")
    max_prompt_length: int | None = option(None, "Longest prompt in tokens; 8192.")
    max_completion_length: int | None = option(None, "Longest completion in tokens; 2048.")
    max_memory_tokens: int | None = option(None, "Longest memory in tokens; 1024.")
    eval_temperature: float | None = option(None, "Sampling temperature, 0 for greedy; 1.")
    eval_top_p: float | None = option(None, "Nucleus, in (0, 1]; 0.7.")
    eval_seed: int | None = option(None, "Seed of the sampling noise, and of a bootstrap; 0.")


READING_DEFAULTS: dict[str, Any] = {
    "layout": None,
    "instruction": None,
    "chunk_size": 5000,
    "max_prompt_length": 8192,
    "max_completion_length": 2048,
    "max_memory_tokens": 1024,
    "eval_temperature": 1.0,
    "eval_top_p": 0.7,
    "eval_seed": 0,
}


def trained_options(adapter: str | None) -> dict[str, Any]:
    """Return the options an exported adapter was trained with, by name (its manifest.json); none where it has none."""
    manifest = Path(adapter or "", "manifest.json")
    if adapter is None or not manifest.is_file():
        return {}
    config = json.loads(manifest.read_text(encoding="utf-8")).get("config") or {}
    return {**config.get("trainer", {}), **config.get("script", {})}


def fill_in(options: Any, defaults: Mapping[str, Any], adapter: str | None) -> None:
    """Set options that were left out to those of the adapter's training, or to the defaults."""
    trained = trained_options(adapter)
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, trained.get(name, default))


@dataclass(frozen=True)
class Served:
    """What a server says of a model: its base where it is an adapter, and where its files are, here or on the Hub."""

    base: str | None
    adapter_folder: str | None
    tokenizer: str
    weights: str | None  # of a listed model or of its base

    @classmethod
    def find(cls, server: Server, model: str) -> "Served":
        """Look a model up in the server's list; the tokenizer is the adapter's, the base model's, or of its name."""
        known = {card["id"]: card for card in served_models(server)}
        card = known.get(model, {})
        base = card.get("parent")
        folders = [known.get(name or "", {}).get("root") or name or "" for name in (model, base)]
        here = [folder for folder in folders if folder and Path(folder, "tokenizer_config.json").is_file()]
        adapter = folders[0] if base and Path(folders[0]).is_dir() else None
        weights = (folders[1] if base else folders[0]) if model in known else None
        return cls(base, adapter, here[0] if here else base or model, weights)


def generation_config(name: str | None) -> GenerationConfig | None:
    """Return the generation config of a model's folder or name, where it has one: it names more ends of text."""
    if name is None:
        return None
    try:
        return GenerationConfig.from_pretrained(name)
    except (OSError, ValueError):  # no such folder or name, or none that could be one
        return None


def evaluation_config(**values: Any) -> TurnGRPOConfig:
    """Return a config that only evaluates: nothing is written, no training precision is asked for."""
    fixed: dict[str, Any] = {"output_dir": "unused", "bf16": False, "gradient_checkpointing": False}
    return TurnGRPOConfig(**(fixed | values), report_to="none", use_cpu=not torch.cuda.is_available())


def run_script(main: Callable[[], int]) -> None:
    """Exit with main's status; a fault of the user's input or of a server is printed without a traceback, status 1."""
    try:
        sys.exit(main())
    except (SetupError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


class SetupError(Exception):
    """Something the user gave is wrong; found before any training or sampling."""


class setting_up:
    """Context in which ValueError and OSError are the user's: they become SetupError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError | OSError):
            raise SetupError(str(error)) from error
