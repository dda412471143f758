"""What must hold before a workflow trains: arguments, model and rows, each with an error that says what to do."""

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, is_peft_model
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import get_config_model_id

from turngrpo.trainer.config import TurnGRPOConfig
from turngrpo.trainer.forward.policy import TRAINED
from turngrpo.trainer.reading.rollout import row_name

MAX_FAULTS = 20  # rows named in one error
# Initialisations of LoRA that write into the base weights, which a reference, an export and a server lack afterwards.
CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
# Kinds of adapters whose policy is no function of the tokens so far alone, with the reason.
REFUSED_KINDS = {
    "LILY": "its experts are chosen by all tokens of a row, the later ones too",
    "POLY": "its forward pass needs task ids",
    "PVERA": "it draws noise in its forward pass",
    "SHADOW": "its second model runs beside the base's layers",
    "XLORA": "it runs the base twice and keeps no cache",
}
TUNED = (BaseTunerLayer, AuxiliaryTrainingWrapper)
ADAPTER_CONFIG = "adapter_config.json"
LOADED_BY = "PeftModel.from_pretrained(base, path, is_trainable=True)"
# What reward functions get under these names is not the dataset's.
RESERVED_COLUMNS = ("prompts", "completions", "trajectories")
# Hooks of GRPOTrainer (trl 1.16) and Trainer (transformers 5.24) that a workflow never calls.
UNUSED_HOOKS = (
    "_calculate_rewards",
    "_compute_loss",
    "_generate",
    "_generate_single_turn",
    "_get_per_token_logps_and_entropies",
    "_get_tool_suffix_ids",
    "_tokenize_prompts",
    "_tool_call_loop",
    "compute_loss_context_manager",
    "get_gamma_weights",
    "get_high_entropy_mask",
    "get_off_policy_mask",
)
Method = TypeVar("Method", bound=Callable[..., Any])


def showing_arguments_of(base: Callable[..., Any]) -> Callable[[Method], Method]:
    """Let inspect.signature, by which launchers decide what to pass, see `base`'s arguments before a method's own."""

    def decorate(method: Method) -> Method:
        own = [p for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY]
        theirs, shown = inspect.signature(base), cast(Any, method)
        shown.__signature__ = theirs.replace(parameters=[*theirs.parameters.values(), *own])
        return method

    return decorate


def check_hooks(subclass: type, trainer: type) -> None:
    """Refuse a subclass that overrides what TRL or transformers would call, and a workflow never does."""
    ignored = [name for name in UNUSED_HOOKS if getattr(subclass, name) is not getattr(trainer, name)]
    if ignored:
        raise ValueError(
            f"{subclass.__name__} overrides {', '.join(ignored)}, which nothing calls under a workflow: override "
            "_generate_and_score_completions (the generation step), compute_loss (the loss of one micro-batch) or the "
            "workflow itself, or train without a workflow"
        )


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
        args = TurnGRPOConfig(f"{name.split('/')[-1]}-GRPO")
    if not isinstance(args, TurnGRPOConfig):
        raise ValueError(
            f"args is a {type(args).__name__}, but a workflow needs a TurnGRPOConfig: it has the same fields"
        )
    for name in ("tools", "rollout_func", "environment_factory"):
        if arguments.get(name):
            raise ValueError(f"{name} is not honoured under a workflow: the workflow drives the turns; leave it out")
    if arguments.get("quantization_config"):
        raise ValueError("quantization_config is not honoured under a workflow: load the model in 16 or 32 bits")
    args.check_workflow_options()
    check_rollout_engine(args, bool(arguments.get("peft_config")) or isinstance(model, PeftModel))
    check_adapters(model, arguments.get("peft_config"))
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs: launch a process for each (accelerate_configs/multi_gpu.yaml), or "
            "show it one (CUDA_VISIBLE_DEVICES=0)"
        )
    fsdp = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if fsdp:
        check_fsdp(args)
    if args.parallelism_config is not None:
        raise ValueError(
            "parallelism_config is not honoured under a workflow: every process runs whole passes; leave it None"
        )
    loading: Any = args.accelerator_config
    if args.world_size > 1 and (loading.split_batches or loading.dispatch_batches or not loading.even_batches):
        raise ValueError(
            "accelerator_config with split_batches, dispatch_batches or without even_batches is not honoured under a "
            "workflow: every process reads its own rows of a global batch, equally many; leave them out"
        )
    deepspeed = args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if args.fp16 and (deepspeed or fsdp):
        raise ValueError(
            "fp16 is not honoured under a workflow with DeepSpeed or FSDP, whose loss scaling it bypasses: set bf16"
        )
    return args


