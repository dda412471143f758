"""Evaluate a model, or a model with an adapter, on a corpus: every metric with its 95% bootstrap interval.

    python scripts/evaluate.py --model Qwen/Qwen2.5-3B-Instruct --adapter outputs/run/adapters/run/v0001 \
        --corpus code.jsonl --split validation --compare_base --output evaluation.json
    python scripts/evaluate.py --model outputs/quickstart/start/model --corpus outputs/quickstart/start/corpus.jsonl \
        --trivial_policies --output evaluation.json

    python scripts/evaluate.py --base_url http://localhost:8000 --model ADAPTER --corpus code.jsonl --compare_base \
        --output evaluation.json

--compare_base also evaluates prompting alone (the adapter switched off) on the same rows and the same sampling noise,
and gives the paired difference. --ignore_exit also reads every document to its end whatever the exit gate says.
On several processes (accelerate launch) each reads its share of the rows and process 0 writes.
Options left out that say how the model reads and how the corpus is split are those the adapter was trained with (its
manifest.json), or the defaults of training. With --base_url a served model or adapter reads (see read_document.py);
the base that it is compared with is the one the server names, and tokenizer and manifest come from folders that the
server names, where they exist here too.
"""

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from common import (
    GATED_REWARDS,
    PATIENCE,
    READING_DEFAULTS,
    TRAJECTORY_REWARDS,
    TURN_REWARDS,
    ReadingOptions,
    Served,
    evaluation_config,
    fill_in,
    find_rewards,
    generation_config,
    load_model,
    load_tokenizer,
    make_workflow,
    option,
    parse_options,
    read_corpus,
    run_script,
    sample_rows,
    setting_up,
)
from peft import PeftConfig, PeftModel
from reporting import finite, make_console, metrics_table, policies_table, write_json
from trl import ModelConfig

from turngrpo.data_prep import corpus_digest
from turngrpo.trainer.checks import check_rows
from turngrpo.trainer.evaluation import (
    TRIVIAL_GATES,
    Evaluation,
    ForcedGates,
    eos_ids,
    evaluate_policy,
    paired_difference,
    try_rewards,
)
from turngrpo.trainer.server import Server
from turngrpo.trainer.server_engines import connect


@dataclass
class EvaluateArguments(ReadingOptions):
    """What to evaluate on what, and where the numbers go."""

    model: str = option(None, "Model folder or name on the Hub; with --base_url a name that the server lists.")
    corpus: str = option(None, "Corpus file.")
    output: str = option(None, "JSON file to write; an existing one is replaced.")
    adapter: str | None = option(None, "Adapter folder; with --base_url only its manifest is read.")
    base_url: str | None = option(None, "OpenAI-compatible server that samples, as in http://localhost:8000.")
    api: str = option("auto", "How to ask it: completions (token ids), chat (text), or auto.")
    tokenizer: str | None = option(None, "Tokenizer folder or name, with --base_url.")
    concurrency: int = option(16, "Requests open at once, with --base_url; >= 1.")
    revision: str = option("main", "Revision of the model.")
    dtype: str = option("auto", "Precision of the weights: auto, float32, bfloat16 or float16.")
    split: str = option("validation", "validation or train.")
    validation_fraction: float | None = option(None, "Share of the projects that are held out; 0.1.")
    split_seed: int | None = option(None, "Seed of the split by project; 0.")
    rows: int | None = option(None, "Only a sample of so many rows.")
    members: int = option(1, "Readings of every row, >= 1.")
    workflow: str | None = option(None, "gated or memagent; gated.")
    compare_base: bool = option(False, "Also without the adapter, with the paired difference.")
    ignore_exit: bool = option(False, "Also with the exit gate ignored.")
    trivial_policies: bool = option(False, "Also with forced gates: always no, always yes, to the end, stop at once.")
    reward_funcs: list[str] = field(default_factory=lambda: list(GATED_REWARDS))
    turn_reward_funcs: list[str] = field(default_factory=lambda: list(TURN_REWARDS))


DEFAULTS = {"validation_fraction": 0.1, "split_seed": 0, "workflow": "gated"} | READING_DEFAULTS


def check_options(options: EvaluateArguments) -> None:
    """Raise ValueError for options that say nothing together."""
    for name in ("model", "corpus", "output"):
        if not getattr(options, name):
            raise ValueError(f"--{name} is missing")
    if options.split not in ("train", "validation"):
        raise ValueError(f"--split is {options.split!r}: expected train or validation")
    if options.concurrency < 1:
        raise ValueError(f"--concurrency is {options.concurrency}: expected 1 or more")
    if options.compare_base and options.adapter is None and options.base_url is None:
        raise ValueError("--compare_base compares an adapter with its base: give --adapter")
    if options.members < 1 or (options.rows is not None and options.rows < 1):
        raise ValueError(f"--members is {options.members} and --rows is {options.rows}: expected 1 or more")
    if not Path(options.output).resolve().parent.is_dir():
        raise ValueError(f"--output is {options.output!r}: its folder does not exist")
    if Path(options.output).is_dir():
        raise ValueError(f"--output is {options.output!r}, a folder: expected a file to write")


