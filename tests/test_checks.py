"""What is refused before training: arguments, options, models and rows, each by name."""

import warnings
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from tiny import tiny_model, word_tokenizer
from torch import nn
from training import make_trainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from trl import GRPOConfig

from turngrpo.trainer import GatedMemory, SingleTurn, TurnGRPOConfig
from turngrpo.trainer.checks import check_adapters, check_arguments, check_model, check_rewards, check_rows
from turngrpo.trainer.inherited_options import REFUSED

# ---- options ----

# What a workflow does honour of the fields that TRL defines. A field that a new TRL brings stands in neither list.
HONOURED = {
    # the training loop, the model, the data
    "learning_rate",
    "lr_scheduler_kwargs",
    "bf16",
    "gradient_checkpointing",
    "torch_empty_cache_steps",
    "logging_steps",
    "model_init_kwargs",
    "trust_remote_code",
    "router_aux_loss_coef",  # refused by check_model where it would act
    "disable_dropout",  # always done
    "cast_lm_head_to_fp32",
    "ds3_gather_for_generation",  # of several processes, which are refused
    "shuffle_dataset",
    # rollouts
    "num_generations",
    "num_generations_eval",
    "max_completion_length",
    "generation_batch_size",
    "steps_per_generation",
    "temperature",
    "chat_template_kwargs",
    # the objective
    "beta",
    "num_iterations",
    "epsilon",
    "epsilon_high",
    "reward_weights",
    "scale_rewards",
    "loss_type",
    "use_bias_correction_kl",  # of kl="k3"; the exact KL needs no correction
    # logs
    "log_completions",
    "log_multimodal",  # of images, which a workflow has none of
    "num_completions_to_print",
    "log_unique_prompts",
    "log_completions_hub_repo",
}

# A value that a user might set, for every refused field; the default of each is another.
SET_TO = {
    "use_vllm": True,
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"max_batch_tokens": 512},
    "use_transformers_paged": True,
    "cache_implementation": "static",
    "generation_kwargs": {"do_sample": False},
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "pad_to_multiple_of": 8,
    "delta": 2.0,
    "importance_sampling_level": "sequence",
    "multi_objective_aggregation": "normalize_then_sum",
    "mask_truncated_completions": True,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 0.9,
    "ref_model_sync_steps": 64,
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
    "entropy_coef_min": 0.1,
    "entropy_coef_max": 0.5,
    "entropy_coef_delta": 0.1,
    "entropy_target": 0.5,
    "max_tool_calling_iterations": 3,
    "off_policy_mask_threshold": 0.5,
    "sapo_temperature_neg": 2.0,
    "sapo_temperature_pos": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "remove_unused_columns": True,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "torch_compile": True,
    "neftune_noise_alpha": 5.0,
    "label_smoothing_factor": 0.1,
    "vllm_mode": "server",
    "vllm_model_impl": "transformers",
    "vllm_enable_sleep_mode": True,
    "vllm_structured_outputs_regex": "[a-z]+",
    "vllm_server_base_url": "http://localhost:8000",
    "vllm_server_host": "localhost",
    "vllm_server_port": 9000,
    "vllm_server_timeout": 10.0,
    "vllm_group_port": 51000,
    "vllm_gpu_memory_utilization": 0.9,
    "vllm_max_model_length": 4096,
    "vllm_tensor_parallel_size": 2,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_cap": 2.0,
}


@pytest.fixture
def config(tmp_path):
    return TurnGRPOConfig(str(tmp_path), report_to="none", bf16=False, use_cpu=True)


def trl_fields():
    """Names of the fields of GRPOConfig that a class of TRL declares, its own or another default of transformers'."""
    classes = [k for k in GRPOConfig.__mro__ if k.__module__.startswith("trl.")]
    declared = {name for k in classes for name in k.__dict__.get("__annotations__", {})}
    return {f.name for f in fields(GRPOConfig)} & declared


