"""Options of the command line and of --config, and where those that were left out come from."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import parse_flag_from_env
from trl import TrlParser

from turngrpo.trainer.config import PAPER_VALUES, TurnGRPOConfig


def parse_options(kinds: Sequence[Any], arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line and the YAML file of --config; without an accelerator the defaults are a CPU's.

    Raises ValueError for names that are no option, with the nearest one that is.
    """
    parser = TrlParser(list(kinds), usage="%(prog)s [--OPTION VALUE ...]  (--help lists the options)")
    if parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available():
        parser.set_defaults_with_config(use_cpu=True, bf16=False)
    try:
        *parsed, in_file, given = parser.parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
    except (yaml.YAMLError, IndexError) as error:  # IndexError: --config without a file
        raise ValueError(f"--config: expected a YAML file of options ({error})") from error
    known = [name for action in parser._actions for name in action.option_strings]
    faults = []
    for name in [text for text in (*in_file, *given) if text.startswith("--")] or given[:1]:
        near = difflib.get_close_matches(name, known, 1)
        where = " (in the file of --config)" if name in in_file else ""
        faults.append(f"{name} is no option{where}: {f'did you mean {near[0]}?' if near else '--help lists them'}")
    if faults:
        raise ValueError("\n".join(faults))
    return tuple(parsed)


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


def reading_defaults(*more: str) -> dict[str, Any]:
    """Return the defaults of ReadingOptions and `more` fields: TurnGRPOConfig's, the paper's where that has others."""
    defaults = {one.name: one.default for one in fields(TurnGRPOConfig)} | PAPER_VALUES
    return {name: defaults.get(name) for name in (*(one.name for one in fields(ReadingOptions)), *more)}


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


def evaluation_config(**values: Any) -> TurnGRPOConfig:
    """Return a config that only evaluates: nothing is written, no training precision is asked for."""
    fixed: dict[str, Any] = {"output_dir": "unused", "bf16": False, "gradient_checkpointing": False}
    return TurnGRPOConfig(**(fixed | values), report_to="none", use_cpu=not torch.cuda.is_available())
