"""Stages in processes of their own: each reads only the files it is given, and is on disk whole or not at all."""

import json
import multiprocessing
import os
import resource
import shutil
import stat
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lib.output import write_json
from lib.running import fail
from rich.console import Console

from turngrpo.trainer.files import digests, is_lock, sha256
from turngrpo.trainer.writing import WriteError, writing

from .config import LabConfig

RECORD, PEAKS = "stage.json", ".peaks.json"
GOES_ON = "Finished stages are whole: the same command goes on from here"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "numpy")


@dataclass(frozen=True)
class Stage:
    """One step of the experiment: `run(folder, config, **inputs, **options)` in a process of its own.

    `inputs` maps an argument to a path that a finished stage left under the laboratory's folder, such as
    "data/rl.jsonl" or "grpo/straight/model"; the process is told these paths and no other.
    """

    name: str
    run: Callable[..., None]
    inputs: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class Laboratory:
    """Runs stages in order under one folder; a finished stage is never run or written again.

    A stage works in NAME.partial, which is renamed when it ended well. Every artefact's SHA-256 is in manifest.json
    and is checked whenever a later stage reads it. Raises ValueError where the folder holds a run of another config.
    """

    def __init__(self, root: Path, config: LabConfig, console: Console):
        self.root, self.config, self.console = root, config, console
        root.mkdir(parents=True, exist_ok=True)
        saved, own = root / "config.json", asdict(config)
        if saved.exists():
            before = json.loads(saved.read_text(encoding="utf-8"))
            changed = [f"{k}: {before.get(k)!r} there, {own[k]!r} here" for k in own if before.get(k) != own[k]]
            if changed:
                raise ValueError(
                    f"--output {str(root)!r} holds a run with other options: choose another folder, or give these\n"
                    + "\n".join(changed)
                )
        elif not all(map(is_lock, root.iterdir())):
            raise ValueError(f"--output {str(root)!r} is not empty and holds no laboratory: choose a new folder")
        write_json(saved, own)
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        self._processes: Any = multiprocessing.get_context(method)
        if method == "forkserver":  # one import of torch and trl for all stages
            scripts = str(Path(__file__).parents[1])  # the server itself finds modules by PYTHONPATH alone
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [scripts, os.environ.get("PYTHONPATH")]))
            self._processes.set_forkserver_preload(["lab.experiment"])

    def run(self, stage: Stage) -> None:
        """Run a stage unless it has finished; RuntimeError where it fails."""
        final = self.root / stage.name
        if final.exists():
            self.console.print(f"{stage.name}: finished before", highlight=False)
            return
        inputs = {name: self.root / path for name, path in stage.inputs.items()}
        read = {file: digest for path in stage.inputs.values() for file, digest in self._checked(path).items()}
        self.console.rule(stage.name)
        partial = final.with_name(f"{final.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        clean(partial, "unpacked-*")  # of a process that was killed
        started, begun = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
        arguments = (stage.run, partial, self.config, {**inputs, **stage.options})
        readable = [partial, *inputs.values()]
        process = self._processes.Process(target=_in_process, args=(self.root, readable, *arguments))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(
                f"stage {stage.name} ended with status {process.exitcode}; the same command goes on from it"
            )
        peaks = partial / PEAKS
        record = {
            "name": stage.name,
            "started": begun,
            "seconds": round(time.perf_counter() - started, 3),
            **json.loads(peaks.read_text(encoding="utf-8")),
            "inputs": read,
            "options": dict(stage.options),
            "versions": {name: version(name) for name in PACKAGES},
        }
        peaks.unlink()
        record["outputs"] = digests(partial, RECORD)
        write_json(partial / RECORD, record)
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
        os.rename(partial, final)
        self.write_manifest()

    def records(self) -> dict[str, Any]:
        """Return the record of every finished stage, in the order in which they ran."""
        found = [json.loads(path.read_text(encoding="utf-8")) for path in self.root.rglob(RECORD)]
        done = [record for record in found if (self.root / record["name"]).is_dir()]
        return {
            record["name"]: record for record in sorted(done, key=lambda record: (record["started"], record["name"]))
        }

    def write_manifest(self) -> None:
        """Collect every stage's record in manifest.json."""
        write_json(self.root / "manifest.json", {"config": asdict(self.config), "stages": self.records()})

    def verify(self) -> int:
        """Check the SHA-256 of every artefact; returns how many there are, ValueError names the first changed one."""
        count = 0
        for name, record in self.records().items():
            count += len(record["outputs"])
            self._compare(record, digests(self.root / name, RECORD))
        return count

    def _checked(self, path: str) -> dict[str, str]:
        """Return the SHA-256 of every file of an input, which must be what the stage before left."""
        stage = next((Path(path).parents[n] for n in range(len(Path(path).parents)) if self._finished(path, n)), None)
        assert stage is not None, f"no finished stage leaves {path}"
        record = json.loads((self.root / stage / RECORD).read_text(encoding="utf-8"))
        inner = str(Path(path).relative_to(stage))
        expected = {f: d for f, d in record["outputs"].items() if f == inner or f.startswith(f"{inner}/")}
        assert expected, f"stage {stage} left no {inner}"
        found = {f: sha256(self.root / stage / f) if (self.root / stage / f).exists() else "missing" for f in expected}
        self._compare(record | {"outputs": expected}, found)
        return {f"{stage}/{file}": digest for file, digest in expected.items()}

    def _finished(self, path: str, level: int) -> bool:
        return (self.root / Path(path).parents[level] / RECORD).is_file()

    def _compare(self, record: Mapping[str, Any], found: Mapping[str, str]) -> None:
        for file in sorted(record["outputs"].keys() | found.keys()):
            before, now = record["outputs"].get(file, "absent"), found.get(file, "missing")
            if before != now:
                raise ValueError(
                    f"{self.root / record['name'] / file} changed since its stage ended: SHA-256 {before} then, {now} "
                    "now; finished stages are never written again: restore it, or start over in another folder"
                )


def confine(root: Path, readable: Sequence[Path]) -> None:
    """From now on let this process open, of what lies under `root`, nothing but `readable`; for good.

    Raises PermissionError at the attempt. It is Python that is watched (sys.addaudithook): code that opens files by
    itself, as safetensors and Arrow do, is told no other path, and is not stopped.
    """
    root, allowed = root.resolve(), [path.resolve() for path in readable]

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = Path(os.fsdecode(arguments[0])).resolve()
        if path.is_relative_to(root) and not any(path.is_relative_to(one) for one in allowed):
            raise PermissionError(f"{path} is no input of this stage: expected one of {', '.join(map(str, allowed))}")

    sys.addaudithook(check)


def _in_process(
    root: Path,
    readable: Sequence[Path],
    run: Callable[..., None],
    folder: Path,
    config: LabConfig,
    arguments: dict[str, Any],
) -> None:
    """What a stage's process does: confine itself, set torch up, run, and leave its peak memory for the record."""
    import datasets
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        with writing(str(folder), GOES_ON):
            confine(root, readable)
            run(folder, config, **arguments)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
            accelerator = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
            write_json(folder / PEAKS, {"peak_rss_mb": round(peak, 1), "peak_accelerator_mb": accelerator})
    except WriteError as error:
        fail(str(error))


def clean(folder: Path, pattern: str) -> None:
    """Remove folders that a stage kept only to go on from."""
    for path in folder.glob(pattern):
        shutil.rmtree(path)
