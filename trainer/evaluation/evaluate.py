"""Evaluation of a policy: trajectories, metrics with their intervals, and where they come from."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from transformers import TrainerState

from turngrpo.rewards import answer_contains, answer_f1
from turngrpo.trainer.checks import check_names, check_weights
from turngrpo.trainer.config import TurnGRPOConfig
from turngrpo.trainer.evaluation.intervals import (
    BALANCED,
    RESAMPLES,
    Observations,
    intervals,
    observe,
    percentiles,
    row_weights,
    wilson,
)
from turngrpo.trainer.forward.policy import Policy, evaluating
from turngrpo.trainer.forward.scoring import Reference, Scorer
from turngrpo.trainer.measuring.metrics import SHARES, balanced, rollout_metrics, scored_metrics, trajectory_measures
from turngrpo.trainer.objective.iteration import ScoredRollout, score_rollout
from turngrpo.trainer.processes import is_main_process, own_share
from turngrpo.trainer.reading.chat_format import eos_ids
from turngrpo.trainer.reading.rollout import (
    EVAL_ITERATION,
    Completion,
    Engine,
    Request,
    TokenCounts,
    Trajectory,
    collect,
    progress,
    rollout_progress,
)
from turngrpo.trainer.reading.trial import hand_over
from turngrpo.trainer.reward_calls import call_rewards, call_turn_rewards, reward_arguments, reward_name
from turngrpo.trainer.sampling.transformers_engine import TransformersEngine

THIRDS = ("first third", "middle third", "last third")


@dataclass(frozen=True)
class Evaluation:
    """What one policy did on the rows: its rollout, metrics by name, 95% intervals, and a breakdown of the metrics.

    breakdown["context_tokens" or "evidence"][bin] holds "rows" and the metrics of those rows.
    """

    rollout: ScoredRollout
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    breakdown: dict[str, dict[str, dict[str, float]]]
    seconds: float
    observations: Observations

    @property
    def trajectories(self) -> list[Any]:
        return self.rollout.trajectories

    def summary(self) -> dict[str, Any]:
        """Return everything but the trajectories, ready for JSON."""
        intervals = {name: list(pair) for name, pair in self.intervals.items()}
        return {
            "metrics": self.metrics,
            "intervals": intervals,
            "breakdown": self.breakdown,
            "seconds": self.seconds,
        }


def paired_difference(
    first: Evaluation, second: Evaluation, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, dict[str, float | list[float]]]:
    """Return by metric the difference second - first with its 95% interval; both evaluated the same rows.

    The bootstrap draws the same rows (or clusters) for both. Shares that agree on all R of them may still differ on as
    many of those not seen as Wilson's interval of 0 of R allows. Raises ValueError where the numbers of rows differ.
    """
    rows = len(first.observations.sums), len(second.observations.sums)
    if rows[0] != rows[1]:
        raise ValueError(f"the evaluations have {rows[0]} and {rows[1]} rows, expected the same rows in both")
    names = [name for name in first.observations.names if name in second.observations.names]
    weights = row_weights(rows[0], resamples, seed)
    samples = [
        part.means(weights)[:, [part.names.index(name) for name in names]]
        for part in (first.observations, second.observations)
    ]
    bounds = percentiles(samples[1] - samples[0], names)
    for name in (*SHARES, BALANCED):
        if bounds.get(name) == (0.0, 0.0):
            unseen = wilson(0.0, min(part.observations.rows_with(name) for part in (first, second)))[1]
            bounds[name] = (-unseen, unseen)
    return {
        name: {"difference": second.metrics[name] - first.metrics[name], "interval": list(bounds[name])}
        for name in bounds
        if name in first.metrics and name in second.metrics
    }


def evaluate_policy(
    model: Any,
    tokenizer: Any,
    workflow: Any,
    rows: Sequence[dict[str, Any]],
    config: TurnGRPOConfig,
    reward_funcs: Sequence[Callable[..., Any]] = (),
    turn_reward_funcs: Sequence[Callable[..., Any]] = (),
    members: int = 1,
    label: str = "evaluation",
    reference: Reference | None = None,
    autocast: Callable[[], Any] = contextlib.nullcontext,
    resamples: int = RESAMPLES,
    engine: Engine | None = None,
    cluster: str | None = None,
) -> Evaluation:
    """Read every row `members` times with the evaluation's sampling and return what came of it.

    The noise of member m of row i is that of (eval_seed, i, m, turn), so that policies are compared on the same noise.
    `engine` samples in the place of `model`, which may then be None. `reference` adds `kl`, the exact
    KL(policy || reference) per response token. Intervals are over rows, or over the values of the column `cluster`,
    such as "project". Raises ValueError without rows, where rows lack that column, or for a reward function that does
    not return one number or None per trajectory.
    Several processes must all call it: each reads its share of the rows, and all return the same.
    """
    if not rows or members < 1:
        raise ValueError(f"found {len(rows)} rows and members={members}, expected at least one of each")
    if cluster is not None and (without := [row for row in rows if row.get(cluster) is None]):
        raise ValueError(
            f"{len(without)} of {len(rows)} rows have no {cluster}: expected one in every row to cluster by"
        )
    names = [reward_name(f) for f in reward_funcs], [reward_name(f) for f in turn_reward_funcs]
    check_names(names[0] + names[1])
    check_weights(config, *names)
    hand_over(workflow, tokenizer, config, rows[0])
    policy = None if model is None else Policy(model, autocast)
    if engine is None:
        assert policy is not None
        engine = own_engine(policy, tokenizer, config)
    engine.refresh()
    started = time.perf_counter()
    repeated = [row for row in rows for _ in range(members)]
    groups, numbers = [i // members for i in range(len(repeated))], [i % members for i in range(len(repeated))]
    share = own_share(len(rows))
    own = slice(share.start * members, share.stop * members)
    given = repeated[own], groups[own], numbers[own], config.eval_seed, EVAL_ITERATION
    hidden = bool(config.disable_tqdm) or not is_main_process()
    with rollout_progress(label, len(repeated[own]), hidden) as on_turn:
        trajectories = gather_object(collect(workflow, engine, tokenizer, *given, on_turn, config.max_turns))
    seconds = time.perf_counter() - started
    logged: dict[str, list[float]] = {}
    log_metric = lambda name, value: logged.setdefault(name, []).append(value)  # noqa: E731
    rollout = score_trajectories(
        trajectories, tokenizer, config, reward_funcs, turn_reward_funcs, workflow, log_metric
    )
    metrics = scored_metrics([rollout], *names) if reward_funcs else rollout_metrics(trajectories)
    measures = [_measures(rollout, index, names[0] if reward_funcs else None) for index in range(len(trajectories))]
    observations = observe(measures, groups)
    totals = observations.means(np.ones((1, len(rows))))[0]
    if cluster is not None:
        observations = observations.clustered([row[cluster] for row in rows])
    metrics |= {name: sum(values) / len(values) for name, values in logged.items()}
    metrics |= {name: float(v) for name, v in zip(observations.names, totals, strict=True) if name not in metrics}
    metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
    if reference is not None:
        assert policy is not None
        metrics["kl"] = mean_kl(policy, reference, trajectories, tokenizer.pad_token_id, config, engine.share_prefix)
    return Evaluation(
        rollout=rollout,
        metrics=metrics,
        intervals=intervals(observations, SHARES, resamples, config.eval_seed),
        breakdown=_breakdown(trajectories, measures, tokenizer),
        seconds=seconds,
        observations=observations,
    )


def own_engine(policy: Policy, tokenizer: Any, config: Any) -> TransformersEngine:
    """Return an engine that samples from a model in this process with the config's evaluation sampling."""
    engine = TransformersEngine(
        policy=policy,
        eos_ids=eos_ids(tokenizer, policy.causal.generation_config),
        pad_id=tokenizer.pad_token_id,
        max_new_tokens=config.max_completion_length or 256,
        max_prompt_length=config.max_prompt_length,
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        share_prefix=config.share_prefix,
        rollout_batch_tokens=config.rollout_batch_tokens,
    )
    engine.verify()
    return engine


