"""TurnGRPOTrainer: trl.GRPOTrainer with our generation step and our loss under a workflow; glue only, no maths."""

import contextlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from accelerate.utils.memory import clear_device_cache
from huggingface_hub import constants
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from turngrpo.trainer.checks import (
    check_arguments,
    check_hooks,
    check_model,
    check_overlap,
    check_rewards,
    check_rows,
    check_without_workflow,
    first_row,
    showing_arguments_of,
)
from turngrpo.trainer.export.exporter import Exporter, is_private
from turngrpo.trainer.export.hub import hub_errors
from turngrpo.trainer.export.model_card import PAPER
from turngrpo.trainer.forward.batching import TurnBatch
from turngrpo.trainer.forward.lora_layers import use_adapted_products
from turngrpo.trainer.forward.policy import Policy, evaluating, tensors_digest, zero_dropout
from turngrpo.trainer.forward.scoring import Reference, Scorer, Scores
from turngrpo.trainer.forward.whole_weights import engine_backward, local_leaves, whole_weights
from turngrpo.trainer.measuring.behavior_check import behavior_gap, default_tolerance, describe_gap
from turngrpo.trainer.measuring.metrics import trajectory_measures
from turngrpo.trainer.measuring.trackers import log_trajectories, trajectory_rows
from turngrpo.trainer.measuring.turn_record import turn_records
from turngrpo.trainer.measuring.update_log import (
    SHOWN_TURNS,
    CompletionLog,
    EvaluationLog,
    OptimizerTimer,
    UpdateLog,
)
from turngrpo.trainer.objective.iteration import (
    MicroBatch,
    ScoredRollout,
    TrainingSlice,
    evaluation_losses,
    score_rollout,
    training_slices,
)
from turngrpo.trainer.objective.losses import clipped_surrogate, token_kl
from turngrpo.trainer.processes import (
    gather_parts,
    gather_tensors,
    is_main_process,
    own_rows,
    process_count,
    sum_gradients,
)
from turngrpo.trainer.reading.rollout import (
    EVAL_ITERATION,
    Engine,
    TokenCounts,
    Trajectory,
    collect,
    outline,
    progress,
    rollout_progress,
)
from turngrpo.trainer.reading.trial import hand_over
from turngrpo.trainer.reading.workflows import Workflow
from turngrpo.trainer.reward_calls import (
    call_rewards,
    call_turn_rewards,
    reward_arguments,
    reward_name,
    reward_of_model,
)
from turngrpo.trainer.runs.checkpoints import ExactCheckpoints
from turngrpo.trainer.runs.fingerprint import stream_digest
from turngrpo.trainer.runs.identity import reward_facts, workflow_facts
from turngrpo.trainer.runs.ledger import Ledger, ledger_faults, place_columns, rollout_rows, save_nonfinite
from turngrpo.trainer.runs.proof import ResumeError
from turngrpo.trainer.runs.resume import StreamPlace, generators_kept, restore_rollout, rollout_state, train_sampler
from turngrpo.trainer.sampling.transformers_engine import TransformersEngine
from turngrpo.trainer.sampling.vllm_engine import make_vllm_engine
from turngrpo.trainer.writing import going_on, writing

TurnRewardFunc = Callable[..., list[list[float | None]]]


