"""What a trainer under a workflow writes down: metrics by update and evaluation, costs, and TRL's completion log."""

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from transformers import TrainerCallback

from turngrpo.trainer.measuring.metrics import COST_NAMES, Meter, evaluation_intervals, scored_metrics
from turngrpo.trainer.objective.iteration import MicroBatch, ScoredRollout
from turngrpo.trainer.processes import is_main_process
from turngrpo.trainer.showing import visible

COMPLETION_COLUMNS = ("prompt", "completion", "advantages")
SHOWN_TURNS = 4  # of a log where num_completions_to_print says nothing: a screen
SHOWN_CHARACTERS = 600  # of a prompt or a completion, from both of its ends
# Chance makes a rollout of constant groups now and then; as many in a row are a reward that tells nothing apart, or a
# policy that always says the same.
CONSTANT_ROLLOUTS = 5


def synchronize() -> None:
    """Wait for the accelerator, where there is one: a clock that is read before it has ended measures nothing."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class UpdateLog:
    """Means, peaks and costs of one update, gathered from all processes into TRL's metrics.

    `metrics` are the trainer's own by mode, which its `log` averages; seconds are this process's, tokens those of all.
    """

    def __init__(
        self,
        metrics: Mapping[str, dict[str, list[Any]]],
        reward_names: Sequence[str],
        turn_reward_names: Sequence[str],
    ):
        self.metrics, self.reward_names, self.turn_reward_names = metrics, reward_names, turn_reward_names
        self._meter, self._costs = Meter(), dict.fromkeys(COST_NAMES, 0.0)
        self._constant = 0  # rollouts in a row whose groups were all constant

    # ---- costs ----

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of what runs inside to `time/<name>`, what it left to an accelerator included."""
        synchronize()
        started = time.perf_counter()
        yield
        synchronize()
        self.add_cost(f"time/{name}", time.perf_counter() - started)

    def add_cost(self, name: str, amount: float) -> None:
        self._costs[name] += amount

    @property
    def pending_costs(self) -> dict[str, float]:
        """Costs since the last update was logged, such as those of the last checkpoint."""
        return dict(self._costs)

    def whole_costs(self) -> dict[str, float]:
        """Return the costs with the tokens of all processes."""
        everywhere = gather_object([self._costs])
        return {
            name: sum(costs[name] for costs in everywhere) if name.startswith("tokens/") else amount
            for name, amount in self._costs.items()
        }

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Keep the costs of an evaluation apart from those of the update around it."""
        costs, self._costs = self._costs, dict.fromkeys(COST_NAMES, 0.0)
        try:
            yield
        finally:
            self._costs = costs

    # ---- an update ----

    def add_rollout(self, rollout: ScoredRollout, tokens_seen: int) -> None:
        """Log the metrics of a rollout that is trained on; `tokens_seen` is the run's count up to it."""
        metrics = self.metrics["train"]
        metrics["num_tokens"] = [tokens_seen]
        for name, value in scored_metrics([rollout], self.reward_names, self.turn_reward_names).items():
            metrics[name].append(value)
        self._constant = self._constant + 1 if metrics["frac_reward_zero_std"][-1] == 1 else 0
        if self._constant == CONSTANT_ROLLOUTS and is_main_process():
            warnings.warn(
                f"in each of the last {CONSTANT_ROLLOUTS} rollouts all members of every group had the same reward "
                "(frac_reward_zero_std is 1), so that no trajectory has an advantage: look at some turns "
                "(log_completions=True), at the rewards by function, and at num_generations and temperature",
                stacklevel=2,
            )

    def add_logged(self, pending: dict[str, list[float]], mode: str) -> None:
        """Log what reward functions of all processes gave to TRL's log_metric, and empty it."""
        everywhere: dict[str, list[float]] = {}
        for part in gather_object([dict(pending)]):
            for name, values in part.items():
                everywhere.setdefault(name, []).extend(values)
        for name, values in everywhere.items():
            self.metrics[mode][name].append(sum(values) / len(values))
        pending.clear()

    def add_tokens(self, batch: MicroBatch, kl: torch.Tensor | None, stats: Mapping[str, torch.Tensor]) -> None:
        """Add what one micro-batch measured; every mean is over the response tokens of the whole update."""
        tokens = float(stats["tokens"])
        self.add_cost("tokens/optimisation", tokens)
        for name in ("ratio/mean", "clip/active", "clip/outside"):
            self._meter.add_mean(name, float(stats[name]) * tokens, tokens)
        self._meter.add_peak("ratio/max", float(stats["ratio/max"]))
        self._meter.add_mean("entropy", float(batch.entropy.sum()), tokens)
        if kl is not None:
            self._meter.add_mean("kl", float(kl.detach().sum()), tokens)

    def add_behavior_gap(self, gap: torch.Tensor, mask: torch.Tensor) -> None:
        """Add |scored - recorded| of every response token, (n, T)."""
        self._meter.add_mean("behavior_gap/mean", float(gap.sum()), float(mask.sum()))
        self._meter.add_peak("behavior_gap/max", float(gap.max()))

    def finish_update(self, step_time: float) -> None:
        """Log what all processes measured in one update, and start again."""
        whole, metrics = Meter(), self.metrics["train"]
        for meter in gather_object([self._meter]):
            whole.merge(meter)
        for name, value in (whole.flush() | self.whole_costs() | {"step_time": step_time}).items():
            metrics[name].append(value)
            if name.endswith("/max"):  # TRL logs the mean over the updates since the last log
                metrics[name] = [max(metrics[name])]
        self._meter, self._costs = Meter(), dict.fromkeys(COST_NAMES, 0.0)


