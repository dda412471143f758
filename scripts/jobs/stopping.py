"""When a training ends and what it leaves: early stopping and the best checkpoint, checked before and told after."""

import difflib
import math
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arguments.commands import TrainArguments
from transformers import IntervalStrategy
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from turngrpo.trainer import TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.evaluation.intervals import BALANCED
from turngrpo.trainer.measuring.convergence import convergence_of
from turngrpo.trainer.showing import counted

AS_IN = "--eval_strategy steps --eval_steps 10 --save_steps 10 --load_best_model_at_end true"


def check_early_stopping(options: TrainArguments, config: TurnGRPOConfig) -> None:
    """Raise ValueError where early stopping is asked for, and nothing would be evaluated, kept and gone back to."""
    patience, threshold = options.early_stopping_patience, options.early_stopping_threshold
    if not 0 <= threshold < math.inf:
        raise ValueError(f"--early_stopping_threshold is {threshold}: expected a finite number >= 0")
    if patience is None:
        if threshold:
            raise ValueError("--early_stopping_threshold says nothing without --early_stopping_patience: give both")
        return
    if patience < 1:
        raise ValueError(f"--early_stopping_patience is {patience}: expected 1 or more evaluations")
    strategy = IntervalStrategy(config.eval_strategy).value
    if strategy == "no" or not config.load_best_model_at_end:
        raise ValueError(
            f"--early_stopping_patience {patience} with --eval_strategy {strategy} and --load_best_model_at_end "
            f"{str(config.load_best_model_at_end).lower()}: expected evaluations along the way, the best of which is "
            f"gone back to, as in {AS_IN} --metric_for_best_model eval_reward"
        )


def check_best_metric(config: TurnGRPOConfig, names: Collection[str]) -> None:
    """Raise ValueError where no evaluation would have the metric by which the best checkpoint is chosen."""
    metric = (config.metric_for_best_model or "loss").removeprefix("eval_")
    if metric not in {*names, BALANCED, "kl", "loss"}:
        near = difflib.get_close_matches(metric, names, 1) or ["reward"]
        raise ValueError(
            f"--metric_for_best_model is {config.metric_for_best_model!r}, which no evaluation measures: did you mean "
            f"eval_{near[0]}? trainer/measuring/README.md lists all"
        )


def outcome(trainer: TurnGRPOTrainer, adapter: Path | None, patience: int | None) -> dict[str, Any]:
    """Return what became of the training: its end, whether the validation reward converged, the best, the exported."""
    state, config, best = trainer.state, trainer.args, None
    metric = f"eval_{(config.metric_for_best_model or 'reward').removeprefix('eval_')}"
    evaluated = {log["step"]: log[metric] for log in state.log_history if metric in log}
    if evaluated:
        update = (min if config.greater_is_better is False else max)(evaluated, key=evaluated.__getitem__)
        checkpoint = Path(config.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{update}"
        name = checkpoint.name if checkpoint.is_dir() else None
        best = {"metric": metric, "value": evaluated[update], "update": update, "checkpoint": name}
        best |= {"evaluations": len(evaluated), "as_good": list(evaluated.values()).count(evaluated[update])}
    return {
        "updates": state.global_step,
        "stopped_early": patience is not None and state.global_step < state.max_steps,
        "convergence": {"metric": "eval_reward", **asdict(convergence_of(state.log_history))},
        "best": best,
        "exported": {
            "version": adapter.name if adapter else None,
            "update": trainer.weights_update,
            "is_best": best is not None and trainer.weights_update == best["update"],
        },
    }


def ending(summary: dict[str, Any]) -> str:
    """Say in a sentence how the training ended, whether it converged, and what is left."""
    found, best, exported = summary["convergence"], summary["best"], summary["exported"]
    text = counted(summary["updates"], "update")
    if summary["stopped_early"]:
        text += ", then no better validation for as long as the early stopping waits"
    text += f"; validation reward: {found['verdict']}"
    if found["slope"] is not None:
        low, high = found["interval"]
        text += f" ({found['slope']:+.2g} per update, 95% [{low:+.2g}, {high:+.2g}])"
    if best is not None:
        kept = best["checkpoint"] or f"update {best['update']}, without a checkpoint"
        told = best["evaluations"] > best["as_good"]  # apart from the others
        others = "" if told else f", as in {counted(best['evaluations'], 'evaluation')} of {best['evaluations']}"
        text += f"; best {best['metric']} {best['value']:.3g} at {kept}{others}"
    what = f"adapter {exported['version']}" if exported["version"] else "model/"
    is_best = exported["is_best"] and best is not None and told
    which = "the best" if is_best else "the last" if exported["update"] == summary["updates"] else "one"
    return f"{text}; {what} is {which}, of update {exported['update']}"
