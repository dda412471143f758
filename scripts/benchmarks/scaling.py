"""How time and memory of our GRPO step grow with the group, the prompt and the vocabulary, one varied at a time.

    python scripts/benchmarks/scaling.py                        # G 2 4 8 16, P 256 1024 4096, V 32768 151936
    python scripts/benchmarks/scaling.py --quick                # a tiny random model, in seconds
    python scripts/benchmarks/scaling.py --model FOLDER --threads 2 --repeats 3 --json scaling.json
    python scripts/benchmarks/scaling.py --vary group --groups 4 32

The step is that of train_step.py at P=1024, C=64, G=8 but for the varied number; the vocabulary is varied on random
weights of hidden size 256 and 4 layers, where the head weighs most. `x first` is a figure over that of the first line
of its kind; `floor` is the least that the step takes at this machine's measured rates (floor.py).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from common import console, parse, parser, summarise, write_json
from floor import Rates
from rich.table import Table
from trainers import Setting, check_rounds, machine_rates, ours
from workers import take_turns

KINDS = ("group", "prompt", "vocabulary")


def settings(kind: str, values: Sequence[int], base: Setting, quick: bool) -> Iterator[tuple[str, Setting]]:
    """Yield the name and the setting of every value of what is varied."""
    for value in values:
        if kind == "vocabulary":
            base = base._replace(model="tiny" if quick else "small")
        yield f"{kind[0].upper()}={value}", base._replace(**{kind: value})


def benchmark(name: str, setting: Setting, machine: Rates, repeats: int, threads: int) -> dict[str, Any]:
    """Return the figures of one setting."""
    rounds = take_turns({"ours": (ours, (setting,))}, repeats, threads)["ours"]
    check_rounds(rounds, setting, "ours")
    floor = setting.floor(machine)
    side = summarise(rounds, setting.shape()[1])
    return {
        "name": name,
        **setting._asdict(),
        **side,
        "floor": floor,
        "floor_ratio": side["seconds"] / floor["seconds"],
    }


def with_growth(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to every case its time and memory over those of the first."""
    first = cases[0]
    ratios = {"time_ratio": "seconds", "memory_ratio": "peak_mib"}
    return [case | {ratio: case[name] / first[name] for ratio, name in ratios.items()} for case in cases]


def as_table(kinds: dict[str, list[dict[str, Any]]], title: str) -> Table:
    """Return a line per setting."""
    table = Table("varied", title=title)
    for heading in ("seconds", "x first", "floor", "x floor", "peak MiB", "over set-up", "x first"):
        table.add_column(heading, justify="right")
    for cases in kinds.values():
        for case in cases:
            numbers = (case["seconds"], case["time_ratio"], case["floor"]["seconds"], case["floor_ratio"])
            memory = (f"{case['peak_mib']:.0f}", f"{case['over_set_up_mib']:.0f}", f"{case['memory_ratio']:.2f}")
            last = case is cases[-1]
            table.add_row(
                case["name"],
                *(f"{x:.{n}f}" for x, n in zip(numbers, (3, 2, 3, 1), strict=True)),
                *memory,
                end_section=last,
            )
    return table


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--vary", choices=KINDS, nargs="+", default=list(KINDS))
    options.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8, 16])
    options.add_argument("--prompts", type=int, nargs="+", default=[256, 1024, 4096])
    options.add_argument("--vocabularies", type=int, nargs="+", default=[32768, 151936])
    given = parse(options)
    base = Setting(given.model, 1024, 64, 8)
    if given.quick:
        base = Setting(given.model, 64, 8, 4)
        given.groups, given.prompts, given.vocabularies = [2, 4], [32, 128], [512, 2048]
    values = dict(zip(KINDS, (given.groups, given.prompts, given.vocabularies), strict=True))
    machine = machine_rates(given)
    kinds = {
        kind: with_growth(
            [
                benchmark(name, setting, machine, given.repeats, given.threads)
                for name, setting in settings(kind, values[kind], base, given.quick)
            ]
        )
        for kind in given.vary
    }
    console().print(as_table(kinds, f"{base.name} but for one, medians of {given.repeats}, {given.threads} threads"))
    write_json(given.json, [case for cases in kinds.values() for case in cases], rates=machine._asdict())


if __name__ == "__main__":
    main()