class EvaluationLog:
    """The rollouts of one evaluation with the loss and KL of their own turns; `limit` rows are not repetitions.

    `seed` is that of the bootstrap of its intervals.
    """

    def __init__(self, limit: int | None = None, seed: int = 0):
        self.limit, self.seed = limit, seed
        self.rollouts: list[ScoredRollout] = []
        self._losses: list[float] = []
        self._kl: list[float] = []

    @property
    def rows(self) -> int:
        """Trajectories of all processes so far."""
        return sum(len(rollout.trajectories) for rollout in self.rollouts)

    def add(self, rollout: ScoredRollout, losses: torch.Tensor, kl: float | None) -> None:
        """Add a batch: the losses (N,) of its turns, and the sum of the KL of all own tokens."""
        self.rollouts.append(rollout)
        self._losses.append(float(losses.sum()))
        if kl is not None:
            self._kl.append(kl)

    def metrics(self, log: UpdateLog, loss_type: str) -> dict[str, float]:
        """Return the metrics over every trajectory; `loss` weighs batches as the objective does."""
        metrics = scored_metrics(self.rollouts, log.reward_names, log.turn_reward_names)
        metrics |= evaluation_intervals(self.rollouts, self.seed)
        tokens = [sum(turn.completion_tokens for turn in rollout.turns) for rollout in self.rollouts]
        groups = [len(rollout.constant_groups()) for rollout in self.rollouts]
        shares = tokens if loss_type == "dapo" else groups
        parts = gather_object([(self._losses, sum(self._kl))])  # each process has its own turns'
        losses = [sum(batch) for batch in zip(*(part for part, _ in parts), strict=True)]
        metrics["loss"] = sum(n * loss for n, loss in zip(shares, losses, strict=True)) / sum(shares)
        if self._kl:
            metrics["kl"] = sum(part for _, part in parts) / sum(tokens)
        for name, values in log.metrics["eval"].items():  # what reward functions logged
            metrics[name] = sum(values) / len(values)
        log.metrics["eval"].clear()
        metrics |= {name: cost for name, cost in log.whole_costs().items() if cost}
        return {name: value for name, value in metrics.items() if value == value}  # NaN: not observed


