"""The experiment as a list of stages, in order: data, learning, the test of what was learnt, the exercise, report."""

from typing import Any

from .config import LabConfig
from .data import make_data, make_model
from .exercise import SEEN, check_exercise, protect
from .probes import divergences, probe
from .report import write_report
from .stages import Stage
from .testing import compare, respond, score_responses
from .training import train_grpo, train_sft


def stages(config: LabConfig) -> list[Stage]:
    """Return every stage; each branch runs straight, interrupted and resumed, and the two ends are compared.

    The main branches are tested and scored, and what they left is protected, before the exercise begins.
    """
    start, sft_data = "model/weights", {"validation": "data/validation.jsonl"}
    warm_start = "warm_start/straight/model"
    sizes = {"grpo": config.generations} | {f"grpo_g{size}": size for size in config.exercise_generations}
    main, exercise = ["warm_start", "sft", "grpo"], [name for name in sizes if name != "grpo"]
    lengths = (config.exercise_iterations, config.exercise_interrupt)
    exercised = [grpo_branch(name, warm_start, sizes[name], *lengths) for name in exercise]
    return [
        Stage("model", make_model),
        Stage("data", make_data),
        *sft_branch("warm_start", start, sft_data | {"examples": "data/warm_start.jsonl"}, config.warm_start_epochs),
        *sft_branch("sft", warm_start, sft_data | {"examples": "data/sft.jsonl"}, config.sft_epochs),
        *grpo_branch("grpo", warm_start, config.generations, config.grpo_iterations, config.grpo_interrupt),
        *test_stages(main, "scores"),
        Stage("main", protect, artefacts(main)),
        *(stage for stages_of_one in exercised for stage in stages_of_one),
        *test_stages(exercise, "exercise/scores"),
        Stage(
            "exercise/checks",
            check_exercise,
            {"main": "main/main.json", **artefacts(main), **{f"{n}{SEEN}": f"{n}/straight/rollouts" for n in sizes}},
            {"sizes": sizes},
        ),
        *(
            Stage(
                f"probes/{name}",
                probe,
                {"model": f"{name}/straight/model", "examples": "data/validation.jsonl"},
            )
            for name in main + exercise
        ),
        Stage("divergences", divergences, {name: f"probes/{name}/probes.safetensors" for name in main + exercise}),
        Stage("report", write_report, report_inputs(main + exercise), {"branches": main + exercise}),
    ]


def test_stages(branches: list[str], scores: str) -> list[Stage]:
    """Return the answering of the test by every branch, which is given no label, and the scoring of the answers."""
    answering = [
        Stage(
            f"responses/{name}",
            respond,
            {"model": f"{name}/straight/model", "prompts": "data/test_prompts.jsonl"},
        )
        for name in branches
    ]
    given = {"labels": "data/test_labels.jsonl"} | {n: f"responses/{n}/responses.parquet" for n in branches}
    return [*answering, Stage(scores, score_responses, given)]


def artefacts(branches: list[str]) -> dict[str, str]:
    """Return what branches and their test left, under names of their own."""
    models = {f"{name}__model": f"{name}/straight/model" for name in branches}
    responses = {f"{name}__responses": f"responses/{name}/responses.parquet" for name in branches}
    return models | responses | {"scores": "scores/scores.json"}


def sft_branch(name: str, model: str, data: dict[str, str], epochs: int) -> list[Stage]:
    """Return a supervised branch; the interrupted one stops after its first epoch."""
    return branch(name, train_sft, {"model": model, **data}, {"epochs": epochs}, {"stop_epoch": 1}, ledger=False)


def grpo_branch(name: str, model: str, generations: int, iterations: int, interrupt: int) -> list[Stage]:
    """Return a GRPO branch; the interrupted one stops after `interrupt` iterations."""
    inputs, options = (
        {"model": model, "prompts": "data/rl.jsonl"},
        {"generations": generations, "iterations": iterations},
    )
    return branch(name, train_grpo, inputs, options, {"stop_iteration": interrupt}, ledger=True)


def branch(
    name: str, run: Any, inputs: dict[str, str], options: dict[str, Any], stop: dict[str, Any], ledger: bool
) -> list[Stage]:
    """Return the four stages of a branch: straight, interrupted, resumed, and the comparison of the ends."""
    earlier = {"state": f"{name}/interrupted/state.tar.zst"}
    ends = {kind: f"{name}/{kind}/state.tar.zst" for kind in ("straight", "resumed")}
    if ledger:
        earlier |= {"rollouts": f"{name}/interrupted/rollouts"}
        ends |= {f"{kind}_rollouts": f"{name}/{kind}/rollouts" for kind in ("straight", "resumed")}
    return [
        Stage(f"{name}/straight", run, inputs, options | {"keep_model": True}),
        Stage(f"{name}/interrupted", run, inputs, options | stop),
        Stage(f"{name}/resumed", run, inputs | earlier, options),
        Stage(f"{name}/comparison", compare, ends),
    ]


def report_inputs(branches: list[str]) -> dict[str, str]:
    """Return what the report reads: facts, scores, comparisons, histories and costs, under names it can take apart."""
    inputs = {
        "model_facts": "model/model.json",
        "scores": "scores/scores.json",
        "exercise_scores": "exercise/scores/scores.json",
        "exercise": "exercise/checks/exercise.json",
        "divergences": "divergences/divergences.json",
    }
    for name in branches:
        inputs[f"{name}__comparison"] = f"{name}/comparison/comparison.json"
        inputs[f"{name}__history"] = f"{name}/straight/history.json"
        inputs[f"{name}__responses_costs"] = f"responses/{name}/costs.json"
        for kind in ("straight", "interrupted", "resumed"):
            inputs[f"{name}__{kind}_costs"] = f"{name}/{kind}/costs.json"
            inputs[f"{name}__{kind}_archive"] = f"{name}/{kind}/archive.json"
    return inputs
