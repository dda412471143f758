"""The driver of studies: its stages as commands, going on after a kill, projects set apart, the tables."""

import json
import re
import subprocess
import sys
import time

import learning
import psutil
import pytest
from arguments.commands import EvaluateArguments
from learning import OutOfTime, Stage, Study

from turngrpo.data_prep import build_needle_corpus, load_corpus, write_corpus

STUDIES = sorted(learning.RECIPES.glob("*.yaml"))
PART = {"corpus": {"kind": "needle"}, "test_fraction": 0.3, "reading": {"chunk_size": 9}, "warm_start": {}}
PART |= {
    "warm_starts": {"w": {}},
    "training": {},
    "arms": {"a": {"from": "w"}},
    "testing": {},
    "tests": {"t": {"of": "a"}},
}


def study_file(folder, **changes):
    path = folder / "study.yaml"
    path.write_text(json.dumps(PART | changes))
    return path


@pytest.mark.parametrize("path", STUDIES, ids=[path.stem for path in STUDIES])
def test_every_stage_of_a_recipe_is_a_command_that_its_script_takes(path, tmp_path):
    """Parsed by the scripts' own parsers; files that stages make do not exist yet."""
    import prepare_corpus
    from arguments.commands import ModelOptions, SftArguments, TrainArguments
    from lib.options import parse_options
    from trl import SFTConfig

    from turngrpo.trainer import TurnGRPOConfig

    kinds = {
        "sft.py": [SftArguments, SFTConfig, ModelOptions],
        "train.py": [TrainArguments, TurnGRPOConfig, ModelOptions],
        "evaluate.py": [EvaluateArguments],
    }
    study = Study.read(path)
    source = [] if study.corpus["kind"] == "needle" else ["packages"]
    stages = list(learning.stages(study, "model", source, tmp_path))
    for stage in stages:
        script, *line = stage.command
        if script == "prepare_corpus.py":
            assert prepare_corpus.parse_arguments(line).command == line[0]
        else:
            parse_options(kinds[script], line)
    outputs = [stage.output for stage in stages]
    assert len(set(outputs)) == len(outputs) and len({stage.name for stage in stages}) == len(stages)


def test_who_reads_what(tmp_path):
    """Training reads the developing projects, tests the others; an arm's test is of its adapter on its warm start."""
    commands = {
        s.name: " ".join(s.command) for s in learning.stages(Study.read(study_file(tmp_path)), "m", [], tmp_path)
    }
    assert list(commands) == ["corpus", "warm w", "arm a", "test t"]
    assert all(
        "develop.jsonl" in commands[name] and "test.jsonl" not in commands[name] for name in ("warm w", "arm a")
    )
    assert (
        "develop.jsonl" not in commands["test t"]
        and f"--corpus {tmp_path}/corpus/test.jsonl --split all" in commands["test t"]
    )
    assert f"--model {tmp_path}/warm/w --adapter {tmp_path}/arms/a/adapters/a/latest" in commands["test t"]
    assert f"--model_name_or_path {tmp_path}/warm/w" in commands["arm a"]


def test_every_policy_is_tested_at_once_and_first_seeds_come_first(tmp_path):
    """So that a budget that ends in between leaves whole rounds of seeds, tested."""
    arms = {"a": {"from": "w", "seeds": [3, 4]}, "b": {"from": "model", "seeds": [3, 4]}}
    tests = {"base": {"of": "model"}, "warm": {"of": "w"}, "a": {"of": "a"}, "b": {"of": "b"}}
    study = Study.read(study_file(tmp_path, arms=arms, tests=tests))
    order = [stage.name for stage in learning.stages(study, "m", [], tmp_path)]
    assert order[:4] == ["corpus", "test base", "warm w", "test warm"]
    rounds = [f"{which} {of}" for seed in (3, 4) for arm in "ab" for which, of in (
        ("arm", f"{arm}_seed_{seed}"), ("test", f"{arm}, seed {seed}"))]  # fmt: skip
    assert order[4:] == rounds