class CompletionLog:
    """TRL's table of completions, one row per turn where it is asked for; texts are kept until it is written.

    `columns` are the trainer's `_logs`; TRL bounds them by prompts, with many turns they are cleared per rollout.
    """

    def __init__(self, columns: dict[str, Any], tokenizer: Any, names: Sequence[str], is_wanted: bool):
        self.columns, self.tokenizer, self.names, self.is_wanted = columns, tokenizer, names, is_wanted
        for name in COMPLETION_COLUMNS:
            columns[name] = []
        columns["rewards"].default_factory = columns["extra"].default_factory = list

    def add(self, rollout: ScoredRollout, mode: str, logged: dict[str, list[Any]]) -> None:
        """Add the turns of a rollout; what reward functions gave to TRL's log_extra stands at every turn."""
        indices = rollout.own_turns if self.is_wanted else []
        rows = [self._row(rollout, index, mode, logged) for index in indices]
        logged.clear()
        rows = gather_object(rows) if self.is_wanted else rows
        for name in COMPLETION_COLUMNS:
            self.columns[name].extend(row[name] for row in rows)
        for kind in ("rewards", "extra"):
            for name in dict.fromkeys(name for row in rows for name in row[kind]):
                self.columns[kind][name].extend(row[kind].get(name) for row in rows)

    def _row(self, rollout: ScoredRollout, index: int, mode: str, logged: dict[str, list[Any]]) -> dict[str, Any]:
        turn, owner = rollout.turns[index], int(rollout.trajectory_ids[index])
        group, member, _ = rollout.places[index]
        values = rollout.rewards_per_func[owner].tolist() + rollout.turn_rewards_per_func[index].tolist()
        extra = {name: column[owner - rollout.own.start] for name, column in logged.items()}
        return {
            "prompt": self.tokenizer.decode(turn.prompt_ids),
            "completion": turn.text,
            "advantages": float(rollout.advantages[index]),
            "rewards": dict(zip(self.names, values, strict=True)),
            "extra": {"split": mode, "group": group, "member": member, "step": turn.step} | extra,
        }

    def show(self, update: int, count: int) -> None:
        """Print up to `count` turns from everywhere in the log, one below the other."""
        turns, console = len(self.columns["prompt"]), Console()
        for index in [place * turns // count for place in range(min(count, turns))] if count < turns else range(turns):
            rewards = {name: values[index] for name, values in self.columns["rewards"].items()}
            extra = {name: values[index] for name, values in self.columns["extra"].items()}
            place = ", ".join(f"{name} {value}" for name, value in extra.items())
            console.print(Rule(escape(visible(f"update {update}, {place}")), align="left"))
            console.print(shortened(self.columns["prompt"][index]), style="dim", markup=False, highlight=False)
            console.print(shortened(self.columns["completion"][index]), markup=False, highlight=False)
            numbers = [f"{name} {value:.3g}" for name, value in rewards.items() if value == value]
            numbers.append(f"advantage {self.columns['advantages'][index]:+.3g}")
            console.print("  ".join(numbers), style="bold", markup=False, highlight=False)

    def clear(self) -> None:
        for column in self.columns.values():
            column.clear()

    def state(self) -> dict[str, Any]:
        """Return the rows as plain values."""
        return {name: list(self.columns[name]) for name in COMPLETION_COLUMNS} | {
            kind: {name: list(values) for name, values in self.columns[kind].items()} for kind in ("rewards", "extra")
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the rows of `state`."""
        for name, values in state.items():
            self.columns[name].clear()
            (self.columns[name].update if isinstance(values, dict) else self.columns[name].extend)(values)


def shortened(text: str) -> str:
    """Return the two ends of a long text, which steers no terminal, and how many characters are left out between them.

    >>> shortened("a" * 400 + "b" * 400)[295:330]
    'aaaaa ... [200 characters] ... bbbb'
    """
    text = visible(text)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} ... [{len(text) - SHOWN_CHARACTERS} characters] ... {text[-half:]}"


class OptimizerTimer(TrainerCallback):
    """Adds the seconds of every optimizer step to `time/optimisation`."""

    def __init__(self, log: UpdateLog):
        self.log = log

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        self.started = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        self.log.add_cost("time/optimisation", time.perf_counter() - self.started)