def check_adapters(model: Any, peft_config: Any) -> None:
    """Refuse adapters that reference, export and server would take for another policy than the trained one."""
    configs = [peft_config] if peft_config else []
    if isinstance(model, str) and Path(model, ADAPTER_CONFIG).is_file():
        raise ValueError(f"model is {model!r}, a folder that holds an adapter: pass the adapter's model, {LOADED_BY}")
    if isinstance(model, PeftModel):
        check_adapter_state(model)
        configs = [model.peft_config[TRAINED]]
    elif isinstance(model, nn.Module) and any(isinstance(module, TUNED) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has adapter layers but is no PeftModel, as load_adapter of transformers and "
            f"inject_adapter_in_model of peft leave it: load the adapter with {LOADED_BY}"
        )
    for config in configs:
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in REFUSED_KINDS:
            raise ValueError(
                f"adapters of the kind {kind} are not honoured under a workflow: {REFUSED_KINDS[kind]}; use LoRA"
            )
        start = str(getattr(config, "init_lora_weights", "")).lower()
        if start.startswith(CHANGES_BASE) or getattr(config, "kasa_config", None):
            raise ValueError(
                f"init_lora_weights={start!r} or kasa_config changes the base weights, which a reference or a server "
                "then lacks: leave init_lora_weights True and kasa_config None"
            )


def check_adapter_state(model: PeftModel) -> None:
    """Refuse a PeftModel whose adapter is another one, merged into its base, or switched off."""
    if model.active_adapters != [TRAINED]:
        raise ValueError(
            f"the active adapters are {model.active_adapters}, expected [{TRAINED!r}]: load the one to train with "
            f"{LOADED_BY}, without adapter_name"
        )
    layers: Any = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    merged = sorted({name for layer in layers for name in layer.merged_adapters})
    if merged:
        raise ValueError(
            f"the adapters {merged} are merged into the base model, where no gradient reaches them: call "
            "model.unmerge_adapter() before training, and merge what comes out"
        )
    if any(layer.disable_adapters for layer in layers):
        raise ValueError("the adapter is switched off: call model.enable_adapter_layers() before training")