def test_every_field_of_trl_is_either_refused_or_honoured():
    assert len(trl_fields()) > 80 and {"beta", "use_vllm", "learning_rate"} <= trl_fields()
    assert trl_fields() - set(REFUSED) - HONOURED == set()  # decide what a workflow does with each
    assert HONOURED - trl_fields() == set()  # gone from TRL: take it out of the list
    assert HONOURED & set(REFUSED) == set()


def test_refused_names_are_fields():
    names = {f.name for f in fields(GRPOConfig)}
    assert set(REFUSED) <= names and set(SET_TO) == set(REFUSED)
    # Beyond TRL's own these of transformers are refused.
    assert set(REFUSED) - trl_fields() == {
        "liger_kernel_config",
        "torch_compile",
        "neftune_noise_alpha",
        "label_smoothing_factor",
    }
    assert {f.name for f in fields(TrainingArguments)} >= set(REFUSED) - trl_fields()


@pytest.mark.parametrize(("group", "batch"), [(1, 8), (2, 8), (3, 9), (8, 8), (12, 12), (16, 16)])
def test_an_evaluation_batch_holds_whole_groups(group, batch):
    """TRL's 8 is refused for groups of 3, 12 and 16 as soon as something is evaluated."""
    sizes = {"per_device_train_batch_size": 48, "num_generations": group if group > 1 else 2, "eval_strategy": "steps"}
    config = TurnGRPOConfig("out", num_generations_eval=group, use_cpu=True, bf16=False, eval_steps=1, **sizes)
    assert config.per_device_eval_batch_size == batch
    kept = TurnGRPOConfig("out", num_generations_eval=2, use_cpu=True, bf16=False, per_device_eval_batch_size=4)
    assert kept.per_device_eval_batch_size == 4


def test_defaults_and_paper_values_are_honoured(config, tmp_path):
    config.check_workflow_options()
    TurnGRPOConfig.paper(output_dir=str(tmp_path), report_to="none", bf16=False, use_cpu=True).check_workflow_options()


@pytest.mark.parametrize("name", REFUSED)
def test_an_inherited_option_that_is_not_honoured_is_refused_by_name(name, config):
    assert getattr(config, name) != SET_TO[name]
    setattr(config, name, SET_TO[name])
    with pytest.raises(ValueError) as caught:
        config.check_workflow_options()
    (line,) = str(caught.value).splitlines()  # this one and no other
    assert line.startswith(f"{name}={SET_TO[name]!r} is not honoured under a workflow: {REFUSED[name]}; leave it ")


@pytest.mark.parametrize("name", ["top_p", "use_vllm", "entropy_coef", "vllm_server_port", "pad_to_multiple_of"])
def test_refused_also_as_given_to_the_config(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = TurnGRPOConfig(str(tmp_path), report_to="none", bf16=False, use_cpu=True, **{name: SET_TO[name]})
    with pytest.raises(ValueError, match=f"^{name}="):
        check_arguments({"model": None, "args": made})


def test_all_faults_are_named_at_once(config):
    config.top_k, config.delta, config.loss_type = 5, 3.0, "bnpo"
    with pytest.raises(ValueError) as caught:
        config.check_workflow_options()
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == ["top_k", "delta", "loss_type"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_type": "dr_grpo"}, "loss_type='dr_grpo' is not honoured under a workflow: use one of"),
        ({"scale_rewards": "other"}, "scale_rewards='other'"),
        ({"temperature": 0.0}, "temperature=0.0: training samples"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"epsilon": -0.2}, "epsilon=-0.2: expected a finite number >= 0"),
        ({"epsilon_high": float("nan")}, "epsilon_high=nan: expected"),
        ({"beta": -0.001}, "beta=-0.001: expected"),
        ({"beta": float("inf")}, "beta=inf: expected"),
        ({"reward_weights": [1.0, float("nan")]}, r"reward_weights=\[1.0, nan\]: expected finite numbers"),
        ({"turn_reward_weights": [float("inf")]}, r"turn_reward_weights=\[inf\]: expected finite numbers"),
        ({"num_iterations": 0}, "num_iterations=0: a rollout is trained on once at least"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "steps_per_generation=3 is not a multiple of gradient_accumulation_steps=2",
        ),
        (
            {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1, "num_generations": 2},
            r"3 \* 1 is not a multiple of num_generations=2: an optimizer step would split a group",
        ),
    ],
)
def test_values_that_a_workflow_cannot_train(values, message, config):
    for name, value in values.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        config.check_workflow_options()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", 1.1),
        ("alpha", -0.1),
        ("alpha", float("nan")),
        ("turn_baseline", "step"),
        ("kl", "k1"),
        ("behavior_check", "last"),
        ("behavior_tolerance", 0.0),
        ("advantage_epsilon", 0.0),
        ("eval_temperature", -1.0),
        ("eval_temperature", float("inf")),
        ("eval_top_p", 0.0),
        ("eval_top_p", 1.1),
        ("chunk_size", 0),
        ("max_prompt_length", 2.5),
        ("max_memory_tokens", -1),
        ("max_tokens_per_microbatch", 0),
        ("rollout_batch_tokens", 0),
    ],
)
def test_fields_of_our_own_are_checked_by_name(name, value, tmp_path):
    with pytest.raises(ValueError, match=rf"^{name} is .*, expected"):
        TurnGRPOConfig(str(tmp_path), report_to="none", bf16=False, use_cpu=True, **{name: value})


