"""Evaluate a model, or a model with an adapter, on a corpus: every metric with its 95% bootstrap interval.

    python scripts/evaluate.py --model Qwen/Qwen2.5-3B-Instruct --adapter outputs/run/adapters/run/v0001 \
        --corpus code.jsonl --split validation --compare_base --output evaluation.json
    python scripts/evaluate.py --model outputs/quickstart/start/model --corpus outputs/quickstart/start/corpus.jsonl \
        --trivial_policies --output evaluation.json

--compare_base also evaluates prompting alone (the adapter switched off) on the same rows and the same sampling noise,
and gives the paired difference. --ignore_exit also reads every document to its end whatever the exit gate says.
On several processes (accelerate launch) each reads its share of the rows and process 0 writes.
Options left out that say how the model reads and how the corpus is split are those the adapter was trained with (its
manifest.json), or the defaults of training.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from common import (
    TRAJECTORY_REWARDS,
    TURN_REWARDS,
    evaluation_config,
    find_rewards,
    load_model,
    load_tokenizer,
    make_workflow,
    read_corpus,
    run_script,
    sample_rows,
    setting_up,
)
from peft import PeftModel
from reporting import finite, make_console, metrics_table, policies_table, write_json
from trl import ModelConfig, TrlParser

from turngrpo.data_prep import corpus_digest
from turngrpo.trainer.checks import check_rows
from turngrpo.trainer.evaluation import TRIVIAL_GATES, Evaluation, ForcedGates, evaluate_policy, paired_difference


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class EvaluateArguments:
    """What to evaluate on what, and where the numbers go."""

    model: str = _option(None, "Model folder or name on the Hub.")
    corpus: str = _option(None, "Corpus file.")
    output: str = _option(None, "JSON file to write; an existing one is replaced.")
    adapter: str | None = _option(None, "Adapter folder.")
    revision: str = _option("main", "Revision of the model.")
    dtype: str = _option("auto", "Precision of the weights: auto, float32, bfloat16 or float16.")
    split: str = _option("validation", "validation or train.")
    validation_fraction: float | None = _option(None, "Share of the projects that are held out; 0.1.")
    split_seed: int | None = _option(None, "Seed of the split by project; 0.")
    rows: int | None = _option(None, "Only a sample of so many rows.")
    members: int = _option(1, "Readings of every row, >= 1.")
    workflow: str | None = _option(None, "gated or memagent; gated.")
    layout: str | None = _option(None, "chunk_first or memory_first; the workflow's own when left out.")
    instruction: str | None = _option(None, "Instruction of chunk turns; the workflow's own when left out.")
    compare_base: bool = _option(False, "Also without the adapter, with the paired difference.")
    ignore_exit: bool = _option(False, "Also with the exit gate ignored.")
    trivial_policies: bool = _option(False, "Also with forced gates: always no, always yes, to the end, stop at once.")
    reward_funcs: list[str] = field(default_factory=lambda: ["answer_reward", "exit_reward", "format_reward"])
    turn_reward_funcs: list[str] = field(default_factory=lambda: ["update_reward"])
    chunk_size: int | None = _option(None, "Tokens per chunk where the corpus holds whole documents; 5000.")
    max_prompt_length: int | None = _option(None, "Longest prompt in tokens; 8192.")
    max_completion_length: int | None = _option(None, "Longest completion in tokens; 2048.")
    max_memory_tokens: int | None = _option(None, "Longest memory in tokens; 1024.")
    eval_temperature: float | None = _option(None, "Sampling temperature, 0 for greedy; 1.")
    eval_top_p: float | None = _option(None, "Nucleus, in (0, 1]; 0.7.")
    eval_seed: int | None = _option(None, "Seed of the sampling noise, and of the bootstrap; 0.")


DEFAULTS: dict[str, Any] = {
    "validation_fraction": 0.1,
    "split_seed": 0,
    "workflow": "gated",
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


def fill_in(options: EvaluateArguments) -> None:
    """Set options left out to those of the adapter's training, or to the defaults."""
    trained: dict[str, Any] = {}
    manifest = Path(options.adapter or "", "manifest.json")
    if options.adapter is not None and manifest.is_file():
        config = json.loads(manifest.read_text(encoding="utf-8")).get("config") or {}
        trained = {**config.get("trainer", {}), **config.get("script", {})}
    for name, default in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, trained.get(name, default))


