"""What we rely on of other libraries beside their documented use: every such name, who uses it, and its parameters.

CONTRACT lists names below the file of ours that uses or overrides them:

    library.module.name(a, b)             there, and taking these parameters; (a, b, ...) these among others
    library.Class().attribute             on a real instance, as the library leaves it (trainers after one update)
    library.Class().attribute[key]        and that key in it
    library.module.name ~ word            the word stands in its source
"""

import ast
import importlib
import importlib.metadata
import inspect
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, word_tokenizer
from training import PROMPTS

from turngrpo.trainer import TurnGRPOConfig
from turngrpo.trainer.checks import UNUSED_HOOKS
from turngrpo.trainer.inherited_options import HONOURED_WITH_VLLM, REFUSED
from turngrpo.trainer.runs.fingerprint import FREE_FIELDS, LENGTH_FIELDS

ROOT = Path(__file__).parents[1]
LIBRARIES = ("trl", "transformers", "accelerate", "peft", "deepspeed", "filelock", "huggingface_hub", "torch")

CONTRACT = """
scripts/arguments/commands.py
    trl.ModelConfig
    trl.ScriptArguments
scripts/benchmarks/common.py
    transformers.AutoConfig
    transformers.AutoModelForCausalLM
    transformers.AutoTokenizer
    transformers.PreTrainedTokenizerFast
    transformers.Qwen2Config
scripts/benchmarks/exact_kl.py
    torch.nn.functional.linear
    trl.kernels.chunked_divergence.ChunkedDivergenceFunction
    trl.kernels.chunked_divergence.ChunkedDivergenceFunction.forward(ctx, student_hidden, student_weight, student_bias,
        teacher_hidden, teacher_weight, teacher_bias, beta, temperature, student_logit_scale,
        student_final_logit_softcapping, teacher_logit_scale, teacher_final_logit_softcapping)
    trl.kernels.chunked_logprob.ChunkedLogProbFunction
    trl.kernels.chunked_logprob.ChunkedLogProbFunction.forward(ctx, hidden, weight, bias, targets, temperature,
        chunk_size, final_logit_softcapping, logit_scale, outputs)
scripts/benchmarks/gated_step.py
    trl.GRPOTrainer().model
    trl.GRPOTrainer._prepare_inputs(self, generation_batch)
    trl.GRPOTrainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
    trl.GRPOTrainer.get_train_dataloader(self)
scripts/benchmarks/rollout.py
    transformers.GenerationConfig
scripts/benchmarks/trainers.py
    peft.LoraConfig
    transformers.AutoModelForCausalLM
    transformers.PrinterCallback
    transformers.ProgressCallback
    transformers.TrainerCallback
    transformers.TrainerCallback.on_log(self, args, state, control, kwargs)
    transformers.TrainerCallback.on_step_begin(self, args, state, control, kwargs)
    transformers.TrainerCallback.on_step_end(self, args, state, control, kwargs)
    transformers.TrainerCallback.on_train_begin(self, args, state, control, kwargs)
    trl.GRPOConfig
    trl.GRPOTrainer
    trl.GRPOTrainer().eos_token_ids
    trl.GRPOTrainer().model
    trl.GRPOTrainer.remove_callback(self, callback)
scripts/benchmarks/values.py
    torch.nn.functional.linear
scripts/inspect_group.py
    trl.GRPOTrainer().state
    trl.GRPOTrainer().train_dataset
scripts/jobs/evaluating.py
    accelerate.PartialState
    peft.PeftConfig
    trl.ModelConfig
scripts/jobs/inspecting.py
    transformers.PrinterCallback
    transformers.TrainerCallback
    transformers.TrainerCallback.on_optimizer_step(self, args, state, control, kwargs)
    transformers.TrainerCallback.on_pre_optimizer_step(self, args, state, control, kwargs)
    trl.GRPOTrainer()._buffered_inputs
    trl.GRPOTrainer().epsilon_high
    trl.GRPOTrainer().epsilon_low
    trl.GRPOTrainer().lr_scheduler
    trl.GRPOTrainer().model
    trl.GRPOTrainer().optimizer
    trl.GRPOTrainer().processing_class
    trl.GRPOTrainer().reward_func_names
    trl.GRPOTrainer().temperature
    trl.GRPOTrainer.add_callback(self, callback)
    trl.GRPOTrainer.remove_callback(self, callback)
    trl.GRPOTrainer.train(self, resume_from_checkpoint, trial, ignore_keys_for_eval)
    trl.ModelConfig
scripts/jobs/gpu_memory.py
    peft.get_peft_model(model, peft_config, adapter_name, mixed, autocast_adapter_dtype, revision, low_cpu_mem_usage)
scripts/jobs/imitating.py
    trl.GRPOTrainer().state
    trl.GRPOTrainer.save_model(self, output_dir, _internal_call)
    trl.SFTConfig
scripts/jobs/quickstart.py
    transformers.PreTrainedTokenizerBase
    transformers.Qwen2Config
    transformers.Qwen2ForCausalLM
    transformers.Qwen2Tokenizer
    transformers.TrainerCallback
    transformers.TrainerCallback.on_log(self, args, state, control, kwargs)
    transformers.TrainerControl().should_training_stop
    trl.SFTConfig
scripts/jobs/stopping.py
    transformers.IntervalStrategy
    transformers.TrainerState().global_step
    transformers.TrainerState().log_history
    transformers.TrainerState().max_steps
    transformers.trainer_utils.PREFIX_CHECKPOINT_DIR
    trl.GRPOTrainer().args
    trl.GRPOTrainer().state
scripts/jobs/training.py
    accelerate.Accelerator().distributed_type
    accelerate.Accelerator().num_processes
    accelerate.Accelerator.autocast(self, autocast_handler)
    peft.get_peft_model_state_dict(model, state_dict, adapter_name, unwrap_compiled, save_embedding_layers)
    transformers.EarlyStoppingCallback
    transformers.EarlyStoppingCallback.__init__(self, early_stopping_patience, early_stopping_threshold)
    transformers.PrinterCallback
    transformers.ProgressCallback
    trl.GRPOTrainer().accelerator
    trl.GRPOTrainer().model
    trl.GRPOTrainer().state
    trl.GRPOTrainer.add_callback(self, callback)
    trl.GRPOTrainer.is_world_process_zero(self)
    trl.GRPOTrainer.remove_callback(self, callback)
    trl.GRPOTrainer.train(self, resume_from_checkpoint, trial, ignore_keys_for_eval)
    trl.ModelConfig
scripts/lab/data.py
    trl.ModelConfig
scripts/lab/stages.py
    transformers.utils.logging.disable_progress_bar()
scripts/lab/training.py
    transformers.PrinterCallback
    transformers.ProgressCallback
    transformers.TrainerCallback
    transformers.TrainerCallback.on_step_end(self, args, state, control, kwargs)
    transformers.TrainerControl().should_save
    transformers.TrainerControl().should_training_stop
    transformers.trainer_utils.get_last_checkpoint(folder)
    trl.GRPOTrainer().processing_class
    trl.GRPOTrainer().state
    trl.GRPOTrainer.remove_callback(self, callback)
    trl.GRPOTrainer.save_model(self, output_dir, _internal_call)
    trl.GRPOTrainer.train(self, resume_from_checkpoint, trial, ignore_keys_for_eval)
    trl.ModelConfig
    trl.SFTConfig
scripts/lib/adapters.py
    peft.PeftConfig
    peft.PeftModel
    trl.ModelConfig
    trl.get_peft_config(model_args)
scripts/lib/loading.py
    peft.LoraConfig
    peft.get_peft_model(model, peft_config, adapter_name, mixed, autocast_adapter_dtype, revision, low_cpu_mem_usage)
    transformers.AutoConfig
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    transformers.PreTrainedModel
    transformers.Qwen2Config()._name_or_path
    trl.ModelConfig
scripts/lib/options.py
    accelerate.utils.parse_flag_from_env(key, default)
    trl.TrlParser
    trl.TrlParser()._actions
    trl.TrlParser.parse_args_and_config(self, args, return_remaining_strings, fail_with_unknown_args,
        separate_remaining_strings)
    trl.TrlParser.set_defaults_with_config(self, kwargs)
scripts/lib/output.py
    accelerate.utils.gather_object(object)
    transformers.trainer_utils.get_last_checkpoint(folder)
scripts/lib/reporting.py
    transformers.TrainerCallback
    transformers.TrainerCallback.on_log(self, args, state, control, kwargs)
    transformers.TrainerCallback.on_train_begin(self, args, state, control, kwargs)
scripts/memory_estimate.py
    peft.LoraConfig
    transformers.AutoModelForCausalLM
    transformers.Qwen2Config
scripts/page/sources.py
    huggingface_hub.try_to_load_from_cache(repo_id, filename, ...)
scripts/sft.py
    trl.SFTConfig
scripts/train.py
    trl.GRPOTrainer.push_to_hub(self, commit_message, blocking, token, revision, private, kwargs)
trainer/checks.py
    accelerate.utils.DistributedType
    accelerate.utils.DistributedType.MULTI_CPU
    accelerate.utils.DistributedType.NO
    accelerate.utils.FullyShardedDataParallelPlugin
    accelerate.utils.FullyShardedDataParallelPlugin().activation_checkpointing
    accelerate.utils.FullyShardedDataParallelPlugin().cpu_offload
    accelerate.utils.FullyShardedDataParallelPlugin().cpu_ram_efficient_loading
    accelerate.utils.FullyShardedDataParallelPlugin().fsdp_version
    accelerate.utils.FullyShardedDataParallelPlugin().state_dict_type
    accelerate.utils.dataclasses.AcceleratorConfig().dispatch_batches
    accelerate.utils.dataclasses.AcceleratorConfig().even_batches
    accelerate.utils.dataclasses.AcceleratorConfig().split_batches
    accelerate.utils.is_peft_model(model)
    peft.LoraConfig().bias
    peft.LoraConfig().init_lora_weights
    peft.LoraConfig().is_prompt_learning
    peft.LoraConfig().kasa_config
    peft.LoraConfig().peft_type
    peft.PeftModel
    peft.PeftModel().active_adapters
    peft.PeftModel().peft_config
    peft.PeftModel.set_adapter(self, adapter_name, inference_mode)
    peft.get_peft_model_state_dict(model, state_dict, adapter_name, unwrap_compiled, save_embedding_layers)
    peft.tuners.lora.Linear().disable_adapters
    peft.tuners.lora.Linear().merged_adapters
    peft.tuners.tuners_utils.BaseTunerLayer
    peft.utils.other.AuxiliaryTrainingWrapper
    torch.distributed.fsdp.CPUOffloadPolicy
    transformers.PreTrainedTokenizerBase
    trl.GRPOConfig().accelerator_config
    trl.GRPOConfig().deepspeed
    trl.GRPOConfig().distributed_state
    trl.GRPOConfig().fp16
    trl.GRPOConfig().fsdp
    trl.GRPOConfig().fsdp_plugin_args
    trl.GRPOConfig().loss_type
    trl.GRPOConfig().n_gpu
    trl.GRPOConfig().parallelism_config
    trl.GRPOConfig().world_size
    trl.GRPOTrainer._calculate_rewards(self, inputs, prompts, completions, completion_ids_list)
    trl.GRPOTrainer._compute_loss(self, model, inputs)
    trl.GRPOTrainer._generate(self, prompts)
    trl.GRPOTrainer._generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations,
        has_tool_images)
    trl.GRPOTrainer._get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep,
        batch_size, compute_entropy, compute_aux_loss, pixel_values, image_grid_thw, num_images, pixel_attention_mask,
        spatial_shapes, num_tiles, image_sizes, token_type_ids, mm_token_type_ids, image_position_ids)
    trl.GRPOTrainer._get_tool_suffix_ids(self, tool_messages)
    trl.GRPOTrainer._tokenize_prompts(self, prompts)
    trl.GRPOTrainer._tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, logprobs, images,
        multimodal_fields)
    trl.GRPOTrainer.compute_loss_context_manager(self)
    trl.GRPOTrainer.get_gamma_weights(advantages, log_ratio_per_token, mask, importance_sampling_ratio, k_pos,
        lambda_pos, k_neg, lambda_neg)
    trl.GRPOTrainer.get_high_entropy_mask(self, entropies, mask, threshold)
    trl.GRPOTrainer.get_off_policy_mask(advantages, per_token_logps, sampling_per_token_logps, mask,
        off_policy_threshold)
    trl.trainer.utils.get_config_model_id(config)
trainer/config.py
    trl.GRPOConfig
trainer/evaluation/evaluate.py
    accelerate.utils.gather_object(object)
    transformers.TrainerState
trainer/export/exporter.py
    huggingface_hub.HfApi
    huggingface_hub.HfApi.run_as_future(self, fn, args, kwargs)
    trl.GRPOConfig().hub_model_id
    trl.GRPOConfig().hub_private_repo
    trl.GRPOConfig().hub_token
    trl.GRPOConfig().output_dir
    trl.GRPOConfig.to_dict(self)
trainer/export/hub.py
    huggingface_hub.CommitInfo
    huggingface_hub.CommitInfo ~ oid
    huggingface_hub.HfApi
    huggingface_hub.HfApi.create_repo(repo_id, private, exist_ok, ...)
    huggingface_hub.HfApi.create_tag(repo_id, tag, revision, ...)
    huggingface_hub.HfApi.hf_hub_download(repo_id, filename, revision, cache_dir, ...)
    huggingface_hub.HfApi.model_info(repo_id, revision, ...)
    huggingface_hub.HfApi.upload_folder(repo_id, folder_path, commit_message, revision, delete_patterns, ...)
    huggingface_hub.errors.EntryNotFoundError
    huggingface_hub.errors.HfHubHTTPError
    huggingface_hub.errors.LocalEntryNotFoundError
    huggingface_hub.errors.OfflineModeIsEnabled
    huggingface_hub.errors.RevisionNotFoundError
    huggingface_hub.get_token()
    huggingface_hub.utils.validate_repo_id(repo_id)
trainer/export/merge.py
    peft.PeftModel
    peft.PeftModel.from_pretrained(model, model_id, adapter_name, is_trainable, config, autocast_adapter_dtype,
        ephemeral_gpu_offload, low_cpu_mem_usage, key_mapping, kwargs)
    peft.tuners.lora.LoraModel.merge_and_unload(self, progressbar, safe_merge, adapter_names)
    peft.tuners.tuners_utils.BaseTunerLayer
    peft.utils.other.AuxiliaryTrainingWrapper
    transformers.AutoModelForCausalLM
    transformers.AutoTokenizer
    transformers.Qwen2Config()._name_or_path
trainer/export/model_card.py
    huggingface_hub.ModelCard
    huggingface_hub.ModelCard.from_template(card_data, template_str, ...)
    huggingface_hub.ModelCardData
trainer/export/versions.py
    accelerate.utils.is_peft_model(model)
    peft.PeftModel.save_pretrained(self, save_directory, safe_serialization, selected_adapters, save_embedding_layers,
        is_main_process, path_initial_model_for_weight_conversion, kwargs)
    transformers.AutoTokenizer
    transformers.trainer_utils.get_last_checkpoint(folder)
trainer/files.py
    filelock.FileLock
    filelock.Timeout
trainer/forward/joined_attention.py
    torch.autograd.function.once_differentiable(fn)
    torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, return_debug_mask,
        scale)
    torch.ops.aten._scaled_dot_product_flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q,
        cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale)
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, attn_mask,
        scale)
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp,
        dropout_p, is_causal, attn_mask, scale)
trainer/forward/lora_layers.py
    peft.tuners
    peft.tuners.lora.Linear().active_adapters
    peft.tuners.lora.Linear().base_layer
    peft.tuners.lora.Linear().disable_adapters
    peft.tuners.lora.Linear().lora_A
    peft.tuners.lora.Linear().lora_B
    peft.tuners.lora.Linear().lora_bias
    peft.tuners.lora.Linear().lora_dropout
    peft.tuners.lora.Linear().lora_variant
    peft.tuners.lora.Linear().merged
    peft.tuners.lora.Linear().scaling
    peft.tuners.lora.Linear().training
    peft.tuners.lora.Linear.forward(self, x, args, kwargs)
    torch.autograd.function.once_differentiable(fn)
trainer/forward/policy.py
    accelerate.utils.is_peft_model(model)
    peft.PeftModel.get_base_model(self)
    peft.tuners.tuners_utils.BaseTunerLayer
    torch.nn.modules.dropout._DropoutNd
    transformers.PreTrainedModel.get_output_embeddings(self)
    transformers.Qwen2Config.get_text_config(self, decoder, encoder)
trainer/forward/scoring.py
    accelerate.utils.is_peft_model(model)
    peft.LoraConfig().peft_type
    peft.LoraConfig().trainable_token_indices
    peft.PeftModel().peft_config
    peft.PeftModel.disable_adapter(self)
    peft.TrainableTokensConfig ~ token_indices
    torch.nn.Module()._parameters
trainer/forward/shared_prefix.py
    transformers.AttentionInterface
    transformers.AttentionInterface.register(key, value)
    transformers.Qwen2Config()._attn_implementation
    transformers.models.qwen2.modeling_qwen2.Qwen2Attention().is_causal
    transformers.models.qwen2.modeling_qwen2.Qwen2Attention().layer_idx
    transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer()._gradient_checkpointing_func
trainer/forward/whole_weights.py
    accelerate.Accelerator().device
    accelerate.Accelerator.backward(self, loss, kwargs)
    accelerate.utils.deepspeed.DeepSpeedEngineWrapper().engine
    deepspeed.DeepSpeedEngine._backward_prologue(self)
    deepspeed.runtime.engine ~ scale_wrt_gas
    deepspeed.runtime.zero.partition_parameters ~ ds_id
    deepspeed.zero.GatheredParameters
    torch.distributed.tensor.DTensor
    torch.distributed.tensor.DTensor.full_tensor(self, grad_placements)
    torch.distributed.tensor.distribute_tensor(tensor, device_mesh, placements, src_data_rank)
    torch.nn.Module()._forward_hooks
    torch.nn.Module()._forward_pre_hooks
    torch.nn.Module()._parameters
    trl.models.utils.add_hooks(model)
    trl.models.utils.remove_hooks(model)
trainer/measuring/metrics.py
    trl.trainer.utils.nanstd(tensor, dim, keepdim)
trainer/measuring/trackers.py
    transformers.TrainerCallback
    transformers.integrations.TensorBoardCallback
trainer/measuring/update_log.py
    accelerate.utils.gather_object(object)
    transformers.TrainerCallback
    transformers.TrainerCallback.on_optimizer_step(self, args, state, control, kwargs)
    transformers.TrainerCallback.on_pre_optimizer_step(self, args, state, control, kwargs)
    trl.GRPOTrainer()._logs[advantages]
    trl.GRPOTrainer()._logs[completion]
    trl.GRPOTrainer()._logs[extra]
    trl.GRPOTrainer()._logs[prompt]
    trl.GRPOTrainer()._logs[rewards]
    trl.GRPOTrainer()._metrics[eval]
    trl.GRPOTrainer()._metrics[train]
trainer/objective/exact_kl.py
    torch.autograd.function.once_differentiable(fn)
trainer/objective/fused_head.py
    torch.autograd.function.once_differentiable(fn)
trainer/processes.py
    accelerate.PartialState
    accelerate.PartialState().is_main_process
    accelerate.PartialState().num_processes
    accelerate.PartialState().process_index
    accelerate.utils.gather_object(object)
trainer/reward_calls.py
    trl.apply_chat_template(example, processing_class, tools, template_kwargs)
trainer/runs/checkpoints.py
    accelerate.Accelerator().is_local_main_process
    accelerate.Accelerator().num_processes
    accelerate.Accelerator().process_index
    accelerate.Accelerator.wait_for_everyone(self)
    accelerate.utils.gather_object(object)
    torch.save(obj, f, ...)
    transformers.EarlyStoppingCallback
    transformers.EarlyStoppingCallback().early_stopping_patience
    transformers.EarlyStoppingCallback().early_stopping_patience_counter
    transformers.Trainer
    transformers.TrainerState().best_global_step
    transformers.TrainerState().best_model_checkpoint
    transformers.TrainerState().global_step
    transformers.TrainerState().max_steps
    transformers.TrainerState().stateful_callbacks
    transformers.TrainerState.save_to_json(self, json_path)
    transformers.trainer.TRAINER_STATE_NAME
    transformers.trainer_callback.ExportableState
    transformers.trainer_callback.ExportableState.state(self)
    transformers.trainer_utils.PREFIX_CHECKPOINT_DIR
    transformers.trainer_utils.TrainOutput
    transformers.trainer_utils.get_last_checkpoint(folder)
    transformers.trainer_utils.rotate_checkpoints(output_dir, save_total_limit, best_model_checkpoint, use_mtime,
        checkpoint_prefix)
    trl.GRPOConfig().device
    trl.GRPOConfig().output_dir
    trl.GRPOConfig().push_to_hub
    trl.GRPOConfig().save_only_model
    trl.GRPOConfig().save_total_limit
    trl.GRPOConfig().should_save
    trl.GRPOTrainer()._globalstep_last_logged
    trl.GRPOTrainer()._metrics
    trl.GRPOTrainer()._total_loss_scalar
    trl.GRPOTrainer()._tr_loss
    trl.GRPOTrainer().accelerator
    trl.GRPOTrainer().args
    trl.GRPOTrainer().callback_handler
    trl.GRPOTrainer().log_completions
    trl.GRPOTrainer().lr_scheduler
    trl.GRPOTrainer().model
    trl.GRPOTrainer().optimizer
    trl.GRPOTrainer().processing_class
    trl.GRPOTrainer().state
    trl.GRPOTrainer().train_dataset
    trl.GRPOTrainer._get_output_dir(self, trial)
    trl.GRPOTrainer._load_rng_state(self, checkpoint)
    trl.GRPOTrainer._push_from_checkpoint(self, checkpoint_folder)
    trl.GRPOTrainer.log(self, logs, start_time)
trainer/runs/identity.py
    transformers.PreTrainedTokenizerBase
trainer/runs/interruption.py
    accelerate.utils.gather_object(object)
    transformers.TrainerCallback
    transformers.TrainerCallback.on_epoch_end(self, args, state, control, kwargs)
    transformers.TrainerCallback.on_step_end(self, args, state, control, kwargs)
    transformers.TrainerControl().should_evaluate
    transformers.TrainerControl().should_log
    transformers.TrainerControl().should_save
    transformers.TrainerControl().should_training_stop
    transformers.trainer_utils.SaveStrategy
    trl.GRPOConfig().load_best_model_at_end
    trl.GRPOConfig().save_only_model
    trl.GRPOConfig().save_strategy
    trl.GRPOConfig().save_total_limit
trainer/runs/proof.py
    deepspeed.runtime.fp16.loss_scaler.LossScaler
    deepspeed.runtime.zero.config.ZeroStageEnum
    torch.load(f, map_location, weights_only, ...)
    torch.serialization.safe_globals
    transformers.trainer_utils.PREFIX_CHECKPOINT_DIR
trainer/runs/resume.py
    trl.trainer.utils.RepeatSampler
    trl.trainer.utils.RepeatSampler().batch_size
    trl.trainer.utils.RepeatSampler().data_source
    trl.trainer.utils.RepeatSampler().generator
    trl.trainer.utils.RepeatSampler().mini_repeat_count
    trl.trainer.utils.RepeatSampler().num_samples
    trl.trainer.utils.RepeatSampler().repeat_count
    trl.trainer.utils.RepeatSampler().seed
    trl.trainer.utils.RepeatSampler().shuffle
    trl.trainer.utils.RepeatSampler.__init__(self, data_source, mini_repeat_count, batch_size, repeat_count, shuffle,
        seed)
    trl.trainer.utils.RepeatSampler.__iter__(self)
trainer/sampling/padded_decoder.py
    transformers.DynamicCache
    transformers.DynamicCache.__init__(self, ddp_cache_data, config, offloading, offload_only_non_sliding)
    transformers.DynamicCache.reorder_cache(self, beam_idx)
trainer/sampling/served_adapter.py
    accelerate.PartialState
    accelerate.utils.broadcast_object_list(object_list, from_process)
trainer/turn_grpo_trainer.py
    accelerate.Accelerator().device
    accelerate.Accelerator().gradient_state
    accelerate.Accelerator().is_main_process
    accelerate.Accelerator().process_index
    accelerate.Accelerator().scaler
    accelerate.Accelerator().sync_gradients
    accelerate.Accelerator.autocast(self, autocast_handler)
    accelerate.Accelerator.backward(self, loss, kwargs)
    accelerate.Accelerator.wait_for_everyone(self)
    accelerate.utils.gather_object(object)
    accelerate.utils.is_peft_model(model)
    accelerate.utils.memory.clear_device_cache(garbage_collection)
    huggingface_hub.constants
    transformers.PreTrainedModel
    transformers.TrainerControl().should_training_stop
    transformers.TrainerState().global_step
    transformers.TrainerState().num_input_tokens_seen
    transformers.trainer_callback.CallbackHandler.on_push_begin(self, args, state, control, kwargs)
    trl.GRPOConfig
    trl.GRPOConfig().beta
    trl.GRPOConfig().bf16
    trl.GRPOConfig().chat_template_kwargs
    trl.GRPOConfig().device
    trl.GRPOConfig().disable_tqdm
    trl.GRPOConfig().generation_batch_size
    trl.GRPOConfig().gradient_accumulation_steps
    trl.GRPOConfig().hub_model_id
    trl.GRPOConfig().hub_revision
    trl.GRPOConfig().max_completion_length
    trl.GRPOConfig().output_dir
    trl.GRPOConfig().per_device_train_batch_size
    trl.GRPOConfig().report_to
    trl.GRPOConfig().seed
    trl.GRPOConfig().should_save
    trl.GRPOConfig().steps_per_generation
    trl.GRPOConfig().torch_empty_cache_steps
    trl.GRPOConfig().use_bias_correction_kl
    trl.GRPOTrainer
    trl.GRPOTrainer()._buffered_inputs
    trl.GRPOTrainer()._current_train_step_time
    trl.GRPOTrainer()._logs
    trl.GRPOTrainer()._metrics
    trl.GRPOTrainer()._name
    trl.GRPOTrainer()._paper
    trl.GRPOTrainer()._pending_extra_logs
    trl.GRPOTrainer()._pending_metrics
    trl.GRPOTrainer()._step
    trl.GRPOTrainer()._tag_names
    trl.GRPOTrainer()._tokenizer
    trl.GRPOTrainer().accelerator
    trl.GRPOTrainer().args
    trl.GRPOTrainer().aux_loss_enabled
    trl.GRPOTrainer().beta
    trl.GRPOTrainer().callback_handler
    trl.GRPOTrainer().control
    trl.GRPOTrainer().deepspeed
    trl.GRPOTrainer().eos_token_ids
    trl.GRPOTrainer().epsilon_high
    trl.GRPOTrainer().epsilon_low
    trl.GRPOTrainer().eval_dataset
    trl.GRPOTrainer().hub_model_id
    trl.GRPOTrainer().is_deepspeed_enabled
    trl.GRPOTrainer().is_fsdp_enabled
    trl.GRPOTrainer().log_completions
    trl.GRPOTrainer().loss_type
    trl.GRPOTrainer().model
    trl.GRPOTrainer().num_completions_to_print
    trl.GRPOTrainer().num_generations
    trl.GRPOTrainer().num_generations_eval
    trl.GRPOTrainer().num_iterations
    trl.GRPOTrainer().optimizer
    trl.GRPOTrainer().processing_class
    trl.GRPOTrainer().ref_model
    trl.GRPOTrainer().reward_func_names
    trl.GRPOTrainer().reward_funcs
    trl.GRPOTrainer().reward_processing_classes
    trl.GRPOTrainer().state
    trl.GRPOTrainer().temperature
    trl.GRPOTrainer().train_dataset
    trl.GRPOTrainer.__init__(self, model, reward_funcs, args, train_dataset, eval_dataset, processing_class,
        reward_processing_classes, callbacks, optimizers, quantization_config, peft_config, tools, rollout_func,
        environment_factory)
    trl.GRPOTrainer._finalize_training(self, trial, num_train_samples, start_time)
    trl.GRPOTrainer._generate_and_score_completions(self, inputs)
    trl.GRPOTrainer._get_eval_sampler(self, eval_dataset)
    trl.GRPOTrainer._get_grad_norm(self, model, grad_norm)
    trl.GRPOTrainer._get_train_sampler(self, dataset)
    trl.GRPOTrainer._load_best_model(self)
    trl.GRPOTrainer._load_rng_state(self, checkpoint)
    trl.GRPOTrainer._log_completion_extra(self, column, values)
    trl.GRPOTrainer._log_metric(self, name, value)
    trl.GRPOTrainer._prepare_inputs(self, generation_batch)
    trl.GRPOTrainer._run_epoch(self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial,
        ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch)
    trl.GRPOTrainer._save_checkpoint(self, model, trial)
    trl.GRPOTrainer.add_callback(self, callback)
    trl.GRPOTrainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
    trl.GRPOTrainer.evaluation_loop(self, dataloader, description, prediction_loss_only, ignore_keys,
        metric_key_prefix)
    trl.GRPOTrainer.create_model_card(self, model_name, dataset_name, tags)
    trl.GRPOTrainer.init_hf_repo(self, token, private)
    trl.GRPOTrainer.is_world_process_zero(self)
    trl.GRPOTrainer.log(self, logs, start_time)
    trl.GRPOTrainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
    trl.GRPOTrainer.push_to_hub(self, commit_message, blocking, token, revision, private, kwargs)
    trl.GRPOTrainer.save_model(self, output_dir, _internal_call)
    trl.GRPOTrainer.train(self, resume_from_checkpoint, trial, ignore_keys_for_eval)
    trl.GRPOTrainer.training_step(self, model, inputs, num_items_in_batch)
    trl.trainer.utils.RepeatSampler
trainer/warm_start.py
    accelerate.Accelerator.autocast(self, autocast_handler)
    transformers.PrinterCallback
    transformers.Trainer
    transformers.Trainer.log(self, logs, start_time)
    transformers.TrainerCallback
    transformers.TrainerCallback.on_step_end(self, args, state, control, kwargs)
    transformers.TrainerControl().should_log
    transformers.TrainerControl().should_training_stop
    trl.SFTConfig
    trl.SFTTrainer
    trl.SFTTrainer()._total_train_tokens
    trl.SFTTrainer().accelerator
    trl.SFTTrainer().control
    trl.SFTTrainer().model
    trl.SFTTrainer().processing_class
    trl.SFTTrainer().state
    trl.SFTTrainer().train_dataset
    trl.SFTTrainer._finalize_training(self, trial, num_train_samples, start_time)
    trl.SFTTrainer._load_rng_state(self, checkpoint)
    trl.SFTTrainer._run_epoch(self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial,
        ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch)
    trl.SFTTrainer._save_checkpoint(self, model, trial)
    trl.SFTTrainer.add_callback(self, callback)
    trl.SFTTrainer.create_model_card(self, model_name, dataset_name, tags)
    trl.SFTTrainer.get_batch_samples(self, epoch_iterator, num_batches, device)
    trl.SFTTrainer.remove_callback(self, callback)
    trl.SFTTrainer.train(self, resume_from_checkpoint, trial, ignore_keys_for_eval)
"""