# ---- arguments ----


def test_arguments_of_the_trainer(config, tmp_path):
    assert check_arguments({"model": None, "args": config}) is config
    plain = GRPOConfig(str(tmp_path), report_to="none", bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match="args is a GRPOConfig, but a workflow needs a TurnGRPOConfig"):
        check_arguments({"model": None, "args": plain})
    for name in ("tools", "rollout_func", "environment_factory", "quantization_config"):
        with pytest.raises(ValueError, match=f"^{name} is not honoured under a workflow"):
            check_arguments({"model": None, "args": config, name: [len]})
        check_arguments({"model": None, "args": config, name: None})


# ---- models ----


def test_models_that_are_refused():
    tokenizer, model = word_tokenizer(), tiny_model(40)
    check_model(model, tokenizer, 0.1, False)
    with pytest.raises(ValueError, match="a workflow needs a tokenizer, found SimpleNamespace"):
        check_model(model, SimpleNamespace(), 0.1, False)
    with pytest.raises(ValueError, match="router_aux_loss_coef is not honoured"):
        check_model(model, tokenizer, 0.1, True)
    with pytest.raises(ValueError, match="no parameter is trainable: load an adapter with is_trainable=True"):
        check_model(tiny_model(40).requires_grad_(False), tokenizer, 0.1, False)
    prompted = get_peft_model(tiny_model(40), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="prompt-learning adapters are not honoured"):
        check_model(prompted, tokenizer, 0.1, False)
    biased = get_peft_model(tiny_model(40), LoraConfig(r=2, target_modules=["q_proj"], bias="all"))
    with pytest.raises(ValueError, match="use bias='none'"):
        check_model(biased, tokenizer, 0.1, False)
    check_model(biased, tokenizer, 0.0, False)  # without a reference nothing has to stay frozen
    quantized = tiny_model(40)
    quantized.is_loaded_in_4bit = True
    with pytest.raises(ValueError, match="a quantized model is not honoured"):
        check_model(quantized, tokenizer, 0.1, False)
    endless = word_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no EOS token"):
        check_model(model, endless, 0.1, False)


def test_tokens_without_an_embedding_are_refused_where_prompts_can_hold_them():
    tokenizer = word_tokenizer()
    rows, model = len(tokenizer), tiny_model(len(tokenizer))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_model(model, tokenizer, 0.1, False)  # kept out of texts, and not in the template
    with pytest.raises(ValueError, match=f"has 3 tokens without an embedding, .* has {rows} rows"):
        tokenizer.add_tokens(["new", "words"])
        tokenizer.chat_template += "<image>"
        check_model(model, tokenizer, 0.1, False)
    model.resize_token_embeddings(len(tokenizer))
    check_model(model, tokenizer, 0.1, False)