def check_trained_parameters(model: Any) -> None:
    """Refuse a PEFT model that would not train its adapter, all of it and nothing else."""
    exported = {id(parameter) for parameter in adapter_parameters(model).values()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    beside = [name for name, parameter in trained.items() if id(parameter) not in exported]
    others = sorted(
        {part for name in beside for part in name.split(".") if part in set(model.peft_config) - {TRAINED}}
    )
    if others:
        raise ValueError(
            f"the adapters {others} are trainable beside {TRAINED!r}, but reference, checkpoint and export are of "
            f"{TRAINED!r} alone: call model.delete_adapter({others[0]!r}), or freeze its parameters"
        )
    if beside:
        raise ValueError(
            f"{len(beside)} parameters beside the adapter are trainable, {beside[0]} among them, which checkpoint and "
            "export would lose: call requires_grad_(False) on them, or name their modules in modules_to_save"
        )
    frozen = sorted(marked_trainable(model) - set(trained))
    if frozen:
        raise ValueError(
            f"{len(frozen)} parameters of the adapter are frozen, {frozen[0]} among them: peft frees them again with "
            f"its first change of adapters, so that they would be trained all the same; call model.set_adapter"
            f"({TRAINED!r}), or name other target_modules"
        )


def adapter_parameters(model: Any) -> dict[str, Any]:
    """Return the parameters and buffers of the trained adapter themselves, by the names that an export gives them."""
    state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return get_peft_model_state_dict(model, dict(state), TRAINED, save_embedding_layers=False)


def marked_trainable(model: Any) -> set[str]:
    """Return the names of the parameters that peft trains where the adapter is active; no flag is changed."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.requires_grad_(False)
        model.set_adapter(TRAINED)
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


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
        raise ValueError(
            f"a workflow needs a tokenizer, found {type(processing_class).__name__}: pass processing_class"
        )
    if processing_class.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token, which ends a turn: set tokenizer.eos_token")
    check_vocabulary(processing_class, model.get_input_embeddings().weight.shape[0])
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "no parameter is trainable: load an adapter with is_trainable=True, pass peft_config, or call "
            "model.requires_grad_(True) on a model that was merged and unloaded"
        )
    adapters = model.peft_config.values() if is_peft_model(model) else []
    if any(config.is_prompt_learning for config in adapters):
        raise ValueError("prompt-learning adapters are not honoured under a workflow: use LoRA or full fine-tuning")
    if beta and any(getattr(config, "bias", "none") != "none" for config in adapters):
        raise ValueError("an adapter that trains biases has no frozen base to be the reference: use bias='none'")
    if is_quantized(model):
        raise ValueError("a quantized model is not honoured under a workflow: load it in 16 or 32 bits")
    if is_peft_model(model):
        check_trained_parameters(model)
    if aux_loss_enabled:
        raise ValueError("router_aux_loss_coef is not honoured under a workflow: set it to 0")


def is_quantized(model: Any) -> bool:
    """Whether a model, or the base of an adapter, holds its weights in less than 16 bits."""
    flags = ("is_loaded_in_4bit", "is_loaded_in_8bit", "hf_quantizer")
    held = not all(parameter.is_floating_point() for parameter in model.parameters())
    return held or any(getattr(model, flag, None) for flag in flags)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Refuse tokens that prompts can hold but the model has no embedding for.

    Special tokens that the chat template does not spell stay out of prompts: some models leave such without a row.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    template = str(tokenizer.chat_template)
    beyond = [
        token
        for token, index in tokenizer.get_vocab().items()
        if index >= rows and (token not in special or token in template or token == tokenizer.eos_token)
    ]
    if beyond:
        raise ValueError(
            f"the tokenizer has {len(beyond)} tokens without an embedding, {beyond[0]!r} among them; the model has "
            f"{rows} rows: call model.resize_token_embeddings(len(tokenizer))"
        )


def check_names(names: list[str]) -> None:
    """Refuse reward functions of one name, of which metrics, ledger and logs would hold the last alone."""
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"several reward functions are named {doubled}: give each a __name__ of its own")


def check_weights(config: TurnGRPOConfig, names: Sequence[str], turn_names: Sequence[str]) -> None:
    """Refuse weights that are not one for each function."""
    for option, kind, functions in (
        ("reward_weights", "reward", names),
        ("turn_reward_weights", "turn reward", turn_names),
    ):
        weights = getattr(config, option)
        if weights is not None and len(weights) != len(functions):
            raise ValueError(
                f"{option} has {len(weights)} numbers, expected one for each of {len(functions)} {kind} functions "
                f"({', '.join(functions) or 'there are none'})"
            )


def check_rewards(config: TurnGRPOConfig, workflow: Any, names: list[str], turn_names: list[str]) -> None:
    """Refuse turn reward weights that fit no functions; warn of rewards that a workflow or alpha makes no sense of."""
    check_names(names + turn_names)
    check_weights(config, names, turn_names)
    if workflow.strict_format and "format_reward" not in names:
        warnings.warn(
            "strict_format sets the reward of an unparsed trajectory to 0; without format_reward a parsed one can "
            "score below that: add turngrpo.rewards.format_reward",
            stacklevel=5,
        )
    if not turn_names and config.alpha < 1:
        warnings.warn(
            f"no turn_reward_funcs, so every advantage is alpha={config.alpha} times the trajectory's: set alpha=1.0, "
            "or pass turn_reward_funcs",
            stacklevel=5,
        )


def check_overlap(train: Any, evaluation: Mapping[str, Any], allowed: bool) -> None:
    """Refuse evaluation rows whose id or project is a training row's, unless `allowed`; streams are not read."""
    columns = set(getattr(train, "column_names", None) or ())
    for name, dataset in evaluation.items():
        if allowed or not hasattr(train, "__len__") or not hasattr(dataset, "__len__"):
            continue
        for column in sorted({"id", "project"} & columns & set(getattr(dataset, "column_names", None) or ())):
            shared = sorted(map(str, set(train[column]) & set(dataset[column])))
            if shared:
                raise ValueError(
                    f"the train and the {name} dataset share {len(shared)} values of {column!r} "
                    f"({', '.join(map(repr, shared[:5]))}): what is evaluated would be trained on; split by project "
                    "(data_prep.split_by_project), or set allow_overlap=True"
                )


def first_row(dataset: Any) -> Any:
    """Return the first row of a dataset or stream, None where there is none."""
    return None if dataset is None else next(iter(dataset), None)


def check_rows(workflow: Any, dataset: Any, name: str, config: TurnGRPOConfig, model: Any = None) -> None:
    """Raise one ValueError naming every row (up to 20) of a dataset that has a prompt which cannot fit.

    A stream, or a workflow without `max_prompt_tokens`, is checked turn by turn during the rollout instead.
    """
    taken = [column for column in RESERVED_COLUMNS if column in (getattr(dataset, "column_names", None) or ())]
    if taken:
        raise ValueError(
            f"the {name} dataset has columns {taken}, names under which reward functions get something else: rename "
            "them"
        )
    bound = getattr(workflow, "max_prompt_tokens", None)
    if bound is None or dataset is None or not hasattr(dataset, "__len__"):
        return
    shape = None if model is None else model.config.get_text_config()  # a server's model is not here
    positions = getattr(shape, "max_position_embeddings", None)
    completion = config.max_completion_length or 0
    limit = config.max_prompt_length if positions is None else min(config.max_prompt_length, positions - completion)
    if positions is not None and positions <= completion:
        raise ValueError(
            f"the model has {positions} positions, and max_completion_length={completion} leaves none for a prompt: "
            f"lower it, and max_memory_tokens={config.max_memory_tokens} where that is as large"
        )
    parts = getattr(workflow, "prompt_parts", None)
    faults: list[str] = []
    for index, row in enumerate(tqdm(dataset, desc=f"checking {name} rows", leave=False, delay=2)):
        longest = bound(row)
        if longest > limit:
            shown = parts(row) if parts is not None and len(faults) < MAX_FAULTS else {}
            counted = ", ".join(f"{part} {tokens}" for part, tokens in shown.items())
            faults.append(
                f"  {name} {row_name(row, index)}: up to {longest} prompt tokens{counted and f' ({counted})'}"
            )
    if faults:
        more = [f"  and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise ValueError(
            f"{len(faults)} rows cannot fit in {limit} prompt tokens (max_prompt_length={config.max_prompt_length}; "
            f"the model has {positions} positions, of which max_completion_length={completion} are kept for the "
            "reply). Prompts are never truncated: cut chunks smaller, allow less memory (max_memory_tokens), or "
            f"{'raise max_prompt_length' if limit == config.max_prompt_length else 'lower max_completion_length'}\n"
            + "\n".join(faults[:MAX_FAULTS] + more)
        )
