"""Every option of TRL and transformers under a workflow: honoured, or refused by name with the reason."""

import math
from dataclasses import fields
from typing import Any

from turngrpo.trainer.objective.losses import LOSS_TYPES

# Inherited options that a workflow does not honour, with the reason; anything but the default raises by name.
REFUSED: dict[str, str] = {
    "use_vllm": "TRL's vLLM modes belong to training without a workflow; set rollout_engine='vllm' and vllm_base_url",
    "use_transformers_continuous_batching": "it returns no log-probabilities of the sampled tokens",
    "transformers_continuous_batching_config": "it returns no log-probabilities of the sampled tokens",
    "use_transformers_paged": "it returns no log-probabilities of the sampled tokens",
    "cache_implementation": "the engine keeps its own cache of shared prefixes",
    "generation_kwargs": "training samples with full support; see temperature, eval_temperature and eval_top_p",
    "top_p": "training samples with full support (1.0); for evaluation set eval_top_p",
    "top_k": "training samples with full support (0)",
    "min_p": "training samples with full support (None)",
    "repetition_penalty": "training samples with full support (1.0)",
    "pad_to_multiple_of": "rows are packed by max_tokens_per_microbatch",
    "delta": "the surrogate is clipped on one interval, by epsilon and epsilon_high",
    "importance_sampling_level": "ratios are per token",
    "multi_objective_aggregation": "rewards are summed with reward_weights",
    "mask_truncated_completions": "a truncated turn is unparsed and rewarded as such, never hidden from the loss",
    "sync_ref_model": "the reference is frozen, and its digest is checked at the end",
    "ref_model_mixup_alpha": "the reference is frozen",
    "ref_model_sync_steps": "the reference is frozen",
    "top_entropy_quantile": "every response token is trained",
    "entropy_coef": "the objective is the surrogate and the exact KL; entropy is logged",
    "use_adaptive_entropy": "the objective is the surrogate and the exact KL; entropy is logged",
    "entropy_coef_min": "there is no entropy bonus",
    "entropy_coef_max": "there is no entropy bonus",
    "entropy_coef_delta": "there is no entropy bonus",
    "entropy_target": "there is no entropy bonus",
    "max_tool_calling_iterations": "turns belong to the workflow, there are no tools",
    "off_policy_mask_threshold": "every sampled token is trained, with its recorded log-probability",
    "sapo_temperature_neg": "loss_type 'sapo' is refused",
    "sapo_temperature_pos": "loss_type 'sapo' is refused",
    "vespo_k_pos": "loss_type 'vespo' is refused",
    "vespo_lambda_pos": "loss_type 'vespo' is refused",
    "vespo_k_neg": "loss_type 'vespo' is refused",
    "vespo_lambda_neg": "loss_type 'vespo' is refused",
    "remove_unused_columns": "workflows and reward functions read the dataset's columns",
    "use_liger_kernel": "its kernels replace the forward that records and scores log-probabilities",
    "liger_kernel_config": "its kernels replace the forward that records and scores log-probabilities",
    "torch_compile": "scoring calls the backbone and the head apart",
    "neftune_noise_alpha": "noise would make recorded and scored log-probabilities differ",
    "label_smoothing_factor": "there are no labels",
} | {
    name: "it belongs to TRL's own vLLM modes; set rollout_engine='vllm' and vllm_base_url"
    for name in (
        "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
        "vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction "
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap"
    ).split()
}


HONOURED_WITH_VLLM = ("vllm_server_base_url", "vllm_server_timeout")  # under rollout_engine="vllm", as TRL means them


def _same(name: str, value: Any, default: Any) -> bool:
    if name == "pad_to_multiple_of":  # TRL resolves its default "auto"
        return value is None or value == default
    if name == "remove_unused_columns":
        return not value
    if name == "torch_compile":  # the environment of a launcher may spell it as text
        return value in (False, None)
    return bool(value == default)


def option_faults(config: Any) -> list[str]:
    """Return one line per inherited option of a TurnGRPOConfig that a workflow does not honour, with what to do."""
    defaults = {f.name: f.default for f in fields(config)}
    with_vllm = config.rollout_engine == "vllm"
    return [
        *(_vllm_faults(config) if with_vllm else ()),
        *(
            f"{name}={getattr(config, name)!r} is not honoured under a workflow: {reason}; leave it {defaults[name]!r}"
            for name, reason in REFUSED.items()
            if name in defaults and not _same(name, getattr(config, name), defaults[name])
            if not (with_vllm and name in HONOURED_WITH_VLLM)
        ),
        *_value_faults(config),
        *_batch_faults(config),
    ]