class Silent:
    """An engine whose every reply is empty."""

    prompt_limit, share_prefix = sys.maxsize, False

    def __init__(self, eos_id: int):
        self.eos_id, self.counts = eos_id, TokenCounts()

    def refresh(self) -> None:
        pass

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion([self.eos_id], [0.0], "eos") for _ in requests]


def try_rewards(
    row: dict[str, Any],
    members: int,
    workflow: Any,
    tokenizer: Any,
    config: TurnGRPOConfig,
    reward_funcs: Sequence[Callable[..., Any]],
    turn_reward_funcs: Sequence[Callable[..., Any]],
) -> set[str]:
    """Reward a group of readings with empty replies, which need no model: a broken reward is found before any is.

    Returns the names of the metrics that come of it.
    """
    group = [row] * members, [0] * members, list(range(members))
    trajectories = collect(
        workflow, Silent(tokenizer.eos_token_id), tokenizer, *group, seed=0, iteration=0, max_turns=config.max_turns
    )
    logged: set[str] = set()
    log_metric = lambda name, value: logged.add(name)  # noqa: E731
    rollout = score_trajectories(
        trajectories, tokenizer, config, reward_funcs, turn_reward_funcs, workflow, log_metric
    )
    names = [reward_name(f) for f in reward_funcs], [reward_name(f) for f in turn_reward_funcs]
    return logged | set(scored_metrics([rollout], *names))


