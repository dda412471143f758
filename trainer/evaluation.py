"""Evaluation of a policy: trajectories, metrics with bootstrap intervals, and where they come from."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import TrainerState

from turngrpo.rewards import answer_contains, answer_f1

from .callbacks import rollout_progress
from .checks import check_names
from .config import TurnGRPOConfig
from .engines import TransformersEngine
from .gates import GateDecision
from .iteration import ScoredRollout, score_rollout
from .metrics import balanced, rollout_metrics, scored_metrics, trajectory_measures
from .policy import Policy, evaluating
from .processes import own_share
from .reward_calls import call_rewards, call_turn_rewards, last_turns, reward_name
from .rollout import Completion, Engine, Request, Trajectory, Turn, collect
from .scoring import Reference, Scorer
from .turn_grpo_trainer import EVAL_ITERATION
from .workflows import GatedMemory

RESAMPLES = 1000
THIRDS = ("first third", "middle third", "last third")


class ForcedGates(GatedMemory):
    """The same model with its gates overridden: `check` and `exit` are True, False, or None (the model decides).

    check=True writes the turn's candidate where it has one, else memory stays; a turn that does not parse obeys the
    forced gates too, and still counts as unparsed.
    """

    def __init__(self, check: bool | None = None, exit: bool | None = None, **options: Any):
        super().__init__(**options)
        self.check, self.exit = check, exit

    def decide(self, turn: Turn) -> GateDecision:
        own = super().decide(turn) or GateDecision(check=False, candidate="", exit=False)
        check = own.check if self.check is None else self.check
        return GateDecision(check, own.candidate, own.exit if self.exit is None else self.exit)

    def write(self, state: Any, turn: Turn, candidate: str) -> None:
        if candidate:
            super().write(state, turn, candidate)

    def advance(self, state: Any, turn: Turn) -> bool:
        reading = not state.answering
        goes_on = super().advance(state, turn)
        state.parsed &= not reading or super().decide(turn) is not None
        return goes_on


TRIVIAL_GATES: dict[str, dict[str, bool]] = {
    "always no": {"check": False},
    "always yes": {"check": True},
    "read to the end": {"exit": False},
    "stop at once": {"exit": True},
}


@dataclass(frozen=True)
class Observations:
    """Sums and counts (R rows, M metrics) of every observation of a metric, so that rows can be resampled."""

    names: list[str]
    sums: np.ndarray  # (R, M)
    counts: np.ndarray  # (R, M)

    def means(self, weights: np.ndarray) -> np.ndarray:
        """Return (S, M) means under row weights (S, R); NaN where nothing was observed."""
        counts = weights @ self.counts
        with np.errstate(invalid="ignore"):
            values = np.where(counts > 0, weights @ self.sums / np.maximum(counts, 1e-12), np.nan)
        return values


@dataclass(frozen=True)
class Evaluation:
    """What one policy did on the rows: `metrics` by name, 95% `intervals`, and a `breakdown` of the metrics.

    breakdown["context_tokens" or "evidence"][bin] holds "rows" and the metrics of those rows.
    """

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    breakdown: dict[str, dict[str, dict[str, float]]]
    seconds: float
    observations: Observations

    def summary(self) -> dict[str, Any]:
        """Return everything but the trajectories, ready for JSON."""
        intervals = {name: list(pair) for name, pair in self.intervals.items()}
        return {
            "metrics": self.metrics,
            "intervals": intervals,
            "breakdown": self.breakdown,
            "seconds": self.seconds,
        }


def row_weights(rows: int, resamples: int, seed: int) -> np.ndarray:
    """Return (resamples, rows) how often the bootstrap draws each row; the same for the same arguments."""
    return np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=resamples).astype(float)


def _percentiles(samples: np.ndarray, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    columns = dict(zip(names, samples.T, strict=True))
    sides = [columns.get(f"update_accuracy/{side}") for side in ("evidence", "evidence_free")]
    if sides[0] is not None and sides[1] is not None:
        columns["update_accuracy/balanced"] = (sides[0] + sides[1]) / 2
    intervals = {}
    for name, column in columns.items():
        seen = column[~np.isnan(column)]
        if len(seen):
            low, high = np.percentile(seen, [2.5, 97.5])
            intervals[name] = (float(low), float(high))
    return intervals


def bootstrap_intervals(
    observations: Observations, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return the 95% percentile interval of every metric's mean, resampling rows with all their members."""
    weights = row_weights(len(observations.sums), resamples, seed)
    return _percentiles(observations.means(weights), observations.names)


