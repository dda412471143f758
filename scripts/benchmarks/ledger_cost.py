"""What the ledger costs: seconds of a step with it against without, and its bytes against those of its tokens.

    python scripts/benchmarks/ledger_cost.py                            # 4 chunks of 512 tokens, G=8, 48 new tokens
    python scripts/benchmarks/ledger_cost.py --quick                    # a tiny random model, in seconds
    python scripts/benchmarks/ledger_cost.py --form full                # with the records of every token
    python scripts/benchmarks/ledger_cost.py --run outputs/quickstart   # the bytes of a run that was made

Both sides are the trainer of gated_step.py with shared prefixes, saving nothing; only `ledger` differs. The tokens are
prompt, completion and recorded log-probabilities; bytes are those of the columns as they lie in the Parquet files.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from common import compared, console, parse, parser, summarise, write_json
from gated_step import Reading, make_trainer
from trainers import Timekeeper
from workers import Rounds, take_turns

TOKENS = ("prompt_ids", "completion_ids", "behavior_logprobs")


def side(rounds: Rounds, reading: Reading, form: str) -> None:
    """One step with this form of the ledger."""
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(reading, folder, ledger=form, callbacks=[Timekeeper(rounds)]).train()


def column_bytes(paths: Iterable[Path]) -> Counter[str]:
    """Return the compressed bytes of every column of Parquet files, and of what is around them ("metadata")."""
    found: Counter[str] = Counter()
    for path in paths:
        metadata = pq.ParquetFile(path).metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(group.num_columns)]
        for column in columns:
            found[column.path_in_schema.split(".")[0]] += column.total_compressed_size
        found["metadata"] += path.stat().st_size - sum(column.total_compressed_size for column in columns)
    return found


def ledger_bytes(run: Path) -> dict[str, Any]:
    """Return the bytes of a run's tokens and of everything else, by file kind and column."""
    kinds = {"rollouts": "iteration_*.parquet", "updates": "updates/update_*.parquet"}
    found = {name: column_bytes((run / "rollouts").glob(pattern)) for name, pattern in kinds.items()}
    tokens = sum(found["rollouts"][name] for name in TOKENS)
    return {"tokens": tokens, "all": sum(sum(one.values()) for one in found.values()), "columns": found}


def main() -> None:
    options = parser(__doc__, repeats=7)
    options.add_argument("--chunks", type=int, default=4)
    options.add_argument("--chunk", type=int, default=512, help="tokens")
    options.add_argument("--completion", type=int, default=48)
    options.add_argument("--group", type=int, default=8)
    options.add_argument("--form", choices=["true", "full"], default="true", help="of the ledger")
    options.add_argument("--run", type=Path, help="only count the bytes of this run")
    given = parse(options)
    screen = console()
    if given.run is None:
        if given.quick:
            given.chunks, given.chunk, given.completion, given.group = 2, 128, 6, 4
        reading = Reading(given.model, given.chunks, given.chunk, given.completion, given.group, 4096)
        forms = {"ledger": given.form, "none": "false"}
        rounds = take_turns(
            {name: (side, (reading, form)) for name, form in forms.items()}, given.repeats, given.threads
        )
        sides = {name: summarise(one, reading.setting().shape()[1]) for name, one in rounds.items()}
        cases = [{"name": "step", **reading._asdict(), **compared(sides)}]
        seconds = [sides[name]["seconds"] for name in forms]
        told = f"one step, medians of {given.repeats}: ledger {given.form} {seconds[0]:.3f} s, none {seconds[1]:.3f} s"
        screen.print(f"{told}, x{seconds[0] / seconds[1]:.3f}", highlight=False)
        write_json(given.json, cases, threads=given.threads)
        return
    found = ledger_bytes(given.run)
    screen.print(
        f"{given.run}: tokens {found['tokens']:,} bytes, all {found['all']:,}, x{found['all'] / found['tokens']:.3f}"
    )
    for name, columns in found["columns"].items():
        largest = ", ".join(f"{column} {size:,}" for column, size in columns.most_common(12))
        screen.print(f"{name}: {largest}", highlight=False)


if __name__ == "__main__":
    main()