LORA = {"r": 2, "target_modules": ["q_proj"]}


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_changes_its_base_is_refused(start):
    check_adapters("any", LoraConfig(**LORA))
    config = LoraConfig(init_lora_weights=start, **LORA)
    base = tiny_model(40)
    before = base.model.layers[0].self_attn.q_proj.weight.clone()
    adapted = get_peft_model(base, config)
    after = adapted.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert (after - before).abs().max() > 1e-3  # what a reference without the adapter would be
    for model, given in (("any", config), (adapted, None)):
        with pytest.raises(ValueError, match=f"init_lora_weights='{start}' or kasa_config changes the base weights"):
            check_adapters(model, given)


def test_the_trained_adapter_is_the_one_that_reference_and_export_take():
    model = get_peft_model(tiny_model(40), LoraConfig(**LORA))
    check_adapters(model, None)
    model.add_adapter("second", LoraConfig(**LORA))
    model.set_adapter("second")
    with pytest.raises(ValueError, match=r"the active adapters are \['second'\], expected \['default'\]"):
        check_adapters(model, None)
    with pytest.raises(ValueError, match=r"the active adapters are \['mine'\]"):
        check_adapters(get_peft_model(tiny_model(40), LoraConfig(**LORA), adapter_name="mine"), None)


def warm(**options):
    """Return a PeftModel as PEFT loads it to go on: its adapter changes the base."""
    model = get_peft_model(tiny_model(40), LoraConfig(**(LORA | options), init_lora_weights=False))
    check_adapters(model, None)
    check_model(model, word_tokenizer(), 0.1, False)
    return model


def test_parameters_that_are_trainable_beside_the_adapter_are_refused():
    """Reference, checkpoint and export hold the adapter alone: what embeddings learnt would be gone, or move both."""
    model = warm()
    model.get_input_embeddings().requires_grad_(True)
    for beta in (0.1, 0.0):
        with pytest.raises(ValueError, match=r"1 parameters beside the adapter are trainable, .*embed_tokens.weight"):
            check_model(model, word_tokenizer(), beta, False)
    kept = warm(modules_to_save=["embed_tokens"])  # what PEFT carries through all of them
    check_model(kept, word_tokenizer(), 0.1, False)


@pytest.mark.parametrize("part", ["lora_A", "layers.1"])
def test_an_adapter_that_is_frozen_in_part_is_refused(part):
    model = warm()
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ValueError, match=rf"2 parameters of the adapter are frozen, .*{part}.* among them"):
        check_model(model, word_tokenizer(), 0.1, False)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    model.set_adapter("default")  # what the message says
    check_model(model, word_tokenizer(), 0.1, False)


def test_a_second_adapter_is_frozen_or_refused():
    model = warm()
    model.add_adapter("second", LoraConfig(**LORA))
    check_model(model, word_tokenizer(), 0.1, False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("second" in name or parameter.requires_grad)
    with pytest.raises(ValueError, match=r"the adapters \['second'\] are trainable beside 'default'.*delete_adapter"):
        check_model(model, word_tokenizer(), 0.1, False)
    model.delete_adapter("second")
    check_model(model, word_tokenizer(), 0.1, False)


def test_an_adapter_that_has_no_part_in_the_forward_pass_is_refused_for_what_it_is():
    model = warm()
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"the adapters \['default'\] are merged into the base .*unmerge_adapter"):
        check_adapters(model, None)
    model.unmerge_adapter()
    check_adapters(model, None)
    model.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match=r"the adapter is switched off: call model.enable_adapter_layers\(\)"):
        check_adapters(model, None)
    with pytest.raises(ValueError, match=r"call model.requires_grad_\(True\) on a model that was merged and unloaded"):
        check_model(warm().merge_and_unload(), word_tokenizer(), 0.1, False)


