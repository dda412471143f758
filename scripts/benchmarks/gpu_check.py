"""On one GPU: values against a float64 reference, then our GRPO step against trl's on the shape of Qwen2.5-3B.

    bash scripts/benchmarks/gpu_check.sh                                # 6 minutes at most; exit 1 where a part failed
    bash scripts/benchmarks/gpu_check.sh --dry_run                      # the same path on CPU with a tiny model
    bash scripts/benchmarks/gpu_check.sh --chunk 5000 --completion 64 --group 16 --json gpu_check.json
    bash scripts/benchmarks/gpu_check.sh --gradient_checkpointing       # on both sides

Needs torch, transformers, trl, peft and this package; it downloads nothing. An error is the largest difference of a
value or gradient over the largest number of the reference, which has the same rounded inputs. The steps train random
weights in bfloat16 with LoRA of rank 16, one side after the other, each in a process of its own that has the whole
memory: ours with the whole group; trl with groups that double until memory is out, then with the whole group in
micro-batches of the largest that fitted.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import SHAPES, console, summarise, write_json
from floor import Rates, measure_rates
from rich.table import Table
from trainers import Setting, check_rounds, ours, trl
from values import BOUNDS, attention_errors, fused_errors
from workers import Rounds, SideFailed, Worker, device, synchronize

CAPS = {"checks": 70.0, "ours": 100.0, "trl": 70.0, "trl, in parts": 90.0}  # seconds of a part at most
LIMIT = 330.0  # seconds of all parts together, start and tables apart


class Sizes(NamedTuple):
    """Of the check of the head, and of the product that measures the device's rate."""

    rows: int
    hidden: int
    vocabulary: int
    product: int


def checks(rounds: Rounds, sizes: Sizes) -> None:
    """Report the errors of every check and the device's rates."""
    rounds.ready()
    rounds.begin()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        errors = fused_errors(dtype, device(), *sizes[:3]) | attention_errors(dtype, device())
        name = str(dtype).removeprefix("torch.")
        found += [{"what": k, "dtype": name, "error": v, "bound": BOUNDS[name]} for k, v in errors.items()]
    machine = measure_rates(device(), torch.bfloat16, synchronize, sizes.product)
    rounds.stop()
    rounds.report(checks=found, rates=machine._asdict())


