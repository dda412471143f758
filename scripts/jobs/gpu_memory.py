"""The memory of one GPU, or of a process on a CPU, on paper."""

from dataclasses import dataclass
from typing import Any

from peft import get_peft_model
from rich.table import Table

from turngrpo.trainer import TurnGRPOConfig
from turngrpo.trainer.objective.fused_head import TILE_ELEMENTS


@dataclass(frozen=True)
class Sizes:
    """What the memory of a model depends on."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    attention: int  # width of all query heads
    keys: int  # width of all key heads
    intermediate: int
    vocabulary: int


def model_sizes(model: Any, peft_config: Any = None) -> Sizes:
    """Return the sizes of a causal model, which may be without weights (on the meta device)."""
    shape = model.config.get_text_config()
    total = trained = sum(parameter.numel() for parameter in model.parameters())
    if peft_config is not None:
        trained = get_peft_model(model, peft_config).get_nb_trainable_parameters()[0]
    heads = shape.num_attention_heads
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return Sizes(
        parameters=total,
        trained=trained,
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        attention=heads * head_size,
        keys=(getattr(shape, "num_key_value_heads", None) or heads) * head_size,
        intermediate=getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size,
        vocabulary=shape.vocab_size,
    )


def memory_parts(
    sizes: Sizes, config: TurnGRPOConfig, width: int, longest: int | None = None, turns: int | None = None
) -> dict[str, dict[str, int]]:
    """Return the bytes of one GPU by name: `always`, in a `rollout`, in an `update`; `width` bytes hold a number.

    In an update a prefix and one micro-batch of its suffixes hold max_tokens_per_microbatch tokens, and a group's
    responses have reference states; in a rollout rollout_batch_tokens are cached, every prefix once. Neither is more
    than what there can be: trajectories of at most `turns` turns, prompts of `longest` tokens, whole completions.
    """
    row = (longest or config.max_prompt_length) + (config.max_completion_length or 0)
    sampled = config.per_device_train_batch_size * (config.steps_per_generation or 1)  # trajectories at once
    cached = min(config.rollout_batch_tokens, sampled * row)
    tokens = config.max_tokens_per_microbatch
    if turns is not None:
        tokens = min(tokens, config.per_device_train_batch_size * turns * row)
    responses = (config.num_generations or 1) * (config.max_completion_length or 0)
    keys_and_values = 2 * sizes.keys * sizes.layers * width  # of a token
    # A layer keeps for backward: inputs and outputs of two norms, what attention returns, queries and their results,
    # keys, values; gate, its activation, up and the product. Checkpointing keeps inputs alone, and one layer at work.
    layer = (5 * sizes.hidden + 2 * sizes.attention + 2 * sizes.keys + 4 * sizes.intermediate) * width
    kept = sizes.layers * sizes.hidden * width + layer if config.gradient_checkpointing else sizes.layers * layer
    # Of a trained number: a float32 gradient and AdamW's two states; a LoRA's own weights are float32 too.
    trained = 16 if sizes.trained < sizes.parameters else 12
    return {
        "always": {
            f"weights ({sizes.parameters:,} parameters)": sizes.parameters * width,
            f"trained ({sizes.trained:,}) with gradient and AdamW": sizes.trained * trained,
        },
        "rollout": {
            f"KV cache of {cached:,} tokens": cached * keys_and_values,
            "head in float32": sizes.vocabulary * sizes.hidden * 4,
        },
        "update": {
            f"activations of {tokens:,} tokens": tokens * kept,
            "their keys and values with gradients": tokens * keys_and_values * 2,
            f"reference states of {responses:,} tokens": responses * sizes.hidden * width if config.beta else 0,
            "head tiles": 5 * TILE_ELEMENTS * 4,
        },
    }


def peak(parts: dict[str, dict[str, int]]) -> int:
    """Return the bytes held at once: a rollout and an update follow one another."""
    always, rollout, update = (sum(parts[name].values()) for name in ("always", "rollout", "update"))
    return always + max(rollout, update)


def memory_table(parts: dict[str, dict[str, int]], title: str, of: str = "memory of one GPU") -> Table:
    """Return memory_parts as a table of rough gigabytes."""
    table = Table("when", f"{of}, estimated", title=title)
    table.add_column("GB", justify="right")
    for when, sizes in parts.items():
        for name, size in sizes.items():
            table.add_row(when, name, f"{size / 1e9:.3f}")
    table.add_row("peak", "always + the larger of rollout and update", f"{peak(parts) / 1e9:.3f}")
    return table
