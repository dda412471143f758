"""What evaluate.py does: the policies asked for, who samples, and the numbers of all of them."""

import contextlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from arguments.commands import EvaluateArguments
from datasets import concatenate_datasets
from lib.adapters import Adapter, put_on
from lib.loading import load_weights, read_corpus, sample_rows
from lib.lookup import (
    GATED_REWARDS,
    TRAJECTORY_REWARDS,
    TURN_REWARDS,
    find_rewards,
    make_workflow,
)
from lib.options import (
    OF_A_WORKFLOW,
    check_held_out,
    evaluation_config,
    reading_defaults,
    resolve,
    sources_table,
    warm_start_of,
)
from lib.output import finite, held_file, write_json, write_text
from lib.reporting import make_console, metrics_table, policies_table
from lib.running import setting_up
from lib.served import PATIENCE, Served
from lib.tokenizing import generation_config, load_tokenizer
from peft import PeftConfig
from trl import ModelConfig

from turngrpo.data_prep import corpus_digest
from turngrpo.trainer import MemAgent, TurnGRPOConfig
from turngrpo.trainer.checks import check_rows, check_weights
from turngrpo.trainer.evaluation.evaluate import Evaluation, evaluate_policy, paired_difference, try_rewards
from turngrpo.trainer.evaluation.forced_gates import TRIVIAL_GATES, ForcedGates
from turngrpo.trainer.evaluation.whole_document import WholeDocument
from turngrpo.trainer.reading.chat_format import eos_ids
from turngrpo.trainer.reading.trial import hand_over
from turngrpo.trainer.reward_calls import reward_name
from turngrpo.trainer.runs.columns import ROLLOUT, as_table
from turngrpo.trainer.runs.ledger import rollout_rows, write_rows
from turngrpo.trainer.runs.proof import prove
from turngrpo.trainer.sampling.chat_engine import connect
from turngrpo.trainer.sampling.server import Server
from turngrpo.trainer.writing import writing

UNGATED, DOCUMENT = "ungated", "whole document"
FEW = 10  # clusters, below which a bootstrap over them is known to be too narrow

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
    "max_turns chat_template_kwargs reward_weights turn_reward_weights reward_timeout"
).split()


def check_options(options: EvaluateArguments) -> None:
    """Raise ValueError for options that say nothing together."""
    if options.split not in ("train", "validation", "all"):
        raise ValueError(f"--split is {options.split!r}: expected train, validation or all")
    if options.cluster not in ("row", "project"):
        raise ValueError(f"--cluster is {options.cluster!r}: expected row or project")
    if options.concurrency < 1:
        raise ValueError(f"--concurrency is {options.concurrency}: expected 1 or more")
    if options.compare_base and options.adapter is None and options.base_url is None:
        raise ValueError(
            "--compare_base compares an adapter with its base, found no adapter: give --adapter or --base_url"
        )
    if options.members < 1 or (options.rows is not None and options.rows < 1):
        raise ValueError(f"--members is {options.members} and --rows is {options.rows}: expected 1 or more of each")
    if options.trajectories is not None and Path(options.trajectories).suffix not in (".parquet", ".jsonl"):
        raise ValueError(
            f"--trajectories is {options.trajectories!r}: expected a name that ends in .parquet or .jsonl"
        )
    for name in ("output", "trajectories"):
        path = getattr(options, name)
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"--{name} is {path!r}: its folder does not exist, make it first")
        if path is not None and Path(path).is_dir():
            raise ValueError(f"--{name} is {path!r}, a folder: expected a file to write")


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


def take_baselines(options: EvaluateArguments, base: bool) -> None:
    """Ask for every policy that --baselines means; `base`: there is an adapter, whose base can read without it."""
    if options.baselines:
        options.compare_base, options.compare_document = base, True
        options.compare_ungated = options.trivial_policies = options.workflow == "gated"


def check_workflow(options: EvaluateArguments) -> None:
    """Raise ValueError for a workflow that does not exist, or one without the gates that an option is about."""
    if options.workflow == "single_turn":
        raise ValueError("--workflow is 'single_turn': expected gated, memagent, or a dotted path; it reads no corpus")
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
    if options.compare_document:
        chosen[DOCUMENT] = WholeDocument(), False
    if options.trivial_policies:
        kept = {key: value for key, value in given.items() if value is not None and key != "exit_gate"}
        for label, gates in TRIVIAL_GATES.items():
            chosen[label] = ForcedGates(**gates, **kept), False
    return chosen


def write_trajectories(path: Path, results: Mapping[str, Evaluation], *names: Sequence[str]) -> None:
    """Write one row per turn with the ledger's columns; `names` are those of the rewards and of the turn rewards."""
    rows = [row for label, one in results.items() for row in rollout_rows(one.rollout, *names, policy=label)]
    if path.suffix == ".parquet":
        write_rows(rows, path)
    else:
        lines = (json.dumps(row, ensure_ascii=False) for row in as_table(rows, ROLLOUT).to_pylist())
        write_text(path, "".join(f"{line}\n" for line in lines))


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