def test_adapter_layers_outside_of_a_peft_model_are_refused(tmp_path):
    """As transformers' load_adapter makes them: base and adapter would be trained and saved as one whole model."""
    for options in (LORA, LORA | {"target_modules": ["embed_tokens"]}):
        injected = inject_adapter_in_model(LoraConfig(**options), tiny_model(40))
        with pytest.raises(ValueError, match="Qwen2ForCausalLM has adapter layers but is no PeftModel.*is_trainable"):
            check_adapters(injected, None)
        with pytest.raises(ValueError, match="has adapter layers but is no PeftModel"):
            check_adapters(injected, LoraConfig(**LORA))
    warm().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="a folder that holds an adapter: pass the adapter's model, PeftModel.from_pr"
    ):
        check_adapters(str(tmp_path), None)


@pytest.mark.parametrize("mark", ["is_loaded_in_8bit", "hf_quantizer", "weights"])
def test_the_quantized_base_of_an_adapter_is_refused(mark):
    model = warm()
    if mark == "weights":
        rounded = nn.Parameter(torch.zeros(64, 32, dtype=torch.int8), requires_grad=False)
        model.get_base_model().model.layers[0].mlp.up_proj.weight = rounded
    else:
        setattr(model.get_base_model(), mark, "bitsandbytes")
    with pytest.raises(ValueError, match="a quantized model is not honoured"):
        check_model(model, word_tokenizer(), 0.1, False)


# ---- rewards ----


def test_reward_functions_of_one_name_are_refused(config):
    config.alpha = 1.0
    check_rewards(config, SingleTurn(), ["a", "b"], ["c"])
    with pytest.raises(ValueError, match=r"several reward functions are named \['a'\]: give each a __name__"):
        check_rewards(config, SingleTurn(), ["a", "a", "b"], ["c"])
    with pytest.raises(ValueError, match=r"are named \['b'\]"):
        check_rewards(config, SingleTurn(), ["a", "b"], ["b"])


# ---- rows ----


def bound(workflow, tokenizer, max_memory_tokens=8):
    workflow.bind(tokenizer, SimpleNamespace(chat_template_kwargs=None, max_memory_tokens=max_memory_tokens))
    return workflow


def text_rows(*lengths, named=True):
    return [({"id": f"q{n}"} if named else {}) | {"prompt": "code " * length} for n, length in enumerate(lengths)]


def check(rows, prompt_length=10, completion=20, positions=512, workflow=None, name="train"):
    sizes = {"max_prompt_length": prompt_length, "max_completion_length": completion, "max_memory_tokens": 16}
    config = SimpleNamespace(**sizes)
    workflow = workflow or bound(SingleTurn(), word_tokenizer())
    check_rows(workflow, rows, name, config, tiny_model(40, max_position_embeddings=positions))


def test_rows_that_cannot_fit_are_named():
    check(text_rows(1, 10, 5))
    with pytest.raises(ValueError) as caught:
        check(text_rows(11, 10, 30))
    message = str(caught.value)
    assert message.startswith(
        "2 rows cannot fit in 10 prompt tokens (max_prompt_length=10; the model has 512 positions"
    )
    assert message.splitlines()[1:] == [
        "  train row 'q0': up to 11 prompt tokens",
        "  train row 'q2': up to 30 prompt tokens",
    ]
    with pytest.raises(ValueError, match="eval row 1: up to 11 prompt tokens"):
        check(Dataset.from_list(text_rows(3, 11, named=False)), name="eval")


@pytest.mark.parametrize("column", ["prompts", "completions", "trajectories"])
def test_columns_that_reward_functions_would_get_other_things_by_are_refused(column):
    dataset = Dataset.from_dict({"prompt": ["code"], column: ["x"]})
    with pytest.raises(ValueError, match=rf"the eval dataset has columns \['{column}'\]"):
        check(dataset, name="eval")
    check(dataset.rename_column(column, "other"))


