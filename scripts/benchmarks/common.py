"""What the benchmarks share: models, prompts, figures, tables, options."""

import argparse
import json
import platform
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config
from workers import device

PAD, EOS = 1, 2  # of the tokenizer made for random models

SHAPES = {
    name: dict(zip("hidden_size intermediate_size num_hidden_layers num_attention_heads".split(), sizes, strict=True))
    | {"num_key_value_heads": key_heads, "vocab_size": vocabulary}
    for name, sizes, key_heads, vocabulary in (
        ("tiny", (64, 128, 2, 4), 2, 512),
        ("small", (256, 512, 4, 4), 2, 32768),
        ("135m", (576, 1536, 30, 9), 3, 49152),
        ("3b", (2048, 11008, 36, 16), 2, 151936),  # of Qwen2.5-3B
    )
}


# ---- models and prompts ----


def model_config(name: str, **overrides: Any) -> Any:
    """Return the config of a shape by name, `overrides` applied, or that of a model's folder."""
    if name not in SHAPES:
        return AutoConfig.from_pretrained(name)
    fixed = {"max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": None}
    return Qwen2Config(**SHAPES[name] | fixed | {"eos_token_id": EOS, "pad_token_id": PAD} | overrides)


def make_model(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Return a randomly initialised model of a shape by name, or the one in a folder, on the device."""
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device())
    torch.manual_seed(0)
    with device():
        return AutoModelForCausalLM.from_config(model_config(name, **overrides), dtype=dtype)


def make_tokenizer(name: str, vocabulary: int) -> Any:
    """Return the tokenizer of a folder, or for a shape one of `vocabulary` made-up words."""
    if name not in SHAPES:
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    words = ["<unk>", "<pad>", "<eos>", *(f"w{index}" for index in range(3, vocabulary))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def random_text(tokenizer: Any, length: int, seed: int = 0, **options: Any) -> str:
    """Return random words that `tokenizer(text, **options)` reads as exactly `length` tokens; ValueError where not."""
    choice, words = random.Random(seed), list[str]()
    while len(words) < length:
        word = tokenizer.decode([choice.randrange(len(tokenizer))]).strip()
        one_token = word.isascii() and word.isalnum() and len(tokenizer.tokenize(f" {word}")) == 1
        words += [word] * one_token
    while words:
        found = len(tokenizer(" ".join(words), **options)["input_ids"])
        if found == length:
            return " ".join(words)
        del words[min(-1, length - found) :]
    raise ValueError(f"{type(tokenizer).__name__}: found no text of exactly {length} tokens")


# ---- figures ----


def summarise(rounds: Sequence[Mapping[str, Any]], model_mib: float) -> dict[str, Any]:
    """Return the medians of a side's rounds, with its peak memory: as it is, over weights, over set-up."""
    peak = max(one["peak_mib"] for one in rounds)
    return {
        "seconds": statistics.median(one["seconds"] for one in rounds),
        "all_seconds": [one["seconds"] for one in rounds],
        "peak_mib": peak,
        "over_model_mib": peak - model_mib,
        "over_set_up_mib": max(one["over_set_up_mib"] for one in rounds),
        "times": {name: statistics.median(one[name] for one in rounds) for name in rounds[0] if "time/" in name},
    }


def compared(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sides' summaries with what the first of them needs over what each needs."""
    ours = next(iter(sides.values()))
    return {
        "sides": dict(sides),
        "time_ratio": {name: ours["seconds"] / side["seconds"] for name, side in sides.items()},
        "memory_ratio": {name: ours["peak_mib"] / side["peak_mib"] for name, side in sides.items()},
    }


def as_table(cases: Sequence[Mapping[str, Any]], title: str, first: str = "ours") -> Table:
    """Return a line per case and side; the floor stands beside the first side's seconds."""
    table = Table("case", "side", title=title)
    for heading in (
        "seconds",
        f"{first} / it",
        "floor",
        "x floor",
        "peak MiB",
        "over model",
        "over set-up",
        f"{first} / it",
    ):
        table.add_column(heading, justify="right")
    for case in cases:
        for number, (name, side) in enumerate(case["sides"].items()):
            floor = case["floor"]["seconds"]
            table.add_row(
                "" if number else case["name"],
                name,
                f"{side['seconds']:.3f}",
                f"{case['time_ratio'][name]:.2f}",
                "" if number else f"{floor:.3g}",
                f"{side['seconds'] / floor:.1f}",
                f"{side['peak_mib']:.0f}",
                f"{side['over_model_mib']:.0f}",
                f"{side['over_set_up_mib']:.0f}",
                f"{case['memory_ratio'][name]:.2f}",
            )
    return table


def times_line(side: Mapping[str, Any]) -> str:
    """Return the seconds of each purpose in words."""
    return ", ".join(f"{name.removeprefix('time/')} {value:.3f}" for name, value in side["times"].items() if value)


def parser(text: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """Return a parser of the options that every benchmark has."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="135m", help=f"a folder, or random weights of {', '.join(SHAPES)}")
    found.add_argument("--repeats", type=int, default=repeats)
    found.add_argument("--threads", type=int, default=1)
    found.add_argument("--quick", action="store_true", help="a tiny random model and small sizes, in seconds")
    found.add_argument("--json", type=Path, metavar="PATH", help="also write everything there")
    return found


def parse(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; a quick run takes the tiny model and two rounds."""
    given = options.parse_args()
    if given.quick:
        given.model, given.repeats = "tiny", 2
    return given


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def write_json(path: Path | None, cases: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write the cases and what they were measured with, where a path was given."""
    if path is not None:
        found = {"torch": torch.__version__, "platform": platform.platform(), **more, "cases": list(cases)}
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
