"""TurnGRPOTrainer: trl.GRPOTrainer with our generation step and our loss under a workflow; glue only, no maths."""

import contextlib
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from .batching import TurnBatch
from .callbacks import OptimizerTimer, rollout_progress
from .checks import (
    check_arguments,
    check_model,
    check_rewards,
    check_rows,
    check_without_workflow,
    showing_arguments_of,
)
from .engines import TokenCounts, TransformersEngine
from .exporting import Exporting
from .iteration import ScoredRollout, TrainingSlice, objective_weights, score_rollout
from .lora_layers import use_adapted_products
from .losses import clipped_surrogate, k3_kl
from .model_card import PAPER
from .policy import Policy, zero_dropout
from .processes import (
    engine_backward,
    gather_rollout,
    local_leaves,
    own_rows,
    process_count,
    sum_gradients,
    whole_weights,
)
from .recording import Recording
from .resume import Resumable
from .reward_calls import call_turn_rewards, checked_reward, last_turns, reward_name
from .rollout import Trajectory, collect
from .scoring import Reference, Scorer, Scores
from .vllm_engine import VllmEngine, make_vllm_engine
from .workflows import Workflow

EVAL_ITERATION = -1  # evaluation noise has a domain of its own, whatever eval_seed is

TurnRewardFunc = Callable[..., list[list[float | None]]]


