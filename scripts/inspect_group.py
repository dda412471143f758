"""Show one group and one update: responses, rewards, advantages, and log-probabilities before and after.

    python scripts/inspect_group.py --model_name_or_path outputs/warm_start --row 3 --tokens --json group.json
    python scripts/inspect_group.py --model_name_or_path outputs/warm_start --row train-0131 --rewards 1 0 1 0
    python scripts/inspect_group.py --model_name_or_path M --workflow gated --corpus corpus.jsonl --scale_rewards none

The trainer samples the group and makes the update; this shows what it trained on: a train row of StockArithmetic-v1
that no warm start has seen, or of a corpus, one line per turn. --tokens adds every token, with KL(after || before) and
the ratio and clip that a second update would start from. Nothing is saved unless --json names a file.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from arguments.commands import InspectArguments, ModelOptions, UpdateArguments
from lib.options import parse_options
from lib.running import run_script, setting_up

from turngrpo.trainer.writing import writing


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, make the update in a temporary folder, and show it."""
    with setting_up():
        kinds = [InspectArguments, UpdateArguments, ModelOptions]
        options, sizes, model_options = parse_options(kinds, arguments, __doc__)
    from jobs.inspecting import make_trainer, show, update
    from lib.output import finite, write_json
    from lib.reporting import make_console

    with TemporaryDirectory() as folder:
        with setting_up():
            trainer = make_trainer(options, sizes, model_options, folder)
        turns = update(trainer)
    row = trainer.train_dataset[0]
    report = {
        "options": asdict(options) | asdict(sizes) | {"model": model_options.model_name_or_path},
        "row": row["id"],
        "problem": row["question"] if options.corpus else row["prompt"][-1]["content"],
        "expected": row["answers"] if options.corpus else row["problem"]["final_stock"],
        "update": trainer.state.log_history[0],
        "turns": turns,
    }
    show(report, make_console(), options.tokens)
    if options.json is not None:
        with (
            setting_up(),
            writing(options.json, "What it would say stands in the tables above; the same command does it again"),
        ):
            write_json(Path(options.json), finite(report))
    return 0


if __name__ == "__main__":
    run_script(main)