class Part(NamedTuple):
    """One line of CONTRACT."""

    file: str
    path: str
    parameters: tuple[str, ...] | None = None
    key: str | None = None
    word: str | None = None

    @property
    def name(self) -> str:
        """The last name of the path, by which our code uses it."""
        return self.path.rsplit(".", 1)[-1].removesuffix("()")

    @property
    def library(self) -> str:
        return self.path.split(".")[0]


def read_contract(text: str) -> list[Part]:
    """Return the parts of a table; a line that is indented further goes on with the one before."""
    parts, file = [], ""
    for line in re.sub(r"\n {8,}", " ", text).splitlines():
        found = re.fullmatch(r"    ([\w.]+?(?:\(\)[\w.]+)?)(?:\((.*)\)|\[(\w+)\]|( ~ \w+))?", line)
        if found:
            path, parameters, key, word = found.groups()
            given = None if parameters is None else tuple(filter(None, parameters.split(", ")))
            parts.append(Part(file, path, given, key, word and word.removeprefix(" ~ ")))
        elif line.strip():
            assert re.fullmatch(r"[\w/]+\.py", line), f"not a line of CONTRACT: {line!r}"
            file = line
    return parts


PARTS = read_contract(CONTRACT)


# ---- real instances, by the path of their class ----


@cache
def trained_grpo() -> Any:
    """Return trl's own trainer after one update."""
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = word_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=2,
            max_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            tiny_model(len(tokenizer)),
            lambda completions, **_: [float(len(text)) for text in completions],
            config,
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
        )
        trainer.train()
    return trainer


