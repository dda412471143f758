"""What must hold before a workflow trains: arguments, model and rows, each with an error that says what to do."""

import os
import warnings
from typing import Any

from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, is_peft_model
from peft import PeftModel
from torch.distributed.fsdp import CPUOffloadPolicy
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import get_config_model_id

from .config import TurnGRPOConfig
from .rollout import row_name

MAX_FAULTS = 20  # rows named in one error
DEFAULT_CONFIG = TurnGRPOConfig  # made where a workflow is given no args


def check_without_workflow(args: Any, turn_reward_funcs: Any) -> None:
    """Refuse what only a workflow gives a meaning to."""
    if turn_reward_funcs is not None:
        raise ValueError("turn_reward_funcs reward the turns of a workflow: pass workflow too, or neither")
    if args is not None and args.loss_type == "group":
        raise ValueError("loss_type='group' needs a workflow; without one use a loss type of trl.GRPOTrainer")
    if getattr(args, "rollout_engine", "transformers") != "transformers":
        raise ValueError("rollout_engine='vllm' needs a workflow; without one set TRL's use_vllm and vllm_mode")


def check_rollout_engine(config: TurnGRPOConfig, adapted: bool) -> None:
    """Refuse vLLM for a model that is trained whole."""
    if config.rollout_engine == "vllm" and not adapted:
        raise ValueError(
            "rollout_engine='vllm' needs a PEFT adapter, found a model that is trained whole, whose weights a vLLM "
            "server cannot be given: pass peft_config (--use_peft), or leave rollout_engine 'transformers'"
        )


def check_arguments(arguments: dict[str, Any]) -> TurnGRPOConfig:
    """Refuse, before a model is loaded, trainer arguments that a workflow does not honour; returns the config."""
    args, model = arguments.get("args"), arguments["model"]
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        args = DEFAULT_CONFIG(f"{name.split('/')[-1]}-GRPO")
    if not isinstance(args, TurnGRPOConfig):
        raise ValueError(f"args is a {type(args).__name__}, but a workflow needs a TurnGRPOConfig")
    for name in ("tools", "rollout_func", "environment_factory", "quantization_config"):
        if arguments.get(name):
            raise ValueError(f"{name} is not honoured under a workflow: the workflow drives the turns; leave it out")
    args.check_workflow_options()
    check_rollout_engine(args, bool(arguments.get("peft_config")) or isinstance(model, PeftModel))
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs: launch a process for each (accelerate_configs/multi_gpu.yaml), or "
            "show it one (CUDA_VISIBLE_DEVICES=0)"
        )
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        check_fsdp(args)
    loading: Any = args.accelerator_config
    if args.world_size > 1 and (loading.split_batches or loading.dispatch_batches or not loading.even_batches):
        raise ValueError(
            "accelerator_config with split_batches, dispatch_batches or without even_batches is not honoured under a "
            "workflow: every process reads its own rows of a global batch, equally many; leave them out"
        )
    if args.fp16 and (args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"):
        raise ValueError(
            "fp16 is not honoured under a workflow with DeepSpeed, whose loss scaling it bypasses: set bf16"
        )
    return args


def check_fsdp(args: TurnGRPOConfig) -> None:
    """Refuse, under FSDP, what does not leave whole weights for a rollout and its passes, or none that are right."""
    state: Any = args.distributed_state
    if state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        raise ValueError(
            f"FSDP needs several GPUs, found {state.num_processes} process(es) on {state.device}, where accelerate "
            "would train without it: use accelerate_configs/cpu.yaml, cpu_2proc.yaml or single_gpu.yaml"
        )
    plugin = FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}))
    wrong = {
        "fsdp_version: 2": plugin.fsdp_version != 2,
        "fsdp_cpu_ram_efficient_loading: false": plugin.cpu_ram_efficient_loading,
        "fsdp_offload_params: false": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "fsdp_activation_checkpointing: false (use gradient_checkpointing)": plugin.activation_checkpointing,
        "fsdp_state_dict_type: FULL_STATE_DICT": "FULL_STATE_DICT" not in str(plugin.state_dict_type),
    }
    if any(wrong.values()):
        expected = ", ".join(name for name, fault in wrong.items() if fault)
        raise ValueError(f"FSDP under a workflow needs {expected}: see accelerate_configs/fsdp2.yaml")


def check_model(model: Any, processing_class: Any, beta: float, aux_loss_enabled: bool) -> None:
    """Refuse models that cannot be sampled, scored and compared with a frozen reference exactly."""
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise ValueError(f"a workflow needs a tokenizer, found {type(processing_class).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter is trainable: load an adapter with is_trainable=True")
    adapters = model.peft_config.values() if is_peft_model(model) else []
    if any(config.is_prompt_learning for config in adapters):
        raise ValueError("prompt-learning adapters are not honoured under a workflow: use LoRA or full fine-tuning")
    if beta and any(getattr(config, "bias", "none") != "none" for config in adapters):
        raise ValueError("an adapter that trains biases has no frozen base to be the reference: use bias='none'")
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        raise ValueError("a quantized model is not honoured under a workflow: load it in 16 or 32 bits")
    if aux_loss_enabled:
        raise ValueError("router_aux_loss_coef is not honoured under a workflow: set it to 0")


def check_rewards(config: TurnGRPOConfig, workflow: Any, names: list[str], turn_reward_funcs: list[Any]) -> None:
    """Refuse turn reward weights that fit no functions; warn of rewards that a workflow or alpha makes no sense of."""
    weights = config.turn_reward_weights
    if weights is not None and len(weights) != len(turn_reward_funcs):
        raise ValueError(
            f"turn_reward_weights has {len(weights)} numbers, expected one for each of "
            f"{len(turn_reward_funcs)} turn reward functions"
        )
    if workflow.strict_format and "format_reward" not in names:
        warnings.warn(
            "strict_format sets the reward of an unparsed trajectory to 0; without format_reward a parsed one can "
            "score below that: add turngrpo.rewards.format_reward",
            stacklevel=5,
        )
    if not turn_reward_funcs and config.alpha < 1:
        warnings.warn(f"no turn_reward_funcs: every advantage is alpha={config.alpha} of TRL's", stacklevel=5)


def check_rows(workflow: Any, dataset: Any, name: str, config: TurnGRPOConfig, model: Any = None) -> None:
    """Raise one ValueError naming every row (up to 20) of a dataset that has a prompt which cannot fit.

    A stream, or a workflow without `max_prompt_tokens`, is checked turn by turn during the rollout instead.
    """
    bound = getattr(workflow, "max_prompt_tokens", None)
    if bound is None or dataset is None or not hasattr(dataset, "__len__"):
        return
    shape = None if model is None else model.config.get_text_config()  # a server's model is not here
    positions = getattr(shape, "max_position_embeddings", None)
    completion = config.max_completion_length or 0
    limit = config.max_prompt_length if positions is None else min(config.max_prompt_length, positions - completion)
    faults = []
    for index, row in enumerate(tqdm(dataset, desc=f"checking {name} rows", leave=False, delay=2)):
        longest = bound(row)
        if longest > limit:
            faults.append(f"  {name} {row_name(row, index)}: up to {longest} prompt tokens")
    if faults:
        more = [f"  and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise ValueError(
            f"{len(faults)} rows cannot fit in {limit} prompt tokens (max_prompt_length={config.max_prompt_length}; "
            f"the model has {positions} positions, max_completion_length={completion}). Prompts are never truncated: "
            "cut chunks smaller, allow less memory, or raise the limit\n" + "\n".join(faults[:MAX_FAULTS] + more)
        )
