"""CPU time of --help of every command, beside that of importing trl's configs.

    python scripts/benchmarks/startup.py --repeats 5

prints the median of user and system seconds of each, and its ratio to `from trl import GRPOConfig, ModelConfig`; the
commands take turns, so that all meet the same machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

SCRIPTS = Path(__file__).parents[1]
BASE = "from trl import GRPOConfig, ModelConfig"


def cpu_seconds(command: Sequence[str]) -> float:
    """Return user and system seconds of a command that ends well."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Measure every command in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each command; the first is left out")
    repeats = parser.parse_args().repeats
    commands = {BASE: [sys.executable, "-c", BASE]}
    commands |= {path.name: [sys.executable, str(path), "--help"] for path in sorted(SCRIPTS.glob("*.py"))}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats + 1):
        for name, command in commands.items():
            seconds[name].append(cpu_seconds(command))
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    table = Table("command", "CPU seconds", "ratio", title=f"medians of {repeats}")
    for name, median in medians.items():
        table.add_row(name, f"{median:.2f}", f"{median / medians[BASE]:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