@cache
def trained_sft() -> Any:
    """Return trl's own trainer of supervised fine-tuning after one update."""
    from trl import SFTConfig, SFTTrainer

    tokenizer = word_tokenizer()
    examples = Dataset.from_list([{"input_ids": [4, 5, 6, 3], "completion_mask": [0, 0, 1, 1]}] * 4)
    with tempfile.TemporaryDirectory() as folder:
        options: Any = {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}
        config = SFTConfig(folder, max_steps=1, gradient_checkpointing=False, max_length=None, **options)
        trainer = SFTTrainer(tiny_model(len(tokenizer)), config, train_dataset=examples, processing_class=tokenizer)
        trainer.train()
    return trainer


@cache
def adapted() -> Any:
    """Return a model with peft's adapter, in train mode and with gradient checkpoints."""
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(24), config)
    model.get_base_model().gradient_checkpointing_enable()
    return model.train()


@cache
def fsdp_plugin() -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    with patch.dict(os.environ):  # where it leaves what it was told
        return FullyShardedDataParallelPlugin(fsdp_version=2)


def lora_layer() -> Any:
    return next(module for name, module in adapted().named_modules() if name.endswith("q_proj"))


def repeat_sampler() -> Any:
    from trl.trainer.utils import RepeatSampler

    return RepeatSampler([1, 2, 3, 4], 2, 2)


