"""One whole GRPO step, ours against trl: rollout, log-probabilities, reference, forward, backward, optimizer.

    python scripts/benchmarks/train_step.py                             # P=1024 C=64 G=8, and P=128 C=8 G=4
    python scripts/benchmarks/train_step.py --quick                     # a tiny random model, in seconds
    python scripts/benchmarks/train_step.py --model FOLDER --threads 2 --repeats 5 --json train_step.json
    python scripts/benchmarks/train_step.py --prompt 4096 --completion 32 --group 16
    python scripts/benchmarks/train_step.py --against k3                # what exact KL costs: ours with the estimate

LoRA of rank 16 on all linear layers, beta 0.02, float32; both sides read the same prompt and sample exactly C tokens
for each of G responses. A micro-batch holds --max_tokens tokens at most on both sides: trl takes as many rows at once
as fit, at some 4 MiB a token for the default model. trl's KL is its estimate k3, ours is exact over the vocabulary.
The sides take turns, each in a process of its own; figures are medians, and a ratio below 1 means that ours needs
less. `floor` is the least that the step's arithmetic and reading take at this machine's measured rates (floor.py).
"""

from typing import Any

from common import as_table, compared, console, parse, parser, summarise, times_line, write_json
from floor import Rates
from trainers import Setting, check_rounds, machine_rates, ours, trl
from workers import Sides, take_turns


def sides(against: str, setting: Setting) -> Sides:
    """Return ours, and what it is compared with."""
    other = {"trl": (trl, (setting,)), "k3": (ours, (setting._replace(kl="k3"),))}
    return {"ours": (ours, (setting,)), against: other[against]}


def benchmark(setting: Setting, against: str, machine: Rates, repeats: int, threads: int) -> dict[str, Any]:
    """Return the comparison of one setting."""
    found = take_turns(sides(against, setting), repeats, threads)
    for name, rounds in found.items():
        check_rounds(rounds, setting, name)
    model_mib = setting.shape()[1]
    figures = {name: summarise(rounds, model_mib) for name, rounds in found.items()}
    return {"name": setting.name, **setting._asdict(), **compared(figures), "floor": setting.floor(machine)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, help="tokens; with --completion and --group in place of both cases")
    options.add_argument("--completion", type=int, default=64)
    options.add_argument("--group", type=int, default=8)
    options.add_argument("--against", choices=["trl", "k3"], default="trl")
    options.add_argument("--max_tokens", type=int, default=4096, help="of a micro-batch")
    options.add_argument("--gradient_checkpointing", action="store_true", help="on both sides")
    given = parse(options)
    sizes = [(1024, 64, 8), (128, 8, 4)]
    if given.prompt:
        sizes = [(given.prompt, given.completion, given.group)]
    if given.quick:
        sizes = [(96, 8, 4)]
    same = {"max_tokens": given.max_tokens, "checkpointing": given.gradient_checkpointing}
    settings = [Setting(given.model, *size, **same) for size in sizes]
    machine = machine_rates(given)
    cases = [benchmark(setting, given.against, machine, given.repeats, given.threads) for setting in settings]
    screen = console()
    screen.print(as_table(cases, f"one step, medians of {given.repeats}, {given.threads} threads, {given.model}"))
    for case in cases:
        screen.print(f"{case['name']}, ours: {times_line(case['sides']['ours'])}")
    write_json(given.json, cases, threads=given.threads, rates=machine._asdict())


if __name__ == "__main__":
    main()
