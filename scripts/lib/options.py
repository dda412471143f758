"""Options of the command line and of --config, and where those that were left out come from."""

import argparse
import difflib
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from arguments.help_page import help_page, own_options
from rich.markup import escape
from rich.table import Table
from trl import TrlParser

from turngrpo.trainer.files import MANIFEST, RUN_FILE, read_json
from turngrpo.trainer.reading.limits import ReadingConfig

if TYPE_CHECKING:
    from turngrpo.trainer.config import TurnGRPOConfig


class Parser(TrlParser):
    """TrlParser whose --help is a page, and --help_all all of it; `hidden` options, which are refused, are in neither.

    The classes of options may have a method `needs`, which returns what must be given by name, and what is expected.
    """

    def __init__(self, kinds: Sequence[Any], doc: str, hidden: Collection[str]):
        super().__init__(list(kinds), usage="%(prog)s [--OPTION VALUE ...]", add_help=False, allow_abbrev=False)
        required = {name for kind in kinds if hasattr(kind, "needs") for name in kind().needs()}
        told = {"doc": doc, "own": own_options(kinds), "required": required, "hidden": hidden}
        for names, in_full in ((("-h", "--help"), False), (("--help_all",), True)):
            self.add_argument(*names, action=Show, write=partial(self._page, told | {"in_full": in_full}))

    def _page(self, told: Mapping[str, Any]) -> str:
        return help_page(self.format_usage(), self._actions, **told)


class Show(argparse.Action):
    """Prints what `write` returns and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, write: Callable[[], str]):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS)
        self.write = write

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        print(self.write())
        parser.exit()


def parse_options(
    kinds: Sequence[Any], arguments: Sequence[str] | None = None, doc: str | None = "", hidden: Collection[str] = ()
) -> tuple[Any, ...]:
    """Parse the command line and the YAML file of --config; without an accelerator the defaults are a CPU's.

    `doc` is the docstring of the command, `hidden` are options that its help leaves out. Raises ValueError for names
    that are no option, with the nearest one that is, and for options that are missing.
    """
    parser = Parser(kinds, doc or "", hidden)
    if any(one.name == "use_cpu" for kind in kinds for one in fields(kind)) and _is_without_accelerator():
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
        if name == "--config":
            faults.append("--config is there twice: expected one file, over which the command line's options stand")
            continue
        near = difflib.get_close_matches(name, known, 1)
        where = " (in the file of --config)" if name in in_file else ""
        faults.append(f"{name} is no option{where}: {f'did you mean {near[0]}?' if near else '--help lists them'}")
    if faults:
        raise ValueError("\n".join(faults))
    check_given(parsed)
    return tuple(parsed)


def check_given(parsed: Sequence[Any]) -> None:
    """Raise one ValueError that names every option which is missing."""
    values = {name: value for one in parsed for name, value in vars(one).items()}
    needed = {name: what for one in parsed if hasattr(one, "needs") for name, what in one.needs().items()}
    missing = [name for name in needed if values[name] is None or not str(values[name]).strip()]
    if missing:
        raise ValueError("\n".join(f"--{name} is missing: expected {needed[name]}" for name in missing))


def _is_without_accelerator() -> bool:
    import torch  # which the options of a training have brought already
    from accelerate.utils import parse_flag_from_env

    return bool(parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())


def option(default: Any, text: str) -> Any:
    """Return the dataclass field of a command-line option."""
    return field(default=default, metadata={"help": text})


@dataclass
class ReadingOptions:
    """How a served or loaded model reads; what is left out is that of the adapter's training, see `resolve`."""

    workflow: str | None = option(None, "gated, memagent, or a class or instance as my_module.Workflow; gated.")
    layout: str | None = option(None, "chunk_first or memory_first; the workflow's own when left out.")
    instruction: str | None = option(None, "Instruction of chunk turns; the workflow's own when left out.")
    strict_format: bool | None = option(None, "Reward an unparsed trajectory 0; true for gated.")
    exit_gate: bool | None = option(None, "Stop where the exit gate says so; true for gated.")
    chat_template_kwargs: str | None = option(
        None, "JSON for the chat template, as in '{\"enable_thinking\": false}'."
    )
    chunk_size: int | None = option(None, "Tokens per chunk of a whole document; 5000.")
    max_prompt_length: int | None = option(None, "Longest prompt in tokens; 8192.")
    max_completion_length: int | None = option(None, "Longest completion in tokens; 2048.")
    max_memory_tokens: int | None = option(None, "Longest memory in tokens; 1024.")
    eval_temperature: float | None = option(None, "Sampling temperature, 0 for greedy; 1.")
    eval_top_p: float | None = option(None, "Nucleus, in (0, 1]; 0.7.")
    eval_seed: int | None = option(None, "Seed of the sampling noise, and of a bootstrap; 0.")


READING_FILE = "reading.json"  # of a warm start, beside its weights
OF_A_WORKFLOW = ("layout", "instruction", "strict_format", "exit_gate")  # which mean nothing to another one


def reading_of(workflow: Any, name: str, template: Any) -> dict[str, Any]:
    """Return how a workflow reads, as a warm start leaves it in reading.json and a training compares it."""
    own = {option: getattr(workflow, option, None) for option in ("layout", "instruction")}
    return {"workflow": name, **own, "chat_template_kwargs": template or None}


def read_of_warm_start(model: str | None) -> dict[str, Any]:
    """Return how a model was warm-started to read, without what is nothing; empty where its folder does not say."""
    path = Path(model or "", READING_FILE)
    found = read_json(path) if model and path.is_file() else {}
    return {name: value for name, value in found.items() if value is not None}