def score_trajectories(
    trajectories: list[Trajectory],
    tokenizer: Any,
    config: TurnGRPOConfig,
    reward_funcs: Sequence[Callable[..., Any]],
    turn_reward_funcs: Sequence[Callable[..., Any]],
    workflow: Any,
    log_metric: Callable[[str, float], None] = lambda name, value: None,
) -> ScoredRollout:
    """Call the reward functions as the trainer does and add everything up; there is no table for log_extra."""
    helpers = TrainerState(), lambda column, values: None, log_metric
    arguments = reward_arguments(trajectories, tokenizer, *helpers)
    per_func = call_rewards(reward_funcs, arguments, config.reward_timeout)
    per_turn = call_turn_rewards(turn_reward_funcs, trajectories, arguments, config.reward_timeout)
    options = config.advantage_options() | {"strict_format": workflow.strict_format}
    return score_rollout(trajectories, EVAL_ITERATION, per_func, per_turn, **options)


def mean_kl(
    policy: Policy,
    reference: Reference,
    trajectories: Sequence[Trajectory],
    pad_id: int,
    config: TurnGRPOConfig,
    share_prefix: bool,
) -> float:
    """Return the exact KL(policy || reference), mean over all response tokens; each process scores its share."""
    share = own_share(len(trajectories))
    trajectories = trajectories[share.start : share.stop]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    keys = [(trajectory.group, number) for trajectory in trajectories for number in range(len(trajectory.turns))]
    limit = config.max_tokens_per_microbatch
    hidden = bool(config.disable_tqdm) or not is_main_process()
    scorer = Scorer(
        policy,
        pad_id,
        reference,
        config.temperature,
        max_tokens=limit,
        share_prefix=share_prefix,
        bar=lambda turns: progress("evaluation: KL", turns, "turn", hidden),
    )
    with evaluating(policy.model):
        _, total = scorer.sum_kl(turns, keys=keys)
    parts = gather_object([(total, sum(turn.completion_tokens for turn in turns))])
    return sum(total for total, _ in parts) / sum(tokens for _, tokens in parts)


def _measures(rollout: ScoredRollout, index: int, reward_names: Sequence[str] | None) -> dict[str, list[float]]:
    """Return the observations of one trajectory by metric name, rewards and answer F1 and containment included."""
    trajectory: Any = rollout.trajectories[index]
    measures = trajectory_measures(trajectory)
    if "answer/accuracy" in measures:
        arguments: dict[str, Any] = {"trajectories": [trajectory], "answers": [trajectory.row["answers"]]}
        for name, function in (("answer/f1", answer_f1), ("answer/contains", answer_contains)):
            measures[name] = [v for v in function([None], [None], [None], **arguments) if v is not None]
    if reward_names is not None:
        values = [rollout.rewards[index], *rollout.rewards_per_func[index]]
        for name, value in zip(["reward", *(f"rewards/{n}/mean" for n in reward_names)], values, strict=True):
            measures[name] = [] if math.isnan(value) else [float(value)]
    return measures


def _breakdown(
    trajectories: Sequence[Trajectory], measures: Sequence[dict[str, list[float]]], tokenizer: Any
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the metrics by context length (in powers of two of tokens) and by where the last evidence lies."""
    lengths: dict[int, str] = {}
    places: dict[int, str] = {}
    for trajectory in trajectories:
        if trajectory.group not in lengths:
            lengths[trajectory.group] = _length_bin(trajectory, tokenizer)
            places[trajectory.group] = evidence_place(trajectory)
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for kind, bins in (("context_tokens", lengths), ("evidence", places)):
        tables[kind] = {}
        for label in sorted(
            set(bins.values()), key=lambda text: (len(text), text) if kind != "evidence" else (0, text)
        ):
            pooled: dict[str, list[float]] = {}
            for trajectory, one in zip(trajectories, measures, strict=True):
                if bins[trajectory.group] == label:
                    for name, values in one.items():
                        pooled.setdefault(name, []).extend(values)
            means = balanced({name: sum(values) / len(values) for name, values in pooled.items() if values})
            tables[kind][label] = {"rows": float(sum(value == label for value in bins.values()))} | means
    return tables


def _length_bin(trajectory: Trajectory, tokenizer: Any) -> str:
    if "chunks" in trajectory.row:
        texts = [chunk["text"] for chunk in trajectory.row["chunks"]]
        tokens = sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    else:
        tokens = len(trajectory.turns[0].prompt_ids)
    return f"up to {1 << max(tokens - 1, 0).bit_length()}"


def evidence_place(trajectory: Trajectory) -> str:
    """Return the third of the document that T* lies in, or "no evidence" where no chunk is labelled as evidence."""
    chunks = trajectory.row.get("chunks") or []
    if trajectory.last_evidence is None or not any(chunk.get("evidence") for chunk in chunks):
        return "no evidence"
    return THIRDS[min(3 * (trajectory.last_evidence - 1) // len(chunks), 2)]