def check_workflow(options: EvaluateArguments) -> None:
    """Raise ValueError for a workflow that does not exist, or one without the gates that an option is about."""
    if options.workflow not in ("gated", "memagent"):
        raise ValueError(f"--workflow is {options.workflow!r}: expected gated or memagent")
    if options.workflow != "gated" and (options.ignore_exit or options.trivial_policies):
        raise ValueError("--ignore_exit and --trivial_policies belong to --workflow gated")


def policies(options: EvaluateArguments, name: str) -> dict[str, tuple[Any, bool]]:
    """Return (workflow, whether the base model reads) of every policy by name; `name` is the one evaluated."""
    given: dict[str, Any] = {"layout": options.layout, "instruction": options.instruction}
    assert options.workflow is not None
    chosen: dict[str, tuple[Any, bool]] = {}
    if options.compare_base:
        chosen["base"] = make_workflow(options.workflow, **given), True
    chosen[name] = make_workflow(options.workflow, **given), False
    if options.ignore_exit:
        chosen["exit ignored"] = make_workflow("gated", exit_gate=False, **given), False
    if options.trivial_policies:
        kept = {key: value for key, value in given.items() if value is not None}
        for label, gates in TRIVIAL_GATES.items():
            chosen[label] = ForcedGates(**gates, **kept), False
    return chosen


def load(options: EvaluateArguments, config: Any) -> Any:
    """Return the model with its adapter: ValueError where it does not fit, a warning where it names another base."""
    model: Any = load_model(
        ModelConfig(model_name_or_path=options.model, model_revision=options.revision, dtype=options.dtype)
    ).to(config.device)
    if options.adapter is None:
        return model
    base = PeftConfig.from_pretrained(options.adapter).base_model_name_or_path
    try:
        adapted = PeftModel.from_pretrained(model, options.adapter)
    except RuntimeError as error:  # torch's, with a line for every matrix
        first = str(error).split("\n")[1:2]
        raise ValueError(
            f"--adapter {options.adapter} was trained on {base!r} and does not fit --model {options.model!r}: {first}"
        ) from error
    if base not in (None, options.model) and Path(str(base)).resolve() != Path(options.model).resolve():
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate every policy asked for, print the tables, write the JSON file."""
    console = make_console()
    with setting_up():
        (options,) = parse_options([EvaluateArguments], arguments)
        console.quiet = not PartialState().is_main_process
        check_options(options)
        server = None
        if options.base_url is not None:
            server = Server(options.base_url, patience=PATIENCE, connections=options.concurrency)
        served = Served.find(server, options.model) if server else None
        options.adapter = options.adapter or (served.adapter_folder if served else None)
        fill_in(options, DEFAULTS, options.adapter)
        check_workflow(options)
        rewards = find_rewards(options.reward_funcs, TRAJECTORY_REWARDS, "--reward_funcs")
        turn_rewards = find_rewards(options.turn_reward_funcs, TURN_REWARDS, "--turn_reward_funcs")
        tokenizer = load_tokenizer(
            options.tokenizer or (served.tokenizer if served else options.model), options.revision
        )
        config = evaluation_config(
            **{name: value for name, value in vars(options).items() if name.startswith(("max_", "eval_", "chunk_"))}
        )
        fraction: Any = options.validation_fraction
        seed: Any = options.split_seed
        corpus = read_corpus(options.corpus, fraction, seed, tokenizer, config.chunk_size)
        rows = list(sample_rows(corpus[options.split], options.rows, seed))
        sampling: dict[bool, Any] = {}
        model: Any = None
        if served is not None and server is not None:
            sampling = engines(options, served, server, tokenizer, config)
            config.max_prompt_length = min(engine.prompt_limit for engine in sampling.values())
        else:
            model = load(options, config)
        name = "adapter" if (served.base if served else options.adapter) else "model"
        chosen = policies(options, name)
        for workflow, _ in chosen.values():
            workflow.bind(tokenizer, config)
        check_rows(chosen[name][0], rows, options.split, config, model)
    try_rewards(rows[0], options.members, chosen[name][0], tokenizer, config, rewards, turn_rewards)
    results: dict[str, Evaluation] = {}
    for label, (workflow, base) in chosen.items():
        reads = {"members": options.members, "label": label, "engine": sampling.get(base)}
        with model.disable_adapter() if base and model is not None else contextlib.nullcontext():
            results[label] = evaluate_policy(model, tokenizer, workflow, rows, config, rewards, turn_rewards, **reads)
        console.print(f"{label}: {len(rows)} rows in {results[label].seconds:.1f} seconds", highlight=False)
    differences = paired_difference(results["base"], results["adapter"]) if options.compare_base else None
    shown = {label: results[label] for label in ("base", "adapter", "model") if label in results}
    console.print(metrics_table(shown, differences))
    console.print(policies_table(results, f"{options.split}: {len(rows)} rows x {options.members}, 95% intervals"))
    report = {
        "options": vars(options),
        "corpus_digest": corpus_digest(options.corpus),
        "rows": len(rows),
        "policies": {label: evaluation.summary() for label, evaluation in results.items()},
        "adapter_minus_base": differences,
    }
    if PartialState().is_main_process:
        write_json(Path(options.output), finite(report))
    console.print(f"wrote {options.output}", highlight=False)
    return 0


if __name__ == "__main__":
    run_script(main)
