"""Tiny real models and tokenizers that tests train in seconds."""

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)

SIZES = {  # of any architecture whose config uses the common names; the vocabulary is the test's
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 1,
}


def word_tokenizer(words: str = "", pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer over the gate tags, a few words, and `words`."""
    tags = [f"<{slash}{name}>" for name in ("think", "check", "update", "next") for slash in ("", "/")]
    vocabulary = ["<unk>", "<|pad|>", "<|im_start|>", "<|im_end|>", *tags]
    vocabulary += "yes no continue end user assistant \\boxed{ } code of red blue is 1 2 3 memory No yet .".split()
    vocabulary = list(dict.fromkeys([*vocabulary, *words.split()]))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>" if pad_is_eos else "<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


class Float64Norm(Qwen2RMSNorm):
    """transformers' norm rounds to float32, whatever the weights: 1e-8 of noise where float64 is compared."""

    def forward(self, hidden_states):
        return self.weight * hidden_states * (hidden_states.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def tiny_model(vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> Qwen2ForCausalLM:
    """Return a randomly initialised two-layer Qwen2 model with grouped queries and tied embeddings."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 3,
        "pad_token_id": 1,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**(config | overrides))).to(dtype)
    if dtype == torch.float64:
        for module in model.modules():
            if isinstance(module, Qwen2RMSNorm):
                module.__class__ = Float64Norm
    return model


def sharpen(model):
    """Scale the random matrices up, so that every token of the context moves the distribution."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def adapted_model(tokenizer: PreTrainedTokenizerFast, base=None, **lora):
    """Return a LoRA model whose trained adapter changes its base, and a second adapter "ref" beside it."""
    if base is None:
        base = tiny_model(len(tokenizer))
        base.name_or_path = base.config._name_or_path = "owner/tiny"
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**(options | lora)))
    model.add_adapter("ref", LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.default" in name:
                parameter.fill_(0.5)
            if "lora_B.ref" in name:
                parameter.fill_(-7.0)
    return model


def save_base(folder):
    """Write a base model, sharp enough for an adapter to change it visibly, with its tokenizer; returns the folder."""
    tokenizer = word_tokenizer()
    sharpen(tiny_model(len(tokenizer), tie_word_embeddings=False)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
