"""Sampling alone: TransformersEngine with and without shared prefixes against model.generate.

    python scripts/benchmarks/rollout.py                                # P=1024, C=64: a group of 8, four groups of 4
    python scripts/benchmarks/rollout.py --quick                        # a tiny random model, in seconds
    python scripts/benchmarks/rollout.py --model FOLDER --threads 2 --repeats 5 --json rollout.json
    python scripts/benchmarks/rollout.py --prompt 4096 --completion 32 --groups 1 --group 16

Every side reads the same token ids and samples exactly C tokens for every row at temperature 1, float32. The engine
records the log-probability of every token, generate returns tokens alone. The sides take turns, each in a process of
its own; figures are medians, and a ratio below 1 means that ours needs less. `floor` is the least that arithmetic and
reading take at this machine's measured rates (floor.py).
"""

import random
from typing import Any, NamedTuple

import torch
from common import (
    EOS,
    PAD,
    as_table,
    compared,
    console,
    make_model,
    model_config,
    parse,
    parser,
    summarise,
    write_json,
)
from floor import Rates, Work, decoding_seconds
from trainers import Setting, machine_rates, never_ends
from transformers import GenerationConfig
from workers import Rounds, device, take_turns

from turngrpo.trainer.forward.policy import Policy
from turngrpo.trainer.reading.rollout import NoiseKey, Request
from turngrpo.trainer.sampling.transformers_engine import TransformersEngine


class Batch(NamedTuple):
    """`groups` prompts of `prompt` tokens, each completed `group` times with `completion` tokens."""

    model: str
    prompt: int
    completion: int
    groups: int
    group: int

    def prompts(self) -> list[list[int]]:
        """Return the prompt ids of every row."""
        choice, size = random.Random(0), model_config(self.model).vocab_size
        prompts = [[choice.randrange(EOS + 1, size) for _ in range(self.prompt)] for _ in range(self.groups)]
        return [prompt for prompt in prompts for _ in range(self.group)]


def engine(rounds: Rounds, batch: Batch, share: bool) -> None:
    """Sample with our engine, round after round."""
    model = make_model(batch.model).eval()
    sampler = TransformersEngine(Policy(model), never_ends(model), PAD, batch.completion, share_prefix=share)
    rounds.ready()
    for iteration in range(10**6):
        requests = [
            Request([prompt], NoiseKey(0, iteration, row // batch.group, row % batch.group, 0))
            for row, prompt in enumerate(batch.prompts())
        ]
        rounds.begin()
        completions = sampler.generate(requests)
        rounds.stop()
        rounds.report(tokens=[len(one.ids) for one in completions], shared=sampler.share_prefix)


@torch.no_grad()
def generate(rounds: Rounds, batch: Batch) -> None:
    """Sample with transformers' generate, round after round."""
    model = make_model(batch.model).eval()
    lengths = {"min_new_tokens": None, "max_new_tokens": batch.completion}
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    model.generation_config = GenerationConfig(**sampling, eos_token_id=never_ends(model), pad_token_id=PAD)
    ids = torch.tensor(batch.prompts(), device=device())  # (R, P)
    rounds.ready()
    while True:
        rounds.begin()
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **lengths)  # (R, P + C)
        rounds.stop()
        rounds.report(tokens=[found.shape[1] - ids.shape[1]] * len(found))


def benchmark(batch: Batch, machine: Rates, repeats: int, threads: int) -> dict[str, Any]:
    """Return the comparison of one batch."""
    sides = {
        "ours": (engine, (batch, True)),
        "unshared": (engine, (batch, False)),
        "generate": (generate, (batch,)),
    }
    found = take_turns(sides, repeats, threads)
    for name, rounds in found.items():
        for one in rounds:
            if one["tokens"] != [batch.completion] * (batch.groups * batch.group):
                raise ValueError(f"{name} sampled {one['tokens']} tokens, expected {batch.completion} in every row")
            if one.get("shared", share := name == "ours") != share:
                raise ValueError(f"{name}: sharing is {one['shared']}")
    shape, model_mib = Setting(batch.model, batch.prompt, batch.completion, batch.group).shape()
    work = Work(batch.prompt, batch.completion, batch.group, groups=batch.groups)
    return {
        "name": f"P={batch.prompt} C={batch.completion}, {batch.groups} x {batch.group}",
        **batch._asdict(),
        **compared({name: summarise(rounds, model_mib) for name, rounds in found.items()}),
        "floor": {"seconds": decoding_seconds(shape, work, machine, 4)},
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, default=1024)
    options.add_argument("--completion", type=int, default=64)
    options.add_argument("--groups", type=int, help="with --group in place of both cases")
    options.add_argument("--group", type=int, default=8)
    given = parse(options)
    if given.quick:
        given.prompt, given.completion = 128, 8
    sizes = [(given.groups, given.group)] if given.groups else [(1, 8), (4, 4)]
    batches = [Batch(given.model, given.prompt, given.completion, *size) for size in sizes]
    machine = machine_rates(given)
    cases = [benchmark(batch, machine, given.repeats, given.threads) for batch in batches]
    title = f"rollout, groups x members, medians of {given.repeats}, {given.threads} threads, {given.model}"
    console().print(as_table(cases, title))
    write_json(given.json, cases, threads=given.threads, rates=machine._asdict())


if __name__ == "__main__":
    main()
