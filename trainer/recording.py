"""What TurnGRPOTrainer writes down: metrics by update and rollout, costs, and TRL's completion log by turn."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object

from .batching import TurnBatch
from .behavior import behavior_gap, default_tolerance, describe_gap
from .iteration import ScoredRollout
from .metrics import COST_NAMES, Meter, scored_metrics
from .policy import evaluating
from .scoring import Scores


class Recording:
    """The part of TurnGRPOTrainer that measures and logs; uses the trainer's `_metrics`, `_logs` and reward names."""

    _metrics: Any
    _logs: Any
    _pending_metrics: Any
    _pending_extra_logs: Any
    _tokenizer: Any
    state: Any
    reward_func_names: list[str]
    _turn_reward_names: list[str]
    loss_type: str
    log_completions: bool
    args: Any
    model: Any
    policy: Any
    scorer: Any

    def _start_recording(self) -> None:
        """TRL bounds its completion log by prompts; with many turns per trajectory it is cleared per rollout."""
        self._meter, self._costs = Meter(), dict.fromkeys(COST_NAMES, 0.0)
        self._evaluated: list[tuple[ScoredRollout, torch.Tensor, torch.Tensor | None]] = []
        for name in ("prompt", "completion", "advantages"):
            self._logs[name] = []
        self._logs["rewards"].default_factory = self._logs["extra"].default_factory = list

    # ---- costs ----

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._add_cost(f"time/{name}", time.perf_counter() - started)

    def _add_cost(self, name: str, amount: float) -> None:
        self._costs[name] += amount

    @property
    def pending_costs(self) -> dict[str, float]:
        """Costs since the last log, such as those of the last checkpoint."""
        return dict(self._costs)

    # ---- updates ----

    def _meter_tokens(self, stats: Any, scores: Scores, kl: torch.Tensor | None, batch: TurnBatch) -> None:
        """Add what one micro-batch measured; every mean is over the response tokens of the whole update."""
        tokens = float(batch.mask.sum())
        self._add_cost("tokens/optimisation", tokens)
        for name in ("ratio/mean", "clip/active", "clip/outside"):
            self._meter.add_mean(name, float(stats[name]) * tokens, tokens)
        self._meter.add_peak("ratio/max", float(stats["ratio/max"]))
        self._meter.add_mean("entropy", float(scores.entropy.sum()), tokens)
        if kl is not None:
            self._meter.add_mean("kl", float(kl.detach().sum()), tokens)

    def _log_update(self, step_time: float) -> None:
        """Log what all processes measured in one update; seconds are those of this process."""
        whole = Meter()
        for meter in gather_object([self._meter]):
            whole.merge(meter)
        metrics = self._metrics["train"]
        for name, value in (whole.flush() | self._whole_costs() | {"step_time": step_time}).items():
            metrics[name].append(value)
            if name.endswith("/max"):  # TRL logs the mean over the updates since the last log
                metrics[name] = [max(metrics[name])]
        self._meter, self._costs = Meter(), dict.fromkeys(COST_NAMES, 0.0)

    def _whole_costs(self) -> dict[str, float]:
        """Return the costs with the tokens of all processes."""
        everywhere = gather_object([self._costs])
        return {
            name: sum(costs[name] for costs in everywhere) if name.startswith("tokens/") else amount
            for name, amount in self._costs.items()
        }

    # ---- behavior check ----

    def _check_behavior(self, rollout: ScoredRollout) -> None:
        """Score every turn of a fresh rollout and compare with what was recorded at sampling."""
        count = lambda _, tokens: self._add_cost("tokens/behavior_check", tokens)  # noqa: E731
        scorer = replace(self.scorer, reference=None, timed=lambda _: contextlib.nullcontext(), count=count)
        with evaluating(self.model), self._timed("behavior_check"):
            plan = scorer.plan(rollout.turns, rollout.own_turns, rollout.clusters)
            for rows, batch, scores in scorer.score(rollout.turns, plan):
                self._compare_behavior(rollout, rows, batch, scores.logprobs)

    def _compare_behavior(
        self, rollout: ScoredRollout, indices: Sequence[int], batch: TurnBatch, logprobs: torch.Tensor
    ) -> None:
        """Measure |scored - recorded| and stop above the tolerance, naming the worst token."""
        gap = behavior_gap(logprobs, batch)
        self._meter.add_mean("behavior_gap/mean", float(gap.sum()), float(batch.mask.sum()))
        self._meter.add_peak("behavior_gap/max", float(gap.max()))
        default = default_tolerance(self.policy.dtype, self.args.rollout_engine)
        tolerance = self.args.behavior_tolerance or default
        if self.args.behavior_check != "off" and not float(gap.max()) <= tolerance:
            row = int(gap.amax(dim=1).argmax())
            name = rollout.turn_name(indices[row])
            raise RuntimeError(describe_gap(name, row, gap, batch, logprobs, tolerance, self._tokenizer))

    # ---- rollouts ----

    def _record(self, rollout: ScoredRollout, mode: str) -> None:
        """Log one rollout's metrics (an evaluation's are logged at its end) and its turns."""
        if mode == "train":
            self.state.num_input_tokens_seen += sum(len(t.prompt_ids) + len(t.completion_ids) for t in rollout.turns)
            self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
            values = scored_metrics([rollout], self.reward_func_names, self._turn_reward_names)
            for name, value in values.items():
                self._metrics[mode][name].append(value)
        pending: dict[str, list[float]] = {}
        for part in gather_object([dict(self._pending_metrics)]):
            for name, several in part.items():
                pending.setdefault(name, []).extend(several)
        for name, several in pending.items():
            self._metrics[mode][name].append(sum(several) / len(several))
        self._pending_metrics.clear()
        self._log_turns(rollout, mode)

    def _log_turns(self, rollout: ScoredRollout, mode: str) -> None:
        """Add one row per turn to TRL's completion log, where it is asked for; all texts are kept until it is written.

        What reward functions logged stands at every turn.
        """
        indices = rollout.own_turns if self.log_completions else []
        rows = [self._turn_row(rollout, index, mode) for index in indices]
        self._pending_extra_logs.clear()
        rows = gather_object(rows) if self.log_completions else rows
        for name in ("prompt", "completion", "advantages"):
            self._logs[name].extend(row[name] for row in rows)
        for kind in ("rewards", "extra"):
            for name in dict.fromkeys(name for row in rows for name in row[kind]):
                self._logs[kind][name].extend(row[kind].get(name) for row in rows)

    def _turn_row(self, rollout: ScoredRollout, index: int, mode: str) -> dict[str, Any]:
        turn, owner = rollout.turns[index], int(rollout.trajectory_ids[index])
        group, member, _ = rollout.places[index]
        values = rollout.rewards_per_func[owner].tolist() + rollout.turn_rewards_per_func[index].tolist()
        logged = {name: column[owner - rollout.own.start] for name, column in self._pending_extra_logs.items()}
        return {
            "prompt": self._tokenizer.decode(turn.prompt_ids),
            "completion": turn.text,
            "advantages": float(rollout.advantages[index]),
            "rewards": dict(zip(self.reward_func_names + self._turn_reward_names, values, strict=True)),
            "extra": {"split": mode, "group": group, "member": member, "step": turn.step} | logged,
        }

    def _clear_logs(self) -> None:
        for name in ("prompt", "completion", "advantages", "rewards", "extra"):
            self._logs[name].clear()

    # ---- evaluation ----

    @contextlib.contextmanager
    def _evaluation_recording(self) -> Iterator[None]:
        """Collect one evaluation's rollouts and costs apart from those of the update around it."""
        costs, self._costs, self._evaluated = self._costs, dict.fromkeys(COST_NAMES, 0.0), []
        try:
            yield
        finally:
            self._costs, self._evaluated = costs, []

    def _evaluation_metrics(self) -> dict[str, float]:
        """Return the metrics over every trajectory of one evaluation; `loss` weighs batches as the objective does."""
        rollouts = [rollout for rollout, _, _ in self._evaluated]
        metrics = scored_metrics(rollouts, self.reward_func_names, self._turn_reward_names)
        tokens = [sum(len(turn.completion_ids) for turn in rollout.turns) for rollout in rollouts]
        groups = [len(rollout.constant_groups()) for rollout in rollouts]
        shares = tokens if self.loss_type == "dapo" else groups
        losses = [float(losses.sum()) for _, losses, _ in self._evaluated]
        divergences = [float(kl.sum()) for _, _, kl in self._evaluated if kl is not None]
        parts = gather_object([(losses, sum(divergences))])  # each process has its own turns'
        whole = [sum(batch) for batch in zip(*(part for part, _ in parts), strict=True)]
        metrics["loss"] = sum(n * loss for n, loss in zip(shares, whole, strict=True)) / sum(shares)
        if divergences:
            metrics["kl"] = sum(part for _, part in parts) / sum(tokens)
        for name, values in self._metrics["eval"].items():  # what reward functions logged
            metrics[name] = sum(values) / len(values)
        metrics |= {name: cost for name, cost in self._whole_costs().items() if cost}
        self._metrics["eval"].clear()
        return {name: value for name, value in metrics.items() if value == value}  # NaN: not observed
