"""What a model learns: corpus, warm starts, training arms, tests on projects apart, intervals, plots and one report.

    python scripts/benchmarks/learning.py --study code --model MODEL --source PACKAGES --output outputs/code
    python scripts/benchmarks/learning.py --study code --model MODEL --source PACKAGES --output outputs/code --budget 3

A study is a recipe of scripts/recipes/learning/. Its stages are commands of this project, run one after the other;
what each did is in stages/NAME.json and logs/NAME.log. The same command goes on after a kill: a stage that ended is
kept, training goes on from its newest checkpoint, anything else is done again. --budget ends a training that is going
on after so many hours, with a checkpoint, and reports what was tested until then: a policy is tested as soon as it is
made, and every arm's first seed is trained before any arm's second. No choice is made on the test projects: they are a
file of their own, which the tests alone read, once each; validation projects are those of training.
"""

import argparse
import contextlib
import hashlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from common import console
from rich.table import Table

from turngrpo.data_prep import split_by_project
from turngrpo.trainer.files import sha256

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts")]
from lib.curves import COLUMNS  # noqa: E402
from lib.output import write_json  # noqa: E402

RECIPES = ROOT / "scripts" / "recipes" / "learning"
GRACE = 1800  # seconds in which a training that is told to stop finishes its update and writes its checkpoint


# ---- a study and its stages ----


@dataclass(frozen=True)
class Study:
    """A recipe: options of the commands by part. `warm_starts`, `arms` and `tests` are by name.

    An arm has the options of train.py and "from", a warm start or "model"; a test has the options of evaluate.py and
    "of", an arm, a warm start or "model". An arm with "seeds" is one for each, called NAME_seed_SEED, as are its tests
    ("NAME, seed SEED").
    """

    corpus: Mapping[str, Any]  # of prepare_corpus.py, with "kind"
    test_fraction: float
    reading: Mapping[str, Any]  # of everything that reads
    warm_start: Mapping[str, Any]  # of sft.py, for all
    warm_starts: Mapping[str, Mapping[str, Any]]
    training: Mapping[str, Any]  # of train.py, for all
    arms: Mapping[str, Mapping[str, Any]]
    testing: Mapping[str, Any]  # of evaluate.py, for all
    tests: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "Study":
        """Return the study of a YAML file; ValueError for parts that are missing, unknown or name nothing."""
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        expected = {one.name for one in fields(cls)}
        if not isinstance(found, dict) or found.keys() != expected:
            held = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"{path}: found {held}, expected {sorted(expected)}")
        study = cls(**found)
        starts = ["model", *study.warm_starts]
        for name, arm in study.arms.items():
            if arm.get("from") not in starts:
                raise ValueError(f"{path}: arm {name} is from {arm.get('from')!r}, expected one of {starts}")
        known = [*starts, *study.arms]
        for name, test in study.tests.items():
            if test.get("of") not in known:
                raise ValueError(f"{path}: test {name} is of {test.get('of')!r}, expected one of {known}")
        return replace(study, arms=study.every_arm(), tests=study.every_test())

    def every_arm(self) -> dict[str, Mapping[str, Any]]:
        """Return the arms, each with one seed, all first seeds first; "series" is the name it has in the recipe."""
        found: list[tuple[int, str, Mapping[str, Any]]] = []
        for name, arm in self.arms.items():
            options = {key: value for key, value in arm.items() if key != "seeds"} | {"series": name}
            seeds = arm.get("seeds")
            if seeds:
                found += [(turn, f"{name}_seed_{seed}", options | {"seed": seed}) for turn, seed in enumerate(seeds)]
            else:
                found.append((0, name, options))
        return {name: options for _, name, options in sorted(found, key=lambda one: one[0])}

    def every_test(self) -> dict[str, Mapping[str, Any]]:
        """Return the tests, each of one arm, warm start or the model."""
        found: dict[str, Mapping[str, Any]] = {}
        for name, test in self.tests.items():
            seeds = self.arms.get(test["of"], {}).get("seeds") or []
            found |= {f"{name}, seed {seed}": {**test, "of": f"{test['of']}_seed_{seed}"} for seed in seeds}
            found |= {} if seeds else {name: test}
        return found

    def start(self, arm: str, model: str, root: Path) -> Path | str:
        """Return the model that an arm starts from."""
        start = self.arms[arm]["from"]
        return model if start == "model" else root / "warm" / start