def deepspeed_wrapper() -> Any:
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

    return DeepSpeedEngineWrapper(object())


INSTANCES = {
    "trl.GRPOTrainer": trained_grpo,
    "trl.GRPOConfig": lambda: trained_grpo().args,
    "trl.SFTTrainer": trained_sft,
    "trl.trainer.utils.RepeatSampler": repeat_sampler,
    "transformers.TrainerState": lambda: trained_grpo().state,
    "transformers.EarlyStoppingCallback": lambda: importlib.import_module("transformers").EarlyStoppingCallback(),
    "transformers.TrainerControl": lambda: trained_grpo().control,
    "transformers.Qwen2Config": lambda: tiny_model(24).config,
    "transformers.models.qwen2.modeling_qwen2.Qwen2Attention": lambda: tiny_model(24).model.layers[0].self_attn,
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": lambda: adapted().get_base_model().model.layers[0],
    "accelerate.Accelerator": lambda: trained_grpo().accelerator,
    "accelerate.PartialState": lambda: importlib.import_module("accelerate").PartialState(),
    "accelerate.utils.dataclasses.AcceleratorConfig": lambda: trained_grpo().args.accelerator_config,
    "accelerate.utils.deepspeed.DeepSpeedEngineWrapper": deepspeed_wrapper,
    "accelerate.utils.FullyShardedDataParallelPlugin": fsdp_plugin,
    "peft.LoraConfig": lambda: adapted().peft_config["default"],
    "peft.PeftModel": adapted,
    "peft.tuners.lora.Linear": lora_layer,
    "trl.TrlParser": lambda: importlib.import_module("trl").TrlParser([]),
    "torch.nn.Module": lambda: torch.nn.Linear(2, 2),
}


