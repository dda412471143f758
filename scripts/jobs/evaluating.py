"""What evaluate.py does: the policies asked for, and who samples."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.adapters import Adapter, put_on
from lib.loading import generation_config, load_weights
from lib.lookup import GATED_REWARDS, TURN_REWARDS, make_workflow
from lib.options import OF_A_WORKFLOW, ReadingOptions, option, reading_defaults
from lib.served import Served
from peft import PeftConfig
from trl import ModelConfig

from turngrpo.trainer import MemAgent, TurnGRPOConfig
from turngrpo.trainer.evaluation.evaluate import eos_ids
from turngrpo.trainer.evaluation.forced_gates import TRIVIAL_GATES, ForcedGates
from turngrpo.trainer.sampling.chat_engine import connect
from turngrpo.trainer.sampling.server import Server

UNGATED = "ungated"


@dataclass
class EvaluateArguments(ReadingOptions):
    """What to evaluate on what, and where the numbers go."""

    model: str = option(None, "Model or adapter (folder or name on the Hub); with --base_url a name of the server.")
    corpus: str = option(None, "Corpus file.")
    output: str = option(None, "JSON file to write; an existing one is replaced.")
    adapter: str | None = option(None, "Adapter folder; with --base_url only its manifest is read.")
    base_url: str | None = option(None, "OpenAI-compatible server that samples, as in http://localhost:8000.")
    api: str = option("auto", "How to ask it: completions (token ids), chat (text), or auto.")
    tokenizer: str | None = option(None, "Tokenizer folder or name, with --base_url.")
    concurrency: int = option(16, "Requests open at once, with --base_url; >= 1.")
    revision: str = option("main", "Revision of the model.")
    dtype: str = option("auto", "Precision of the weights: auto, float32, bfloat16 or float16.")
    max_turns: int | None = option(None, "Turns of a reading; one that goes on after so many is an error; 1000.")
    split: str = option("validation", "validation or train.")
    validation_fraction: float | None = option(None, "Share of the projects that are held out; 0.1.")
    split_seed: int | None = option(None, "Seed of the split by project; 0.")
    rows: int | None = option(None, "Only a sample of so many rows.")
    members: int = option(1, "Readings of every row, >= 1.")
    compare_base: bool = option(False, "Also without the adapter, with the paired difference.")
    ignore_exit: bool = option(False, "Also with the exit gate ignored.")
    compare_ungated: bool = option(False, "Also as MemAgent reads, without gates, with the paired difference.")
    trivial_policies: bool = option(False, "Also with forced gates: always no, always yes, to the end, stop at once.")
    allow_overlap: bool = option(False, "Evaluate on rows of projects that the adapter was trained on.")
    reward_funcs: list[str] | None = option(None, "Trajectory rewards by short name or dotted path; the training's.")
    turn_reward_funcs: list[str] | None = option(None, "Turn rewards by short name or dotted path; the training's.")
    reward_weights: list[float] | None = option(None, "One weight per trajectory reward; the training's, or 1.")
    turn_reward_weights: list[float] | None = option(None, "One weight per turn reward; the training's, or 1.")


DEFAULTS = reading_defaults(
    validation_fraction=0.1,
    split_seed=0,
    max_turns=TurnGRPOConfig.max_turns,
    reward_funcs=list(GATED_REWARDS),
    turn_reward_funcs=list(TURN_REWARDS),
    reward_weights=None,
    turn_reward_weights=None,
)
CONFIG = (
    "chunk_size max_prompt_length max_completion_length max_memory_tokens eval_temperature eval_top_p eval_seed "
    "max_turns chat_template_kwargs reward_weights turn_reward_weights"
).split()


def check_options(options: EvaluateArguments) -> None:
    """Raise ValueError for options that say nothing together."""
    expected = {
        "model": "a model's folder or name, or with --base_url a name that the server lists",
        "corpus": "a corpus file; scripts/prepare_corpus.py makes one",
        "output": "a JSON file to write",
    }
    for name, what in expected.items():
        if not getattr(options, name):
            raise ValueError(f"--{name} is missing: expected {what}")
    if options.split not in ("train", "validation"):
        raise ValueError(f"--split is {options.split!r}: expected train or validation")
    if options.concurrency < 1:
        raise ValueError(f"--concurrency is {options.concurrency}: expected 1 or more")
    if options.compare_base and options.adapter is None and options.base_url is None:
        raise ValueError(
            "--compare_base compares an adapter with its base, found no adapter: give --adapter or --base_url"
        )
    if options.members < 1 or (options.rows is not None and options.rows < 1):
        raise ValueError(f"--members is {options.members} and --rows is {options.rows}: expected 1 or more of each")
    if not Path(options.output).resolve().parent.is_dir():
        raise ValueError(f"--output is {options.output!r}: its folder does not exist, make it first")
    if Path(options.output).is_dir():
        raise ValueError(f"--output is {options.output!r}, a folder: expected a file to write")


def find_adapter(options: EvaluateArguments) -> None:
    """Where --model is a folder that holds an adapter, let that be --adapter and its base --model."""
    adapter = Adapter.find(options.model)
    if adapter is None or options.base_url is not None:
        return
    if options.adapter is not None and Path(options.adapter).resolve() != Path(adapter.folder).resolve():
        raise ValueError(
            f"--model {options.model} is itself an adapter, of {adapter.base!r}: leave --adapter out, or give the "
            f"base of {options.adapter}"
        )
    options.adapter, options.model = adapter.folder, adapter.weights


def check_workflow(options: EvaluateArguments) -> None:
    """Raise ValueError for a workflow that does not exist, or one without the gates that an option is about."""
    if options.workflow not in ("gated", "memagent"):
        raise ValueError(f"--workflow is {options.workflow!r}: expected gated or memagent")
    if options.workflow != "gated" and (options.ignore_exit or options.trivial_policies or options.compare_ungated):
        raise ValueError(
            "--ignore_exit, --compare_ungated and --trivial_policies are about gates, which --workflow "
            f"{options.workflow} has not: leave them out, or set --workflow gated"
        )


def policies(options: EvaluateArguments, name: str) -> dict[str, tuple[Any, bool]]:
    """Return (workflow, whether the base model reads) of every policy by name; `name` is the one evaluated."""
    given = {name: getattr(options, name) for name in OF_A_WORKFLOW}
    assert options.workflow is not None
    chosen: dict[str, tuple[Any, bool]] = {}
    if options.compare_base:
        chosen["base"] = make_workflow(options.workflow, **given), True
    chosen[name] = make_workflow(options.workflow, **given), False
    if options.ignore_exit:
        chosen["exit ignored"] = make_workflow("gated", **given | {"exit_gate": False}), False
    if options.compare_ungated:
        chosen[UNGATED] = MemAgent(), False
    if options.trivial_policies:
        kept = {key: value for key, value in given.items() if value is not None and key != "exit_gate"}
        for label, gates in TRIVIAL_GATES.items():
            chosen[label] = ForcedGates(**gates, **kept), False
    return chosen


def load(options: EvaluateArguments, config: Any) -> Any:
    """Return the model with its adapter: ValueError where it does not fit, a warning where it names another base."""
    model: Any = load_weights(
        ModelConfig(model_name_or_path=options.model, model_revision=options.revision, dtype=options.dtype)
    ).to(config.device)
    if options.adapter is None:
        return model
    base = PeftConfig.from_pretrained(options.adapter).base_model_name_or_path
    adapted = put_on(model, options.adapter, f"--adapter {options.adapter}", f"--model {options.model!r}")
    known = (None, options.model) if options.adapter != options.model else (base,)
    if base not in known and Path(str(base)).resolve() != Path(options.model).resolve():
        warnings.warn(f"{options.adapter} was trained on {base!r}, evaluated on {options.model!r}", stacklevel=2)
    return adapted


def engines(
    options: EvaluateArguments, served: Served, server: Server, tokenizer: Any, config: Any
) -> dict[bool, Any]:
    """Return the engine of the served model and, where it is compared, that of its base (True)."""
    if options.compare_base and served.base is None:
        raise ValueError(
            f"--compare_base compares an adapter with its base, but {options.base_url} names no base of "
            f"{options.model!r}: expected an adapter of a vLLM server (--lora-modules)"
        )
    ends = eos_ids(tokenizer, generation_config(served.weights))
    names = {False: options.model} | ({True: served.base} if options.compare_base else {})
    return {base: connect(server, str(name), tokenizer, config, ends, options.api) for base, name in names.items()}