@dataclass(frozen=True)
class Stage:
    """A command and the folder or file that it leaves.

    `trains` says that it has checkpoints to go on from, `test_fraction` how many projects of a corpus are set apart.
    """

    name: str
    command: list[str]
    output: Path
    trains: bool = False
    test_fraction: float | None = None


def as_options(*parts: Mapping[str, Any]) -> list[str]:
    """Return options as a command line, later parts over earlier ones.

    >>> as_options({"seed": 1, "use_peft": True, "hops": [1, 2]}, {"seed": 2, "instruction": None})
    ['--seed', '2', '--use_peft', '--hops', '1', '2']
    """
    line: list[str] = []
    for name, value in {key: value for part in parts for key, value in part.items()}.items():
        if value is not None:
            values = value if isinstance(value, list) else [] if value is True else [value]
            line += [f"--{name}", *(str(one).lower() if isinstance(one, bool) else str(one) for one in values)]
    return line


def stages(study: Study, model: str, source: list[str], root: Path) -> Iterator[Stage]:
    """Yield the stages in order: every policy is tested as soon as it is made."""
    whole, develop = (root / "corpus" / f"{name}.jsonl" for name in ("whole", "develop"))
    options = {name: value for name, value in study.corpus.items() if name != "kind"}
    given = {"source": source} if source else {}
    corpus = ["prepare_corpus.py", study.corpus["kind"], *as_options(options, given), "--output", str(whole)]
    yield Stage("corpus", corpus, whole, test_fraction=study.test_fraction)
    yield from tests_of("model", study, model, root)
    reading, learning = dict(study.reading), {"corpus": develop}
    for name, own in study.warm_starts.items():
        folder = {"model_name_or_path": model, "output_dir": root / "warm" / name}
        command = ["sft.py", *as_options(read_by_sft(reading), study.warm_start, own, learning, folder)]
        yield Stage(f"warm {name}", command, root / "warm" / name, trains=True)
        yield from tests_of(name, study, model, root)
    for name, arm in study.arms.items():
        own = {key: value for key, value in arm.items() if key not in ("from", "series")}
        folder = {"model_name_or_path": study.start(name, model, root), "output_dir": root / "arms" / name}
        command = ["train.py", *as_options(reading, study.training, own, learning, folder)]
        yield Stage(f"arm {name}", command, root / "arms" / name, trains=True)
        yield from tests_of(name, study, model, root)


def tests_of(policy: str, study: Study, model: str, root: Path) -> Iterator[Stage]:
    """Yield the tests of the model, of a warm start or of an arm."""
    for name, one in study.tests.items():
        if one["of"] != policy:
            continue
        own = {key: value for key, value in one.items() if key != "of"}
        who: dict[str, Any] = {"model": root / "warm" / one["of"]}
        if one["of"] == "model":
            who = {"model": model}
        elif one["of"] in study.arms:
            version = root / "arms" / one["of"] / "adapters" / one["of"] / "latest"
            who = {"model": study.start(one["of"], model, root), "adapter": version}
        output = root / "tests" / f"{name}.json"
        said = {"corpus": root / "corpus" / "test.jsonl", "split": "all"}
        said |= {"output": output, "trajectories": output.with_suffix(".parquet")}
        command = ["evaluate.py", *as_options(study.reading, study.testing, who, own, said)]
        yield Stage(f"test {name}", command, output)


def read_by_sft(reading: Mapping[str, Any]) -> dict[str, Any]:
    """Return how is read as sft.py says it: its prompts and replies are bounded by max_length."""
    return {
        name: value for name, value in reading.items() if name not in ("max_prompt_length", "max_completion_length")
    }


# ---- running them ----


class OutOfTime(Exception):
    """The budget is spent; what was done is kept."""


