"""Evaluate a model, or a model with an adapter, on a corpus: every metric with its 95% bootstrap interval.

    python scripts/evaluate.py --model Qwen/Qwen2.5-3B-Instruct --adapter outputs/run/adapters/run/v0001 \
        --corpus code.jsonl --split validation --compare_base --output evaluation.json
    python scripts/evaluate.py --model outputs/quickstart/start/model --corpus outputs/quickstart/start/corpus.jsonl \
        --trivial_policies --output evaluation.json

    python scripts/evaluate.py --base_url http://localhost:8000 --model ADAPTER --corpus code.jsonl --compare_base \
        --output evaluation.json

--compare_base also evaluates prompting alone (the adapter switched off) on the same rows and the same sampling noise,
and gives the paired difference; --baselines adds every policy that a trained reader should beat. --ignore_exit also
reads every document to its end whatever the exit gate says.
On several processes (accelerate launch) each reads its share of the rows and process 0 writes.
Options left out that say how the model reads and how the corpus is split are those the adapter was trained with (its
manifest.json), or the defaults of training. With --base_url a served model or adapter reads (see read_document.py);
the base that it is compared with is the one the server names, and tokenizer and manifest come from folders that the
server names, where they exist here too.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import concatenate_datasets
from jobs.evaluating import (
    CONFIG,
    DEFAULTS,
    DOCUMENT,
    UNGATED,
    EvaluateArguments,
    check_options,
    check_workflow,
    engines,
    find_adapter,
    load,
    policies,
    take_baselines,
    write_trajectories,
)
from lib.loading import load_tokenizer, read_corpus, sample_rows
from lib.lookup import TRAJECTORY_REWARDS, TURN_REWARDS, find_rewards
from lib.options import check_held_out, evaluation_config, parse_options, resolve, sources_table
from lib.output import finite, held_file, write_json
from lib.reporting import make_console, metrics_table, policies_table
from lib.running import run_script, setting_up
from lib.served import PATIENCE, Served

from turngrpo.data_prep import corpus_digest
from turngrpo.trainer.checks import check_rows, check_weights
from turngrpo.trainer.evaluation.evaluate import Evaluation, evaluate_policy, paired_difference, try_rewards
from turngrpo.trainer.reward_calls import reward_name
from turngrpo.trainer.runs.proof import prove
from turngrpo.trainer.sampling.server import Server
from turngrpo.trainer.writing import writing


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate every policy asked for, print the tables, write the JSON file."""
    with contextlib.ExitStack() as stack:
        with setting_up():
            (options,) = parse_options([EvaluateArguments], arguments)
            find_adapter(options)
            check_options(options)
            if PartialState().is_main_process:
                stack.enter_context(held_file(Path(options.output), "--output"))
            for folder in (options.model, options.adapter):
                if Path(folder or "").is_dir() and folder:
                    prove(folder)
        return evaluate(options)


def evaluate(options: EvaluateArguments) -> int:
    """Do what main says, with an output file that is held."""
    console = make_console()
    console.quiet = not PartialState().is_main_process
    with setting_up():
        server = None
        if options.base_url is not None:
            server = Server(options.base_url, patience=PATIENCE, connections=options.concurrency)
        served = Served.find(server, options.model) if server else None
        options.adapter = options.adapter or (served.adapter_folder if served else None)
        taken = resolve(options, DEFAULTS, options.adapter)
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
        if not options.allow_overlap:
            check_held_out(rows, options.adapter)
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
        with model.disable_adapter() if base and model is not None else contextlib.nullcontext():
            results[label] = evaluate_policy(model, tokenizer, workflow, rows, config, rewards, turn_rewards, **reads)
        console.print(f"{label}: {len(rows)} rows in {results[label].seconds:.1f} seconds", highlight=False)
    gains = {label: paired_difference(other, results[name]) for label, other in results.items() if label != name}
    shown = {label: results[label] for label in ("base", name) if label in results}
    console.print(metrics_table(shown, gains.get("base")))
    title = f"{options.split}: {len(rows)} rows x {options.members}, 95% intervals"
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


if __name__ == "__main__":
    run_script(main)
