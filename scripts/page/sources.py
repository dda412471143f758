"""What --run names: the output folder of a training, an evaluation's file, or a laboratory; and what lies there."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from turngrpo.trainer.files import MANIFEST, RUN_FILE
from turngrpo.trainer.runs import ledger
from turngrpo.trainer.runs.columns import ROLLOUT, as_table

EXPECTED = (
    "expected the output_dir of train.py, what evaluate.py wrote (--output NAME.json, or --trajectories NAME.parquet "
    "or NAME.jsonl), or the folder of run_lab.py"
)
SUMMARY, METRICS, CONFIG = "summary.json", "metrics.jsonl", "run.json"
TEST_KINDS = ("greedy", "draws")


class Reader(Protocol):
    """Returns turns, of these columns and ids alone where they are given."""

    def __call__(self, columns: Collection[str] | None = None, ids: Collection[str] | None = None) -> pa.Table: ...


@dataclass
class Found:
    """All that the page is made from; what was not found is empty."""

    kind: str  # training, evaluation or laboratory
    path: Path
    readers: dict[str, Reader] = field(default_factory=dict)  # by branch; a training and an evaluation have one, ""
    config: dict[str, Any] = field(default_factory=dict)
    corpus: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # logs by branch
    rows: int | None = None  # that an evaluation read
    policies: dict[str, Any] = field(default_factory=dict)  # metrics, intervals and seconds by name
    differences: dict[str, Any] = field(default_factory=dict)  # paired, by what is compared and metric
    costs: dict[str, dict[str, float]] = field(default_factory=dict)  # by branch and purpose
    tests: list[dict[str, Any]] = field(default_factory=list)  # a laboratory's: shares of correct responses
    corpus_file: Path | None = None
    tokenizer: Path | None = None
    notes: list[str] = field(default_factory=list)  # what is missing, in a sentence each

    def output(self) -> Path:
        """Return where the page goes unless it is told."""
        return self.path.with_suffix(".html") if self.path.is_file() else self.path / "report.html"

    @property
    def chunk_size(self) -> int | None:
        """Return the tokens of a chunk where the run's documents were cut by it."""
        return self.config.get("trainer", self.config).get("chunk_size")


def find(path: Path, corpus: str | None = None) -> Found:
    """Return what lies at `path`; `corpus` is the corpus file where it is not the one that the run names.

    Raises ValueError where there is nothing to show.
    """
    if not path.exists():
        raise ValueError(f"--run is {str(path)!r}: there is no such file or folder; {EXPECTED}")
    if path.is_file():
        found = _evaluation(path)
    elif (path / "config.json").is_file() and any(path.glob("*/straight*")):
        found = _laboratory(path)
    elif (path / "rollouts").is_dir() or (path / METRICS).is_file() or (path / SUMMARY).is_file():
        found = _training(path)
    else:
        raise ValueError(f"--run is {str(path)!r}, which holds no rollouts/, {METRICS} or {SUMMARY}: {EXPECTED}")
    if corpus is not None and not Path(corpus).is_file():
        raise ValueError(f"--corpus is {corpus!r}: there is no such file")
    found.corpus_file = Path(corpus) if corpus else found.corpus_file
    return found


def _training(folder: Path) -> Found:
    found = Found("training", folder, summary=_object(folder / SUMMARY))
    known = _newest(folder, (CONFIG,), (f"checkpoint-*/{RUN_FILE}", f"adapters/*/latest/{MANIFEST}"))
    facts = _object(known) if known else {}
    found.config, found.corpus = facts.get("config") or {}, facts.get("corpus") or {}
    found.history = {"": _logs(folder / METRICS)}
    found.policies = found.summary.get("policies") or {}
    found.costs = {
        "stages": found.summary.get("seconds") or {},
        "updates": _summed(log for log in found.history[""] if "train_runtime" not in log),
    }
    if any((folder / "rollouts").glob("iteration_*.parquet")):
        found.readers = {"": partial(ledger.read, folder)}
    else:
        found.notes.append("The run kept no ledger (ledger: false), or has not finished a rollout: no trajectories.")
    if not found.summary:
        found.notes.append(f"There is no {SUMMARY}: the run goes on or was ended. This is what it left so far.")
    if not found.config:
        found.notes.append("Neither run.json nor a checkpoint nor an adapter says how the run was made.")
    files = facts.get("files") or {}
    found.corpus_file = _first(files.get("corpus"), folder / "start" / "corpus.jsonl")
    name = "tokenizer.json"
    own = _newest(folder, (), (f"checkpoint-*/{name}", f"adapters/*/latest/{name}", f"model/{name}"))
    found.tokenizer = _first(own, _tokenizer_of(files.get("model") or facts.get("base_model")))
    return found


