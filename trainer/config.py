"""TurnGRPOConfig: GRPOConfig with TRL's defaults, our fields with the paper's values, what a workflow refuses."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from .losses import LOSS_TYPES
from .server import Server

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


def _our(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class TurnGRPOConfig(GRPOConfig):
    """GRPOConfig plus the fields of training with a workflow; without a workflow they do nothing.

    Every inherited field keeps TRL's default; `TurnGRPOConfig.paper()` sets Table 3 of GRU-Mem (arXiv 2602.10560).
    """

    alpha: float = _our(
        0.9, "Share of the trajectory advantage, in [0, 1]; the rest is the turn advantage. Paper: 0.9."
    )
    turn_baseline: str = _our(
        "group", "Turn rewards are compared at the same step with the 'group' or with every group of the 'batch'."
    )
    turn_reward_weights: list[float] | None = _our(None, "One weight per turn reward function; None: all 1.")
    advantage_epsilon: float = _our(1e-8, "Added to the standard deviation where scale_rewards divides by it, > 0.")
    kl: str = _our("exact", "'exact': KL(current || reference) over the whole vocabulary; 'k3': TRL's estimator.")
    behavior_check: str = _our(
        "first",
        "'first' compares the rows of the first update on a rollout with their recorded log-probabilities, 'all' "
        "scores every row before it, 'off' measures only.",
    )
    behavior_tolerance: float | None = _our(
        None, "Largest allowed gap of the behavior check; None: 2e-4 in float32 and float64, no limit below."
    )
    chunk_size: int = _our(5000, "Tokens per chunk where the corpus holds whole documents. Paper: 5000.")
    max_prompt_length: int = _our(8192, "Longest prompt in tokens; a row that cannot fit is an error. Paper: 8192.")
    max_memory_tokens: int = _our(1024, "A memory candidate is cut to this many tokens, and counted. Paper: 1024.")
    max_tokens_per_microbatch: int = _our(
        16384, "Tokens of one forward and backward pass: prefixes and a micro-batch, >= 1."
    )
    rollout_batch_tokens: int = _our(262144, "Prompt and response tokens in the sampler's cache at once, >= 1.")
    share_prefix: bool = _our(True, "Compute the common prefix of a group's prompts once, in sampling and training.")
    rollout_engine: str = _our(
        "transformers",
        "Who samples under a workflow: 'transformers' is the training model itself, 'vllm' are running servers that "
        "get the current adapter before each rollout.",
    )
    vllm_base_url: list[str] | None = _our(
        None,
        "Servers of rollout_engine='vllm', as in http://localhost:8000; one may stand in vllm_server_base_url too.",
    )
    vllm_adapter_dir: str | None = _our(
        None, "Folder for adapters that trainer and servers both see; None: output_dir/vllm_adapters."
    )
    vllm_request_timeout: float = _our(600.0, "Seconds that a server may take for one completion, > 0.")
    vllm_concurrent_requests: int = _our(64, "Requests that each process keeps open at each server, >= 1.")
    ledger: bool = _our(True, "Write every rollout to output_dir/rollouts as Parquet before training on it.")
    eval_temperature: float = _our(1.0, "Sampling temperature in evaluation, 0 for greedy. Paper: 1.0.")
    eval_top_p: float = _our(0.7, "Nucleus of sampling in evaluation, in (0, 1]. Paper: 0.7.")
    eval_seed: int = _our(0, "Seed of the sampling noise in evaluation, the same at every evaluation.")

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "a whole number >= 1")  # before they divide anything
        super().__post_init__()
        self._require("alpha", 0 <= self.alpha <= 1, "a number in [0, 1]")
        self._require("turn_baseline", self.turn_baseline in ("group", "batch"), "'group' or 'batch'")
        self._require("kl", self.kl in ("exact", "k3"), "'exact' or 'k3'")
        self._require("behavior_check", self.behavior_check in ("first", "all", "off"), "'first', 'all' or 'off'")
        tolerance = self.behavior_tolerance
        self._require("behavior_tolerance", tolerance is None or tolerance > 0, "None or a number above 0")
        self._require("advantage_epsilon", self.advantage_epsilon > 0, "a number above 0")
        self._require("eval_temperature", 0 <= self.eval_temperature < math.inf, "a number >= 0 (0 is greedy)")
        self._require("rollout_engine", self.rollout_engine in ("transformers", "vllm"), "'transformers' or 'vllm'")
        self._require("vllm_request_timeout", self.vllm_request_timeout > 0, "a number above 0")
        self._require("eval_top_p", 0 < self.eval_top_p <= 1, "a number in (0, 1]")
        for name in (
            "chunk_size",
            "max_prompt_length",
            "max_memory_tokens",
            "max_tokens_per_microbatch",
            "rollout_batch_tokens",
            "vllm_concurrent_requests",
        ):
            value = getattr(self, name)
            self._require(name, isinstance(value, int) and value >= 1, "a whole number >= 1")

    def _require(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    @classmethod
    def paper(cls, **overrides: Any) -> "TurnGRPOConfig":
        """Return the values of GRU-Mem's Table 3 (arXiv 2602.10560): 128 prompts x 16 rollouts, one update each."""
        values: dict[str, Any] = {
            "learning_rate": 1e-6,
            "warmup_steps": 20,
            "lr_scheduler_type": "constant_with_warmup",
            "num_generations": 16,
            "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 128,
            "max_completion_length": 2048,
            "epsilon": 0.2,
            "beta": 0.001,
            "loss_type": "group",
            "scale_rewards": "none",
            "temperature": 1.0,
            "top_p": 1.0,
        }
        return cls(**(values | overrides))

    def check_workflow_options(self) -> None:
        """Raise ValueError naming every inherited option that a workflow does not honour, with what to do."""
        defaults = {f.name: f.default for f in fields(self)}
        with_vllm = self.rollout_engine == "vllm"
        faults = self._vllm_faults() if with_vllm else []
        faults += [
            f"{name}={getattr(self, name)!r} is not honoured under a workflow: {reason}; leave it {defaults[name]!r}"
            for name, reason in REFUSED.items()
            if name in defaults and not _same(name, getattr(self, name), defaults[name])
            if not (with_vllm and name in HONOURED_WITH_VLLM)
        ]
        if self.loss_type not in LOSS_TYPES:
            faults.append(f"loss_type={self.loss_type!r} is not honoured under a workflow: use one of {LOSS_TYPES}")
        if self.scale_rewards not in ("none", "group", "batch"):
            faults.append(f"scale_rewards={self.scale_rewards!r}: use 'none', 'group' or 'batch'")
        if not 0 < self.temperature < math.inf:
            faults.append(f"temperature={self.temperature!r}: training samples, so it must be above 0")
        if self.max_completion_length is None or self.max_completion_length < 1:
            faults.append(
                f"max_completion_length={self.max_completion_length}: a turn needs a limit of 1 token or more"
            )
        faults += self._number_faults()
        assert self.steps_per_generation is not None
        if self.steps_per_generation % self.gradient_accumulation_steps:
            faults.append(
                f"steps_per_generation={self.steps_per_generation} is not a multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: an optimizer step would mix rollouts of two iterations"
            )
        # One update on a rollout takes all of it; of several, each takes a part of every process's rows.
        several = self.steps_per_generation > self.gradient_accumulation_steps
        processes = 1 if several else self.world_size
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps * processes
        if rows % (self.num_generations or 1):
            counted = f" * {processes} processes" if processes > 1 else " on every process" if several else ""
            faults.append(
                f"per_device_train_batch_size * gradient_accumulation_steps = {self.per_device_train_batch_size} * "
                f"{self.gradient_accumulation_steps}{counted} is not a multiple of num_generations="
                f"{self.num_generations}: an optimizer step would split a group (per_device_train_batch_size counts "
                "trajectories)"
            )
        if self.push_to_hub and self.hub_strategy != "end":
            faults.append(
                "push_to_hub: under a workflow the exported version is pushed at the end, never output_dir with its "
                "rollouts at every checkpoint; set hub_strategy='end'"
            )
        if faults:
            raise ValueError("\n".join(faults))

    def _number_faults(self) -> list[str]:
        faults = []
        for name in ("epsilon", "epsilon_high", "beta", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                faults.append(f"{name}={value!r}: expected a finite number >= 0")
        for name in ("reward_weights", "turn_reward_weights"):
            if not all(map(math.isfinite, getattr(self, name) or [])):
                faults.append(f"{name}={getattr(self, name)!r}: expected finite numbers")
        if self.num_iterations < 1:
            faults.append(f"num_iterations={self.num_iterations!r}: a rollout is trained on once at least")
        return faults

    def _vllm_faults(self) -> list[str]:
        faults = []
        if bool(self.vllm_base_url) == bool(self.vllm_server_base_url):
            faults.append(
                f"rollout_engine='vllm' samples on running servers: found vllm_base_url={self.vllm_base_url!r} and "
                f"vllm_server_base_url={self.vllm_server_base_url!r}, expected one of them, as in http://localhost:8000"
            )
        if self.temperature != 1:
            faults.append(
                f"temperature={self.temperature!r} is not honoured with rollout_engine='vllm': the servers report the "
                "log-probabilities at temperature 1; leave it 1.0"
            )
        return faults

    def vllm_servers(self) -> list[Server]:
        """Return the servers of rollout_engine='vllm'; ValueError for what is no URL."""
        urls = self.vllm_base_url or [self.vllm_server_base_url or ""]
        waits = self.vllm_server_timeout, self.vllm_request_timeout
        return [Server(url, *waits, connections=self.vllm_concurrent_requests) for url in urls]


def _same(name: str, value: Any, default: Any) -> bool:
    if name == "pad_to_multiple_of":  # TRL resolves its default "auto"
        return value is None or value == default
    if name == "remove_unused_columns":
        return not value
    if name == "torch_compile":  # the environment of a launcher may spell it as text
        return value in (False, None)
    return bool(value == default)
