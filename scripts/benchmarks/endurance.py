"""Runs killed at random moments and gone on with, against runs that nobody disturbed; then memory over many updates.

    python scripts/benchmarks/endurance.py --output endurance                  # 60 kills, 1,000 updates
    python scripts/benchmarks/endurance.py --output endurance --kinds laboratory --kills 10
    python scripts/benchmarks/endurance.py --output endurance --quick          # a kill of each kind, 20 updates

Each kind of run is done once straight. Then the same command is killed (SIGKILL to all its processes) at a moment
drawn from the time in which it writes, and gone on with until it ends. Both must have left the same: every field of
the last checkpoint but durations, every logged number and every rollout once, one version, nothing half written.
Finished kills are kept in OUTPUT/endurance.json, so an interrupted benchmark goes on with the same command.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from common import console
from rich.table import Table

from turngrpo.trainer.files import sha256
from turngrpo.trainer.runs.compare import LEFT_OUT, compare_states

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]
from jobs.quickstart import INSTRUCTION, StartOptions  # noqa: E402
from jobs.quickstart import prepare as prepare_start  # noqa: E402

LAUNCH = "-m accelerate.commands.launch --config_file accelerate_configs/cpu_2proc.yaml".split()
UPDATES = 8  # of a run that is killed; a checkpoint after each
UNEQUAL = (*LEFT_OUT, "second")  # in the name of what two equal runs need not share
LIMIT = 1800  # seconds after which a run hangs


@dataclass(frozen=True)
class Kind:
    """A command, with which option it goes on, what of its output must be the same, and its last checkpoint.

    `reached` tells how far a run was when it was killed; one that was nowhere is begun anew.
    """

    command: Sequence[str]
    found: Callable[[Path], dict[str, Any]]
    go_on: Sequence[str] = ("--resume_from_checkpoint", "true")
    checkpoint: str | None = f"checkpoint-{UPDATES}"
    reached: Callable[[Path], str | None] = lambda output: newest(output, "checkpoint-*")


# ---- what a run leaves ----


def newest(folder: Path, pattern: str) -> str | None:
    """Return the name of what was written last in a folder; None where there is nothing."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns, default=Path("")).name or None


def without_unequal(value: Any) -> Any:
    """Return JSON content without the fields that two equal runs need not share, such as durations."""
    if isinstance(value, Mapping):
        return {key: without_unequal(one) for key, one in value.items() if not any(part in key for part in UNEQUAL)}
    return [without_unequal(one) for one in value] if isinstance(value, list) else value


def half_written(folder: Path) -> list[str]:
    """Return what an interrupted write leaves."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "partial" in path.name)


def trained(folder: Path) -> dict[str, Any]:
    """Return what train.py left: the numbers logged, the ledger's rows, the versions with their digests."""
    logged = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rollouts = [
        path for path in sorted((folder / "rollouts").rglob("*.parquet")) if "abandoned" not in path.parent.name
    ]
    versions = sorted(path for path in (folder / "adapters" / folder.name).iterdir() if path.is_dir())
    return {
        "logged": without_unequal([json.loads(line) for line in logged]),
        "ledger": {path.name: without_unequal(pq.read_table(path).to_pylist()) for path in rollouts},
        "versions": [path.name for path in versions],
        "weights": [sha256(path / "adapter_model.safetensors") for path in versions],
        "half written": half_written(folder),
    }


def imitated(folder: Path) -> dict[str, Any]:
    """Return what sft.py left."""
    return {
        "losses": without_unequal(json.loads((folder / "sft.json").read_text(encoding="utf-8"))),
        "weights": sha256(folder / "adapter_model.safetensors"),
        "half written": half_written(folder),
    }


