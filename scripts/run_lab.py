"""Run the laboratory StockArithmetic-v1: data, warm start, SFT, GRPO, each also interrupted and resumed, test, report.

    python scripts/run_lab.py --preset smoke --output outputs/lab_smoke
    python scripts/run_lab.py --model Qwen/Qwen2.5-0.5B-Instruct --preset minimum --output outputs/lab

`minimum` is the full experiment, `smoke` the same path on a tiny model within minutes on two CPU cores; any number of
a preset can be changed by its flag. A run that was interrupted goes on with the same command: finished stages are
never run or written again, a learning stage goes on from its last checkpoint. manifest.json has the SHA-256 of every
artefact; report/ has results.json, report.md and the plots. Exits with 1 where a resumed branch did not end identical.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.config import LabConfig
from lib.options import option, parse_options
from lib.running import SetupError, run_script, setting_up
from rich.markdown import Markdown

from turngrpo.trainer.writing import writing

RECIPES = Path(__file__).parent / "recipes"
PRESETS = ("minimum", "smoke")


@dataclass
class LabArguments:
    """Which numbers, and where the run's files go."""

    preset: str = option("minimum", "minimum (the full experiment) or smoke.")
    output: str = option("outputs/lab", "Folder of the run, new or one to go on with.")


def parse(arguments: Sequence[str]) -> tuple[LabArguments, LabConfig]:
    """Return the options; the preset's recipe gives the defaults. Raises ValueError for an unknown preset."""
    chosen = [given for flag, given in zip(arguments, arguments[1:], strict=False) if flag == "--preset"]
    chosen += [given.removeprefix("--preset=") for given in arguments if given.startswith("--preset=")]
    preset = chosen[-1] if chosen else PRESETS[0]
    if preset not in PRESETS:
        raise ValueError(f"--preset is {preset!r}: expected {' or '.join(PRESETS)}")
    recipe = ["--config", str(RECIPES / f"stock_{preset}.yaml")]
    options, config = parse_options([LabArguments, LabConfig], [*recipe, *arguments], __doc__)
    return options, config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every stage that has not finished, then show the report."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # repeatable products on a GPU
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with setting_up():
        options, config = parse(list(sys.argv[1:] if arguments is None else arguments))
    from lab.experiment import stages
    from lab.stages import GOES_ON, Laboratory
    from lib.output import held
    from lib.reporting import make_console

    console = make_console()
    with setting_up(), held(Path(options.output), "--output"), writing(options.output, GOES_ON):
        laboratory = Laboratory(Path(options.output), config, console)
        try:
            for stage in stages(config):
                laboratory.run(stage)
            checked = laboratory.verify()
        except RuntimeError as error:
            raise SetupError(str(error)) from error
        except KeyboardInterrupt:
            console.print("interrupted: the same command goes on from here")
            return 130
    report = Path(options.output) / "report"
    console.print(Markdown((report / "report.md").read_text(encoding="utf-8").split("## Learning")[0]))
    resumed = json.loads((report / "results.json").read_text(encoding="utf-8"))["resume"]
    different = [name for name, one in resumed.items() if not one["identical"]]
    console.print(f"{checked} artefacts have the SHA-256 of {options.output}/manifest.json", highlight=False)
    console.print(f"{report}: report.md, results.json, plots", highlight=False)
    if different:
        console.print(f"NOT identical after a resume: {', '.join(different)}; see {options.output}/NAME/comparison")
    return int(bool(different))


if __name__ == "__main__":
    run_script(main)