def resolve(path: str) -> Any:
    """Return what a path of the table names; AttributeError or ModuleNotFoundError where it is gone."""
    holder, _, attributes = path.partition("().")
    if attributes:
        found, names = INSTANCES[holder](), attributes.split(".")
    else:
        first, *names = path.split(".")
        found = importlib.import_module(first)
    for name in names:
        if inspect.ismodule(found) and not hasattr(found, name):
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = getattr(found, name)
    return found


def parameters_of(called: Any) -> tuple[str, ...]:
    """Return the names of a callable's parameters; an operator of torch has them in its schema."""
    if hasattr(called, "default") and hasattr(called.default, "_schema"):
        return tuple(argument.name for argument in called.default._schema.arguments)
    return tuple(inspect.signature(called).parameters)


def change_of(part: Part) -> str | None:
    """Say what is no longer as in the table, None where everything is."""
    try:
        found = resolve(part.path)
    except (AttributeError, ImportError) as error:
        return f"is gone ({error})"
    if part.parameters is not None:
        taken, some = parameters_of(found), part.parameters[-1:] == ("...",)
        if not set(part.parameters[:-1]) <= set(taken) if some else taken != part.parameters:
            return f"takes ({', '.join(taken)}), expected ({', '.join(part.parameters)})"
    if part.key is not None and part.key not in found:
        return f"has the keys {sorted(found)}, expected {part.key!r} among them"
    if part.word is not None and not re.search(rf"\b{part.word}\b", inspect.getsource(found)):
        return f"does not speak of {part.word!r} any more"
    return None