def check_options(options: EvaluateArguments) -> None:
    """Raise ValueError for options that say nothing together."""
    for name in ("model", "corpus", "output"):
        if not getattr(options, name):
            raise ValueError(f"--{name} is missing")
    if options.split not in ("train", "validation"):
        raise ValueError(f"--split is {options.split!r}: expected train or validation")
    if options.workflow not in ("gated", "memagent"):
        raise ValueError(f"--workflow is {options.workflow!r}: expected gated or memagent")
    if options.compare_base and options.adapter is None:
        raise ValueError("--compare_base compares an adapter with its base: give --adapter")
    if options.workflow != "gated" and (options.ignore_exit or options.trivial_policies):
        raise ValueError("--ignore_exit and --trivial_policies belong to --workflow gated")
    if options.members < 1 or (options.rows is not None and options.rows < 1):
        raise ValueError(f"--members is {options.members} and --rows is {options.rows}: expected 1 or more")
    if not Path(options.output).resolve().parent.is_dir():
        raise ValueError(f"--output is {options.output!r}: its folder does not exist")


def policies(options: EvaluateArguments, model: Any) -> dict[str, tuple[Any, Any]]:
    """Return (workflow, context that switches the model) of every policy by name."""
    given: dict[str, Any] = {"layout": options.layout, "instruction": options.instruction}
    assert options.workflow is not None
    chosen: dict[str, tuple[Any, Any]] = {}
    if options.compare_base:
        chosen["base"] = make_workflow(options.workflow, **given), model.disable_adapter
    name = "adapter" if options.adapter else "model"
    chosen[name] = make_workflow(options.workflow, **given), contextlib.nullcontext
    if options.ignore_exit:
        chosen["exit ignored"] = make_workflow("gated", exit_gate=False, **given), contextlib.nullcontext
    if options.trivial_policies:
        kept = {key: value for key, value in given.items() if value is not None}
        for label, gates in TRIVIAL_GATES.items():
            chosen[label] = ForcedGates(**gates, **kept), contextlib.nullcontext
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate every policy asked for, print the tables, write the JSON file."""
    parser = TrlParser([EvaluateArguments])  # type: ignore[list-item]
    (options,) = parser.parse_args_and_config(arguments)
    console = make_console()
    console.quiet = not PartialState().is_main_process
    with setting_up():
        fill_in(options)
        check_options(options)
        rewards = find_rewards(options.reward_funcs, TRAJECTORY_REWARDS, "--reward_funcs")
        turn_rewards = find_rewards(options.turn_reward_funcs, TURN_REWARDS, "--turn_reward_funcs")
        tokenizer = load_tokenizer(options.model, options.revision)
        config = evaluation_config(
            **{name: value for name, value in vars(options).items() if name.startswith(("max_", "eval_", "chunk_"))}
        )
        fraction: Any = options.validation_fraction
        seed: Any = options.split_seed
        corpus = read_corpus(options.corpus, fraction, seed, tokenizer, config.chunk_size)
        rows = list(sample_rows(corpus[options.split], options.rows, seed))
        model: Any = load_model(
            ModelConfig(model_name_or_path=options.model, model_revision=options.revision, dtype=options.dtype)
        ).to(config.device)
        if options.adapter is not None:
            model = PeftModel.from_pretrained(model, options.adapter)
        chosen = policies(options, model)
        for workflow, _ in chosen.values():
            workflow.bind(tokenizer, config)
        check_rows(chosen["adapter" if options.adapter else "model"][0], rows, options.split, config, model)
    results: dict[str, Evaluation] = {}
    for label, (workflow, context) in chosen.items():
        with context():
            results[label] = evaluate_policy(
                model, tokenizer, workflow, rows, config, rewards, turn_rewards, members=options.members, label=label
            )
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