def paired_difference(
    first: Evaluation, second: Evaluation, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, dict[str, float | list[float]]]:
    """Return by metric the difference second - first with its 95% interval; both evaluated the same rows.

    Raises ValueError where they have different numbers of rows.
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
    intervals = _percentiles(samples[1] - samples[0], names)
    return {
        name: {"difference": second.metrics[name] - first.metrics[name], "interval": list(intervals[name])}
        for name in intervals
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
) -> Evaluation:
    """Read every row `members` times with the evaluation's sampling and return what came of it.

    The noise of member m of row i is that of (eval_seed, i, m, turn), so that policies are compared on the same noise.
    `engine` samples in the place of `model`, which may then be None. `reference` adds `kl`, the exact
    KL(policy || reference) per response token. Raises ValueError without rows, or for a reward function that does not
    return one number or None per trajectory.
    Several processes must all call it: each reads its share of the rows, and all return the same.
    """
    if not rows or members < 1:
        raise ValueError(f"found {len(rows)} rows and members={members}, expected at least one of each")
    names = [reward_name(f) for f in reward_funcs], [reward_name(f) for f in turn_reward_funcs]
    check_names(names[0] + names[1])
    workflow.bind(tokenizer, config)
    policy = None if model is None else Policy(model, autocast)
    if engine is None:
        assert policy is not None
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
    engine.refresh()
    started = time.perf_counter()
    repeated = [row for row in rows for _ in range(members)]
    groups, numbers = [i // members for i in range(len(repeated))], [i % members for i in range(len(repeated))]
    share = own_share(len(rows))
    own = slice(share.start * members, share.stop * members)
    given = repeated[own], groups[own], numbers[own], config.eval_seed, EVAL_ITERATION
    with rollout_progress(label, len(repeated[own]), config.disable_tqdm) as on_turn:
        trajectories = gather_object(collect(workflow, engine, tokenizer, *given, on_turn))
    seconds = time.perf_counter() - started
    logged: dict[str, list[float]] = {}
    log_metric = lambda name, value: logged.setdefault(name, []).append(value)  # noqa: E731
    rollout = score_trajectories(
        trajectories, tokenizer, config, reward_funcs, turn_reward_funcs, workflow, log_metric
    )
    metrics = scored_metrics([rollout], *names) if reward_funcs else rollout_metrics(trajectories)
    measures = [_measures(rollout, index, names[0] if reward_funcs else None) for index in range(len(trajectories))]
    observations = _observe(measures, groups)
    totals = observations.means(np.ones((1, len(rows))))[0]
    metrics |= {name: sum(values) / len(values) for name, values in logged.items()}
    metrics |= {name: float(v) for name, v in zip(observations.names, totals, strict=True) if name not in metrics}
    metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
    if reference is not None:
        assert policy is not None
        sharing = getattr(engine, "share_prefix", False)  # where the model itself sampled and knows whether it can
        metrics["kl"] = mean_kl(policy, reference, trajectories, tokenizer.pad_token_id, config, sharing)
    return Evaluation(
        trajectories=trajectories,
        metrics=metrics,
        intervals=bootstrap_intervals(observations, resamples, config.eval_seed),
        breakdown=_breakdown(trajectories, measures, tokenizer),
        seconds=seconds,
        observations=observations,
    )


def eos_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """Return every id that ends a completion: the tokenizer's EOS and those the model declares."""
    declared = getattr(generation_config, "eos_token_id", None)
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    ids = list(dict.fromkeys(token for token in (tokenizer.eos_token_id, *declared) if token is not None))
    if not ids:
        raise ValueError("neither tokenizer nor model has an EOS token, which ends a turn: set tokenizer.eos_token")
    return ids


class Silent:
    """An engine whose every reply is empty."""

    def __init__(self, eos_id: int):
        self.eos_id = eos_id

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
) -> None:
    """Reward a group of readings with empty replies, which need no model: a broken reward is found before any is."""
    group = [row] * members, [0] * members, list(range(members))
    trajectories = collect(workflow, Silent(tokenizer.eos_token_id), tokenizer, *group, seed=0, iteration=0)
    score_trajectories(trajectories, tokenizer, config, reward_funcs, turn_reward_funcs, workflow)


def score_trajectories(
    trajectories: list[Trajectory],
    tokenizer: Any,
    config: TurnGRPOConfig,
    reward_funcs: Sequence[Callable[..., Any]],
    turn_reward_funcs: Sequence[Callable[..., Any]],
    workflow: Any,
    log_metric: Callable[[str, float], None] = lambda name, value: None,
) -> ScoredRollout:
    """Call the reward functions as the trainer does (on the last turn, in TRL's form) and add everything up."""
    prompts, completions, ids = last_turns(trajectories, tokenizer)
    columns = {name: [t.row[name] for t in trajectories] for name in trajectories[0].row if name != "prompt"}
    arguments: dict[str, Any] = columns | {"prompts": prompts, "completions": completions, "completion_ids": ids}
    arguments |= {"trajectories": trajectories, "trainer_state": TrainerState(), "log_metric": log_metric}
    arguments["log_extra"] = lambda column, values: None  # there is no table
    per_func = call_rewards(reward_funcs, arguments)
    table = torch.tensor(per_func, dtype=torch.float32).reshape(len(per_func), len(trajectories)).T  # (B, F)
    weights = torch.tensor(config.reward_weights or [1.0] * len(per_func), dtype=torch.float32)
    per_turn = call_turn_rewards(turn_reward_funcs, trajectories, arguments)
    return score_rollout(trajectories, EVAL_ITERATION, table, weights, per_turn, config, workflow.strict_format)


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
    scorer = Scorer(policy, pad_id, reference, config.temperature, max_tokens=limit, share_prefix=share_prefix)
    total = tokens = 0.0
    with evaluating(policy.model):
        for _, batch, scores in scorer.score(turns, scorer.plan(turns, keys=keys)):
            assert scores.kl is not None
            total, tokens = total + float(scores.kl.sum()), tokens + float(batch.mask.sum())
    parts = gather_object([(total, tokens)])
    return sum(total for total, _ in parts) / sum(tokens for _, tokens in parts)


def _measures(rollout: ScoredRollout, index: int, reward_names: Sequence[str] | None) -> dict[str, list[float]]:
    """Return the observations of one trajectory by metric name, rewards and answer F1 and containment included."""
    trajectory = rollout.trajectories[index]
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


def _observe(measures: Sequence[dict[str, list[float]]], groups: Sequence[int]) -> Observations:
    names = list(dict.fromkeys(name for one in measures for name in one))
    place = {name: column for column, name in enumerate(names)}
    sums = np.zeros((max(groups) + 1, len(names)))  # (R, M)
    counts = np.zeros_like(sums)
    for one, group in zip(measures, groups, strict=True):
        for name, values in one.items():
            sums[group, place[name]] += sum(values)
            counts[group, place[name]] += len(values)
    return Observations(names, sums, counts)


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