def message(part: Part, change: str) -> str:
    """Say what changed, in which library, and who relies on it."""
    users = ", ".join(dict.fromkeys(other.file for other in PARTS if other.path == part.path))
    version = importlib.metadata.version(part.library)
    return f"{part.path} {change}: {part.library} {version}; {users} rely on it, mend them and then CONTRACT"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.file}-{part.path}{part.key or part.word or ''}")
def test_what_we_rely_on_is_there(part):
    if part.library == "deepspeed":
        pytest.importorskip("deepspeed")
    change = change_of(part)
    assert change is None, message(part, change)


def test_run_epoch_gets_the_checkpoint_by_name():
    """Our _run_epoch reads kwargs["resume_from_checkpoint"], which a call by position would not fill."""
    from transformers import Trainer

    tree = ast.parse(textwrap.dedent(inspect.getsource(Trainer)))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "self._run_epoch"]
    assert calls and all("resume_from_checkpoint" in [k.arg for k in call.keywords] for call in calls)


@pytest.mark.parametrize(
    "names",
    [FREE_FIELDS, LENGTH_FIELDS, REFUSED, HONOURED_WITH_VLLM],
    ids=["FREE_FIELDS", "LENGTH_FIELDS", "REFUSED", "HONOURED_WITH_VLLM"],
)
def test_options_that_we_name_are_options_of_the_libraries(names):
    from trl import SFTConfig

    known = {field.name for kind in (TurnGRPOConfig, SFTConfig) for field in fields(kind)}
    known |= set(vars(trained_grpo().args))
    gone = sorted(set(names) - known)
    assert not gone, f"{gone} are no fields of TurnGRPOConfig or SFTConfig (trl, transformers): take them out"