def test_at_most_20_rows_are_named():
    with pytest.raises(ValueError) as caught:
        check(text_rows(*[11] * 20))
    assert len(str(caught.value).splitlines()) == 21 and "more" not in str(caught.value).splitlines()[-1]
    with pytest.raises(ValueError, match="23 rows cannot fit") as caught:
        check(text_rows(*[11] * 23))
    lines = str(caught.value).splitlines()
    assert len(lines) == 22 and "'q19'" in lines[20] and lines[21] == "  and 3 more"


def test_positions_of_the_model_leave_room_for_the_completion():
    check(text_rows(12), prompt_length=100, completion=20, positions=32)  # 12 + 20 = 32
    with pytest.raises(ValueError, match=r"in 12 prompt tokens .*32 positions, of which max_completion_length=20 are"):
        check(text_rows(13), prompt_length=100, completion=20, positions=32)
    with pytest.raises(ValueError, match="32 positions, and max_completion_length=32 leaves none for a prompt"):
        check(text_rows(1), prompt_length=100, completion=32, positions=32)
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=32))
    config = SimpleNamespace(max_prompt_length=100, max_completion_length=20)
    with pytest.raises(ValueError, match="cannot fit in 12 prompt tokens"):
        check_rows(bound(SingleTurn(), word_tokenizer()), text_rows(13), "train", config, learned)


def test_a_reading_is_bounded_by_its_longest_chunk_and_a_full_memory():
    tokenizer = word_tokenizer()
    workflow = bound(GatedMemory(), tokenizer, max_memory_tokens=8)
    row = {"id": "doc", "question": "code", "answers": ["x"], "chunks": [{"text": "code " * n} for n in (3, 9, 2)]}
    # The longest prompt holds the first memory ("No memory yet.", 3 words); a full memory brings 8 - 3 more.
    state = workflow.start(row)
    state.chunk = 1
    longest = sum(map(len, workflow.prompt(state))) + 5
    check([row], prompt_length=longest, workflow=workflow)
    # "code " is one token; the chunk of nine is the longest. The rest is the template's and the tags'.
    parts = workflow.prompt_parts(row)
    assert (parts["chunk"], parts["memory"]) == (9, 8) and sum(parts.values()) == longest
    assert parts["instruction"] == len(workflow.chat.encode_text(workflow.instruction))
    counted = ", ".join(f"{name} {tokens}" for name, tokens in parts.items())
    with pytest.raises(ValueError, match=rf"train row 'doc': up to {longest} prompt tokens \({counted}\)"):
        check([row], prompt_length=longest - 1, workflow=workflow)


def test_streams_and_workflows_without_a_bound_are_left_to_the_rollout():
    check(IterableDataset.from_generator(lambda: iter(text_rows(99))))
    check(None)
    check(text_rows(99), workflow=SimpleNamespace())


# ---- what is evaluated is not trained on ----


def some_rows(ids, projects):
    prompts = ["code of red" for _ in ids]
    return Dataset.from_dict({"prompt": prompts, "id": ids, "project": projects})


@pytest.mark.parametrize(
    ("ids", "projects", "message"),
    [
        (["a", "x", "y"], ["q", "q", "q"], "the train and the eval dataset share 1 values of 'id' \\('a'\\)"),
        (["x", "y", "z"], ["q", "p", "r"], "share 2 values of 'project' \\('p', 'r'\\)"),
    ],
)
def test_training_and_evaluation_share_neither_ids_nor_projects(ids, projects, message, tmp_path):
    train = some_rows(list("abcdef"), list("pppprr"))
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, dataset=train, eval_dataset=some_rows(ids, projects))
    with pytest.raises(ValueError, match="the train and the far dataset share"):
        make_trainer(tmp_path, dataset=train, eval_dataset={"far": some_rows(ids, projects)})
    make_trainer(tmp_path, dataset=train, eval_dataset=some_rows(ids, projects), allow_overlap=True)
    make_trainer(tmp_path, dataset=train, eval_dataset=some_rows(["x"], ["q"]))
