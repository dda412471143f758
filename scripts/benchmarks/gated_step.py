"""A step of gated memory with a shared prefix per group and chunk against none: rollout, training step, gradients.

    python scripts/benchmarks/gated_step.py                             # 4 chunks of 512 tokens, G=8, 48 new tokens
    python scripts/benchmarks/gated_step.py --quick                     # a tiny random model, in seconds
    python scripts/benchmarks/gated_step.py --model FOLDER --threads 2 --repeats 3 --json gated_step.json
    python scripts/benchmarks/gated_step.py --chunks 2 --chunk 5000 --group 16

Both sides are TurnGRPOTrainer with LoRA of rank 16, beta 0.02 and exact KL, float32; only `share_prefix` differs.
Gates are forced so that every reader writes its memory and reads every chunk, then answers. `training` is scoring,
reference, forward, backward and optimizer; peak memory is that of the whole step. The gap is the norm of the
difference of all gradients of one rollout, shared against not, over their norm.
"""

import dataclasses
import statistics
import tempfile
from typing import Any, NamedTuple

import torch
from common import (
    as_table,
    compared,
    console,
    make_tokenizer,
    model_config,
    parse,
    parser,
    random_text,
    summarise,
    times_line,
    write_json,
)
from floor import Rates, Work, step_floor
from trainers import Setting, Timekeeper, check_finite, machine_rates, our_trainer
from workers import Rounds, run_apart, take_turns

from turngrpo.trainer import GatedMemory, Turn
from turngrpo.trainer.forward.batching import common_prefix_length
from turngrpo.trainer.objective.iteration import TrainingSlice
from turngrpo.trainer.reading.gates import GateDecision

SAME_TOKENS = 0.01  # a token that float noise flips makes another memory, of nearly the same length
TRAINING = ("time/scoring", "time/reference", "time/optimisation")


class Reading(NamedTuple):
    """Members of one group that each read `chunks` chunks of `chunk` tokens and reply with `completion` tokens."""

    model: str
    chunks: int
    chunk: int
    completion: int
    group: int
    max_tokens: int

    def setting(self) -> Setting:
        return Setting(self.model, self.chunk, self.completion, self.group, max_tokens=self.max_tokens)


class ForcedGates(GatedMemory):
    """Writes whatever was said into the memory and reads on, as no random text would."""

    def decide(self, turn: Turn) -> GateDecision:
        return GateDecision(check=True, candidate=turn.text.strip() or "nothing", exit=False)


def make_trainer(reading: Reading, folder: str, **options: Any) -> Any:
    """Return a trainer on one document of random words."""
    tokenizer = make_tokenizer(reading.model, model_config(reading.model).vocab_size)
    plain = {"add_special_tokens": False, "split_special_tokens": True}  # as chunks are read
    chunks = [{"text": random_text(tokenizer, reading.chunk, seed, **plain)} for seed in range(reading.chunks)]
    row = {"question": random_text(tokenizer, 8, reading.chunks), "answers": ["none"], "chunks": chunks}
    limits = {"max_prompt_length": 2**20, "max_memory_tokens": reading.completion}  # the model's positions bound it
    workflow = ForcedGates(strict_format=False)
    return our_trainer(reading.setting(), folder, [row], tokenizer, workflow, **limits, **options)


def side(rounds: Rounds, reading: Reading, share: bool) -> None:
    """One step with or without shared prefixes."""
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(reading, folder, share_prefix=share, callbacks=[Timekeeper(rounds)]).train()


def gradients(trainer: Any, part: TrainingSlice, share: bool) -> torch.Tensor:
    """Return every gradient of a slice in one row, scored with or without shared prefixes."""
    trainer.model.zero_grad()
    scorer = dataclasses.replace(trainer.scorer, share_prefix=share)
    plan = scorer.plan(part.rollout.turns, part.indices, part.rollout.clusters)
    for rows, batch, scores in scorer.score(part.rollout.turns, plan):
        trainer.compute_loss(trainer.model, trainer._microbatch(part, rows, batch, scores)).backward()
    return torch.cat([p.grad.flatten().double() for p in trainer.model.parameters() if p.requires_grad])