def warm_start_of(model: str | None) -> str | None:
    """Return a model's folder where it says how the model was warm-started to read, else None."""
    return model if read_of_warm_start(model) else None


def take_reading(model: str | None, options: Any, config: Any) -> list[str]:
    """Let a training read as its model was warm-started to, where nothing else was said; return what was taken.

    `options` and `config` are those of train.py. What belongs to a workflow is taken for that workflow alone.
    """
    before = read_of_warm_start(model)
    taken = []
    for name, holder in (("layout", options), ("instruction", options), ("chat_template_kwargs", config)):
        if name in before and getattr(holder, name) is None and before.get("workflow") == options.workflow:
            setattr(holder, name, before[name])
            taken.append(f"--{name}")
    return taken


def told_of_warm_start(model: str | None, reading: Mapping[str, Any]) -> list[str]:
    """Return a line for everything in which a model was warm-started to read otherwise; none where nothing says."""
    before = read_of_warm_start(model)
    return [
        f"{name} is {reading[name]!r} here, and was {value!r} in the warm start of {model}"
        for name, value in before.items()
        if name in reading and reading[name] != value
    ]


def reading_defaults(**more: Any) -> dict[str, Any]:
    """Return the defaults of ReadingOptions: ReadingConfig's, and `more`."""
    defaults = {one.name: one.default for one in fields(ReadingConfig)} | {"workflow": "gated"}
    return {one.name: defaults.get(one.name) for one in fields(ReadingOptions)} | more


def trained_with(folder: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the options that an adapter was trained with, by name, and the file that says so; empty where none does.

    `folder` is an exported version (manifest.json), a checkpoint or output folder (turngrpo_run.json), or a warm start
    (reading.json).
    """
    for name in (MANIFEST, RUN_FILE):
        path = Path(folder or "", name)
        if folder is not None and path.is_file():
            config = read_json(path).get("config") or {}
            script = config.get("script", {})
            found = {**config.get("trainer", {}), **script, **config.get("reading", {})}
            if "." in (script.get("workflow") or ""):  # by its path: the reading knows the name of its class alone
                found["workflow"] = script["workflow"]
            return {key: value for key, value in found.items() if value is not None}, str(path)
    reading = read_of_warm_start(folder)
    return reading, str(Path(folder or "", READING_FILE)) if reading else None


def resolve(options: Any, defaults: Mapping[str, Any], folder: str | None) -> dict[str, tuple[Any, str]]:
    """Set every option that was left out, and return (value, where it came from) of all of them by name.

    In this order: the command line, the file beside the adapter in `folder`, the default. Options of a workflow are
    taken from an adapter of that workflow alone. A folder without such a file is a warning.
    """
    trained, file = trained_with(folder)
    if folder is not None and file is None:
        warnings.warn(
            f"{folder} holds no {MANIFEST} and no {RUN_FILE}: options left out are the defaults, which may not be "
            "those of its training",
            stacklevel=2,
        )
    taken: dict[str, tuple[Any, str]] = {}
    for name, default in defaults.items():
        value, source = getattr(options, name), "command line"
        other = name in OF_A_WORKFLOW and trained.get("workflow") not in (None, options.workflow)
        if value is None and name in trained and not other:
            value, source = trained[name], str(file)
        elif value is None:
            value, source = default, "default"
        setattr(options, name, value)
        taken[name] = value, source
    return taken


def sources_table(taken: Mapping[str, tuple[Any, str]]) -> Table:
    """Return what `resolve` took from where, without what is nothing at all."""
    table = Table("option", "value", "taken from", title="options")
    for name, (value, source) in taken.items():
        if value is not None:
            text = str(value)
            table.add_row(name, escape(text if len(text) <= 60 else f"{text[:60]}..."), escape(source))
    return table


def check_held_out(rows: Sequence[Mapping[str, Any]], folder: str | None) -> None:
    """Refuse rows of projects that the adapter in `folder` was trained on, where the file beside it says on which."""
    from turngrpo.data_prep.corpus import project_digest  # which brings datasets

    known, file = trained_with(folder)
    trained = set(known.get("train_projects") or [])
    shared = sorted({row["project"] for row in rows if project_digest(row["project"]) in trained})
    if shared:
        raise ValueError(
            f"{len(shared)} of the projects to evaluate on were trained on ({', '.join(map(repr, shared[:5]))}), says "
            f"{file}: leave --split_seed and --validation_fraction out, choose --split validation, or give "
            "--allow_overlap"
        )


def template_options(text: Any) -> dict[str, Any] | None:
    """Return --chat_template_kwargs as the object that its JSON says; ValueError for anything else."""
    if text is None or isinstance(text, dict):
        return text
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--chat_template_kwargs is {text!r}: expected a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"--chat_template_kwargs is {text!r}: expected a JSON object")
    return found


def reading_config(**values: Any) -> ReadingConfig:
    """Return what reading through a server needs of a config."""
    return ReadingConfig(**values | {"chat_template_kwargs": template_options(values.get("chat_template_kwargs"))})


def evaluation_config(**values: Any) -> "TurnGRPOConfig":
    """Return a config that only evaluates: nothing is written, no training precision is asked for."""
    import torch

    from turngrpo.trainer.config import TurnGRPOConfig

    if "chat_template_kwargs" in values:
        values["chat_template_kwargs"] = template_options(values["chat_template_kwargs"])
    fixed: dict[str, Any] = {"output_dir": "unused", "bf16": False, "gradient_checkpointing": False}
    return TurnGRPOConfig(**(fixed | values), report_to="none", use_cpu=not torch.cuda.is_available())
