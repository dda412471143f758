"""TurnGRPOConfig: GRPOConfig with TRL's defaults, and our fields with the paper's values, checked."""

import math
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from turngrpo.trainer.inherited_options import option_faults
from turngrpo.trainer.reading.limits import check_limits, require

TRL_EVAL_BATCH = 8  # per_device_eval_batch_size of transformers

# Of Table 3, where an inherited field has another default.
PAPER_VALUES: dict[str, Any] = {
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
        None, "Largest allowed gap of the behavior check; None: 2e-4 in float32 and float64, none in lower precision."
    )
    chunk_size: int = _our(5000, "Tokens per chunk where the corpus holds whole documents. Paper: 5000.")
    max_prompt_length: int = _our(8192, "Longest prompt in tokens; a row that cannot fit is an error. Paper: 8192.")
    max_memory_tokens: int = _our(1024, "A memory candidate is cut to this many tokens, and counted. Paper: 1024.")
    max_turns: int | None = _our(
        1000, "Turns of a trajectory; a row that still goes on after so many is an error. None: no limit."
    )
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
    reward_timeout: float | None = _our(
        None,
        "Seconds that a reward function may take for one call; None: any time. One that takes longer is an error: an "
        "async one is cancelled, any other interrupted, by a signal in the main thread, which a library's own code "
        "notices when it comes back to Python; on Windows it ends first.",
    )
    allow_changed: list[str] | None = _our(
        None,
        "What a resume may go on with although it differs from the checkpoint's, on purpose: names as its refusal "
        "says them, such as rewards, workflow.layout or learning_rate.",
    )
    ledger: str = _our(
        "true",
        "Write every rollout to output_dir/rollouts before training on it, and what each update made of every turn; "
        "full: of every token too; false: nothing.",
    )
    allow_overlap: bool = _our(False, "Evaluate on rows whose ids or projects are trained on too.")
    per_device_eval_batch_size: int | None = _our(  # type: ignore[assignment]
        None, "Readings of an evaluation batch; as many whole groups as hold 8 or more when left out."
    )
    eval_temperature: float = _our(1.0, "Sampling temperature in evaluation, 0 for greedy. Paper: 1.0.")
    eval_top_p: float = _our(0.7, "Nucleus of sampling in evaluation, in (0, 1]. Paper: 0.7.")
    eval_seed: int = _our(0, "Seed of the sampling noise in evaluation, the same at every evaluation.")

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "a whole number >= 1")  # before they divide anything
        if self.per_device_eval_batch_size is None:
            group = self.num_generations_eval or self.num_generations or TRL_EVAL_BATCH
            self.per_device_eval_batch_size = -(-TRL_EVAL_BATCH // group) * group
        if self.activation_checkpointing is None:  # the name that TRL's default has is a deprecated one
            self.activation_checkpointing = self.gradient_checkpointing
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        super().__post_init__()
        self.ledger = str(self.ledger).lower()
        self._require("ledger", self.ledger in ("true", "false", "full"), "true, false or full")
        self._require("alpha", 0 <= self.alpha <= 1, "a number in [0, 1]")
        self._require("turn_baseline", self.turn_baseline in ("group", "batch"), "'group' or 'batch'")
        self._require("kl", self.kl in ("exact", "k3"), "'exact' or 'k3'")
        self._require("behavior_check", self.behavior_check in ("first", "all", "off"), "'first', 'all' or 'off'")
        turns, tolerance = self.max_turns, self.behavior_tolerance
        self._require("max_turns", turns is None or turns >= 1, "None or a whole number >= 1")
        self._require("behavior_tolerance", tolerance is None or tolerance > 0, "None or a number above 0")
        self._require("advantage_epsilon", self.advantage_epsilon > 0, "a number above 0")
        self._require("rollout_engine", self.rollout_engine in ("transformers", "vllm"), "'transformers' or 'vllm'")
        self._require("vllm_request_timeout", self.vllm_request_timeout > 0, "a number above 0")
        limit = self.reward_timeout
        self._require("reward_timeout", limit is None or 0 < limit < math.inf, "None or a number of seconds above 0")
        check_limits(self)
        for name in ("max_tokens_per_microbatch", "rollout_batch_tokens", "vllm_concurrent_requests"):
            value = getattr(self, name)
            self._require(name, isinstance(value, int) and value >= 1, "a whole number >= 1")

    def _require(self, name: str, fits: bool, expected: str) -> None:
        require(self, name, fits, expected)

    @classmethod
    def paper(cls, **overrides: Any) -> "TurnGRPOConfig":
        """Return the values of GRU-Mem's Table 3 (arXiv 2602.10560): 128 prompts x 16 rollouts, one update each."""
        return cls(**(PAPER_VALUES | overrides))

    def check_workflow_options(self) -> None:
        """Raise ValueError naming every inherited option that a workflow does not honour, with what to do."""
        faults = option_faults(self)
        if faults:
            raise ValueError("\n".join(faults))

    def advantage_options(self) -> dict[str, Any]:
        """Return what score_rollout takes of the config, by its argument names."""
        names = "alpha reward_weights turn_reward_weights turn_baseline scale_rewards advantage_epsilon".split()
        return {name: getattr(self, name) for name in names}