def test_the_hooks_that_a_workflow_never_calls_are_in_the_table():
    listed = {part.name for part in PARTS if part.file == "trainer/checks.py"}
    assert set(UNUSED_HOOKS) <= listed


# ---- the table against our own source ----

HOLDERS = {  # base classes of ours, as written, and a path to an instance
    "GRPOTrainer": "trl.GRPOTrainer",
    "SFTTrainer": "trl.SFTTrainer",
    "RepeatSampler": "trl.trainer.utils.RepeatSampler",
    "tuners.lora.Linear": "peft.tuners.lora.Linear",
}
RECEIVERS = {  # objects of a library by what they are called, and a path to an instance
    "trainer": "trl.GRPOTrainer",
    "accelerator": "accelerate.Accelerator",
    "args": "trl.GRPOConfig",
    "control": "transformers.TrainerControl",
    "sampler": "trl.trainer.utils.RepeatSampler",
}
OF_NAMEDTUPLES = {"_asdict", "_fields", "_replace"}


class Use(NamedTuple):
    """A name of a library in our source: a whole path for an import, a bare name for an attribute or an override."""

    file: str
    line: int
    name: str
    holder: str = ""  # path of the class of an attribute's object, where it is known


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def sources(root: Path) -> dict[str, ast.Module]:
    """Return the syntax tree of every file of ours by its path."""
    files = [file for top in ("trainer", "rewards", "data_prep", "scripts") for file in (root / top).rglob("*.py")]
    return {file.relative_to(root).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in sorted(files)}


def names_of_class(node: ast.ClassDef) -> set[str]:
    """Return methods, fields and attributes of `self` that a class of ours defines."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for item in ast.walk(node):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            names.add(item.attr)
    return names


def import_uses(tree: ast.Module) -> Iterator[tuple[Any, ...]]:
    """Yield the imports from a library's modules, and of anything private of whatever library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                ours = path.startswith("turngrpo.")
                private = any(map(_is_private, path.split("."))) and not ours
                if private or (path.split(".")[0] in LIBRARIES and node.module != "torch"):
                    yield node.lineno, path