class TurnGRPOTrainer(GRPOTrainer):
    """GRPO on trajectories of turns (GRU-Mem, arXiv 2602.10560); without a workflow it is trl.GRPOTrainer as it is.

    `workflow` drives the turns of a trajectory and `turn_reward_funcs` reward single turns; both are keyword-only, all
    other arguments are GRPOTrainer's. The generation step is `_generate_and_score_completions`, the loss compute_loss.
    Under a workflow every option that is not honoured raises ValueError by name, and so does a subclass that overrides
    another hook of TRL which is then never called.
    """

    workflow: Workflow | None = None  # on the class too: tools make instances without __init__
    args: Any  # TurnGRPOConfig under a workflow
    model: Any
    ref_model: Any
    optimizer: Any
    engine: Any  # an Engine
    num_generations: Any
    num_generations_eval: Any
    _buffered_inputs: Any
    _evaluation: EvaluationLog | None = None  # of the evaluation that is going on
    _ledger: Ledger | None = None
    _stream = StreamPlace()
    _best_update: int | None = None  # of the checkpoint whose weights were loaded at the end of training

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
        check_hooks(type(self), TurnGRPOTrainer)
        named = inspect.signature(GRPOTrainer.__init__).bind(self, model, reward_funcs, args, *positional, **kwargs)
        args = named.arguments["args"] = check_arguments(named.arguments)
        self._tag_names, self._name, self._paper = [*self._tag_names, "turngrpo"], "TurnGRPO", PAPER
        # TRL reloads the reference of a fully trained model from its config's path, and copies of an adapter only what
        # has ".default." in its name; our reference is a snapshot.
        beta, self._new_adapter = args.beta, bool(named.arguments.get("peft_config"))
        try:
            args.beta = 0.0
            super().__init__(*named.args[1:], **named.kwargs)
        finally:
            args.beta = self.beta = beta
        with self.whole_weights():
            self._set_up_workflow(workflow, turn_reward_funcs)

    # ---- set-up under a workflow ----

    def _set_up_workflow(self, workflow: Workflow, turn_reward_funcs: Any) -> None:
        check_model(self.model, self.processing_class, self.beta, self.aux_loss_enabled)
        self._set_up_rewards(workflow, turn_reward_funcs)
        with generators_kept():
            hand_over(workflow, self._tokenizer, self.args, first_row(self.train_dataset))
        evaluation = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for name, dataset in {"train": self.train_dataset, **evaluation}.items():
            check_rows(workflow, dataset, name, self.args, self.model)
        check_overlap(self.train_dataset, evaluation, self.args.allow_overlap)
        zero_dropout(self.model)
        use_adapted_products(self.model)
        if self.is_deepspeed_enabled and self.args.bf16:
            self.model.to(torch.bfloat16)  # as the engine will: reference and digests are of the weights that train
        if self.is_fsdp_enabled:
            self.model.to(self.args.device)  # which accelerate would leave on the CPU until training starts
        self._gradients: dict[str, torch.Tensor] = {}  # of this process, until the update gets them
        self.policy = Policy(self.model, self.accelerator.autocast)
        self.reference = Reference(self.policy, self._new_adapter) if self.beta else None
        if self.reference is not None:
            self.reference.check()
            if not is_peft_model(self.model):
                self.ref_model = self.reference.policy.model
        share_prefix = self._set_up_sampling()
        self.update_log = UpdateLog(self._metrics, self.reward_func_names, self.turn_reward_names)
        names = self.reward_func_names + self.turn_reward_names
        self._update_rows: list[dict[str, Any]] = []  # of the ledger, since the last update
        self.completion_log = CompletionLog(self._logs, self._tokenizer, names, self.log_completions)
        self.add_callback(OptimizerTimer(self.update_log))
        self.scorer = Scorer(
            policy=self.policy,
            pad_id=self._tokenizer.pad_token_id,
            reference=self.reference,
            temperature=self.temperature,
            kl=self.args.kl,
            max_tokens=self.args.max_tokens_per_microbatch,
            share_prefix=share_prefix,
            with_reference_logprobs=self.args.ledger == "full",
            timed=self.update_log.timed,
            count=lambda name, tokens: self.update_log.add_cost(f"tokens/{name}", tokens),
            bar=self._scoring_bar,
        )
        self.checkpoints = ExactCheckpoints(
            self, self._run_state, self._restore_run, self._run_facts, self._examine_run, self.args.allow_changed
        )
        self.exporter = Exporter(self.args, self.model, self.processing_class, workflow)

    def _set_up_rewards(self, workflow: Workflow, turn_reward_funcs: Any) -> None:
        """Name every reward function, and make functions of reward models."""
        functions = turn_reward_funcs or []
        self.turn_reward_funcs = functions if isinstance(functions, list) else [functions]
        self.turn_reward_names = [reward_name(function) for function in self.turn_reward_funcs]
        check_rewards(self.args, workflow, self.reward_func_names, self.turn_reward_names)
        known = zip(self.reward_func_names, self.reward_funcs, self.reward_processing_classes, strict=True)
        kwargs: Any = self.args.chat_template_kwargs or {}
        self._reward_functions: list[Any] = [
            reward_of_model(name, function, tokenizer, kwargs) if isinstance(function, torch.nn.Module) else function
            for name, function, tokenizer in known
        ]

    def _set_up_sampling(self) -> bool:
        """Make the engines of training and evaluation; returns whether the model can share prefixes."""
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
        made = make_vllm_engine(self.args, self.policy, self._tokenizer, self.eos_token_ids) if with_vllm else sampler
        self.engine = made
        sampling: Any = {"temperature": self.args.eval_temperature, "top_p": self.args.eval_top_p}
        self.eval_engine = replace(self.engine, counts=TokenCounts(), **sampling)
        return sampler.share_prefix

    # ---- generation step: replaces GRPOTrainer._prepare_inputs, _generate_and_score_completions (trl 1.16) ----

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self.workflow is None:
            return super()._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        if self._buffered_inputs is None or self._step % (steps * self.num_iterations) == 0:
            self.completion_log.clear()
            rollout = self._generate_and_score_completions(generation_batch)
            self._log_rollout(rollout)
            self._write_down(rollout)
            self._buffered_inputs = self._slices(rollout)
            if self.args.behavior_check == "all":
                self._check_behavior(rollout)
        return self._buffered_inputs[self._step % steps]

    def _slices(self, rollout: ScoredRollout) -> list[TrainingSlice]:
        size, per_update = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
        return training_slices(rollout, size, per_update, self.loss_type)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Sample one trajectory per row and score those of all processes: the ScoredRollout that is trained on.

        `inputs` are dataset rows, prompt by prompt, each repeated for its group.
        """
        if self.workflow is None:
            return super()._generate_and_score_completions(inputs)
        evaluation = self._evaluation
        if evaluation is None:
            iteration = self._step // (self.args.steps_per_generation * self.num_iterations)
            return self._roll_out(inputs, self.engine, self.num_generations, self.args.seed, iteration)
        sampling = self.eval_engine, self.num_generations_eval, self.args.eval_seed, EVAL_ITERATION
        return self._roll_out(inputs, *sampling, evaluation.rows, evaluation.limit)

    def _roll_out(
        self,
        rows: Sequence[dict[str, Any]],
        engine: Engine,
        group_size: int,
        seed: int,
        iteration: int,
        before: int = 0,
        limit: int | None = None,
    ) -> ScoredRollout:
        """`before` global rows came earlier; those from `limit` on are repetitions that fill up a batch: dropped."""
        assert self.workflow is not None
        label = "evaluation" if iteration == EVAL_ITERATION else f"rollout {iteration + 1}"
        places = own_rows(len(rows), before)
        groups, members = [place // group_size for place in places], [place % group_size for place in places]
        sampled = engine.counts.total
        with self.update_log.timed("generation"), rollout_progress(label, len(rows), self._hides_bars) as on_turn:
            engine.refresh()
            reads = {"on_turn": on_turn, "max_turns": self.args.max_turns}
            own = collect(self.workflow, engine, self._tokenizer, rows, groups, members, seed, iteration, **reads)
        self.update_log.add_cost("tokens/generation", engine.counts.total - sampled)
        with self.update_log.timed("rewards"):
            per_func, per_turn = self._call_rewards(own)
        everyone, share = gather_parts(own, lambda: [outline(t, trajectory_measures(t)) for t in own])
        if limit is not None and len(everyone) > limit - before:
            everyone = everyone[: limit - before]
            share = range(min(share.start, len(everyone)), min(share.stop, len(everyone)))
            per_func, per_turn = per_func[: len(everyone)], per_turn[: sum(len(t.turns) for t in everyone)]
        options = self.args.advantage_options() | {"strict_format": self.workflow.strict_format, "own": share}
        return score_rollout(everyone, iteration, per_func, per_turn, **options)

    @property
    def _hides_bars(self) -> bool:
        return bool(self.args.disable_tqdm) or not is_main_process()

    def _scoring_bar(self, turns: int) -> contextlib.AbstractContextManager[Any]:
        """A bar of the turns that are scored, and in training go backward too."""
        label = "evaluation: scoring" if self._evaluation else f"update {self.state.global_step + 1}: optimisation"
        return progress(label, turns, "turn", self._hides_bars)

    def _call_rewards(self, trajectories: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards (B, F) and turn rewards (N, F_turn) of the trajectories of all processes."""
        helpers = self.state, self._log_completion_extra, self._log_metric
        arguments = reward_arguments(trajectories, self._tokenizer, *helpers)
        per_func = call_rewards(self._reward_functions, arguments, self.args.reward_timeout)
        per_turn = call_turn_rewards(self.turn_reward_funcs, trajectories, arguments, self.args.reward_timeout)
        return gather_tensors(per_func), gather_tensors(per_turn)

    def _log_rollout(self, rollout: ScoredRollout) -> None:
        mode = "train" if self._evaluation is None else "eval"
        if mode == "train":  # an evaluation's metrics are logged at its end
            tokens = sum(turn.prompt_tokens + turn.completion_tokens for turn in rollout.turns)
            self.state.num_input_tokens_seen += tokens
            self.update_log.add_rollout(rollout, self.state.num_input_tokens_seen)
        self.update_log.add_logged(self._pending_metrics, mode)
        self.completion_log.add(rollout, mode, self._pending_extra_logs)

    def _write_down(self, rollout: ScoredRollout) -> None:
        """Put a fresh rollout on disk before it is trained on."""
        ledger = self._ledger or self._open_ledger(0)
        if ledger.folder is None:
            ledger.record(rollout.iteration, [])
        else:
            trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            seconds = self.update_log.pending_costs["time/generation"]
            with self.update_log.timed("digests"):
                digest = tensors_digest(trained)
            what = f"the rollout of iteration {rollout.iteration}"
            with self.update_log.timed("saving"), writing(what, going_on(self.args.output_dir)):
                ledger.record(rollout.iteration, self._rows(rollout, policy_digest=digest, seconds=seconds))

    def _open_ledger(self, position: int, files: Mapping[str, str] | None = None, updates: int = 0) -> Ledger:
        folder = Path(self.args.output_dir) / "rollouts" if self.args.ledger != "false" else None
        self._ledger = Ledger(folder, position, self.accelerator.process_index, files, updates)
        self.accelerator.wait_for_everyone()
        return self._ledger

    def _rows(self, rollout: ScoredRollout, **columns: Any) -> list[dict[str, Any]]:
        return rollout_rows(rollout, self.reward_func_names, self.turn_reward_names, **columns)

    # ---- loss: replaces GRPOTrainer.training_step and compute_loss (trl 1.16) ----

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if self.workflow is None:
            return super().training_step(model, inputs, num_items_in_batch)
        started = time.perf_counter()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        with self.whole_weights():
            total = self._train_slice(model, self._prepare_inputs(inputs))
            self._step += 1
            self._stream.advance(self.accelerator.gradient_state.end_of_dataloader)
            every = self.args.torch_empty_cache_steps
            if every is not None and self.state.global_step % every == 0:
                clear_device_cache()
            self._current_train_step_time += time.perf_counter() - started
            if self.accelerator.sync_gradients:
                self._finish_update()
        return total * process_count()  # transformers logs the mean over processes, the objective is their sum

    def _train_slice(self, model: Any, part: TrainingSlice) -> torch.Tensor:
        """Run the passes of this process's turns, forward and backward; returns their share of the objective."""
        rollout, total = part.rollout, torch.zeros((), device=self.accelerator.device)
        plan = self.scorer.plan(rollout.turns, self._needs_forward(part), rollout.clusters)
        kept = part.reference_hidden if self.num_iterations > 1 else None
        apart = self.is_deepspeed_enabled or self.is_fsdp_enabled
        first = self._step % (self.args.steps_per_generation * self.num_iterations)
        with local_leaves(self.model, self._gradients) if apart else contextlib.nullcontext():
            for rows, batch, scores in self.scorer.score(rollout.turns, plan, kept):
                with self.update_log.timed("optimisation"):
                    inputs = self._microbatch(part, rows, batch, scores)
                    loss = self.compute_loss(model, inputs)
                    self._record(rollout, rows, inputs)
                    if first < self.args.gradient_accumulation_steps:
                        self._compare_behavior(rollout, rows, batch, scores.logprobs.detach())
                    loss.backward() if apart else self.accelerator.backward(loss)
                total += loss.detach()
        return total

    def _record(self, rollout: ScoredRollout, rows: list[int], batch: MicroBatch) -> None:
        """Keep what this update makes of every turn of a micro-batch for the ledger."""
        if self._ledger is None or self._ledger.folder is None:
            return
        options = self.epsilon_low, self.epsilon_high, self.args.use_bias_correction_kl, self.args.ledger == "full"
        update = {"update": self.state.global_step + 1}
        for row, record in zip(rows, turn_records(batch, *options), strict=True):
            self._update_rows.append({**place_columns(rollout, row), **update, **record})

    def _needs_forward(self, part: TrainingSlice) -> list[int]:
        """The slice's turns that can move the policy: those with a weight, and with beta 0 with an advantage."""
        return [i for i in part.indices if part.weights[i] != 0 and (part.rollout.advantages[i] != 0 or self.beta)]

    def _microbatch(self, part: TrainingSlice, rows: list[int], batch: TurnBatch, scores: Scores) -> MicroBatch:
        """Put together what compute_loss gets of the turns `rows`."""
        rollout = part.rollout
        return MicroBatch(
            turns=[rollout.turns[row] for row in rows],
            names=[rollout.turn_name(row) for row in rows],
            mask=batch.mask,
            weights=part.weights[rows].to(scores.logprobs)[:, None] * batch.mask,  # (n, T)
            advantages=rollout.advantages[rows].to(scores.logprobs),
            behavior_logprobs=batch.behavior_logprobs,
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            kl=scores.kl,
            reference_logprobs=scores.reference_logprobs,
        )

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return a micro-batch's share of the objective: sum of weight * (surrogate + beta * KL) over its tokens.

        Under a workflow `inputs` is a MicroBatch; training_step calls this for every one and sends it backward.
        """
        if self.workflow is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            raise ValueError("return_outputs is not honoured under a workflow: the loss is all there is")
        batch: MicroBatch = inputs
        surrogate, stats = clipped_surrogate(
            batch.logprobs,
            batch.behavior_logprobs,
            batch.advantages,
            batch.mask,
            self.epsilon_low,
            self.epsilon_high,
        )  # (n, T)
        correction = self.args.use_bias_correction_kl
        kl = token_kl(batch.logprobs, batch.behavior_logprobs, batch.kl, batch.reference_logprobs, correction)
        per_token = surrogate if kl is None else surrogate + self.beta * kl
        finite = torch.isfinite(per_token).all(dim=1)
        if not finite.all():
            self._stop_at_loss(batch.names[int((~finite).nonzero()[0])])
        self.update_log.add_tokens(batch, kl, stats)
        return (batch.weights * per_token).sum()

    def _finish_update(self) -> None:
        """Sum the gradients of all processes, once per optimizer step, and log what the whole update measured."""
        with self.update_log.timed("optimisation"):
            if self.is_deepspeed_enabled:
                finite = all(bool(gradient.isfinite().all()) for gradient in self._gradients.values())
                if not all(gather_object([finite])):  # the engine steps at once
                    self._stop_at_gradient(torch.nan)
                engine_backward(self.accelerator, self.model, self._gradients)
                self._gradients.clear()
            else:
                sum_gradients(self.model, self._gradients)
        if self._ledger is not None:
            what = f"the ledger of update {self.state.global_step + 1}"
            with self.update_log.timed("saving"), writing(what, going_on(self.args.output_dir)):
                self._ledger.record_update(self.state.global_step + 1, self._update_rows)
        self._update_rows.clear()
        self.update_log.finish_update(self._current_train_step_time)
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

    def _stop_at_loss(self, turn: str) -> None:
        raise FloatingPointError(f"the loss or KL of {turn} is not finite; its rollout is in {self._save_nonfinite()}")

    def _stop_at_gradient(self, norm: Any) -> None:
        rollout = self._buffered_inputs[0].rollout
        groups = sorted({trajectory.group for trajectory in rollout.trajectories})
        raise FloatingPointError(
            f"the gradient of update {self.state.global_step + 1} is not finite ({norm}); rollouts: iteration "
            f"{rollout.iteration}, groups {groups}, written to {self._save_nonfinite()}"
        )

    def _save_nonfinite(self) -> Path:
        rollout, process = self._buffered_inputs[0].rollout, self.accelerator.process_index
        return save_nonfinite(self._rows(rollout), self.args.output_dir, rollout.iteration, process)

    def whole_weights(self) -> contextlib.AbstractContextManager[None]:
        """Hold the weights whole on every process, which ZeRO-3 and FSDP2 cut into parts; every process must enter."""
        return whole_weights(self.model, getattr(self, "deepspeed", None))

    # ---- behavior check ----

    def _check_behavior(self, rollout: ScoredRollout) -> None:
        """Score every turn of a fresh rollout and compare with what was recorded at sampling."""
        log = self.update_log
        count = lambda _, tokens: log.add_cost("tokens/behavior_check", tokens)  # noqa: E731
        bar = lambda turns: progress("behavior check", turns, "turn", self._hides_bars)  # noqa: E731
        scorer = replace(self.scorer, reference=None, timed=lambda _: contextlib.nullcontext(), count=count, bar=bar)
        with evaluating(self.model), log.timed("behavior_check"):
            plan = scorer.plan(rollout.turns, rollout.own_turns, rollout.clusters)
            for rows, batch, scores in scorer.score(rollout.turns, plan):
                self._compare_behavior(rollout, rows, batch, scores.logprobs)

    def _compare_behavior(
        self, rollout: ScoredRollout, rows: list[int], batch: TurnBatch, logprobs: torch.Tensor
    ) -> None:
        """Measure |scored - recorded| and stop above the tolerance, naming the worst token."""
        gap = behavior_gap(logprobs, batch)
        self.update_log.add_behavior_gap(gap, batch.mask)
        default = default_tolerance(self.policy.dtype, self.args.rollout_engine)
        tolerance = self.args.behavior_tolerance or default
        if self.args.behavior_check != "off" and not float(gap.max()) <= tolerance:
            row = int(gap.amax(dim=1).argmax())
            name = rollout.turn_name(rows[row])
            raise RuntimeError(describe_gap(name, row, gap, batch, logprobs, tolerance, self._tokenizer))

    # ---- evaluation: replaces GRPOTrainer._get_eval_sampler, prediction_step (trl 1.16) ----

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Read rows in their order, where TRL shuffles: a row's noise is that of its place, the same elsewhere."""
        if self.workflow is None:
            return super()._get_eval_sampler(eval_dataset)
        return RepeatSampler(eval_dataset, self.num_generations_eval, shuffle=False)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        if self.workflow is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        rows = len(inputs) * process_count()
        if rows % self.num_generations_eval:
            raise ValueError(
                f"an evaluation batch has {rows} rows, expected a multiple of num_generations_eval="
                f"{self.num_generations_eval}: choose a per_device_eval_batch_size that makes it one"
            )
        assert self._evaluation is not None
        with self.whole_weights(), torch.no_grad():
            rollout = self._generate_and_score_completions(inputs)
            self._log_rollout(rollout)
            correction = self.args.use_bias_correction_kl
            kl, total = self.scorer.sum_kl(rollout.turns, rollout.own_turns, rollout.clusters, correction)
        losses = evaluation_losses(rollout, kl, self.beta, self.loss_type)
        self._evaluation.add(rollout, losses, total)
        return losses.sum(), None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' loop, then report exact means over all trajectories under this set's own prefix."""
        if self.workflow is None:
            return super().evaluation_loop(*args, **kwargs)
        named = inspect.signature(GRPOTrainer.evaluation_loop).bind(self, *args, **kwargs)
        named.apply_defaults()
        limit = None
        if process_count() > 1:  # accelerate fills up the last batches with rows of the first
            rows = named.arguments["dataloader"].dataset
            if not hasattr(rows, "__len__"):
                raise ValueError(
                    "an evaluation stream has no length that would tell its rows from those that fill up the last "
                    "batch on several processes: evaluate on a Dataset"
                )
            limit = len(rows) * self.num_generations_eval
        self._evaluation = EvaluationLog(limit, self.args.eval_seed)
        try:
            with self.update_log.apart(), generators_kept():  # what rewards draw in training is theirs alone
                output: Any = super().evaluation_loop(*args, **kwargs)
                metrics = self._evaluation.metrics(self.update_log, self.loss_type)
                rollouts = self._evaluation.rollouts
        finally:
            self._evaluation = None
        prefix = named.arguments["metric_key_prefix"]
        if self.log_completions and is_main_process():
            shown = SHOWN_TURNS if self.num_completions_to_print is None else self.num_completions_to_print
            rows = trajectory_rows(rollouts, shown, self.state.global_step, prefix)
            log_trajectories(rows, self.args.report_to, self.callback_handler.callbacks)
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    # ---- runs: replaces GRPOTrainer.train, log, _get_train_sampler, and _run_epoch, _save_checkpoint,
    # _load_rng_state, _load_best_model, _finalize_training of transformers' Trainer (5.24) ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as GRPOTrainer does; under a workflow the reference must be the same at the end, to the last bit.

        Raises ResumeError, before anything is loaded, where the run could not go on from the checkpoint.
        """
        if self.workflow is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        self._step, self._buffered_inputs, self._ledger, self.exporter.is_current = 0, None, None, False
        self._update_rows.clear()
        self._best_update = None
        checkpoint, state = self.checkpoints.begin(resume_from_checkpoint)
        self._stream = StreamPlace(state and state.get("stream"))
        output = super().train(checkpoint, *args, **kwargs)
        if self._reference_digest() != self.checkpoints.fingerprint["reference"]:
            raise RuntimeError(
                "the reference policy changed during training, so KL had a moving target: no callback and no reward "
                "may write to frozen weights"
            )
        return output

    def check_resume(self, checkpoint: str) -> None:
        """Raise ResumeError where `train` could not go on from a checkpoint: sooner than `train`, which asks too."""
        self.checkpoints.check(checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        if self.workflow is None or type(sampler) is not RepeatSampler:
            return sampler
        return train_sampler(sampler, lambda: self.state.global_step * self.args.gradient_accumulation_steps)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        place: dict[str, int] | None = {}
        if self.workflow is not None and self.checkpoints.is_finished():
            place, self.control.should_training_stop = None, True
        elif self.workflow is not None and self._reads_stream:
            place = self._stream.enter(kwargs["epoch"])
        if place is not None:
            super()._run_epoch(*args, **(kwargs | place))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        finalize = partial(super()._finalize_training, *args, **kwargs)
        return finalize() if self.workflow is None else self.checkpoints.finish(finalize)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.workflow is None:
            return super()._save_checkpoint(model, trial)
        with self.update_log.timed("saving"), self.checkpoints.saving(trial):
            super()._save_checkpoint(model, trial)

    def _load_best_model(self) -> None:
        """Load the best checkpoint as transformers does; under a workflow it is proved to be whole before."""
        if self.workflow is None:
            return super()._load_best_model()
        self.checkpoints.prove_best()
        super()._load_best_model()
        self._best_update = int(Path(self.state.best_model_checkpoint or "").name.rpartition("-")[2])

    @property
    def weights_update(self) -> int:
        """Updates that made the weights: fewer than there were where the best checkpoint's were loaded at the end."""
        return self.state.global_step if self._best_update is None else self._best_update

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self.workflow is not None and checkpoint is not None:
            self.checkpoints.load(checkpoint)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as GRPOTrainer does (trl 1.16); under a workflow a few turns are shown at the width that there is."""
        if self.workflow is None:
            return super().log(logs, start_time)
        wanted, self.num_completions_to_print = self.num_completions_to_print, 0  # TRL prints the rest of the table
        try:
            with writing(f"the log of update {self.state.global_step}", going_on(self.args.output_dir)):
                super().log(logs, start_time)
        finally:
            self.num_completions_to_print = wanted
        if self.log_completions and is_main_process():
            self.completion_log.show(self.state.global_step, SHOWN_TURNS if wanted is None else wanted)

    @property
    def _reads_stream(self) -> bool:
        return not hasattr(self.train_dataset, "__len__")

    def _reference_digest(self) -> str | None:
        with self.whole_weights():
            return None if self.reference is None else self.reference.digest()

    def _run_facts(self) -> dict[str, Any]:
        """Return what decides the run's numbers beside config, corpus, model and tokenizer."""
        prompts = self.args.generation_batch_size // self.num_generations
        corpus = {"corpus": stream_digest(self.train_dataset, prompts)} if self._reads_stream else {}
        return corpus | {
            "reference": self._reference_digest(),
            "rewards": reward_facts(self.reward_funcs, self.reward_func_names, self.reward_processing_classes),
            "turn_rewards": reward_facts(self.turn_reward_funcs, self.turn_reward_names),
            "workflow": workflow_facts(self.workflow),
            "generation": {"eos_token_ids": str(sorted(self.eos_token_ids))},
        }

    def _run_state(self) -> dict[str, Any]:
        """Return what the next iterations depend on, as plain values and tensors."""
        slices: list[TrainingSlice] | None = self._buffered_inputs
        rollouts = -(-self._step // (self.args.steps_per_generation * self.num_iterations))
        consumed = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return {
            "step": self._step,
            "ledger_position": rollouts,
            "updates": self.state.global_step,
            "ledger_files": {} if self._ledger is None else self._ledger.files,
            "rollout": None if slices is None or consumed else rollout_state(slices[0].rollout),
            "logs": self.completion_log.state(),
            "stream": self._stream.state() if self._reads_stream else None,
        }

    def _examine_run(self, state: dict[str, Any]) -> None:
        """Raise ResumeError where the ledger is not the checkpoint's, or the place in a stream is not known."""
        if self._reads_stream and state.get("stream") is None:
            raise ResumeError(
                "the checkpoint does not say where its run stood in the train stream, as those of version 0.1.0: "
                "rows would be read twice; start again, or train on a Dataset"
            )
        if self.args.ledger == "false" or "ledger_files" not in state:
            return
        folder, process = Path(self.args.output_dir) / "rollouts", self.accelerator.process_index
        faults = ledger_faults(
            folder, state["ledger_files"], state["ledger_position"], process, self._updates_of(state)
        )
        if faults:
            raise ResumeError(
                "the rollouts on disk are not those that the checkpoint's run was trained on:\n  "
                + "\n  ".join(faults)
                + "\nput back the run's rollouts/, or go on without a ledger (ledger=False, --ledger false)"
            )

    def _updates_of(self, state: dict[str, Any]) -> int:
        """Return the updates of a run state; those of version 0.1.0 count training steps alone."""
        return state.get("updates", state["step"] // self.args.gradient_accumulation_steps)

    def _restore_run(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        recorded = -(-self._step // (self.args.steps_per_generation * self.num_iterations))
        self._open_ledger(recorded, state.get("ledger_files"), self._updates_of(state))
        if state["rollout"] is not None:
            self._buffered_inputs = self._slices(restore_rollout(state["rollout"]))
        self.completion_log.restore(state["logs"])

    # ---- export: replaces Trainer.save_model, push_to_hub, init_hf_repo (transformers 5.24) ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, and beside an adapter what its export will say of the run."""
        super().save_model(output_dir, _internal_call)
        if self.workflow is not None and self.args.should_save:
            self.exporter.save_facts(output_dir or self.args.output_dir, self.weights_update)

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What versions of the adapter say of the run beside what the trainer knows; see Exporter."""
        return self.exporter.provenance

    @provenance.setter
    def provenance(self, facts: Mapping[str, Any]) -> None:
        self.exporter.provenance = facts

    @property
    def exported(self) -> Path | None:
        """The newest version of the adapter, on process 0."""
        return self.exporter.exported

    def export_adapter(
        self,
        name: str | None = None,
        before: Mapping[str, float] | None = None,
        after: Mapping[str, float] | None = None,
    ) -> Path | None:
        """Write the adapter as output_dir/adapters/`name`/v0001, v0002, ... and return that folder (on process 0).

        `name` is by default that of the version before, or the output folder's; `before` and `after` are metrics,
        `after` by default those of the evaluation of these weights. Every process must call it. Raises ValueError
        without an adapter.
        """
        with self.whole_weights():
            if self.is_world_process_zero():
                self.exporter.export(name, before, after, self.weights_update, self.state.log_history)
        self.exporter.is_current = True
        return self.exporter.exported

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Under a workflow nothing: trl's card names a local base "None", and every version has one of its own."""
        if self.workflow is None:
            super().create_model_card(*args, **kwargs)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push the exported version, exported now if it was not, and tag the commit with its number.

        Without a workflow it is transformers' method. The repository is args.hub_model_id, private unless `private` or
        args.hub_private_repo say otherwise; the version's card is written at the export, so that options of
        create_model_card raise ValueError. Every process must call it. See push_version for the other errors.
        """
        if self.workflow is None:
            parent: Any = super()
            return parent.push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        if kwargs:
            raise ValueError(f"{', '.join(kwargs)}: under a workflow the model card is written by export_adapter()")
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if not self.exporter.is_current:
            self.export_adapter()
        if not self.is_world_process_zero():
            return None
        options = {"branch": revision or self.args.hub_revision, "message": commit_message}
        return self.exporter.push(self.hub_model_id, token, private, blocking, **options)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository as transformers does, private under a workflow unless told otherwise."""
        parent: Any = super()
        if self.workflow is None:
            return parent.init_hf_repo(token, private)
        with hub_errors(self.args.hub_model_id or Path(self.args.output_dir).name, constants.ENDPOINT):
            parent.init_hf_repo(token, is_private(self.args, private))
