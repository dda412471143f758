"""What wandb, trackio and tensorboard hold after a run without a network: every metric, and a few read documents."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from turngrpo.trainer.measuring.trackers import transcript
from turngrpo.trainer.reading.gates import GateDecision
from turngrpo.trainer.reading.rollout import Trajectory, Turn

RUN = """
import json
from pathlib import Path
from datasets import Dataset
from training import make_trainer
from turngrpo.trainer import GatedMemory

texts = {"red is blue": True, "<b>no</b> \\x1b[2J code": False}
chunks = [{"text": text, "evidence": evidence} for text, evidence in texts.items()]
rows = Dataset.from_list([{"id": f"r{i}", "question": "red", "answers": ["blue"], "chunks": chunks} for i in range(4)])
options = {"eval_strategy": "steps", "eval_steps": 1, "allow_overlap": True, "alpha": 1.0, "max_prompt_length": 400}
options |= {"log_completions": True, "num_completions_to_print": 2, "report_to": ["wandb", "trackio", "tensorboard"]}
trainer = make_trainer("out", GatedMemory(), dataset=rows, eval_dataset=rows, turn_reward_funcs=None, **options)
trainer.train()
Path("history.json").write_text(json.dumps(trainer.state.log_history))
"""
SHOWN = ["r0", "r1"]
ONCE = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}


def names_in(log, once):
    """Names of a log as transformers gives them to trackers; those of the whole run go to tensorboard alone."""
    numbers = [name for name, value in log.items() if isinstance(value, int | float) and name not in ("step", *once)]
    return {f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}" for name in numbers}


def wandb_records(data):
    """Yield the records of wandb's file, a LevelDB log: blocks of 32 KiB, parts with checksum, length and type."""
    place, parts = 7, []
    while place < len(data):
        if 32768 - place % 32768 < 7:  # no header fits: the block's end is padding
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of two updates with an evaluation after each, and its logs."""
    folder = tmp_path_factory.mktemp("tracked")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "helpers"), "HF_HUB_OFFLINE": "1"}
    environment |= {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "TENSORBOARD_LOGGING_DIR": str(folder / "board")}
    command = [sys.executable, "-W", "ignore", "-c", RUN]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    history = json.loads((folder / "history.json").read_text())
    assert [log["step"] for log in history if "eval_reward" in log] == [1, 2]
    return folder, history


def test_tensorboard_holds_every_metric_and_the_documents_as_text(run):
    folder, history = run
    board = EventAccumulator(str(folder / "board"), size_guidance={"tensors": 0}).Reload()
    assert set().union(*(names_in(log, ()) for log in history)) == set(board.Tags()["scalars"])
    for log in history:
        for name in ("reward", "eval_reward", "eval_update_accuracy/balanced"):
            if name in log:
                points = board.Scalars(f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}")
                assert [point.value for point in points if point.step == log["step"]] == pytest.approx([log[name]])
    for row in SHOWN:
        texts = [
            event.tensor_proto.string_val[0].decode()
            for event in board.Tensors(f"trajectories/eval/{row}/text_summary")
        ]
        assert len(texts) == 2 and all(
            "    question: red\n" in text and "chunk 1 (evidence)" in text for text in texts
        )
    assert not any("trajectories/eval/r2" in name for name in board.Tags()["tensors"])


def test_wandb_holds_every_metric_and_a_table_of_documents(run):
    folder, history = run
    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    records = map(Record.FromString, wandb_records(path.read_bytes()))
    names = {item.key or item.nested_key[0] for record in records for item in record.history.item}
    assert set().union(*(names_in(log, ONCE) for log in history)) | {"completions", "trajectories"} <= names
    tables = [json.loads(one.read_text()) for one in path.parent.rglob("trajectories_*.table.json")]
    assert sorted(row[0] for table in tables for row in table["data"]) == [1, 1, 2, 2]  # two rows an evaluation
    (first,) = [dict(zip(t["columns"], t["data"][0], strict=True)) for t in tables if t["data"][0][0] == 1]
    assert (first["row"], first["split"], first["gold"]) == (SHOWN[0], "eval", "blue")
    assert first["transcript"].startswith("chunk 1 (evidence): did not parse, ")


def test_trackio_holds_every_metric_and_a_table_of_documents(run):
    folder, history = run
    held = dict[str, list]()
    with sqlite3.connect(next((folder / "trackio").glob("*.db"))) as database:
        for (text,) in database.execute("select metrics from metrics"):
            for name, value in json.loads(text).items():
                held.setdefault(name, []).append(value)
    assert set().union(*(names_in(log, ONCE) for log in history)) <= set(held)
    assert held["eval/reward"] == pytest.approx([log["eval_reward"] for log in history if "eval_reward" in log])
    assert [[row["row"] for row in table["_value"]] for table in held["trajectories"]] == [SHOWN] * 2


def test_a_transcript_says_what_the_gates_did_and_steers_no_terminal():
    turns = [
        Turn(1, [1], [2], [0.0], "eos", "...", GateDecision(True, "a\nb", False), True, memory="a\nb"),
        Turn(2, [1], [2], [0.0], "length", "\x1b[2Jx", None, False, fault="cut at the limit"),
        Turn(None, [1], [2], [0.0], "eos", "\\boxed{a b}"),
    ]
    assert transcript(Trajectory({}, 0, 0, turns)).splitlines() == [
        "chunk 1 (evidence): written, continue; memory: a b",
        "chunk 2 (no evidence): did not parse, cut at the limit: \\x1b[2Jx",
        "turn 3: \\boxed{a b}",
    ]