def class_uses(node: ast.ClassDef, own: set[str]) -> Iterator[tuple[Any, ...]]:
    """Yield what a class of ours uses of its library base through `self` and `super()`, and what it overrides."""
    holder = next((HOLDERS[base] for base in map(ast.unparse, node.bases) if base in HOLDERS), None)
    theirs = set(dir(INSTANCES[holder]())) if holder else set()
    mine = names_of_class(node)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in theirs and not item.name.startswith("__"):
            yield item.lineno, item.name, holder
    for item in ast.walk(node):
        if not isinstance(item, ast.Attribute):
            continue
        receiver = ast.unparse(item.value)
        if receiver == "super()" and holder and not item.attr.startswith("__"):
            yield item.lineno, item.attr, holder
        elif receiver == "self" and (item.attr in theirs or (holder and item.attr not in mine)):
            yield item.lineno, item.attr, holder
        elif receiver == "self" and _is_private(item.attr) and item.attr not in own:
            yield item.lineno, item.attr


def attribute_uses(tree: ast.Module, own: set[str], our_options: set[str]) -> Iterator[tuple[Any, ...]]:
    """Yield private attributes of objects that are not ours, and all attributes of those in RECEIVERS."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) in ("self", "super()"):
            continue
        called = ast.unparse(node.value).split(".")[-1]
        if called in RECEIVERS and hasattr(INSTANCES[RECEIVERS[called]](), node.attr):
            if node.attr not in our_options:
                yield node.lineno, node.attr, RECEIVERS[called]
        elif _is_private(node.attr) and node.attr not in own | OF_NAMEDTUPLES:
            yield node.lineno, node.attr


def uses(root: Path) -> list[Use]:
    """Return what our source uses of the libraries and CONTRACT must list."""
    trees = sources(root)
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = set().union(*(names_of_class(node) for node in classes if not any(b in HOLDERS for b in _bases(node))))
    subclassed = [node for node in classes if any(base in HOLDERS for base in _bases(node))]
    own |= {name for node in subclassed for name in names_of_class(node) if not _is_theirs(node, name)}
    options = {name for node in classes if node.name == "TurnGRPOConfig" for name in names_of_class(node)}
    found = []
    for file, tree in trees.items():
        inside = [use for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for use in class_uses(node, own)]
        everything = [*import_uses(tree), *inside, *attribute_uses(tree, own, options)]
        found += [Use(file, *use) for use in everything]
    return sorted(set(found))


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def _is_theirs(node: ast.ClassDef, name: str) -> bool:
    """Whether a name of a subclass is one of its library base, too."""
    return any(hasattr(INSTANCES[HOLDERS[base]](), name) for base in _bases(node) if base in HOLDERS)


def unlisted(found: list[Use], parts: list[Part]) -> list[str]:
    """Return a line for each use that the table does not list below its file."""
    listed = {(part.file, part.path) for part in parts} | {(part.file, part.name) for part in parts}
    missing = {(use.file, use.name): use for use in reversed(found) if (use.file, use.name) not in listed}
    return [
        f"{use.file}, line {use.line} uses {use.name} of {use.holder or 'a library'}: add its path below {use.file} "
        "in CONTRACT of tests/test_contract.py, with its parameters where it is called or overridden"
        for use in sorted(missing.values())
    ]


def stale(parts: list[Part], root: Path) -> list[str]:
    """Return a line for each part of the table whose name its file does not speak of any more."""
    faults = []
    for part in parts:
        text = (root / part.file).read_text(encoding="utf-8") if (root / part.file).is_file() else ""
        word = part.key or part.word or (part.path.split(".")[-2] if part.name.startswith("__") else part.name)
        if not re.search(rf"\b{re.escape(word)}\b", text):
            faults.append(f"CONTRACT lists {part.path} below {part.file}, which does not speak of {word}: take it out")
    return faults


def test_the_table_lists_everything_that_our_source_uses():
    faults = unlisted(uses(ROOT), PARTS)
    assert not faults, "\n".join(faults)


def test_the_table_lists_nothing_that_our_source_does_not_use():
    faults = stale(PARTS, ROOT)
    assert not faults, "\n".join(faults)


# ---- the checks themselves ----


def test_a_change_is_told_with_library_version_and_user():
    part = Part("trainer/runs/checkpoints.py", "trl.GRPOTrainer._get_output_dir", ("self", "place"))
    version = importlib.metadata.version("trl")
    assert message(part, change_of(part) or "") == (
        "trl.GRPOTrainer._get_output_dir takes (self, trial), expected (self, place): trl "
        f"{version}; trainer/runs/checkpoints.py rely on it, mend them and then CONTRACT"
    )
    assert "is gone" in (change_of(Part("x.py", "trl.GRPOTrainer()._pending_numbers")) or "")
    assert "is gone" in (change_of(Part("x.py", "trl.trainer.tools.nanstd")) or "")
    absent = Part("x.py", "trl.GRPOTrainer()._metrics", key="test")
    assert "has the keys ['eval', 'train']" in (change_of(absent) or "")


@pytest.mark.parametrize(
    "text, name",
    [
        ("from trl.trainer.utils import pad\n", "trl.trainer.utils.pad"),
        ("from httpx._models import Response\n", "httpx._models.Response"),
        ("class T(GRPOTrainer):\n    def f(self):\n        super()._tokenize([])\n", "_tokenize"),
        ("class T(GRPOTrainer):\n    def f(self):\n        return self._signature_columns\n", "_signature_columns"),
        ("class T(GRPOTrainer):\n    def _inner_training_loop(self):\n        pass\n", "_inner_training_loop"),
        ("def f(trainer):\n    return trainer._memory_tracker\n", "_memory_tracker"),
        ("def f(model):\n    model._hf_peft_config_loaded = True\n", "_hf_peft_config_loaded"),
    ],
)
def test_a_use_that_is_not_listed_is_found(tmp_path, text, name):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "new.py").write_text(text)
    (fault,) = unlisted(uses(tmp_path), PARTS)
    assert f" uses {name} of " in fault and "below trainer/new.py in CONTRACT" in fault