def gap(rounds: Rounds, reading: Reading) -> None:
    """Report the relative gap of the gradients of one rollout, and the work of each of its turns."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(reading, folder)
        rounds.ready()
        rounds.begin()
        part = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        shared, apart = (gradients(trainer, part, share) for share in (True, False))
        rounds.stop()
        turns = zip(*(trajectory.turns for trajectory in part.rollout.trajectories), strict=True)
        rounds.report(gap=float((shared - apart).norm() / apart.norm()), works=[work(turn) for turn in turns])


def work(turns: tuple[Turn, ...]) -> Work:
    """Return what one turn of all members asks for; their own tokens are taken as equally many."""
    prompts = [turn.prompt_ids for turn in turns]
    shared = common_prefix_length(prompts)
    own = round(statistics.mean(map(len, prompts))) - shared
    return Work(shared, len(turns[0].completion_ids), len(turns), own)


def floors(reading: Reading, works: list[Work], machine: Rates) -> dict[str, float]:
    """Return the floor of a step, by part, summed over its turns."""
    shape, _ = reading.setting().shape()
    found = [step_floor(shape, one, machine) for one in works]
    return {name: sum(one[name] for one in found) for name in found[0]}


def benchmark(reading: Reading, machine: Rates, repeats: int, threads: int) -> tuple[list[dict[str, Any]], float]:
    """Return the comparisons of the whole step, its rollout and its training, and the gap of the gradients."""
    found = take_turns({"shared": (side, (reading, True)), "apart": (side, (reading, False))}, repeats, threads)
    for one, other in zip(*found.values(), strict=True):
        if abs(one["num_tokens"] / other["num_tokens"] - 1) > SAME_TOKENS:
            raise ValueError(f"the sides saw {one['num_tokens']} and {other['num_tokens']} tokens in {reading}")
        check_finite([one, other], reading.completion, str(reading))
    once = run_apart(gap, reading, threads=threads)
    floor = floors(reading, once["works"], machine)
    model_mib = reading.setting().shape()[1]
    parts = {
        "step": lambda one: one["seconds"],
        "rollout": lambda one: one["time/generation"],
        "training": lambda one: sum(one[name] for name in TRAINING),
    }
    cases = []
    for name, least in zip(parts, ("seconds", "generation", "training"), strict=True):
        timed = {side: [one | {"seconds": parts[name](one)} for one in rounds] for side, rounds in found.items()}
        sides = {side: summarise(rounds, model_mib) for side, rounds in timed.items()}
        cases.append({"name": name, **reading._asdict(), **compared(sides), "floor": {"seconds": floor[least]}})
    return cases, once["gap"]


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--chunks", type=int, default=4)
    options.add_argument("--chunk", type=int, default=512, help="tokens")
    options.add_argument("--completion", type=int, default=48)
    options.add_argument("--group", type=int, default=8)
    options.add_argument("--max_tokens", type=int, default=4096, help="of a micro-batch, on both sides")
    given = parse(options)
    if given.quick:
        given.chunks, given.chunk, given.completion, given.group = 2, 128, 6, 4
    reading = Reading(given.model, given.chunks, given.chunk, given.completion, given.group, given.max_tokens)
    machine = machine_rates(given)
    cases, difference = benchmark(reading, machine, given.repeats, given.threads)
    title = "{chunks} chunks of {chunk} tokens, G={group}, {completion} new tokens, {model}".format(**cases[0])
    screen = console()
    screen.print(as_table(cases, f"{title}, medians of {given.repeats}, {given.threads} threads", "shared"))
    for name, one in cases[0]["sides"].items():
        screen.print(f"{name}: {times_line(one)}")
    screen.print(f"relative gap of all gradients: {difference:.1e}")
    write_json(given.json, cases, threads=given.threads, rates=machine._asdict(), gradient_gap=difference)


if __name__ == "__main__":
    main()
