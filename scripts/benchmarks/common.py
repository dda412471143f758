"""What the benchmarks share: sides in processes of their own that take turns, models, prompts, tables."""

import argparse
import contextlib
import json
import multiprocessing
import platform
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

MIB = 2**20
GRACE = 10.0  # seconds that a process has to leave by itself
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


# ---- sides that take turns, each in a process of its own ----


class SideFailed(RuntimeError):
    """A side's process raised, ended or gave no answer in time; the message holds its traceback."""


class Rounds:
    """A side's end of the pipe: `ready` once set up, then `begin`, `stop` and `report` for every round."""

    def __init__(self, connection: Any):
        self._connection = connection
        self._started, self._seconds, self._set_up = 0.0, 0.0, 0

    def ready(self) -> None:
        """Say that set-up is over, and forget what it held at its peak."""
        reset_peak_memory()
        self._set_up = peak_memory()
        self._connection.send({})

    def begin(self) -> None:
        """Wait until a round is asked for and start the clock; leave the process where none is wanted any more."""
        if not self._connection.recv():
            sys.exit()
        synchronize()
        self._started = time.perf_counter()

    def stop(self) -> None:
        synchronize()
        self._seconds = time.perf_counter() - self._started

    def report(self, **figures: Any) -> None:
        """Send the seconds from `begin` to `stop`, the peak memory so far and anything else."""
        peak = peak_memory()
        memory = {"peak_mib": peak / MIB, "over_set_up_mib": (peak - self._set_up) / MIB}
        self._connection.send({"seconds": self._seconds, **memory, **figures})


def _serve(side: Callable[..., None], arguments: Sequence[Any], threads: int, connection: Any) -> None:
    torch.set_num_threads(threads)
    try:
        side(Rounds(connection), *arguments)
    except Exception:
        connection.send({"error": traceback.format_exc()})


class Worker:
    """The process of one side, called as `side(rounds, *arguments)`.

    A forked one needs a parent that has not computed anything; a spawned one a side that can be imported.
    """

    def __init__(self, side: Callable[..., None], arguments: Sequence[Any], threads: int, start: str = "fork"):
        context: Any = multiprocessing.get_context(start)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(side, arguments, threads, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the next message; SideFailed where there is none within `timeout` seconds, or an error."""
        if not self._connection.poll(timeout):
            raise SideFailed(f"no answer within {timeout:.0f} seconds")
        try:
            message = self._connection.recv()
        except EOFError:
            raise SideFailed("its process ended") from None
        if "error" in message:
            raise SideFailed(message["error"])
        return message

    def round(self, timeout: float | None = None) -> dict[str, Any]:
        """Ask for one round and return what was reported."""
        self._connection.send(True)
        return self.hear(timeout)

    def close(self) -> None:
        """Let the process leave, or end it."""
        with contextlib.suppress(OSError):
            self._connection.send(False)
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


Sides = Mapping[str, tuple[Callable[..., None], Sequence[Any]]]  # by name: the side and its arguments


def take_turns(sides: Sides, repeats: int, threads: int) -> dict[str, list[dict[str, Any]]]:
    """Return what every side reported in `repeats` rounds in turn, after one of each that is not counted."""
    workers: dict[str, Worker] = {}
    try:
        for name, (side, arguments) in sides.items():
            workers[name] = Worker(side, arguments, threads)
        for worker in workers.values():
            worker.hear()
        rounds = [{name: worker.round() for name, worker in workers.items()} for _ in range(repeats + 1)]
        return {name: [one[name] for one in rounds[1:]] for name in sides}
    finally:
        for worker in workers.values():
            worker.close()


def run_apart(side: Callable[..., None], *arguments: Any, threads: int) -> dict[str, Any]:
    """Return what a side reports in its one round, without a warm-up."""
    worker = Worker(side, arguments, threads)
    try:
        worker.hear()
        return worker.round()
    finally:
        worker.close()


# ---- machine ----


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_resident() -> int:
    """Return the most resident bytes that this process has held so far (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def peak_memory() -> int:
    """Return the most bytes held since the last reset: allocated on a GPU, else resident."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_resident()


def reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # a sandbox may refuse; the peak then counts set-up too
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


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
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device())  # type: ignore[arg-type]
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