def run(stage: Stage, root: Path, until: float | None) -> float:
    """Run a stage to its end unless it ended before; return its seconds over all its lives.

    Raises OutOfTime where the budget ends it, RuntimeError with its last lines where it fails, and ValueError where
    the stage that ended before was another command or left something else.
    """
    record = root / "stages" / f"{stage.name.replace(' ', '_')}.json"
    log = root / "logs" / f"{stage.name.replace(' ', '_')}.log"
    before: dict[str, Any] = json.loads(record.read_text("utf-8")) if record.is_file() else {"seconds": 0.0}
    if before.get("command", stage.command) != stage.command:
        raise ValueError(
            f"{record} holds the stage of another command: expected\n{' '.join(stage.command)}\nfound\n"
            f"{' '.join(before['command'])}\ngive another --output, or remove what follows from it"
        )
    if "digest" in before:
        if digest(stage.output) != before["digest"]:
            raise ValueError(f"{stage.output} changed since its stage ended: put it back, or remove {record}")
        return before["seconds"]
    if until is not None and time.time() > until:
        raise OutOfTime
    end_orphan(before)
    command = list(stage.command)
    if stage.trains and any(stage.output.glob("checkpoint-*")):
        command += ["--resume_from_checkpoint", "true"]
    elif stage.output.is_dir():
        shutil.rmtree(stage.output)
    else:
        stage.output.unlink(missing_ok=True)
    for folder in (record.parent, log.parent, stage.output.parent):
        folder.mkdir(parents=True, exist_ok=True)
    started = time.time()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *launched(command)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        write_json(record, {"command": stage.command, "seconds": before["seconds"], "process": process.pid})
        try:
            process.wait(None if until is None else max(0.0, until - started))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(GRACE)
        finally:
            process.kill()
            seconds = before["seconds"] + time.time() - started
            write_json(record, {"command": stage.command, "seconds": seconds})
    if process.returncode != 0:
        if until is not None and time.time() > until:
            raise OutOfTime
        raise RuntimeError(f"stage {stage.name!r} ended with {process.returncode}; the end of {log}:\n{tail(log)}")
    if stage.test_fraction is not None:
        set_test_apart(stage.output, stage.test_fraction)
    write_json(record, {"command": stage.command, "seconds": seconds, "digest": digest(stage.output)})
    return seconds


def end_orphan(before: Mapping[str, Any]) -> None:
    """Let the process of a stage whose driver was killed finish its update, and end: nobody looks after it."""
    with contextlib.suppress(KeyError, psutil.NoSuchProcess):
        process = psutil.Process(before["process"])
        if process.cmdline()[1 : len(before["command"]) + 1] == launched(before["command"]):
            process.terminate()
            process.wait(GRACE)


def launched(command: list[str]) -> list[str]:
    """Return a command of scripts/ with its path."""
    return [str(ROOT / "scripts" / command[0]), *command[1:]]


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def digest(output: Path) -> str:
    """Return the SHA-256 of what later stages read: a file, or the weights and logs of a folder."""
    if output.is_file():
        return sha256(output)
    kept = sorted(path for path in output.rglob("*") if path.suffix in (".safetensors", ".jsonl"))
    kept = [path for path in kept if not any("checkpoint-" in part for part in path.relative_to(output).parts)]
    return hashlib.sha256("".join(f"{path.name} {sha256(path)}\n" for path in kept).encode()).hexdigest()


def set_test_apart(whole: Path, fraction: float) -> None:
    """Write develop.jsonl and test.jsonl beside a corpus: its projects, split once and for all.

    Raises ValueError where a side has fewer than two projects, as no corpus may.
    """
    manifest, *rows = whole.read_text(encoding="utf-8").splitlines(keepends=True)
    projects = [json.loads(row)["project"] for row in rows]
    held_out = split_by_project(projects, fraction, seed=1)  # not the seed by which training splits again
    if not 2 <= len(held_out) <= len(set(projects)) - 2:
        raise ValueError(
            f"test_fraction {fraction} leaves {len(held_out)} of {len(set(projects))} projects to test: expected two "
            "or more on each side"
        )
    for name, tested in (("develop", False), ("test", True)):
        kept = [row for row, project in zip(rows, projects, strict=True) if (project in held_out) == tested]
        whole.with_name(f"{name}.jsonl").write_text(manifest + "".join(kept), encoding="utf-8")


