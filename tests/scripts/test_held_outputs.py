"""One process writes at one place: a second one is told which the first is, and a killed one leaves nothing held."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import evaluate
import pytest
import run_lab
import sft
import train
from lib import running
from lib.output import held
from test_scripts import LIMITS, PLAIN, READING, tiny, train_arguments  # noqa: F401  a fixture

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
sys.path.insert(0, {scripts!r})
from pathlib import Path
from lib.output import held, held_file
with (held_file if {file} else held)(Path({path!r}), "--output"):
    print("held", flush=True)
    time.sleep(120)
"""


@pytest.fixture
def holder():
    """Start a process that holds a folder, or a file, and wait until it does; ended after the test."""
    started = []

    def start(path, file=False):
        code = HOLD.format(scripts=str(ROOT / "scripts"), file=file, path=str(path))
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def said(process):
    return rf"another process holds .* \(process {process.pid} on {socket.gethostname()}\): wait for it to end"


def test_a_second_run_is_refused_and_told_who_is_there(tiny, tmp_path, holder):  # noqa: F811
    output = tmp_path / "out"
    process = holder(output)
    with pytest.raises(running.SetupError, match=said(process)):
        train.main(train_arguments(tiny, output, "--use_peft"))
    with pytest.raises(running.SetupError, match=said(process)):
        train.main(train_arguments(tiny, output, "--use_peft", "--resume_from_checkpoint", "true"))
    corpus = ["--corpus", str(tiny / "corpus.jsonl"), "--model_name_or_path", str(tiny / "model")]
    with pytest.raises(running.SetupError, match=said(process)):
        sft.main([*corpus, "--output_dir", str(output), *PLAIN])
    with pytest.raises(running.SetupError, match=said(process)):
        run_lab.main(["--preset", "smoke", "--output", str(output)])
    assert sorted(path.name for path in output.iterdir()) == [".lock", ".lock.holder"]  # nobody wrote


def test_a_second_evaluation_into_one_file_is_refused(tiny, tmp_path, holder):  # noqa: F811
    output = tmp_path / "evaluation.json"
    process = holder(output, file=True)
    arguments = ["--model", str(tiny / "model"), "--corpus", str(tiny / "corpus.jsonl"), *READING, *LIMITS]
    with pytest.raises(running.SetupError, match=said(process)):
        evaluate.main([*arguments, "--output", str(output)])
    assert not output.exists()


def test_a_killed_process_holds_nothing(tmp_path, holder):
    process = holder(tmp_path / "out")
    told = json.loads((tmp_path / "out" / ".lock.holder").read_text())
    assert told == {"pid": process.pid, "host": socket.gethostname()}
    process.send_signal(signal.SIGKILL)
    process.wait()
    with held(tmp_path / "out"):
        assert json.loads((tmp_path / "out" / ".lock.holder").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "out" / ".lock.holder").exists()


def test_a_folder_that_got_nothing_is_not_left_behind(tmp_path):
    with pytest.raises(RuntimeError), held(tmp_path / "new"):
        raise RuntimeError
    assert not (tmp_path / "new").exists()
    with held(tmp_path / "used"):
        (tmp_path / "used" / "result").write_text("x")
    assert (tmp_path / "used" / "result").exists()


def test_two_trainings_started_at_once_leave_one_of_them(tiny, tmp_path):  # noqa: F811
    """Two seeds: of both accepted, the files of one would stand under the name of the other."""
    environment, output = os.environ | {"OMP_NUM_THREADS": "1"}, tmp_path / "out"
    command = [sys.executable, str(ROOT / "scripts" / "train.py")]
    runs = []
    for seed in ("1", "2"):
        arguments = train_arguments(tiny, output, "--use_peft", "--seed", seed, "--validation_rows", "1")
        run = subprocess.Popen([*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
        runs.append(run)
        time.sleep(0.2)
    errors = [run.communicate(timeout=300)[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 1], errors
    (refused,) = [error for run, error in zip(runs, errors, strict=True) if run.returncode == 1]
    assert "another process holds" in refused or "is not empty" in refused  # where it came after the end
    versions = list((output / "adapters" / "out").glob("v0*"))
    assert [path.name for path in versions] == ["v0001"]
