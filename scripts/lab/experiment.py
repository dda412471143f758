"""The experiment as a list of stages, in order: data, four kinds of learning, tests of fixed models, report."""

from typing import Any

from .config import LabConfig
from .data import make_data, make_model
from .report import write_report
from .stages import Stage
from .testing import compare, respond, score_responses
from .training import train_grpo, train_sft


def stages(config: LabConfig) -> list[Stage]:
    """Return every stage; each branch runs straight, interrupted and resumed, and the two ends are compared."""
    start, sft_data = "model/weights", {"validation": "data/validation.jsonl"}
    warm_start = "warm_start/straight/model"
    supervised = [
        *sft_branch("warm_start", start, sft_data | {"examples": "data/warm_start.jsonl"}, config.warm_start_epochs),
        *sft_branch("sft", warm_start, sft_data | {"examples": "data/sft.jsonl"}, config.sft_epochs),
    ]
    main = (config.generations, config.grpo_iterations, config.grpo_interrupt)
    reinforced = {"grpo": grpo_branch("grpo", warm_start, *main)}
    for size in config.exercise_generations:
        exercise = (size, config.exercise_iterations, config.exercise_interrupt)
        reinforced[f"grpo_g{size}"] = grpo_branch(f"grpo_g{size}", warm_start, *exercise)
    branches = ["warm_start", "sft", *reinforced]
    return [
        Stage("model", make_model),
        Stage("data", make_data),
        *supervised,
        *(stage for branch in reinforced.values() for stage in branch),
        *(
            Stage(
                f"responses/{branch}",
                respond,
                {"model": f"{branch}/straight/model", "prompts": "data/test_prompts.jsonl"},
            )
            for branch in branches
        ),
        Stage(
            "scores",
            score_responses,
            {"labels": "data/test_labels.jsonl"}
            | {branch: f"responses/{branch}/responses.parquet" for branch in branches},
        ),
        Stage("report", write_report, report_inputs(branches), {"branches": branches}),
    ]


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
    inputs = {"model_facts": "model/model.json", "scores": "scores/scores.json"}
    for name in branches:
        inputs[f"{name}__comparison"] = f"{name}/comparison/comparison.json"
        inputs[f"{name}__history"] = f"{name}/straight/history.json"
        inputs[f"{name}__responses_costs"] = f"responses/{name}/costs.json"
        for kind in ("straight", "interrupted", "resumed"):
            inputs[f"{name}__{kind}_costs"] = f"{name}/{kind}/costs.json"
            inputs[f"{name}__{kind}_archive"] = f"{name}/{kind}/archive.json"
    return inputs
