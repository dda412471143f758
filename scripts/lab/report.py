"""The last stage: results.json, report.md and the plots, from what the other stages left."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib.output import finite, write_json

from .config import LabConfig
from .testing import DRAWS, GREEDY, STRATA

KINDS = ("straight", "interrupted", "resumed")
CAVEATS = """\
- A solver answers these problems exactly: nobody needs a model, or reinforcement learning, for them.
- Problems are fictional and share templates; nothing here says anything about real stock.
- A mean per response weighs a token of a short response more than one of a long one, and dividing by the group's
  standard deviation weighs easy and hard problems more than middling ones.
- A group whose rewards are all equal teaches nothing by reward; KL moves the policy all the same, and so does weight
  decay where learning rate times decay is above the rounding of the weights (1e-6 x 0.01 is below that of float32).
- The exercise's branches and the main one differ in group size and in length: no difference isolates the group size.
- Equal numbers of updates are not equal cost: a rollout of G = 8 has four times the responses of G = 2.
"""


def write_report(folder: Path, config: LabConfig, *, branches: list[str], **inputs: Path) -> None:
    """Write everything that was measured, whatever it shows."""
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in inputs.items()}
    results = {
        "config": asdict(config),
        "model": found["model_facts"],
        "test": found["scores"] | found["exercise_scores"],
        "exercise": found["exercise"],
        "divergences": found["divergences"],
        "resume": {name: found[f"{name}__comparison"] for name in branches},
        "costs": {name: {kind: found[f"{name}__{kind}_costs"] for kind in (*KINDS, "responses")} for name in branches},
        "archives": {name: {kind: found[f"{name}__{kind}_archive"] for kind in KINDS} for name in branches},
        "histories": {name: found[f"{name}__history"] for name in branches},
    }
    write_json(folder / "results.json", finite(results))
    plot_training(results["histories"], folder / "training.png")
    plot_test(results["test"], folder / "test.png")
    (folder / "report.md").write_text(markdown(results), encoding="utf-8")


def markdown(results: Mapping[str, Any]) -> str:
    """Return the report as text: tests, resumes, learning, costs, archives, caveats."""
    model, config = results["model"], results["config"]
    parts = [
        f"# StockArithmetic-v1 on {model['model']}",
        f"{model['class']}, {model['parameters']:,} parameters, float32, eager attention; seed {config['seed']}. "
        "Every model was fixed before its test; no test response entered an update; every response counts, none was "
        "selected.",
        "## Test",
        *(section for kind in (GREEDY, DRAWS) for section in test_section(results["test"], kind)),
        "![correct answers](test.png)",
        "## Learning",
        table(
            ["branch", "updates", "first", "last", "groups of equal rewards", "validation NLL by epoch"],
            learning_rows(results["histories"]),
        ),
        "![training](training.png)",
        "## Interrupted and resumed against straight",
        table(["branch", "identical", "fields compared", "rollouts compared"], resume_rows(results["resume"])),
        "## The exercise",
        exercise_section(results["exercise"]),
        table(["branch", "problems", "responses", "updates"], budget_rows(results["exercise"]["budgets"])),
        table(
            ["group made by hand", "rewards", "advantages", "surrogate", "largest gradient of a token"],
            constructed_rows(results["exercise"]["constructed"]),
        ),
        "## Distance between policies",
        f"Mean KL(row || column) over {results['divergences']['prefixes']} prefixes of validation answers, over the "
        "whole vocabulary, in nats.",
        table(["policy", *results["divergences"]["kl"]], divergence_rows(results["divergences"]["kl"])),
        "## Costs, seconds by purpose and process",
        *cost_sections(results["costs"]),
        "## Full states, archived losslessly (tar, zstd)",
        table(["state", "MB", "archived MB", "ratio", "seconds"], archive_rows(results["archives"])),
        "## What this does not show",
        CAVEATS,
    ]
    return "\n\n".join(parts)


def table(headings: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def test_section(test: Mapping[str, Any], kind: str) -> list[str]:
    """Return title and table of one kind of response, by policy and stratum."""
    title = {
        GREEDY: "Greedy: one response to each problem (pass@1)",
        DRAWS: "Sampled at temperature 1: success per draw over all responses",
    }
    rows = []
    for policy, strata in test.items():
        for stratum in STRATA:
            one = strata[stratum][kind]
            share = f"{one['correct']}/{one['responses']}"
            if kind == DRAWS:
                share += f" ({', '.join(map(str, one['correct_by_draw']))})"
            reasons = ", ".join(f"{reason} {count}" for reason, count in one["reasons"].items())
            rows.append(
                [policy, stratum, share, one["valid_json"], one["without_eos"], f"{one['mean_tokens']:.1f}", reasons]
            )
    headings = ["policy", "problems", "correct", "valid JSON", "without EOS", "tokens", "rejected for"]
    return [f"### {title[kind]}", table(headings, rows)]


def learning_rows(histories: Mapping[str, Any]) -> list[list[Any]]:
    """Return updates, first and last reward (or loss), share of groups of equal rewards, and the validation NLL."""
    rows = []
    for name, history in histories.items():
        measure = "reward" if any("reward" in log for log in history) else "loss"
        values = [log[measure] for log in history if measure in log]
        nll = ", ".join(f"{log['eval_nll']:.4f}" for log in history if "eval_nll" in log)
        updates = max(log["step"] for log in history)
        equal = [log["frac_reward_zero_std"] for log in history if "frac_reward_zero_std" in log]
        share = f"{sum(equal) / len(equal):.2f}" if equal else ""
        rows.append([name, updates, f"{measure} {values[0]:.4f}", f"{measure} {values[-1]:.4f}", share, nll])
    return rows


def resume_rows(resume: Mapping[str, Any]) -> list[list[Any]]:
    return [
        [name, "yes" if one["identical"] else "NO", one["fields"], one.get("rollouts", "")]
        for name, one in resume.items()
    ]


def exercise_section(exercise: Mapping[str, Any]) -> str:
    return (
        f"{exercise['protected']} files of the main experiment had the same SHA-256 after the exercise as before. All "
        f"group sizes saw the same {exercise['same_problems']} problems in the same order."
    )


def budget_rows(budgets: Mapping[str, Any]) -> list[list[Any]]:
    return [[name, one["problems"], one["responses"], one["updates"]] for name, one in budgets.items()]


def constructed_rows(groups: Mapping[str, Any]) -> list[list[Any]]:
    """Return what a first update would make of groups with given rewards: nothing, where they are all equal."""
    return [
        [
            name,
            " ".join(f"{reward:g}" for reward in one["rewards"]),
            " ".join(f"{advantage:+.3f}" for advantage in one["advantages"]),
            f"{one['surrogate']:+.4f}",
            f"{max(abs(gradient) for row in one['token_gradients'] for gradient in row):.4f}",
        ]
        for name, one in groups.items()
    ]


def divergence_rows(kl: Mapping[str, Mapping[str, float]]) -> list[list[Any]]:
    cells = {name: {other: f"{value:.4f}" for other, value in others.items()} for name, others in kl.items()}
    return [[name, *(others.get(other, "") for other in kl)] for name, others in cells.items()]


def cost_sections(costs: Mapping[str, Any]) -> list[str]:
    """Return one table for each kind of branch: supervised, GRPO, and the answering of the test."""
    groups: dict[tuple[str, ...], list[list[Any]]] = {}
    for name, processes in costs.items():
        for process, seconds in processes.items():
            purposes = tuple(purpose for purpose in seconds if purpose.startswith("time/"))
            cells = [f"{seconds[purpose]:.1f}" for purpose in purposes]
            groups.setdefault(purposes, []).append([f"{name}/{process}", *cells])
    return [
        table(["process", *(p.removeprefix("time/") for p in purposes)], rows) for purposes, rows in groups.items()
    ]


def archive_rows(archives: Mapping[str, Any]) -> list[list[Any]]:
    return [
        [
            f"{name}/{kind}/{one['checkpoint']}",
            f"{one['bytes'] / 1e6:.1f}",
            f"{one['archived_bytes'] / 1e6:.1f}",
            f"{one['ratio']:.3f}",
            f"{one['seconds']:.1f}",
        ]
        for name, kinds in archives.items()
        for kind, one in kinds.items()
    ]


def plot_training(histories: Mapping[str, Any], path: Path) -> None:
    """Draw loss and validation NLL of supervised branches, reward and KL of the others, over the updates."""
    figure, axes = _figure(len(histories))
    for axis, (name, history) in zip(axes, histories.items(), strict=True):
        rewarded = any("reward" in log for log in history)
        names, right = (("reward", "kl"), axis.twinx()) if rewarded else (("loss", "eval_nll"), axis)
        for measure, target, color in zip(names, (axis, right), ("C0", "C1"), strict=True):
            points = [(log["step"], log[measure]) for log in history if measure in log]
            marker = "o" if measure == "eval_nll" else ""
            target.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=3, label=measure)
            if rewarded:
                target.set_ylabel(measure, color=color)
        if not rewarded:
            axis.set_ylabel("nats per token")
            axis.legend()
        axis.set(title=name, xlabel="update")
        axis.grid(alpha=0.3)
    _save(figure, path)


def plot_test(test: Mapping[str, Any], path: Path) -> None:
    """Draw the share of correct greedy answers and of correct draws, by policy and stratum."""
    figure, axes = _figure(2)
    for axis, kind in zip(axes, (GREEDY, DRAWS), strict=True):
        for place, stratum in enumerate(STRATA):
            shares = [
                strata[stratum][kind]["correct"] / strata[stratum][kind]["responses"] for strata in test.values()
            ]
            axis.bar([x + 0.27 * place for x in range(len(shares))], shares, width=0.25, label=stratum)
        axis.set_xticks([x + 0.27 for x in range(len(test))], list(test), rotation=20)
        axis.set(title=f"{kind}: share correct")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend()
    _save(figure, path)


def _figure(columns: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(4.2 * columns, 3.4), squeeze=False)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
