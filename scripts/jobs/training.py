"""What train.py does: check everything, evaluate, train, evaluate, export."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from arguments.commands import TrainArguments
from datasets import load_dataset
from jobs.gpu_memory import memory_parts, memory_table, model_sizes
from jobs.quickstart import INSTRUCTION, VALIDATION_FRACTION, StartOptions
from jobs.quickstart import prepare as prepare_start
from jobs.stopping import check_best_metric, check_early_stopping, outcome
from lib.adapters import new_adapter_config
from lib.curves import write_curves
from lib.loading import (
    check_adapter,
    check_loading,
    empty_model,
    load_model,
    lora_of,
    read_corpus,
    sample_rows,
)
from lib.lookup import GATED_REWARDS, TRAJECTORY_REWARDS, TURN_REWARDS, find_rewards, make_workflow
from lib.options import OF_A_WORKFLOW, reading_of, take_reading, told_of_warm_start
from lib.output import finite, write_json
from lib.reporting import RunLog, policies_table
from lib.running import setting_up
from lib.tokenizing import load_tokenizer
from peft import get_peft_model_state_dict
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback
from trl import ModelConfig

from turngrpo.data_prep import corpus_facts
from turngrpo.data_prep.corpus import holds_documents, project_digest
from turngrpo.trainer import TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.checks import (
    check_arguments,
    check_model,
    check_names,
    check_overlap,
    check_rows,
    check_weights,
)
from turngrpo.trainer.evaluation.evaluate import Evaluation, evaluate_policy, try_rewards
from turngrpo.trainer.evaluation.forced_gates import TRIVIAL_GATES, ForcedGates
from turngrpo.trainer.export.hub import check_push
from turngrpo.trainer.export.versions import MANIFEST, WEIGHTS, check_name, read_version
from turngrpo.trainer.forward.policy import TRAINED, tensors_digest
from turngrpo.trainer.reading.trial import hand_over
from turngrpo.trainer.reward_calls import reward_name
from turngrpo.trainer.runs.interruption import Interruption
from turngrpo.trainer.runs.resume import check_length
from turngrpo.trainer.sampling.vllm_engine import check_servers
from turngrpo.trainer.writing import going_on, writing

LOOKED_AT = 200  # rows whose chunks are measured: enough to know how a corpus was cut
PARSED, CUT = 0.1, 0.1  # shares below which a training learns nothing, and from which the limit may be why
PROBE_ROWS = 4  # of which a probe reads one or two, from everywhere in the corpus


@dataclass
class Run:
    """Everything a run needs, checked."""

    options: TrainArguments
    config: TurnGRPOConfig
    model_options: ModelConfig
    rewards: list[Callable[..., Any]]
    turn_rewards: list[Callable[..., Any]]
    workflow: Any
    tokenizer: Any
    train: Any
    validation: Any  # None: no evaluation
    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, stage: str, action: Callable[[], Any]) -> Any:
        """Announce a stage, run it, and keep its seconds."""
        self.console.rule(stage)
        started = time.perf_counter()
        result = action()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
        return result


def prepare(
    options: TrainArguments, config: TurnGRPOConfig, model_options: ModelConfig, console: Console, folder: Path
) -> Run:
    """Check everything that can be checked before a model is loaded; `folder` takes the quickstart's start."""
    if options.workflow == "gated":
        options.reward_funcs = list(GATED_REWARDS) if options.reward_funcs is None else options.reward_funcs
        if options.turn_reward_funcs is None:  # an empty list, which a recipe may hold, is none
            options.turn_reward_funcs = list(TURN_REWARDS)
    rewards = find_rewards(options.reward_funcs, TRAJECTORY_REWARDS, "--reward_funcs")
    turn_rewards = find_rewards(options.turn_reward_funcs, TURN_REWARDS, "--turn_reward_funcs")
    if not rewards:
        raise ValueError(f"--reward_funcs is missing: expected {', '.join(TRAJECTORY_REWARDS)}, or a dotted path")
    called = [reward_name(f) for f in rewards], [reward_name(f) for f in turn_rewards]
    check_names(called[0] + called[1])
    check_weights(config, *called)
    check_loading(model_options)
    if options.probe and not options.dry_run:
        raise ValueError("--probe is a part of --dry_run: give both, or neither")
    if options.probe and config.rollout_engine == "vllm":
        raise ValueError(
            "--probe samples with the model here, where nothing but this process changes: leave it out with "
            "--rollout_engine vllm"
        )
    check_early_stopping(options, config)
    if options.validation_members < 1:
        raise ValueError(f"--validation_members is {options.validation_members}: expected 1 or more")
    if options.quickstart:
        options.instruction = options.instruction or INSTRUCTION
    start = model_options.model_name_or_path
    if taken := take_reading(start, options, config):
        console.print(f"{', '.join(taken)}: as in the warm start of {start}", highlight=False, markup=False)
    given = {name: getattr(options, name) for name in OF_A_WORKFLOW}
    workflow = make_workflow(options.workflow, **given)
    config.check_workflow_options()
    output = Path(config.output_dir or "").resolve()
    if model_options.use_peft:
        check_name(options.adapter_name or output.name)
    if config.push_to_hub:
        if not model_options.use_peft:
            raise ValueError(
                "--push_to_hub pushes the exported adapter: add --use_peft, or push model/ with `hf upload`"
            )
        check_push(config.hub_model_id or output.name, config.hub_token)
    seconds: dict[str, float] = {}
    if options.quickstart:
        started = time.perf_counter()
        quickstart(options, config, model_options, console, folder)
        seconds["warm start"] = time.perf_counter() - started
    tokenizer = load_tokenizer(model_options.model_name_or_path, model_options.model_revision)
    reading = reading_of(workflow, options.workflow, config.chat_template_kwargs)
    for line in told_of_warm_start(model_options.model_name_or_path, reading):
        console.print(f"warning: {line}: it may not parse what it is asked", highlight=False, markup=False)
    train, validation = read_rows(options, config, tokenizer)
    hand_over(workflow, tokenizer, config, train[0])
    run = Run(
        options, config, model_options, rewards, turn_rewards, workflow, tokenizer, train, validation, console, seconds
    )
    lora, model = lora_of(model_options), empty_model(model_options)
    for name, rows in (("train", train), ("validation", validation)):
        check_rows(workflow, rows, name, config, model)
    check_arguments({"model": model, "args": config, "peft_config": lora})
    check_model(check_adapter(model, lora), tokenizer, config.beta, aux_loss_enabled=False)
    check_overlap(train, {"validation": validation}, config.allow_overlap)
    check_length(len(train), (config.generation_batch_size or 1) // (config.num_generations or 1))
    names = try_rewards(train[0], config.num_generations or 1, workflow, tokenizer, config, rewards, turn_rewards)
    check_best_metric(config, names)
    if config.rollout_engine == "vllm":
        check_servers(config, tokenizer, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    return run


def quickstart(
    options: TrainArguments, config: TurnGRPOConfig, model_options: ModelConfig, console: Console, folder: Path
) -> None:
    """Make corpus and warm-started model and put their names into the options."""
    console.rule("corpus, tiny model, warm start")
    size = StartOptions(reading_updates=0, spoiling_updates=0) if options.dry_run else StartOptions()
    model, corpus = folder / "model", folder / "corpus.jsonl"
    if not (config.resume_from_checkpoint and corpus.is_file() and model.is_dir()):
        if config.world_size > 1:
            raise ValueError("--quickstart warm-starts its model in one process: use accelerate_configs/cpu.yaml")
        prepare_start(folder, config.seed, size)
    options.corpus, model_options.model_name_or_path = str(corpus), str(model)
    options.validation_fraction, options.split_seed = VALIDATION_FRACTION, config.seed


def read_rows(options: TrainArguments, config: TurnGRPOConfig, tokenizer: Any) -> tuple[Any, Any]:
    """Return training rows, and the rows to evaluate on or None."""
    if options.workflow == "single_turn" and options.corpus is not None:
        raise ValueError("--workflow single_turn reads prompts: give --dataset_name, and leave --corpus out")
    both = options.corpus is not None and options.dataset_name is not None
    if both or (options.dataset_name is not None and options.workflow in ("gated", "memagent")):
        raise ValueError(f"--workflow {options.workflow} reads a corpus: give --corpus, and leave --dataset_name out")
    if options.dataset_name is not None:
        if Path(options.dataset_name).is_file():
            data = load_dataset("json", data_files=options.dataset_name)
        else:
            data = load_dataset(options.dataset_name, options.dataset_config)
        if options.dataset_train_split not in data:
            raise ValueError(f"--dataset_train_split is {options.dataset_train_split!r}: expected one of {list(data)}")
        train, validation = data[options.dataset_train_split], data.get(options.dataset_test_split)
    else:
        data = read_corpus(
            str(options.corpus), options.validation_fraction, options.split_seed, tokenizer, config.chunk_size
        )
        train, validation = data["train"], data["validation"]
    return train, validation and sample_rows(validation, options.validation_rows, options.split_seed)


def memory(run: Run, longest: int | None) -> Table:
    """Return a table of rough gigabytes that the run needs on one GPU, or in a process on a CPU."""
    own = "." in run.options.workflow  # nobody knows how many turns it takes
    turns = None if own else 1 + max((len(row.get("chunks", ())) for row in run.train), default=0)
    place = "CPU memory of a process" if run.config.device.type == "cpu" else "memory of one GPU"
    sizes = model_sizes(empty_model(run.model_options), lora_of(run.model_options))
    width = 4 if run.model_options.dtype in (None, "float32", "auto") else 2
    parts = memory_parts(sizes, run.config, width, longest, turns)
    return memory_table(parts, str(run.model_options.model_name_or_path), place)


def dry_run(run: Run, folder: Path) -> None:
    """Print what a run would read and need; `folder` takes what a probe leaves."""
    bound = getattr(run.workflow, "max_prompt_tokens", None)
    longest = None if bound is None else max(map(bound, run.train))
    config = run.config
    per_update = config.per_device_train_batch_size * config.gradient_accumulation_steps
    table = Table("checked", "found")
    rows = "none" if run.validation is None else f"{len(run.validation)}"
    table.add_row("rows", f"{len(run.train)} train, {rows} validation")
    for name, found in corpus_table_rows(run):
        table.add_row(name, found)
    known = "checked as they come" if longest is None else f"up to {longest} tokens"
    table.add_row("longest prompt", f"{known} (limit {config.max_prompt_length})")
    table.add_row("an update", f"{per_update} trajectories in groups of {config.num_generations}")
    table.add_row("rewards", ", ".join(f.__name__ for f in [*run.rewards, *run.turn_rewards]))
    run.console.print(table)
    run.console.print(memory(run, longest))
    if run.options.probe:
        group, seconds, log = probe(run, folder)
        table = Table("probe", "seconds per update")
        table.add_row(f"measured, of {group} trajectories", f"{seconds:.2f}")
        table.add_row(f"of {per_update}, at most (more at once take less each)", f"{seconds * per_update / group:.2f}")
        run.console.print(table)
        told = {"reward": "reward", "format/parsed": "parsed", "completions/clipped_ratio": "turns cut"}
        said = [f"{text} {log[name]:.2f}" for name, text in told.items() if log.get(name) is not None]
        run.console.print(f"its first rollout: {', '.join(said)}", highlight=False)
        tell_unparsed(run, log, "the probe")
    run.console.print("dry run: nothing was trained or written")


def corpus_table_rows(run: Run) -> list[tuple[str, str]]:
    """Return what the rows are like, by name: how many chunks are evidence, and where answers stand; for a corpus."""
    rows = [row for data in (run.train, run.validation) if data is not None for row in data]
    if not {"project", "chunks", "answers"} <= rows[0].keys():
        return []
    chunks = [chunk for row in rows for chunk in row["chunks"]]
    labelled = [[chunk["text"] for chunk in row["chunks"] if chunk.get("evidence")] for row in rows]
    without, evidence = labelled.count([]), [" ".join(texts).casefold() for texts in labelled]
    told = sum(any(one.casefold() in text for one in row["answers"]) for row, text in zip(rows, evidence, strict=True))
    split = [len(set(data["project"])) for data in (run.train, run.validation) if data is not None]
    share = sum(map(len, labelled)) / len(chunks)
    return [
        ("projects", ", ".join(f"{n} {name}" for n, name in zip(split, ("train", "validation"), strict=False))),
        ("chunks of a row", f"{len(chunks) / len(rows):.1f}, {share:.0%} of them evidence"),
        ("rows without evidence", f"{without} of {len(rows)}"),
        ("answer stands in the evidence", f"in {told} of {len(rows)} rows"),
    ]


def tell_unparsed(run: Run, metrics: Mapping[str, Any], when: str) -> None:
    """Say that next to nothing parses, where that is so, and why it may be: such a training learns nothing."""
    parsed, cut = metrics.get("format/parsed"), metrics.get("completions/clipped_ratio") or 0.0
    if parsed is None or parsed >= PARSED:
        return
    limit = run.config.max_completion_length
    why = "warm-start the model first (scripts/sft.py), or give the --instruction and --layout of its warm start"
    if cut > CUT:
        why = f"{cut:.0%} of the turns are cut at --max_completion_length {limit}, which may be too short; else {why}"
    run.console.print(
        f"warning: {when}: {parsed:.0%} of the readings parse, so that rewards tell little apart: {why}",
        highlight=False,
    )


def probe(run: Run, folder: Path) -> tuple[int, float, dict[str, Any]]:
    """Train on a group in each process: its trajectories, the seconds of the last updates on a rollout, the first log.

    The first ones warm up. Weights change in this process alone, and what is written goes to `folder`.
    """
    config, group = copy.copy(run.config), run.config.num_generations or 1
    iterations, processes = config.num_iterations, config.world_size
    sizes = {"per_device_train_batch_size": group, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
    quiet = {"save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False, "report_to": []}
    quiet |= {"push_to_hub": False, "ledger": "false", "log_completions": False}
    quiet |= {"logging_strategy": "steps", "logging_steps": 1}
    length = {"max_steps": 2 * iterations, "generation_batch_size": group * processes, "output_dir": str(folder)}
    for name, value in (sizes | quiet | length | {"eval_on_start": False, "resume_from_checkpoint": None}).items():
        setattr(config, name, value)
    rows = sample_rows(run.train, max(processes, PROBE_ROWS), run.options.split_seed)
    with setting_up():
        trainer = make_trainer(replace(run, config=config, train=rows, validation=None))
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seconds = [log["step_time"] for log in trainer.state.log_history if "step_time" in log]
    return group, sum(seconds[iterations:]) / iterations, trainer.state.log_history[0]


def evaluate(run: Run, trainer: Any, label: str, workflow: Any = None) -> Evaluation:
    """Evaluate the trainer's model on the validation rows, always on the same noise; each process reads a share."""
    with trainer.whole_weights():
        return evaluate_policy(
            trainer.model,
            run.tokenizer,
            workflow or run.workflow,
            list(run.validation),
            run.config,
            run.rewards,
            run.turn_rewards,
            members=run.options.validation_members,
            label=label,
            reference=trainer.reference if workflow is None else None,
            autocast=trainer.accelerator.autocast,
            engine=trainer.eval_engine if run.config.rollout_engine == "vllm" else None,
        )


def trivial_policies(run: Run, trainer: Any) -> dict[str, Evaluation]:
    """Evaluate the trained model with forced gates."""
    given = {"layout": run.workflow.layout, "instruction": run.workflow.instruction}
    return {name: evaluate(run, trainer, name, ForcedGates(**gates, **given)) for name, gates in TRIVIAL_GATES.items()}


def make_trainer(run: Run) -> TurnGRPOTrainer:
    """Return the trainer with its model loaded."""
    return TurnGRPOTrainer(
        model=load_model(run.model_options),
        reward_funcs=run.rewards,
        args=run.config,
        train_dataset=run.train,
        eval_dataset=run.validation if run.config.eval_strategy != "no" else None,
        processing_class=run.tokenizer,
        peft_config=new_adapter_config(run.model_options),
        workflow=run.workflow,
        turn_reward_funcs=run.turn_rewards or None,
    )


def train(run: Run) -> tuple[dict[str, Any], TurnGRPOTrainer]:
    """Evaluate, train, evaluate, export; returns the summary and the trainer. Process 0 writes."""
    folder = Path(run.config.output_dir or "")
    with setting_up():
        trainer = run.timed("loading", lambda: make_trainer(run))
        if run.config.resume_from_checkpoint:
            trainer.check_resume(run.config.resume_from_checkpoint)
    trainer.provenance = provenance(run)
    if trainer.is_world_process_zero():
        files = {"corpus": run.options.corpus, "model": run.model_options.model_name_or_path}
        facts = {name: value for name, value in trainer.exporter.facts(0).items() if name != "update"}
        with writing(str(folder / "run.json"), going_on(folder)):
            write_json(folder / "run.json", finite({"files": files, **facts}))
    log = RunLog(folder / "metrics.jsonl", run.console)
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(log)
    if run.options.early_stopping_patience is not None:
        patience, threshold = run.options.early_stopping_patience, run.options.early_stopping_threshold
        trainer.add_callback(EarlyStoppingCallback(patience, threshold))
    interruption = Interruption()
    trainer.add_callback(interruption)
    policies: dict[str, Evaluation] = {}
    if run.validation is not None:
        policies["before"] = run.timed("evaluation before", lambda: evaluate(run, trainer, "before"))
        tell_unparsed(run, policies["before"].metrics, "before training")
    checkpoint = run.config.resume_from_checkpoint
    if checkpoint:
        run.console.print(f"going on from {checkpoint}", highlight=False)
    with interruption.listening(says=run.config.process_index == 0):
        run.timed("training", lambda: trainer.train(resume_from_checkpoint=checkpoint))
    if interruption.came:
        run.console.print(interruption.ended(trainer.state.global_step))
        raise KeyboardInterrupt
    if run.validation is not None:
        policies["after"] = run.timed("evaluation after", lambda: evaluate(run, trainer, "after"))
        if run.options.workflow == "gated":
            policies |= run.timed("trivial policies", lambda: trivial_policies(run, trainer))
    if trainer.is_world_process_zero():
        write_curves(log.history, folder / "curves.png")
    adapter = run.timed("export", lambda: export(run, trainer, policies, folder))
    if policies:
        run.console.print(policies_table(policies, f"{len(run.validation)} validation rows, 95% intervals"))
    summary = {
        "before": policies["before"].metrics if policies else None,
        "after": policies["after"].metrics if policies else None,
        "policies": {name: evaluation.summary() for name, evaluation in policies.items()},
        "adapter": str(adapter) if adapter else None,
        **outcome(trainer, adapter, run.options.early_stopping_patience),
        "processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
    }
    return summary, trainer


def provenance(run: Run) -> dict[str, Any]:
    """Return what checkpoints and the exported adapter say of this run."""
    corpus = None if run.options.corpus is None else corpus_facts(run.options.corpus)
    projects = set(run.train["project"]) if corpus is not None else set()
    script = asdict(run.options) | {"train_projects": sorted(map(project_digest, projects))}
    config = {"script": script, "model": asdict(run.model_options)}
    cut = run.options.corpus is None or holds_documents(run.options.corpus)
    return {
        "corpus": corpus,
        "config": config,
        "reading": {} if cut else chunk_length(run),
    }


def chunk_length(run: Run) -> dict[str, int]:
    """Return as chunk_size the tokens of the longest chunk, where rows came in chunks and were not cut by it."""
    texts = [
        chunk["text"] for row in run.train.select(range(min(LOOKED_AT, len(run.train)))) for chunk in row["chunks"]
    ]
    return {"chunk_size": max(map(len, run.tokenizer(texts, add_special_tokens=False)["input_ids"]))}


def adapter_name(run: Run) -> str:
    """Return what the adapter is called."""
    return run.options.adapter_name or Path(run.config.output_dir or "").resolve().name


def same_version(trainer: TurnGRPOTrainer, folder: Path) -> bool:
    """Whether the newest version of an adapter is the trainer's, as a run that was killed at its end left it."""
    version = (folder / "latest").resolve()
    if not (version / MANIFEST).is_file():
        return False
    with trainer.whole_weights():
        own = get_peft_model_state_dict(trainer.model, adapter_name=TRAINED, save_embedding_layers=False)
        same = tensors_digest(own.items()) == tensors_digest(load_file(version / WEIGHTS).items())
    if same and read_version(version)["update"] == trainer.weights_update:
        trainer.exporter.exported, trainer.exporter.is_current = version, True
        return True
    return False


def export(run: Run, trainer: TurnGRPOTrainer, policies: dict[str, Evaluation], folder: Path) -> Path | None:
    """Export the adapter; a fully trained model is saved under model/ instead."""
    if run.model_options.use_peft:
        if run.config.resume_from_checkpoint and same_version(trainer, folder / "adapters" / adapter_name(run)):
            return trainer.exporter.exported
        before, after = (policies[name].metrics if policies else None for name in ("before", "after"))
        return trainer.export_adapter(run.options.adapter_name, before, after)
    with trainer.whole_weights():
        if trainer.is_world_process_zero():
            with writing(str(folder / "model"), going_on(folder)):
                trainer.model.save_pretrained(folder / "model")
                run.tokenizer.save_pretrained(folder / "model")
    return None