def _evaluation(path: Path) -> Found:
    """Return an evaluation from either of its files, and from the other where it lies where it was written."""
    if path.suffix == ".json":
        report, rows = _object(path), None
        if not isinstance(report.get("policies"), dict):
            raise ValueError(f"--run is {str(path)!r}, which is not what evaluate.py --output writes; {EXPECTED}")
        named = (report.get("options") or {}).get("trajectories")
        rows = _first(named, named and path.parent / Path(named).name)
    elif path.suffix in (".parquet", ".jsonl"):
        report, rows = _report_beside(path), path
    else:
        raise ValueError(f"--run is {str(path)!r}; {EXPECTED}")
    found = Found("evaluation", path, config=report.get("options") or {}, policies=report.get("policies") or {})
    found.rows = report.get("rows")
    found.differences = {name: value for name, value in report.items() if "_minus_" in name}
    found.costs = {"policies": {name: one["seconds"] for name, one in found.policies.items() if "seconds" in one}}
    digest = report.get("corpus_digest")
    found.corpus = {"file": found.config.get("corpus"), "digest": digest} if digest else {}
    if rows is None:
        found.notes.append("The evaluation kept no trajectories, or they are elsewhere: --trajectories keeps them.")
    else:
        found.readers = {"": partial(_read_rows, rows)}
    if not report:
        found.notes.append("The evaluation's JSON file is not beside its trajectories: no policies with intervals.")
    found.corpus_file = _first(found.config.get("corpus"))
    names = ("tokenizer", "adapter", "model")
    found.tokenizer = _first(*(_tokenizer_of(found.config.get(name)) for name in names))
    return found


def _laboratory(folder: Path) -> Found:
    results = _object(folder / "report" / "results.json")
    found = Found("laboratory", folder, config=_object(folder / "config.json"))
    for path in sorted(folder.glob("*/straight*/rollouts")):  # straight.partial while the branch goes on
        if any(path.glob("iteration_*.parquet")):
            found.readers[path.parents[1].name] = partial(ledger.read, path.parent)
    found.history = {name: _renamed(logs) for name, logs in (results.get("histories") or {}).items()}
    found.costs = {
        f"{name}, {kind}": seconds
        for name, kinds in (results.get("costs") or {}).items()
        for kind, seconds in kinds.items()
    }
    for policy, strata in (results.get("test") or {}).items():
        for stratum, kinds in strata.items():
            found.tests += [
                {"policy": policy, "problems": stratum, "kind": kind} | kinds[kind]
                for kind in TEST_KINDS
                if kind in kinds
            ]
    found.summary = {name: results[name] for name in ("model", "resume", "archives") if name in results}
    found.tokenizer = _first(*sorted(folder.glob("*/straight/model/tokenizer.json")))
    if not results:
        found.notes.append("There is no report/results.json: the laboratory goes on or was ended.")
    return found


def _read_rows(path: Path, columns: Collection[str] | None = None, ids: Collection[str] | None = None) -> pa.Table:
    if path.suffix == ".parquet":
        return ledger.read_file(path, columns, ids)
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return as_table([row for row in rows if ids is None or row["id"] in ids], ROLLOUT)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no JSON Lines file of evaluate.py --trajectories ({error!r})") from error


def _report_beside(rows: Path) -> dict[str, Any]:
    """Return the report that names a file of trajectories, from the JSON files in its folder."""
    for path in sorted(rows.parent.glob("*.json")):
        report = _object(path)
        named = (report.get("options") or {}).get("trajectories") if "policies" in report else None
        if named and Path(named).name == rows.name:
            return report
    return {}


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty where there is no file; ValueError where it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}: expected a JSON object")
    return value


def _logs(path: Path) -> list[dict[str, Any]]:
    """Return the logs of a run; the last line of one that was killed, or is being written, may be torn."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _renamed(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"update": log["step"], **log} for log in logs if "train_runtime" not in log]


def _summed(logs: Any) -> dict[str, float]:
    sums: dict[str, float] = {}
    for log in logs:
        for name, value in log.items():
            if name.startswith(("time/", "tokens/", "eval_time/", "eval_tokens/")):
                sums[name] = sums.get(name, 0.0) + value
    return sums


def _newest(folder: Path, fixed: Collection[str], patterns: Collection[str]) -> Path | None:
    """Return the first fixed name that is there, else the newest file of any of the patterns."""
    for name in fixed:
        if (folder / name).is_file():
            return folder / name
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    return max(paths, key=lambda path: path.stat().st_mtime, default=None)


def _first(*candidates: Any) -> Path | None:
    """Return the first that is a file."""
    return next((Path(one) for one in candidates if one and Path(one).is_file()), None)


def _tokenizer_of(name: Any) -> Path | None:
    """Return the tokenizer.json of a model by its folder, or by its name on the Hub where it was downloaded before."""
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name, "tokenizer.json")
    from huggingface_hub import try_to_load_from_cache

    try:
        held = try_to_load_from_cache(str(name), "tokenizer.json")
    except ValueError:  # no name that could be on the Hub: a folder that is gone
        return None
    return Path(held) if isinstance(held, str) else None


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the scalars and lists in nested objects by their path."""
    lines: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            lines |= flat(inner, f"{prefix}{name} · ")
        elif inner is not None:
            lines[f"{prefix}{name}"] = inner
    return lines
