"""Every kind of adapter that PEFT has, each small enough for a tiny model, and what a workflow does with it."""

import torch
from peft import PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from tiny import sharpen, tiny_model

LINEAR = {"target_modules": ["q_proj", "v_proj"]}
# name: (PEFT's kind, options)
KINDS = {
    "LORA": ("LORA", LINEAR),
    "LORA on embeddings": ("LORA", {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}),
    "LORA and single tokens": ("LORA", {"target_modules": ["q_proj"], "trainable_token_indices": [4, 5, 6]}),
    "LORA with modules_to_save": ("LORA", LINEAR | {"modules_to_save": ["norm", "embed_tokens", "lm_head"]}),
    "LORA with biases of its own": ("LORA", LINEAR | {"lora_bias": True}),
    "LORA on parameters": ("LORA", {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]}),
    "DORA": ("LORA", LINEAR | {"use_dora": True}),
    "ADALORA": ("ADALORA", LINEAR | {"total_step": 100}),
    "BEFT": ("BEFT", LINEAR),
    "BOFT": ("BOFT", LINEAR | {"boft_block_size": 8}),
    "C3A": ("C3A", LINEAR | {"block_size": 8}),
    "DEFT": ("DEFT", LINEAR),
    "DELORA": ("DELORA", LINEAR),
    "FOURIERFT": ("FOURIERFT", LINEAR | {"n_frequency": 10}),
    "FROD": ("FROD", LINEAR),
    "GLORA": ("GLORA", LINEAR),
    "GRALORA": ("GRALORA", LINEAR),
    "HIRA": ("HIRA", LINEAR),
    "HRA": ("HRA", LINEAR),
    "IA3": ("IA3", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LN_TUNING": ("LN_TUNING", {"target_modules": ["input_layernorm"]}),
    "LOHA": ("LOHA", LINEAR),
    "LOKR": ("LOKR", LINEAR),
    "MISS": ("MISS", LINEAR | {"r": 4}),
    "OFT": ("OFT", LINEAR | {"oft_block_size": 8}),
    "OSF": ("OSF", LINEAR | {"effective_rank": 8}),
    "PEANUT": ("PEANUT", LINEAR),
    "PSOFT": ("PSOFT", LINEAR | {"r": 4}),
    "RANDLORA": ("RANDLORA", LINEAR | {"r": 2}),
    "ROAD": ("ROAD", LINEAR | {"group_size": 8}),
    "SHIRA": ("SHIRA", LINEAR | {"r": 2}),
    "SUPERTUNING": ("SUPERTUNING", LINEAR),
    "TINYLORA": ("TINYLORA", LINEAR),
    "TRAINABLE_TOKENS": ("TRAINABLE_TOKENS", {"target_modules": ["embed_tokens"], "token_indices": [4, 5, 6]}),
    "UNILORA": ("UNILORA", LINEAR),
    "VBLORA": ("VBLORA", LINEAR | {"num_vectors": 16, "vector_length": 8, "topk": 2, "r": 2}),
    "VERA": ("VERA", LINEAR | {"r": 4}),
    "WAVEFT": ("WAVEFT", LINEAR | {"n_frequency": 10}),
}
# Kinds that change the base as they are made, before any training.
START_CHANGED = {"C3A", "FOURIERFT", "UNILORA", "VBLORA"}
# Kinds that a workflow refuses by name, and how they are made where they can be.
REFUSED = {
    "LILY": LINEAR,
    "POLY": LINEAR,
    "PVERA": LINEAR | {"r": 4},
    "SHADOW": {},
    "XLORA": {},
}
PROMPTS = "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING CPT CARTRIDGE".split()
ELSEWHERE = {"ADAMSS", "ADAPTION_PROMPT"}  # the first needs scikit-learn, the second another architecture


def adapter_config(name):
    kind, options = KINDS[name]
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](task_type="CAUSAL_LM", **options)


def base_model(vocabulary, **overrides):
    """Return a tiny base whose head is its own, the same one each time."""
    return sharpen(tiny_model(vocabulary, **({"tie_word_embeddings": False} | overrides)))


def warm_model(name, vocabulary, **overrides):
    """Return a base with an adapter of a kind whose every trained number is far from where it starts."""
    model = get_peft_model(base_model(vocabulary, **overrides), adapter_config(name))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