# ---- the report ----


def policies(study: Study, root: Path, ended: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return by name what every test that ended found: of its policy and, where it was asked for others, of those."""
    found: dict[str, dict[str, Any]] = {}
    for name, test in study.tests.items():
        if f"test {name}" not in ended:
            continue
        report = json.loads((root / "tests" / f"{name}.json").read_text(encoding="utf-8"))
        for label, policy in report["policies"].items():
            if label == "base":  # of an arm: its warm start, which has a test of its own
                continue
            own = label in ("adapter", "model")
            against = {} if not own else report.get(f"{label}_minus_base") or {}
            found[name if own else f"{name}: {label}"] = {
                **policy,
                "of": test["of"],
                "series": study.arms.get(test["of"], {}).get("series") if own else None,
                "rows": report["rows"],
                "gain": against,
            }
    return found


def cell(policy: Mapping[str, Any], name: str, key: str, narrow: bool) -> str:
    """Return a number ("metrics") or a paired difference ("gain") with its 95% interval, or a dash.

    A narrow one has half the width of the interval, "0.50 ±0.25" for "0.50 [0.25, 0.75]".
    """
    if key == "gain":
        found = policy["gain"].get(name, {})
        value, bounds, text = found.get("difference"), found.get("interval"), "{:+.2f}"
    else:
        value, bounds, text = policy["metrics"].get(name), policy["intervals"].get(name), "{:.2f}"
    if value is None or bounds is None:
        return "-" if value is None else text.format(value)
    if narrow:
        return f"{text.format(value)} ±{(bounds[1] - bounds[0]) / 2:.2f}"
    return f"{text.format(value)} [{', '.join(map(text.format, bounds))}]"


def tables(
    found: Mapping[str, Mapping[str, Any]], narrow: bool = False
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return (title, headings, rows) of what the policies did, and of the differences to their warm starts."""
    shown = [name for name in COLUMNS if any(name in policy["metrics"] for policy in found.values())]
    rows = next(iter(found.values()))["rows"]
    headings = ["policy", *(COLUMNS[name] for name in shown)]
    titles = {
        "metrics": f"{rows} rows of the test projects, 95% intervals",
        "gain": "paired difference to the warm start",
    }

    def lines(key: str) -> list[list[str]]:
        chosen = {name: policy for name, policy in found.items() if policy[key]}
        return [[name, *(cell(one, metric, key, narrow) for metric in shown)] for name, one in chosen.items()]

    made = [(title, headings, lines(key)) for key, title in titles.items()]
    of_series = [[name, *(spread(of, metric) for metric in shown)] for name, of in by_series(found).items()]
    if of_series:
        made.append(("mean over the seeds, with the lowest and the highest", headings, of_series))
    return [one for one in made if one[2]]


def by_series(found: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the policies of every arm that has several seeds."""
    series: dict[str, list[Mapping[str, Any]]] = {}
    for policy in found.values():
        if policy["series"]:
            series.setdefault(policy["series"], []).append(policy)
    return {name: of for name, of in series.items() if len(of) > 1}


def spread(of: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Return the mean over seeds with the lowest and the highest value, or a dash."""
    values = [policy["metrics"][metric] for policy in of if metric in policy["metrics"]]
    return f"{statistics.mean(values):.2f} ({min(values):.2f}-{max(values):.2f})" if values else "-"


def draw_policies(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw every policy's main metrics with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in list(COLUMNS)[:6] if any(name in policy["metrics"] for policy in found.values())]
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(2.1 * len(shown) + 2, 0.32 * len(found) + 1.2), sharey=True, squeeze=False
    )
    for axis, metric in zip(axes[0], shown, strict=True):
        for place, policy in enumerate(found.values()):
            if metric in policy["metrics"]:
                value = policy["metrics"][metric]
                low, high = policy["intervals"].get(metric, (value, value))
                axis.errorbar(
                    value,
                    place,
                    xerr=[[max(0.0, value - low)], [max(0.0, high - value)]],
                    fmt="o",
                    color="C0",
                    capsize=2,
                )
        axis.set_title(COLUMNS[metric], fontsize=10)
        axis.grid(alpha=0.3)
    axes[0, 0].set_yticks(range(len(found)), list(found))
    axes[0, 0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_curves(study: Study, root: Path, path: Path) -> None:
    """Draw the validation reward over the updates: the mean over an arm's seeds, and the band of all of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6))
    series: dict[str, dict[int, list[float]]] = {}
    for name, arm in study.arms.items():
        metrics = root / "arms" / name / "metrics.jsonl"
        for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
            log = json.loads(line)
            if "eval_reward" in log:
                series.setdefault(arm["series"], {}).setdefault(log["update"], []).append(log["eval_reward"])
    for name, points in series.items():
        means, lowest, highest = ([of(values) for values in points.values()] for of in (statistics.mean, min, max))
        (curve,) = axis.plot(list(points), means, marker=".", label=name)
        axis.fill_between(list(points), lowest, highest, color=curve.get_color(), alpha=0.2, linewidth=0)
    axis.set_xlabel("update")
    axis.set_title("validation reward", fontsize=10)
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_report(
    study: Study, root: Path, found: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float]
) -> None:
    """Write report/: report.md, results.json and two plots of what the tests found."""
    folder = root / "report"
    folder.mkdir(exist_ok=True)
    lines = []
    for title, headings, rows in tables(found):
        lines += [f"**{title}**", "", f"| {' | '.join(headings)} |", "| --- " * len(headings) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    lines += [
        "| stage | hours |",
        "| --- | --- |",
        *(f"| {name} | {spent / 3600:.2f} |" for name, spent in seconds.items()),
    ]
    lines += ["", "![policies](policies.png)", "", "![validation reward](curves.png)"]
    draw_policies(found, folder / "policies.png")
    draw_curves(study, root, folder / "curves.png")
    write_json(folder / "results.json", {"policies": found, "seconds": dict(seconds)})
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--study", required=True, help="name of a recipe in scripts/recipes/learning, or a YAML file")
    options.add_argument("--model", required=True, help="folder or name of the model that learns")
    options.add_argument("--source", nargs="+", default=[], help="folders that the corpus is made from")
    options.add_argument("--output", type=Path, required=True, help="folder of everything")
    options.add_argument("--budget", type=float, help="hours after which no further stage begins")
    given = options.parse_args(arguments)
    path = Path(given.study) if given.study.endswith(".yaml") else RECIPES / f"{given.study}.yaml"
    if not path.is_file():
        options.error(
            f"--study {given.study}: expected one of {sorted(one.stem for one in RECIPES.glob('*.yaml'))}, or a file"
        )
    study, root, screen = Study.read(path), given.output.resolve(), console()
    model = str(Path(given.model).resolve()) if Path(given.model).is_dir() else given.model
    source = [str(Path(one).resolve()) for one in given.source]
    until = None if given.budget is None else time.time() + 3600 * given.budget
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "study.json", {one.name: getattr(study, one.name) for one in fields(study)})
    seconds: dict[str, float] = {}
    try:
        for stage in stages(study, model, source, root):
            screen.print(f"{time.strftime('%H:%M:%S')} {stage.name}", highlight=False)
            seconds[stage.name] = run(stage, root, until)
    except OutOfTime:
        screen.print(
            f"the budget of {given.budget} hours is spent before the end of {stage.name!r}: the same command goes on"
        )
    found = policies(study, root, seconds)
    if not found:
        return 0
    write_report(study, root, found, seconds)
    for title, headings, rows in tables(found, narrow=True):
        table = Table(*headings, title=title)
        for row in rows:
            table.add_row(*row)
        screen.print(table)
    screen.print(f"{root / 'report' / 'report.md'}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