class Runner:
    """Runs parts one after the other, each within its own time and all within the limit, and keeps what failed."""

    def __init__(self, limit: float, start: str, repeats: int):
        self.ends, self.start, self.repeats = time.monotonic() + limit, start, repeats
        self.failures: list[str] = []

    def run(self, part: str, side: Any, argument: Any, repeats: int = 0) -> list[dict[str, Any]]:
        """Return the rounds of a side after one that is not counted, or that one where none is asked for.

        Raises SideFailed where it fails or its time is over.
        """
        ends = min(time.monotonic() + CAPS[part], self.ends)
        left = lambda: max(0.1, ends - time.monotonic())  # noqa: E731
        worker = Worker(side, (argument,), torch.get_num_threads(), self.start)
        try:
            worker.hear(left())
            rounds = [worker.round(left()) for _ in range(repeats + 1)]
            return rounds[1:] or rounds
        finally:
            worker.close()

    def step(self, part: str, side: Any, setting: Setting) -> dict[str, Any] | None:
        """Return the figures of one side's step, None where it failed."""
        try:
            rounds = self.run(part, side, setting, self.repeats)
            check_rounds(rounds, setting, part)
        except (SideFailed, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            self.failures.append(f"{part}, group of {setting.group}: {reason}")
            return None
        return {"name": part, **setting._asdict(), **summarise(rounds, setting.shape()[1])}


def steps(runner: Runner, setting: Setting, most: int) -> list[dict[str, Any]]:
    """Return the figures of ours, of trl with groups up to `most` and of trl with the whole group in micro-batches."""
    row = setting.prompt + setting.completion
    found, fitted, group = [runner.step("ours", ours, setting)], 1, 2
    while group <= most:
        one = runner.step("trl", trl, setting._replace(group=group, max_tokens=group * row))
        if one is None:
            if "OutOfMemory" in runner.failures[-1]:
                runner.failures.pop()  # that was the question
            break
        found, fitted, group = [*found, one], group, 2 * group
    if fitted < setting.group:
        found.append(runner.step("trl, in parts", trl, setting._replace(max_tokens=fitted * row)))
    return [one for one in found if one is not None]


def with_ratios(cases: list[dict[str, Any]], machine: Rates | None) -> list[dict[str, Any]]:
    """Add seconds per response, what ours needs over it, and the floor where the rates are known."""
    own = next((one["seconds"] / one["group"] for one in cases if one["name"] == "ours"), float("nan"))
    for case in cases:
        setting = Setting(**{name: case[name] for name in Setting._fields})
        case["seconds_per_response"] = case["seconds"] / setting.group
        case["time_ratio"] = own / case["seconds_per_response"]
        case["floor"] = setting.floor(machine) if machine else {"seconds": float("nan")}
    return cases


def checks_table(found: list[dict[str, Any]]) -> Table:
    table = Table("check", "type", title="largest errors against float64")
    for heading in ("error", "bound", ""):
        table.add_column(heading, justify="right")
    for one in found:
        verdict = "ok" if one["error"] <= one["bound"] else "FAILED"
        table.add_row(one["what"], one["dtype"], f"{one['error']:.1e}", f"{one['bound']:.0e}", verdict)
    return table


def steps_table(cases: list[dict[str, Any]], title: str) -> Table:
    table = Table("side", title=title)
    for heading in (
        "group",
        "rows at once",
        "seconds",
        "per response",
        "ours / it",
        "floor",
        "peak GiB",
        "over model",
    ):
        table.add_column(heading, justify="right")
    for one in cases:
        row = one["prompt"] + one["completion"]
        rows = "all" if one["name"] == "ours" else str(min(one["group"], one["max_tokens"] // row))
        seconds = (one["seconds"], one["seconds_per_response"])
        memory = (one["peak_mib"] / 1024, one["over_model_mib"] / 1024)
        times = (*(f"{x:.3f}" for x in seconds), f"{one['time_ratio']:.2f}", f"{one['floor']['seconds']:.3g}")
        table.add_row(one["name"], str(one["group"]), rows, *times, *(f"{x:.1f}" for x in memory))
    return table


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dry_run", action="store_true", help="a tiny model and small sizes, on CPU too")
    options.add_argument("--model", default="3b", help=f"a folder, or random weights of {', '.join(SHAPES)}")
    options.add_argument("--chunk", type=int, default=5000, help="prompt tokens")
    options.add_argument("--completion", type=int, default=64)
    options.add_argument("--group", type=int, default=16, help="a power of 2")
    options.add_argument("--gradient_checkpointing", action="store_true")
    options.add_argument("--limit", type=float, default=LIMIT, help="seconds of all parts together")
    options.add_argument("--json", type=Path, metavar="PATH")
    given = options.parse_args()
    sizes, repeats, most = Sizes(64, 2048, 151936, 8192), 2, given.group
    if given.dry_run:
        given.model, given.chunk, given.completion, given.group = "tiny", 24, 3, 4
        sizes, repeats, most = Sizes(8, 64, 512, 128), 1, 2  # as if no larger group fitted
    setting = Setting(
        given.model, given.chunk, given.completion, given.group, "bfloat16", checkpointing=given.gradient_checkpointing
    )
    # A process forked from one that has looked at CUDA cannot use it; without CUDA nothing is lost by forking.
    runner = Runner(given.limit, "fork" if given.dry_run else "spawn", repeats)
    found: list[dict[str, Any]] = []
    machine = None
    try:
        (once,) = runner.run("checks", checks, sizes)
        found, machine = once["checks"], Rates(**once["rates"])
    except SideFailed as error:
        runner.failures.append(f"checks: {str(error).strip().splitlines()[-1]}")
    screen = console()
    screen.print(checks_table(found))
    cases = with_ratios(steps(runner, setting, most), machine)
    screen.print(steps_table(cases, f"one step, {setting.name}, bfloat16, {given.model}, medians of {repeats}"))
    for failure in runner.failures:
        screen.print(f"failed: {failure}")
    rates = machine._asdict() if machine else None
    write_json(given.json, cases, checks=found, failures=runner.failures, rates=rates)
    sys.exit(bool(runner.failures) or any(not one["error"] <= one["bound"] for one in found))


if __name__ == "__main__":
    main()