class TurnGRPOTrainer(Exporting, Recording, Resumable, GRPOTrainer):
    """GRPO on trajectories of turns (GRU-Mem, arXiv 2602.10560); without a workflow it is trl.GRPOTrainer as it is.

    `workflow` drives the turns of a trajectory and `turn_reward_funcs` reward single turns; both are keyword-only, all
    other arguments are GRPOTrainer's. Under a workflow every option that is not honoured raises ValueError by name.
    """

    workflow: Workflow | None = None  # on the class too: tools make instances without __init__
    args: Any  # TurnGRPOConfig under a workflow
    model: Any
    ref_model: Any
    optimizer: Any
    engine: TransformersEngine | VllmEngine
    num_generations: Any
    num_generations_eval: Any
    _buffered_inputs: Any
    _evaluation_rows: int | None = None  # of the evaluation set, where a batch may hold more

    @showing_arguments_of(GRPOTrainer.__init__)
    def __init__(
        self,
        model: "str | PreTrainedModel | Any",
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *positional: Any,
        workflow: Workflow | None = None,
        turn_reward_funcs: TurnRewardFunc | list[TurnRewardFunc] | None = None,
        **kwargs: Any,
    ):
        self.workflow = workflow
        if workflow is None:
            check_without_workflow(args, turn_reward_funcs)
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
            return
        named = inspect.signature(GRPOTrainer.__init__).bind(self, model, reward_funcs, args, *positional, **kwargs)
        args = named.arguments["args"] = check_arguments(named.arguments)
        self._tag_names, self._name, self._paper = [*self._tag_names, "turngrpo"], "TurnGRPO", PAPER
        # TRL reloads the reference of a fully trained model from its config's path; ours is a snapshot.
        adapted = named.arguments.get("peft_config") or (not isinstance(model, str) and is_peft_model(model))
        beta, snapshot = args.beta, not adapted
        try:
            args.beta = 0.0 if snapshot else beta
            super().__init__(*named.args[1:], **named.kwargs)
        finally:
            args.beta = self.beta = beta
        with self.whole_weights():
            self._set_up_workflow(workflow, turn_reward_funcs)

    # ---- set-up under a workflow ----

    def _set_up_workflow(self, workflow: Workflow, turn_reward_funcs: Any) -> None:
        check_model(self.model, self.processing_class, self.beta, self.aux_loss_enabled)
        functions = turn_reward_funcs or []
        self.turn_reward_funcs = functions if isinstance(functions, list) else [functions]
        self._turn_reward_names = [reward_name(function) for function in self.turn_reward_funcs]
        self.reward_funcs = [checked_reward(function) for function in self.reward_funcs]
        check_rewards(self.args, workflow, self.reward_func_names, self._turn_reward_names)
        workflow.bind(self._tokenizer, self.args)
        evaluation = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for name, dataset in {"train": self.train_dataset, **evaluation}.items():
            check_rows(workflow, dataset, name, self.args, self.model)
        zero_dropout(self.model)
        use_adapted_products(self.model)
        if self.is_deepspeed_enabled and self.args.bf16:
            self.model.to(torch.bfloat16)  # as the engine will: reference and digests are of the weights that train
        if self.is_fsdp_enabled:
            self.model.to(self.args.device)  # which accelerate would leave on the CPU until training starts
        self._gradients: dict[str, torch.Tensor] = {}  # of this process, until the update gets them
        self.policy = Policy(self.model, self.accelerator.autocast)
        self.reference = Reference(self.policy) if self.beta else None
        if self.reference is not None and not is_peft_model(self.model):
            self.ref_model = self.reference.policy.model
        sampler = TransformersEngine(
            policy=self.policy,
            eos_ids=self.eos_token_ids,
            pad_id=self._tokenizer.pad_token_id,
            max_new_tokens=self.args.max_completion_length,
            max_prompt_length=self.args.max_prompt_length,
            temperature=self.temperature,
            share_prefix=self.args.share_prefix,
            rollout_batch_tokens=self.args.rollout_batch_tokens,
        )
        sampler.verify()
        with_vllm = self.args.rollout_engine == "vllm"
        self.engine = (
            make_vllm_engine(self.args, self.policy, self._tokenizer, self.eos_token_ids) if with_vllm else sampler
        )
        sampling: Any = {"temperature": self.args.eval_temperature, "top_p": self.args.eval_top_p}
        self.eval_engine = replace(self.engine, counts=TokenCounts(), **sampling)
        self._start_recording()
        self.scorer = Scorer(
            policy=self.policy,
            pad_id=self._tokenizer.pad_token_id,
            reference=self.reference,
            temperature=self.temperature,
            kl=self.args.kl,
            max_tokens=self.args.max_tokens_per_microbatch,
            share_prefix=sampler.share_prefix,
            timed=self._timed,
            count=lambda name, tokens: self._add_cost(f"tokens/{name}", tokens),
        )
        self.add_callback(OptimizerTimer(self._add_cost))

    # ---- generation step: replaces GRPOTrainer._prepare_inputs (trl 1.16) ----

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self.workflow is None:
            return super()._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        if self._buffered_inputs is None or self._step % (steps * self.num_iterations) == 0:
            self._clear_logs()
            iteration = self._step // (steps * self.num_iterations)
            rollout = self._roll_out(generation_batch, self.engine, self.num_generations, self.args.seed, iteration)
            self._record(rollout, "train")
            self._write_down(rollout)
            self._buffered_inputs = self._slices(rollout)
            if self.args.behavior_check == "all":
                self._check_behavior(rollout)
        return self._buffered_inputs[self._step % steps]

    def _roll_out(
        self,
        rows: Sequence[dict[str, Any]],
        engine: TransformersEngine | VllmEngine,
        group_size: int,
        seed: int,
        iteration: int,
        before: int = 0,
        limit: int | None = None,
    ) -> ScoredRollout:
        """Sample one trajectory per row and score those of all processes; rows stand prompt by prompt, each repeated.

        `before` global rows came earlier; those from `limit` on are repetitions that fill up a batch, and are dropped.
        """
        assert self.workflow is not None
        sampled, places = engine.counts.total, own_rows(len(rows), before)
        groups = [place // group_size for place in places]
        members = [place % group_size for place in places]
        label = "evaluation" if iteration == EVAL_ITERATION else f"rollout {iteration + 1}"
        with self._timed("generation"), rollout_progress(label, len(rows), self.args.disable_tqdm) as on_turn:
            engine.refresh()
            trajectories = collect(
                self.workflow, engine, self._tokenizer, rows, groups, members, seed, iteration, on_turn
            )
        self._add_cost("tokens/generation", engine.counts.total - sampled)
        per_func, per_turn = self._reward(rows, trajectories)
        everyone, per_turn, own = gather_rollout(trajectories, per_turn)
        if limit is not None:
            everyone = everyone[: limit - before]
            own = range(min(own.start, len(everyone)), min(own.stop, len(everyone)))
            per_func, per_turn = per_func[: len(everyone)], per_turn[: sum(len(t.turns) for t in everyone)]
        return score_rollout(
            everyone, iteration, per_func, self.reward_weights, per_turn, self.args, self.workflow.strict_format, own
        )

    def _reward(
        self, rows: Sequence[dict[str, Any]], trajectories: list[Trajectory]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call TRL's reward machinery on the last turns, then the turn reward functions.

        Returns the rewards (B, F) of all processes, as TRL gathers them, and the turn rewards (N, F_turn) of this one.
        """
        prompts, completions, completion_ids = last_turns(trajectories, self._tokenizer)
        inputs = [{**row, "trajectories": t} for row, t in zip(rows, trajectories, strict=True)]
        per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids).cpu()
        columns = {k: [x[k] for x in inputs] for k in inputs[0] if k not in ("prompt", "completion", "completion_ids")}
        arguments = columns | {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "trainer_state": self.state,
            "log_extra": self._log_completion_extra,
            "log_metric": self._log_metric,
        }
        return per_func, call_turn_rewards(self.turn_reward_funcs, trajectories, arguments)

    # ---- loss: replaces GRPOTrainer.training_step and _compute_loss (trl 1.16) ----

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.workflow is None:
            return super().training_step(model, inputs, num_items_in_batch)
        started = time.perf_counter()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        with self.whole_weights():
            total = self._train_slice(self._prepare_inputs(inputs))
            self._step += 1
            every = self.args.torch_empty_cache_steps
            if every is not None and self.state.global_step % every == 0:
                clear_device_cache()
            self._current_train_step_time += time.perf_counter() - started
            if self.accelerator.sync_gradients:
                self._finish_update()
        return total * process_count()  # transformers logs the mean over processes, the objective is their sum

    def _train_slice(self, part: TrainingSlice) -> torch.Tensor:
        """Run the passes of this process's turns, forward and backward; returns their share of the objective."""
        rollout, total = part.rollout, torch.zeros((), device=self.accelerator.device)
        plan = self.scorer.plan(rollout.turns, self._needs_forward(part), rollout.clusters)
        kept = part.reference_hidden if self.num_iterations > 1 else None
        apart = self.is_deepspeed_enabled or self.is_fsdp_enabled
        with local_leaves(self.model, self._gradients) if apart else contextlib.nullcontext():
            for rows, batch, scores in self.scorer.score(rollout.turns, plan, kept):
                loss = self._microbatch_loss(part, rows, batch, scores)
                with self._timed("optimisation"):
                    loss.backward() if apart else self.accelerator.backward(loss)
                total += loss.detach()
        return total

    def _needs_forward(self, part: TrainingSlice) -> list[int]:
        """The slice's turns that can move the policy: with beta 0, those with an advantage."""
        return [i for i in part.indices if part.rollout.advantages[i] != 0 or self.beta]

    def _microbatch_loss(self, part: TrainingSlice, rows: list[int], batch: TurnBatch, scores: Scores) -> torch.Tensor:
        """Return this micro-batch's share of the objective: sum of weight * (surrogate + beta * KL)."""
        advantages = part.rollout.advantages[rows].to(batch.behavior_logprobs)
        surrogate, stats = clipped_surrogate(
            scores.logprobs, batch.behavior_logprobs, advantages, batch.mask, self.epsilon_low, self.epsilon_high
        )  # (n, T)
        kl = self._kl(scores, batch)
        per_token = surrogate if kl is None else surrogate + self.beta * kl
        finite = torch.isfinite(per_token).all(dim=1)
        if not finite.all():
            worst = part.rollout.turn_name(rows[int((~finite).nonzero()[0])])
            path = self._save_rollout(part.rollout)
            raise FloatingPointError(f"the loss or KL of {worst} is not finite; its rollout is in {path}")
        first = self._step % (self.args.steps_per_generation * self.num_iterations)
        if first < self.args.gradient_accumulation_steps:
            self._compare_behavior(part.rollout, rows, batch, scores.logprobs.detach())
        self._meter_tokens(stats, scores, kl, batch)
        weights = part.weights[rows].to(per_token)[:, None] * batch.mask  # (n, T)
        return (weights * per_token).sum()

    def _kl(self, scores: Scores, batch: TurnBatch) -> torch.Tensor | None:
        """KL(current || reference) per token (n, T): exact, or TRL's k3 with its importance correction."""
        if scores.reference_logprobs is None:
            return scores.kl
        k3 = k3_kl(scores.logprobs, scores.reference_logprobs)
        if self.args.use_bias_correction_kl:
            k3 = k3 * torch.exp(scores.logprobs - batch.behavior_logprobs)
        return k3

    def _finish_update(self) -> None:
        """Sum the gradients of all processes, once per optimizer step, and log what the whole update measured."""
        with self._timed("optimisation"):
            if self.is_deepspeed_enabled:
                finite = all(bool(gradient.isfinite().all()) for gradient in self._gradients.values())
                if not all(gather_object([finite])):  # the engine steps at once
                    self._stop_at_gradient(torch.nan)
                engine_backward(self.accelerator, self.model, self._gradients)
                self._gradients.clear()
            else:
                sum_gradients(self.model, self._gradients)
        self._log_update(self._current_train_step_time)
        self._current_train_step_time = 0.0

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Stop before a nonfinite gradient reaches the weights; called by transformers' loop before the optimizer.

        Under fp16 the loss scaler makes gradients overflow on purpose: it then skips the step and scales less.
        """
        norm = super()._get_grad_norm(model, grad_norm)
        scaler = self.accelerator.scaler
        overflow = scaler is not None and scaler.get_scale() > 1
        if self.workflow is not None and not overflow and not torch.isfinite(torch.as_tensor(norm)):
            self._stop_at_gradient(norm)
        return norm

    def whole_weights(self) -> contextlib.AbstractContextManager[None]:
        """Hold the weights whole on every process, which ZeRO-3 and FSDP2 cut into parts; every process must enter."""
        return whole_weights(self.model, getattr(self, "deepspeed", None))

    # ---- evaluation: replaces GRPOTrainer.prediction_step (trl 1.16) ----

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        if self.workflow is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        rows = len(inputs) * process_count()
        if rows % self.num_generations_eval:
            raise ValueError(
                f"an evaluation batch has {rows} rows, expected a multiple of num_generations_eval="
                f"{self.num_generations_eval}: set per_device_eval_batch_size to one"
            )
        before = sum(len(rollout.trajectories) for rollout, _, _ in self._evaluated)
        sampling = self.eval_engine, self.num_generations_eval, self.args.eval_seed, EVAL_ITERATION
        with self.whole_weights(), torch.no_grad():
            rollout = self._roll_out(inputs, *sampling, before, self._evaluation_rows)
            losses, kl = self._evaluation_losses(rollout)
        self._record(rollout, "eval")
        self._evaluated.append((rollout, losses, kl))
        return losses.sum(), None, None

    def _evaluation_losses(self, rollout: ScoredRollout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (weighted loss (N,), sum of KL (N,)) per turn: the objective of this rollout at ratio 1.

        Turns of other processes have 0.
        """
        weights = objective_weights(rollout, range(len(rollout.trajectories)), self.loss_type)
        lengths = torch.tensor([len(turn.completion_ids) for turn in rollout.turns])
        own = torch.zeros(len(lengths), dtype=torch.float64)
        own[rollout.own_turns] = 1.0
        losses = -rollout.advantages.double() * lengths * weights * own
        if self.reference is None:
            return losses, None
        kl = torch.zeros(len(lengths), dtype=torch.float64)
        plan = self.scorer.plan(rollout.turns, rollout.own_turns, rollout.clusters)
        for rows, batch, scores in self.scorer.score(rollout.turns, plan):
            per_token = self._kl(scores, batch)
            assert per_token is not None
            kl[rows] = (per_token * batch.mask).sum(dim=1).double().cpu()
        return losses + self.beta * kl * weights, kl

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' loop, then report exact means over all trajectories under this set's own prefix."""
        if self.workflow is None:
            return super().evaluation_loop(*args, **kwargs)
        named = inspect.signature(GRPOTrainer.evaluation_loop).bind(self, *args, **kwargs)
        named.apply_defaults()
        if process_count() > 1:  # accelerate fills up the last batches with rows of the first
            rows = named.arguments["dataloader"].dataset
            if not hasattr(rows, "__len__"):
                raise ValueError(
                    "an evaluation stream has no length that would tell its rows from those that fill up the last "
                    "batch on several processes: evaluate on a Dataset"
                )
            self._evaluation_rows = len(rows) * self.num_generations_eval
        with self._evaluation_recording():
            output: Any = super().evaluation_loop(*args, **kwargs)
            metrics = self._evaluation_metrics()
        prefix = named.arguments["metric_key_prefix"]
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output
