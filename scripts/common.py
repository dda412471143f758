"""What the scripts share: workflows by name, reward functions by name, corpora, models, and set-up errors."""

import difflib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import yaml
from accelerate.utils import parse_flag_from_env
from peft import get_peft_model
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, TrlParser

from turngrpo import rewards
from turngrpo.data_prep import load_corpus
from turngrpo.trainer import GatedMemory, MemAgent, SingleTurn, TurnGRPOConfig
from turngrpo.trainer.checkpoints import ResumeError
from turngrpo.trainer.reward_calls import RewardError
from turngrpo.trainer.server import Server, ServerError
from turngrpo.trainer.server_engines import served_models

WORKFLOWS = ("gated", "memagent", "single_turn")
INTERRUPTED = 130  # the shell's status of a program that Ctrl-C ended
DISK_FULL = ("No space left on device", "PytorchStreamWriter failed writing")  # torch, tokenizers, safetensors, the OS
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
PATIENCE = 5.0  # seconds that a script waits for a server which cannot be reached
TURN_REWARDS = ["update_reward"]
GATED_REWARDS = ["answer_reward", "exit_reward", "format_reward"]  # the method's
TRAJECTORY_REWARDS = tuple(n for n in rewards.__all__ if n not in (*TURN_REWARDS, "normalize_answer"))


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
        except Exception as error:  # whatever the user's module raises
            reason = f"{type(error).__name__}: {error}{_place(error)}"
            raise ValueError(f"{option} is {name!r}, which cannot be imported ({reason}): {expected}") from error
        if not callable(value):
            raise ValueError(f"{option} is {name!r}, a {type(value).__name__}: expected a function")
        found.append(value)
    return found


def _place(error: BaseException) -> str:
    """Return where in the user's files an import failed; a syntax error says so itself."""
    ours = (__file__, importlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and f.filename[0] != "<"]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


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
    if not Path(name).is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ValueError(f"found no folder {name!r}: expected a model's folder or its name on the Hub")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer can be loaded from {name!r}: expected a model's folder or its name on the Hub\n{error}"
        ) from error
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
    dtype = options.dtype or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}: expected one of {', '.join(DTYPES)}")
    return AutoModelForCausalLM.from_pretrained(
        name,
        revision=options.model_revision,
        dtype="auto" if dtype == "auto" else getattr(torch, dtype),
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


def check_adapter(model: PreTrainedModel, lora: Any) -> None:
    """Raise ValueError for a LoRA that does not fit a model, which is changed; one without weights will do."""
    if lora is not None:
        get_peft_model(model, lora)


def _check_output(folder: Path, resumed: bool) -> None:
    """Raise ValueError where the run would write over what another one left; every process sees it as it is found."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir is {str(folder)!r}, which is a file: expected a folder, or a new name")
    if folder.is_dir() and any(folder.iterdir()) and not resumed:
        raise ValueError(
            f"--output_dir {str(folder)!r} is not empty and its results would be overwritten: choose another "
            "--output_dir, remove it, or continue its newest checkpoint with --resume_from_checkpoint true"
        )


def make_output(folder: Path) -> None:
    """Make the output directory; OSError where nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder) as probe:
        probe.write(b"x")


def _resume_folder(given: str | bool | None, output_dir: str | None) -> str | None:
    """Return the checkpoint to go on from: the folder given, or for "true" the newest of the output directory.

    Raises ValueError where there is none.
    """
    if given in (None, False, "false", "False"):
        return None
    newest = given in (True, "true", "True")
    found = (get_last_checkpoint(output_dir) if Path(output_dir or "").is_dir() else None) if newest else str(given)
    if found is None or not Path(found, "trainer_state.json").is_file():
        raise ValueError(
            f"--resume_from_checkpoint is {str(given)!r}: found no checkpoint in {output_dir if newest else found!r}; "
            "expected a folder checkpoint-N, or true for the newest one of --output_dir"
        )
    return found


def claim_output(config: Any) -> Path:
    """Return a run's output directory and set the checkpoint that it goes on from; every process must call it.

    Raises ValueError where another run's results would be overwritten, or there is no such checkpoint.
    """
    folder = Path(config.output_dir or "")
    config.resume_from_checkpoint = _resume_folder(config.resume_from_checkpoint, config.output_dir)
    _check_output(folder, config.resume_from_checkpoint is not None)
    config.distributed_state.wait_for_everyone()  # nobody writes before everyone has looked
    return folder


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
    """Exit with main's status; a fault of the user's input or of a server is printed without a traceback, status 1.

    Ctrl-C ends with status 130.
    """
    try:
        sys.exit(main())
    except (SetupError, ServerError, RewardError, ResumeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if not any(text in str(error) for text in DISK_FULL):
            raise
        text = (
            "the disk is full; finished checkpoints are whole, --resume_from_checkpoint true goes on from the newest"
        )
        print(f"error: {text} ({error})", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(
            "interrupted; training that has a checkpoint goes on with --resume_from_checkpoint true", file=sys.stderr
        )
        sys.exit(INTERRUPTED)


class SetupError(Exception):
    """Something the user gave is wrong; found before any training or sampling."""


class setting_up:
    """Context in which ValueError and OSError are the user's: they become SetupError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError | OSError):
            raise SetupError(str(error)) from error
