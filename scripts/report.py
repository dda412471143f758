"""Write what a run left as one HTML page: curves, policies, costs, and every decision of every reading.

    python scripts/report.py --run outputs/quickstart
    python scripts/report.py --run evaluation.json --output evaluation.html

--run is the output folder of train.py, also while it trains, what evaluate.py wrote (--output, or --trajectories), or
the folder of run_lab.py. The page is one file and opens from disk without a network. A trajectory is a row of cells, a
cell is a turn: check against label by colour, a click shows what was read, remembered, said and rewarded. Of more than
--trajectories those with a fault come first, and what does not fit in --megabytes is left out; the page says so.
"""

from collections.abc import Sequence
from pathlib import Path

from arguments.commands import ReportArguments
from lib.options import parse_options
from lib.running import run_script, setting_up

from turngrpo.trainer.writing import writing


def main(arguments: Sequence[str] | None = None) -> int:
    """Find what was left, write the page, say where it is."""
    with setting_up():
        (options,) = parse_options([ReportArguments], arguments, __doc__)
        from lib.output import write_text
        from page.sources import find
        from page.writing import write_page

        if options.trajectories < 1 or options.megabytes <= 0:
            raise ValueError(
                f"--trajectories is {options.trajectories} and --megabytes is {options.megabytes}: expected 1 or "
                "more, and a positive number"
            )
        found = find(Path(options.run), options.corpus)
        output = Path(options.output or found.output())
        if output.is_dir():
            raise ValueError(f"--output is {str(output)!r}, a folder: expected a file to write")
        page, shown = write_page(found, options.trajectories, int(options.megabytes * 1e6))
        with writing(str(output), "Nothing else is touched: the same command writes it again"):
            write_text(output, page)
    print(f"{output}: {len(page.encode()) / 1e6:.1f} MB, {shown} trajectories")
    return 0


if __name__ == "__main__":
    run_script(main)