def test_a_report_holds_the_tests_that_ended(tmp_path):
    study = Study.read(study_file(tmp_path, tests={"base": {"of": "model"}, "t": {"of": "a"}}))
    (tmp_path / "tests").mkdir()
    for name in ("base", "t"):  # a file alone is not enough: its stage may have been stopped before it was recorded
        report = {"rows": 4, "policies": {"model": {"metrics": {"reward": 1.0}, "intervals": {"reward": [0.5, 1.5]}}}}
        (tmp_path / "tests" / f"{name}.json").write_text(json.dumps(report))
    found = learning.policies(study, tmp_path, ["corpus", "test base"])
    assert list(found) == ["base"] and found["base"]["rows"] == 4
    learning.write_report(study, tmp_path, found, {"corpus": 1.0, "test base": 2.0})
    assert "| base | 1.00 [0.50, 1.50] |" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(("changes", "message"), [
    ({"arms": {"a": {"from": "gone"}}}, "arm a is from 'gone', expected one of ['model', 'w']"),
    ({"tests": {"t": {}}}, "test t is of None, expected one of ['model', 'w', 'a']"),
    ({"more": {}}, "'more'"),
])  # fmt: skip
def test_what_is_wrong_with_a_recipe(changes, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        Study.read(study_file(tmp_path, **changes))


def test_test_projects_are_set_apart_once_and_for_all(tmp_path):
    manifest, rows = build_needle_corpus(rows_per_project=2)
    write_corpus(tmp_path / "whole.jsonl", manifest, rows)
    learning.set_test_apart(tmp_path / "whole.jsonl", 0.4)
    parts = [load_corpus(tmp_path / f"{name}.jsonl") for name in ("develop", "test")]
    projects = [{row["project"] for side in part.values() for row in side} for part in parts]
    assert not projects[0] & projects[1] and projects[0] | projects[1] == {row["project"] for row in rows}
    assert sum(len(side) for part in parts for side in part.values()) == len(rows)
    with pytest.raises(ValueError, match="leaves 1 of 8 projects to test"):
        learning.set_test_apart(tmp_path / "whole.jsonl", 0.001)


class Scripts:
    """Stands in for the processes of stages: what each is told, whether it ends, and what it leaves."""

    def __init__(self, monkeypatch, output):
        self.told, self.status, self.output = [], 0, output
        monkeypatch.setattr(learning.subprocess, "Popen", self)

    def __call__(self, command, **options):
        self.told.append(command[2:])
        self.output.parent.mkdir(parents=True, exist_ok=True)
        (self.output / "checkpoint-3").mkdir(parents=True, exist_ok=True)
        (self.output / "model.safetensors").write_text("weights")
        return self

    pid = 0
    returncode = property(lambda self: self.status)

    def wait(self, timeout=None):
        if timeout == 0.0:
            raise subprocess.TimeoutExpired("", 0)

    def kill(self): ...

    def send_signal(self, which): ...


def test_a_stage_goes_on_ends_once_and_is_kept(tmp_path, monkeypatch):
    stage = Stage("arm a", ["train.py", "--seed", "1"], tmp_path / "arms" / "a", trains=True)
    scripts = Scripts(monkeypatch, stage.output)
    scripts.status = -9
    with pytest.raises(RuntimeError, match="'arm a' ended with -9"):
        learning.run(stage, tmp_path, None)
    scripts.status = 0
    spent = learning.run(stage, tmp_path, None)
    assert learning.run(stage, tmp_path, None) == spent  # kept, with its seconds
    assert scripts.told == [["--seed", "1"], ["--seed", "1", "--resume_from_checkpoint", "true"]]
    with pytest.raises(ValueError, match="another command"):
        learning.run(Stage("arm a", ["train.py", "--seed", "2"], stage.output, trains=True), tmp_path, None)
    (stage.output / "model.safetensors").write_text("others")
    with pytest.raises(ValueError, match="changed since its stage ended"):
        learning.run(stage, tmp_path, None)


def test_a_budget_begins_no_stage_and_stops_one_that_goes_on(tmp_path, monkeypatch):
    stage = Stage("arm a", ["train.py"], tmp_path / "arms" / "a", trains=True)
    scripts = Scripts(monkeypatch, stage.output)
    with pytest.raises(OutOfTime):
        learning.run(stage, tmp_path, until=0.0)
    assert scripts.told == []
    times = iter([0.0, 0.0, 2.0, 2.0])  # before the stage, at its beginning, at its end
    monkeypatch.setattr(learning.time, "time", lambda: next(times))
    scripts.status = 130  # of a training that was told to stop: it wrote a checkpoint
    with pytest.raises(OutOfTime):
        learning.run(stage, tmp_path, until=1.0)
    assert json.loads((tmp_path / "stages" / "arm_a.json").read_text()) == {"command": ["train.py"], "seconds": 2.0}


def test_a_stage_that_outlived_its_driver_is_ended(tmp_path, monkeypatch):
    """Beside a second one in the same folder it would be refused."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "slow.py").rename(tmp_path / "scripts" / "slow.py")
    left = subprocess.Popen([sys.executable, *learning.launched(["slow.py", "--seed", "1"])])
    while "slow.py" not in " ".join(psutil.Process(left.pid).cmdline()):
        time.sleep(0.01)  # it is a copy of this one until then
    before = {"command": ["slow.py", "--seed", "1"], "process": left.pid}
    learning.end_orphan(before | {"command": ["slow.py", "--seed", "2"]})  # another program got the number since
    assert left.poll() is None
    learning.end_orphan(before)
    left.wait(10)
    learning.end_orphan(before)  # gone
    learning.end_orphan({"seconds": 0.0})  # never begun


def test_tables_hold_what_the_tests_found_with_its_intervals():
    policy = {"metrics": {"exit/exact": 0.5}, "intervals": {"exit/exact": [0.25, 0.75]}, "rows": 8, "gain": {}}
    policy |= {"series": None}
    gain = {"exit/exact": {"difference": 0.25, "interval": [-0.125, 0.5]}}
    (_, headings, did), (_, _, gained) = learning.tables({"warm": policy, "arm": policy | {"gain": gain}})
    assert headings == ["policy", "exact exit"]
    assert did == [["warm", "0.50 [0.25, 0.75]"], ["arm", "0.50 [0.25, 0.75]"]]
    assert gained == [["arm", "+0.25 [-0.12, +0.50]"]]
    (_, _, did) = learning.tables({"warm": policy}, narrow=True)[0]
    assert did == [["warm", "0.50 ±0.25"]]


def test_an_arm_with_seeds_is_one_for_each(tmp_path):
    arms = {"a": {"from": "model", "alpha": 1.0, "seeds": [3, 4]}}
    study = Study.read(study_file(tmp_path, arms=arms, tests={"t": {"of": "a"}, "start": {"of": "w"}}))
    assert list(study.arms) == ["a_seed_3", "a_seed_4"] and list(study.tests) == ["t, seed 3", "t, seed 4", "start"]
    commands = {s.name: " ".join(s.command) for s in learning.stages(study, "m", [], tmp_path)}
    assert "--alpha 1.0 --seed 4" in commands["arm a_seed_4"] and "series" not in commands["arm a_seed_4"]
    assert "--model_name_or_path m " in commands["arm a_seed_4"]
    assert f"--model m --adapter {tmp_path}/arms/a_seed_4/" in commands["test t, seed 4"]
    seeds = [{"metrics": {"exit/exact": one}, "intervals": {}, "rows": 8, "gain": {}, "series": "a"} for one in (0, 1)]
    title, _, lines = learning.tables({"t, seed 3": seeds[0], "t, seed 4": seeds[1]})[-1]
    assert title.startswith("mean over the seeds") and lines == [["a", "0.50 (0.00-1.00)"]]