def hold_and_evaluate(options: EvaluateArguments) -> int:
    """Check the options, then evaluate with an output file that is held."""
    with contextlib.ExitStack() as stack:
        with setting_up():
            find_adapter(options)
            check_options(options)
            if PartialState().is_main_process:
                stack.enter_context(held_file(Path(options.output), "--output"))
            for folder in (options.model, options.adapter):
                if Path(folder or "").is_dir() and folder:
                    prove(folder)
        return evaluate(options)


def evaluate(options: EvaluateArguments) -> int:
    """Evaluate every policy asked for, print the tables, write the JSON file."""
    console = make_console()
    console.quiet = not PartialState().is_main_process
    with setting_up():
        server = None
        if options.base_url is not None:
            server = Server(options.base_url, patience=PATIENCE, connections=options.concurrency)
        served = Served.find(server, options.model) if server else None
        options.adapter = options.adapter or (served.adapter_folder if served else None)
        started = warm_start_of(served.weights if served else options.model)
        taken = resolve(options, DEFAULTS, options.adapter or started)
        take_baselines(options, base=bool(served.base if served else options.adapter))
        check_workflow(options)
        rewards = find_rewards(options.reward_funcs, TRAJECTORY_REWARDS, "--reward_funcs")
        turn_rewards = find_rewards(options.turn_reward_funcs, TURN_REWARDS, "--turn_reward_funcs")
        tokenizer = load_tokenizer(
            options.tokenizer or (served.tokenizer if served else options.model), options.revision
        )
        config = evaluation_config(**{name: getattr(options, name) for name in CONFIG})
        check_weights(config, [reward_name(f) for f in rewards], [reward_name(f) for f in turn_rewards])
        fraction: Any = options.validation_fraction
        seed: Any = options.split_seed
        corpus = read_corpus(options.corpus, fraction, seed, tokenizer, config.chunk_size)
        data = concatenate_datasets(list(corpus.values())) if options.split == "all" else corpus[options.split]
        rows = list(sample_rows(data, options.rows, seed))
        projects = len({row["project"] for row in rows})
        if options.cluster == "project" and projects < 2:
            raise ValueError(
                f"--cluster project: all {len(rows)} rows are of one project, and nothing can be said of others: "
                "expected two or more, better ten; leave --cluster out, or read more projects (--split all)"
            )
        if options.cluster == "project" and projects < FEW:
            warnings.warn(
                f"--cluster project: {projects} projects are few to resample, so that intervals come out too narrow; "
                f"expected {FEW} or more",
                stacklevel=2,
            )
        if not options.allow_overlap:
            for folder in (options.adapter, started):
                check_held_out(rows, folder)
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
            hand_over(workflow, tokenizer, config, rows[0])
        for label in (name, UNGATED):  # the others' prompts are those of the first
            if label in chosen:
                check_rows(chosen[label][0], rows, options.split, config, model)
    console.print(sources_table(taken))
    if DOCUMENT in chosen:
        try:
            check_rows(chosen[DOCUMENT][0], rows, options.split, config, model)
        except ValueError as error:
            console.print(f"{DOCUMENT}: left out, {str(error).splitlines()[0]}", highlight=False, markup=False)
            del chosen[DOCUMENT]
    try_rewards(rows[0], options.members, chosen[name][0], tokenizer, config, rewards, turn_rewards)
    results: dict[str, Evaluation] = {}
    for label, (workflow, base) in chosen.items():
        reads = {"members": options.members, "label": label, "engine": sampling.get(base)}
        reads["cluster"] = None if options.cluster == "row" else options.cluster
        with model.disable_adapter() if base and model is not None else contextlib.nullcontext():
            results[label] = evaluate_policy(model, tokenizer, workflow, rows, config, rewards, turn_rewards, **reads)
        console.print(f"{label}: {len(rows)} rows in {results[label].seconds:.1f} seconds", highlight=False)
    gains = {label: paired_difference(other, results[name]) for label, other in results.items() if label != name}
    shown = {label: results[label] for label in ("base", name) if label in results}
    console.print(metrics_table(shown, gains.get("base")))
    title = f"{options.split}: {len(rows)} rows x {options.members}, 95% intervals over {options.cluster}s"
    console.print(policies_table(results, title, name, gains))
    report = {
        "options": vars(options),
        "corpus_digest": corpus_digest(options.corpus),
        "rows": len(rows),
        "policies": {label: evaluation.summary() for label, evaluation in results.items()},
        **{f"{name}_minus_{label.replace(' ', '_')}": gain for label, gain in gains.items()},
        "taken_from": {option: source for option, (_, source) in taken.items()},
    }
    if PartialState().is_main_process:
        with writing(options.output, "What it would say stands in the tables above; the same command evaluates again"):
            write_json(Path(options.output), finite(report))
        if options.trajectories is not None:
            names = ([reward_name(function) for function in functions] for functions in (rewards, turn_rewards))
            with writing(options.trajectories, f"{options.output} is whole; the same command evaluates again"):
                write_trajectories(Path(options.trajectories), results, *names)
    written = [path for path in (options.output, options.trajectories) if path is not None]
    console.print(f"wrote {' and '.join(written)}", highlight=False)
    return 0