def _value_faults(config: Any) -> list[str]:
    faults = []
    if config.loss_type not in LOSS_TYPES:
        faults.append(f"loss_type={config.loss_type!r} is not honoured under a workflow: use one of {LOSS_TYPES}")
    if config.scale_rewards not in ("none", "group", "batch"):
        faults.append(f"scale_rewards={config.scale_rewards!r}: use 'none', 'group' or 'batch'")
    if not 0 < config.temperature < math.inf:
        faults.append(f"temperature={config.temperature!r}: training samples, so it must be above 0")
    if config.max_completion_length is None or config.max_completion_length < 1:
        faults.append(f"max_completion_length={config.max_completion_length}: a turn needs a limit of 1 token or more")
    for name in ("epsilon", "epsilon_high", "beta", "learning_rate"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            faults.append(f"{name}={value!r}: expected a finite number >= 0")
    for name in ("reward_weights", "turn_reward_weights"):
        if not all(map(math.isfinite, getattr(config, name) or [])):
            faults.append(f"{name}={getattr(config, name)!r}: expected finite numbers")
    if config.num_iterations < 1:
        faults.append(f"num_iterations={config.num_iterations!r}: a rollout is trained on once at least")
    if config.load_best_model_at_end:
        faults += _best_model_faults(config)
    if config.push_to_hub and config.hub_strategy != "end":
        faults.append(
            "push_to_hub: under a workflow the exported version is pushed at the end, never output_dir with its "
            "rollouts at every checkpoint; set hub_strategy='end'"
        )
    return faults


def _best_model_faults(config: Any) -> list[str]:
    """What transformers takes, and what would then be loaded is not the best."""
    faults = []
    if config.metric_for_best_model in ("loss", "eval_loss"):
        faults.append(
            f"metric_for_best_model={config.metric_for_best_model!r}, load_best_model_at_end's default: the loss is "
            "least where the policy has hardly moved; set metric_for_best_model='eval_reward'"
        )
    both = config.eval_strategy == config.save_strategy == "steps"
    if both and config.save_steps != config.eval_steps:
        faults.append(
            f"save_steps={config.save_steps:g} with load_best_model_at_end and eval_steps={config.eval_steps:g}: an "
            "evaluation without a checkpoint may be the best; set save_steps to eval_steps, or save_strategy='best'"
        )
    return faults


def _batch_faults(config: Any) -> list[str]:
    """An optimizer step holds whole groups of one iteration."""
    faults, accumulation = [], config.gradient_accumulation_steps
    if config.steps_per_generation % accumulation:
        faults.append(
            f"steps_per_generation={config.steps_per_generation} is not a multiple of gradient_accumulation_steps="
            f"{accumulation}: an optimizer step would mix rollouts of two iterations"
        )
    # One update on a rollout takes all of it; of several, each takes a part of every process's rows.
    several = config.steps_per_generation > accumulation
    processes = 1 if several else config.world_size
    rows = config.per_device_train_batch_size * accumulation * processes
    if rows % (config.num_generations or 1):
        counted = f" * {processes} processes" if processes > 1 else " on every process" if several else ""
        faults.append(
            f"per_device_train_batch_size * gradient_accumulation_steps = {config.per_device_train_batch_size} * "
            f"{accumulation}{counted} is not a multiple of num_generations={config.num_generations}: an optimizer "
            "step would split a group; choose sizes whose product is a multiple (per_device_train_batch_size counts "
            "trajectories)"
        )
    return faults


def _vllm_faults(config: Any) -> list[str]:
    faults = []
    if bool(config.vllm_base_url) == bool(config.vllm_server_base_url):
        faults.append(
            f"rollout_engine='vllm' samples on running servers: found vllm_base_url={config.vllm_base_url!r} and "
            f"vllm_server_base_url={config.vllm_server_base_url!r}, expected one of them, as in http://localhost:8000"
        )
    if config.temperature != 1:
        faults.append(
            f"temperature={config.temperature!r} is not honoured with rollout_engine='vllm': the servers report the "
            "log-probabilities at temperature 1; leave it 1.0"
        )
    return faults