def laboratory(folder: Path) -> dict[str, Any]:
    """Return what the laboratory left; archives hold seconds, so that their sizes differ."""
    results = json.loads((folder / "report" / "results.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in results.items() if name not in ("archives", "costs", "options")}
    return {
        "results": without_unequal(kept),
        "not identical": [name for name, one in results["resume"].items() if not one["identical"]],
        "half written": half_written(folder),
    }


def studied(folder: Path) -> dict[str, Any]:
    """Return what a study left: its tables' numbers, and the weights of every warm start and arm."""
    results = json.loads((folder / "report" / "results.json").read_text(encoding="utf-8"))
    weights = [path for path in sorted(folder.rglob("*.safetensors")) if "checkpoint-" not in str(path)]
    logged = sorted(folder.glob("arms/*/metrics.jsonl"))
    return {
        "policies": without_unequal(results["policies"]),
        "logged": [without_unequal(json.loads(line)) for path in logged for line in path.read_text().splitlines()],
        "weights": {str(path.relative_to(folder)): sha256(path) for path in weights},
        "half written": half_written(folder),
    }


def pushed(hub: Any, folder: Path) -> dict[str, Any]:
    """Return what train.py left, and what stands at the hub: its files, and one tag."""
    _, files = hub.files(f"owner/{folder.parent.name}", "main")
    weights = hashlib.sha256(files["adapter_model.safetensors"]).hexdigest()
    tags = sorted(hub.refs[f"owner/{folder.parent.name}"])
    return trained(folder) | {"pushed": {"files": sorted(files), "weights": weights, "branches and tags": tags}}


# ---- running and killing ----


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command of this project; its output goes to a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(command: Sequence[str], log: Path, output: Path) -> tuple[float, float]:
    """Run a command to its end; return after how many seconds it wrote into `output` first, and ended.

    Raises RuntimeError with its last lines where it fails.
    """
    started, wrote = time.perf_counter(), None
    process = start(command, log)
    try:
        while (code := process.poll()) is None and time.perf_counter() - started < LIMIT:
            time.sleep(0.1)
            if wrote is None and has_written(output):
                wrote = time.perf_counter() - started
    finally:
        kill_all(process)
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{log.read_text(errors='replace')[-3000:]}")
    ended = time.perf_counter() - started
    return wrote or ended, ended


def has_written(output: Path) -> bool:
    """Whether a run has made its first folder."""
    return any(path.is_dir() for path in output.glob("*"))


def killed_after(seconds: float, command: Sequence[str], log: Path, output: Path) -> bool:
    """Start a command and kill all its processes so many seconds after it wrote first; False where it had ended."""
    process = start(command, log)
    try:
        while not has_written(output) and process.poll() is None:
            time.sleep(0.02)
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        kill_all(process)
        process.wait()


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started; the workers of torch's launcher have sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        for one in [leader, *leader.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def as_text(value: Any) -> str:
    """Return a text that is the same for equal values, whatever the order of keys; NaN is NaN."""
    return json.dumps(value, sort_keys=True, default=repr)


def gradients(value: Any) -> int:
    """Return how many updates in JSON content had a gradient: what trains nothing has nothing in which to differ."""
    if isinstance(value, Mapping):
        return int((value.get("grad_norm") or 0.0) > 0) + sum(map(gradients, value.values()))
    return sum(map(gradients, value)) if isinstance(value, list) else 0


def differences(kind: Kind, straight: Path, folder: Path) -> list[str]:
    """Return a line per thing in which a run that was killed differs from the straight one."""
    ours, theirs = kind.found(folder), kind.found(straight)
    lines = [
        f"{name} differ: {str(ours[name])[:300]}" for name in ours if as_text(ours[name]) != as_text(theirs[name])
    ]
    if kind.checkpoint:
        lines += compare_states(straight / kind.checkpoint, folder / kind.checkpoint)
    return lines


def one_kill(kind: Kind, folder: Path, straight: Path, seconds: float) -> dict[str, Any]:
    """Kill a run so many seconds after its first writing, go on until it ends, and compare it with the straight."""
    folder.mkdir(parents=True)
    output, log = folder / straight.name, folder / "log"
    command = filled(kind.command, output)
    was_killed = killed_after(seconds, command, log, output)
    reached = kind.reached(output)
    if was_killed:
        finish([*command, *(kind.go_on if reached else ())], log, output)
    return {
        "after_seconds": round(seconds, 2),
        "killed": was_killed,
        "reached": reached,
        "differences": differences(kind, straight, output),
    }


def filled(command: Sequence[str], output: Path) -> list[str]:
    return [part.format(output=output, run=output.parent.name) for part in command]


# ---- the kinds of runs ----


def make_kinds(start: Path, hub: Any) -> dict[str, Kind]:
    """Return the runs by name: training in one process, in two and with a push, warm start, laboratory, a study."""
    shared = (
        f"--model_name_or_path {start / 'model'} --output_dir {{output}} --use_peft --lora_r 4 --use_cpu --bf16 false"
    )
    shared += " --gradient_checkpointing false --report_to none --logging_steps 1 --save_strategy steps --save_steps 1"
    shared += f" --corpus {start / 'corpus.jsonl'} --max_steps {UPDATES} --learning_rate 1e-3"
    train = (
        f"scripts/train.py {shared} --num_generations 4 --gradient_accumulation_steps 2 --num_iterations 2 --beta 0.1"
    )
    train += " --max_prompt_length 200 --max_completion_length 32 --max_memory_tokens 16 --loss_type group --alpha 0.5"
    train += " --eval_strategy steps --eval_steps 3 --validation_rows 4"
    one = [*train.split(), "--per_device_train_batch_size", "4", "--instruction", INSTRUCTION]
    two = [*LAUNCH, *train.split(), "--per_device_train_batch_size", "2", "--instruction", INSTRUCTION]
    warm = [*f"scripts/sft.py {shared} --per_device_train_batch_size 4".split(), "--instruction", INSTRUCTION]
    lab = "scripts/run_lab.py --preset smoke --output {output} --warm_start_epochs 2 --sft_rows 16 --grpo_iterations 3"
    lab += " --grpo_interrupt 1 --exercise_iterations 2 --exercise_interrupt 1 --exercise_generations 2 --save_every 1"
    lab += " --draws 2"
    study = f"scripts/benchmarks/learning.py --study smoke --model {start / 'model'} --output {{output}}"
    return {
        "one process": Kind(one, trained),
        "two processes": Kind(two, trained),
        "warm start": Kind(warm, imitated),
        "laboratory": Kind(lab.split(), laboratory, go_on=(), checkpoint=None),
        "study": Kind(study.split(), studied, (), None, lambda output: newest(output / "logs", "*")),
        "push": Kind(
            [*one, "--push_to_hub", "--hub_strategy", "end", "--hub_model_id", "owner/{run}"],
            lambda folder: pushed(hub, folder),
        ),
    }


@contextlib.contextmanager
def local_hub() -> Iterator[Any]:
    """Yield a model hub on this machine (that of the tests) which the commands push to."""
    with importlib.import_module("hub_server").running_hub() as (hub, address):
        os.environ |= {"HF_ENDPOINT": address, "HF_TOKEN": "hf_owner", "HF_HUB_DISABLE_XET": "1"}
        yield hub


# ---- memory ----


def resources(process: int) -> tuple[float, int]:
    """Return the resident memory (MiB) and the open handles of a process, from /proc."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list(Path(f"/proc/{process}/fd").iterdir()))


def memory(kind: Kind, updates: int, folder: Path) -> list[dict[str, float]]:
    """Train so many updates and return (update, MiB, handles) as they were seen, once a second at most."""
    output, found = folder / "run", list[dict[str, float]]()
    options = ["--max_steps", str(updates), "--save_steps", "100", "--save_total_limit", "2", "--eval_steps", "100"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    process = start(filled([*kind.command, *options], output), folder / "log")
    metrics = output / "metrics.jsonl"
    while process.poll() is None:
        time.sleep(1)
        with contextlib.suppress(FileNotFoundError):  # not begun, or just ended
            update = sum('"loss"' in line for line in metrics.read_text(encoding="utf-8").splitlines())
            mebibytes, handles = resources(process.pid)
            found.append({"update": update, "mebibytes": mebibytes, "handles": handles})
    if process.returncode != 0:
        raise RuntimeError((folder / "log").read_text(errors="replace")[-3000:])
    return found


# ---- the tables ----


def kills_table(kills: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Return a line per kind of run."""
    table = Table("run", title="killed at a random moment, gone on with")
    for heading in ("kills", "before a checkpoint", "identical", "different"):
        table.add_column(heading, justify="right")
    for name, found in kills.items():
        done = [one for one in found if one["killed"]]
        early = sum(one["reached"] is None for one in done)
        different = sum(bool(one["differences"]) for one in done)
        table.add_row(name, *map(str, (len(done), early, len(done) - different, different)))
    return table


def memory_table(found: Sequence[Mapping[str, float]], updates: int) -> Table:
    """Return memory and handles at tenths of the run."""
    table = Table("update", title=f"memory over {updates} updates")
    for heading in ("MiB", "open handles"):
        table.add_column(heading, justify="right")
    for tenth in range(1, 11):
        reached = [one for one in found if one["update"] <= updates * tenth / 10]
        seen = max(reached or found[:1], key=lambda one: one["update"])
        table.add_row(*(f"{seen[name]:.0f}" for name in ("update", "mebibytes", "handles")))
    return table


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--output", type=Path, required=True, help="folder of the runs and of endurance.json")
    options.add_argument("--kills", type=int, default=10, help="of each kind of run")
    options.add_argument("--updates", type=int, default=1000, help="of the run whose memory is watched; 0: none")
    options.add_argument("--kinds", nargs="+", help="some of the kinds; all when left out")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--quick", action="store_true", help="a kill of each kind and 20 updates")
    given = options.parse_args()
    if given.quick:
        given.kills, given.updates = 1, 20
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    record = output / "endurance.json"
    report: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {"kills": {}, "straight": {}}
    if not (output / "start" / "model" / "config.json").is_file():
        prepare_start(output / "start", given.seed, StartOptions(6, 32, reading_updates=400, spoiling_updates=60))
    with local_hub() as hub:
        kinds = make_kinds(output / "start", hub)
        for name in given.kinds or kinds:
            kind, folder = kinds[name], output / name.replace(" ", "_")
            straight = folder / "straight" / "run"
            if name not in report["straight"] or name == "push":  # the hub's content ends with this process
                shutil.rmtree(straight.parent, ignore_errors=True)
                straight.parent.mkdir(parents=True)
                found = finish(filled(kind.command, straight), straight.parent / "log", straight)
                report["straight"][name] = found
                if not gradients(kind.found(straight)):
                    raise RuntimeError(f"no update of {straight} had a gradient: nothing could differ after a kill")
            kills = report["kills"].setdefault(name, [])
            while sum(one["killed"] for one in kills) < given.kills:  # a moment may lie behind the end
                wrote, ended = report["straight"][name]
                part = len(kills) % given.kills + random.Random(f"{given.seed} {name} {len(kills)}").random()
                moment = part / given.kills * (ended - wrote)  # one in each tenth of the run, say
                place = folder / f"kill_{len(kills):02d}"
                shutil.rmtree(place, ignore_errors=True)
                kills.append(one_kill(kind, place, straight, moment))
                if not kills[-1]["differences"]:
                    shutil.rmtree(place)
                record.write_text(json.dumps(report, indent=2) + "\n")
                console().print(f"{name} {len(kills)}: {kills[-1]}", highlight=False, soft_wrap=True)
        console().print(kills_table(report["kills"]))
        if given.updates and "memory" not in report:
            report["memory"] = memory(kinds["one process"], given.updates, output / "memory")
            record.write_text(json.dumps(report, indent=2) + "\n")
        if "memory" in report:
            console().print(memory_table(report["memory"], int(max(one["update"] for one in report["memory"]))))
    return int(any(one["differences"] for found in report["kills"].values() for one in found))


if __name__ == "__main__":
    sys.exit(main())
