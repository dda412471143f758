"""Time and memory of log-probabilities, entropy and exact KL with their gradients: ours, whole logits, trl's kernels.

    python scripts/benchmarks/exact_kl.py                          # 512 rows, vocabularies of 32768 and 151936
    python scripts/benchmarks/exact_kl.py --quick                  # a few seconds, small sizes
    python scripts/benchmarks/exact_kl.py --json exact_kl.json --rows 4096 --hidden 2048 --repeats 3 --threads 2

The sides take turns on the same inputs (float32, one forward and backward each); figures are medians, and a ratio
below 1 means that ours needs less. Peak memory is what each side, in its own process, takes over its inputs (Linux).
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from workers import peak_resident

from turngrpo.trainer.objective.exact_kl import fused_logprobs_and_kl

TRL_CHUNK = 32768  # columns at once in trl's own calls of ChunkedLogProbFunction
TOLERANCE = 1e-3  # between the sides: a benchmark of two different numbers says nothing


class Inputs(NamedTuple):
    hidden: Tensor  # (M, H)
    reference_hidden: Tensor  # (M, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (M,)


class Case(NamedTuple):
    vocabulary: int
    rows: int
    hidden: int
    head: str  # "frozen" as under LoRA, or "trained"

    def inputs(self) -> Inputs:
        """Return hidden states near those of the reference, and a head that makes logits of standard deviation 3."""
        generator = torch.Generator().manual_seed(0)
        reference = torch.randn(self.rows, self.hidden, generator=generator)  # (M, H)
        hidden = reference + 0.1 * torch.randn(self.rows, self.hidden, generator=generator)
        weight = torch.randn(self.vocabulary, self.hidden, generator=generator).mul_(3 / self.hidden**0.5)  # (V, H)
        targets = torch.randint(self.vocabulary, (self.rows,), generator=generator)  # (M,)
        return Inputs(hidden.requires_grad_(), reference, weight.requires_grad_(self.head == "trained"), targets)


def ours(x: Inputs) -> tuple[Tensor, Tensor]:
    logprobs, kl, _ = fused_logprobs_and_kl(
        x.hidden, x.reference_hidden, x.weight, x.targets, reference_lm_head_weight=x.weight.detach()
    )
    assert kl is not None
    return logprobs, kl


def whole_logits(x: Inputs) -> tuple[Tensor, Tensor]:
    logp = linear(x.hidden, x.weight).log_softmax(-1)  # (M, V)
    with torch.no_grad():
        logq = linear(x.reference_hidden, x.weight).log_softmax(-1)  # (M, V)
        (logp.exp() * logp).sum(-1).neg()  # the entropy, which every side computes
    return logp.gather(-1, x.targets[:, None]).squeeze(-1), (logp.exp() * (logp - logq)).sum(-1)


def trl_kernels(x: Inputs) -> tuple[Tensor, Tensor]:
    logprobs, *_ = ChunkedLogProbFunction.apply(
        x.hidden, x.weight, None, x.targets, 1.0, TRL_CHUNK, None, 1.0, ("entropy",)
    )
    reverse = 1.0  # KL(student || teacher)
    kl, _ = ChunkedDivergenceFunction.apply(
        x.hidden, x.weight, None, x.reference_hidden, x.weight.detach(), None, reverse
    )
    return logprobs, kl


SIDES: dict[str, Callable[[Inputs], tuple[Tensor, Tensor]]] = {
    "ours": ours,
    "whole logits": whole_logits,
    "trl kernels": trl_kernels,
}


def forward_and_backward(side: str, inputs: Inputs) -> tuple[float, list[Tensor]]:
    """Return the seconds, and log p, KL and the gradients of one mixture of both."""
    leaves = [x for x in (inputs.hidden, inputs.weight) if x.requires_grad]
    start = time.perf_counter()
    logprobs, kl = SIDES[side](inputs)
    gradients = torch.autograd.grad((kl - logprobs).sum(), leaves)
    return time.perf_counter() - start, [logprobs.detach(), kl.detach(), *gradients]


def memory_over_inputs(side: str, case: Case) -> float:
    """Return the MiB that one forward and backward takes over its inputs in this process."""
    forward_and_backward(side, Case(512, 8, 8, case.head).inputs())  # what torch sets up at a first call
    inputs = case.inputs()
    before = peak_resident()
    forward_and_backward(side, inputs)
    return (peak_resident() - before) / 2**20


def measure_memory(case: Case) -> dict[str, float]:
    """Return the MiB of every side, each in a forked process: call it before this one computes on several threads."""
    found = {}
    for side in SIDES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            found[side] = pool.submit(memory_over_inputs, side, case).result()
    return found


def benchmark(case: Case, memory: Mapping[str, float], repeats: int) -> dict[str, Any]:
    """Return medians and ratios of one case. Raises ValueError where the sides disagree about a number."""
    inputs = case.inputs()
    results = {side: forward_and_backward(side, inputs)[1] for side in SIDES}  # also the warm-up
    for side, tensors in results.items():
        for found, expected in zip(tensors, results["ours"], strict=True):
            if not torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
                raise ValueError(f"{side} and ours differ by {(found - expected).abs().max():.1e} in {case}")
    del results
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side in SIDES:
            seconds[side].append(forward_and_backward(side, inputs)[0])
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    return {
        **case._asdict(),
        "seconds": medians,
        "peak_mib": dict(memory),
        "time_ratio": {side: medians["ours"] / value for side, value in medians.items()},
        "memory_ratio": {side: memory["ours"] / value for side, value in memory.items()},
    }


def as_table(found: list[dict[str, Any]], title: str) -> Table:
    """Return a line per case and side."""
    table = Table("V x M x H, head", "side", title=title)
    for heading in ("seconds", "ours / it", "peak MiB", "ours / it"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in found:
        for side in SIDES:
            name = "{vocabulary} x {rows} x {hidden}, {head}".format(**case) if side == "ours" else ""
            time_ratio, memory_ratio = (f"{case[ratio][side]:.2f}" for ratio in ("time_ratio", "memory_ratio"))
            seconds, memory = f"{case['seconds'][side]:.3f}", f"{case['peak_mib'][side]:.0f}"
            table.add_row(name, side, seconds, time_ratio, memory, memory_ratio)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32768, 151936])
    parser.add_argument("--rows", type=int, default=512, help="response tokens of a micro-batch")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="64 rows, a vocabulary of 8192, hidden 128, 3 repeats")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick:
        options.vocabularies, options.rows, options.hidden, options.repeats = [8192], 64, 128, 3
    cases = [
        Case(vocabulary, options.rows, options.hidden, head)
        for vocabulary in options.vocabularies
        for head in ("frozen", "trained")
    ]
    memory = [measure_memory(case) for case in cases]
    found = [benchmark(case, measured, options.repeats) for case, measured in zip(cases, memory, strict=True)]
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(as_table(found, f"forward and backward, medians of {options.repeats}, {options.threads} threads"))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
