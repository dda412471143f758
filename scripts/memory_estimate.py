"""Memory of one GPU on paper, and the batch sizes that keep an iteration the same on any number of GPUs.

    python scripts/memory_estimate.py

prints both for scripts/recipes/qwen2.5_3b.yaml on 1, 4 and 8 GPUs; train.py --dry_run prints the memory of any run.
Under DDP every GPU holds all of it; ZeRO and FSDP2 share out AdamW's states, 8 bytes of a trained parameter.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import yaml
from jobs.gpu_memory import memory_parts, memory_table, model_sizes
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen2Config

from turngrpo.trainer import TurnGRPOConfig

RECIPE = Path(__file__).parent / "recipes" / "qwen2.5_3b.yaml"
QWEN2_5_3B: dict[str, Any] = {
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GPUS = (1, 4, 8)


def batch_fields(trajectories: int, group: int, processes: int) -> dict[str, int]:
    """Return the options with which so many processes roll out `trajectories` and make one update of them.

    Raises ValueError where whole groups cannot be shared out evenly.
    """
    if trajectories % (group * processes):
        raise ValueError(
            f"{trajectories} trajectories in groups of {group} cannot be shared out over {processes} GPUs: expected a "
            f"multiple of {group * processes}"
        )
    accumulation = trajectories // (group * processes)
    return {
        "per_device_train_batch_size": group,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation,
        "num_generations": group,
    }


def main() -> int:
    """Print the memory and the batches of the recipe; it takes no options."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    names = "per_device_train_batch_size num_generations max_completion_length max_tokens_per_microbatch beta".split()
    names.append("gradient_checkpointing")
    config = TurnGRPOConfig(
        "unused", report_to="none", use_cpu=True, bf16=False, **{name: recipe[name] for name in names}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN2_5_3B))
    lora = LoraConfig(r=recipe["lora_r"], target_modules=recipe["lora_target_modules"])
    console = Console()
    console.print(memory_table(memory_parts(model_sizes(model, lora), config, 2), "Qwen2.5-3B, LoRA, bfloat16"))
    group = recipe["num_generations"]
    trajectories = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    table = Table("one iteration, one update", *(f"{count} GPU{'s' * (count > 1)}" for count in GPUS))
    batches = [batch_fields(trajectories, group, count) for count in GPUS]
    for name in batches[0]:
        table.add_row(name, *(str(batch[name]) for batch in batches))
    table.add_row("max_tokens_per_microbatch", *[str(config.max_tokens_per_microbatch)] * len(GPUS))
    console.print(table)
    return 0


if __name__ == "__main__":
    main()
