"""The ledger: what a turn was, what every update made of it, and that its numbers are those of the run."""

import math
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from training import make_trainer

from turngrpo.rewards import answer_reward, exit_reward, update_reward
from turngrpo.trainer import GatedMemory
from turngrpo.trainer.reading.gates import GateDecision
from turngrpo.trainer.runs import columns
from turngrpo.trainer.runs.ledger import read

OPTIONS = {"num_iterations": 2, "max_steps": 4, "beta": 0.1, "alpha": 0.5, "max_prompt_length": 200}


class Parsing(GatedMemory):
    """Takes any reply as gates, by its first token: 0 mod 5 does not parse, an even one writes, 0 mod 3 leaves."""

    def decide(self, turn):
        first = turn.completion_ids[0]
        if first % 5 == 0:
            turn.fault = "0 mod 5"
            return None
        return GateDecision(first % 2 == 0, "red", first % 3 == 0)


def rows():
    labels = [[True, False, False], [False, True, False]]
    return [
        {
            "id": f"r{i}",
            "project": "p",
            "question": "code of red",
            "answers": ["1", "one"],
            "chunks": [{"text": f"code of red is {i}", "evidence": label} for label in labels[i % 2]],
        }
        for i in range(6)
    ]


def length_reward(trajectories, **kwargs):
    return [len(t.turns[0].completion_ids) / 7 for t in trajectories]


def train(folder, resume=None, **options):
    trainer = make_trainer(
        folder,
        Parsing(strict_format=False),
        dataset=Dataset.from_list(rows()),
        reward_funcs=[answer_reward, exit_reward, length_reward],
        turn_reward_funcs=update_reward,
        **OPTIONS | options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    return train(folder, ledger="full"), folder, read(folder).to_pylist()


def mean(values):
    return sum(values) / len(values)


def test_every_column_is_in_the_schema_and_every_turn_once_per_update(run):
    _, folder, table = run
    known = [column.name for column in (*columns.ROLLOUT, *columns.UPDATE, *columns.TOKENS)]
    known.remove("policy")  # of an evaluation's file
    assert list(table[0]) == list(dict.fromkeys(known))
    for pattern, kinds in (("iteration_*", columns.ROLLOUT), ("updates/update_*", (*columns.UPDATE, *columns.TOKENS))):
        for path in (folder / "rollouts").glob(f"{pattern}.parquet"):
            schema = pq.read_schema(path)
            assert schema.metadata[b"turngrpo_ledger"] == b"1"
            for column in (one for one in kinds if one.name != "policy"):
                assert column.kind == "by function" or str(schema.field(column.name).type) == (
                    {"float64": "double"}.get(column.kind, column.kind)
                    .replace("list<", "list<element: ")
                    .replace("float64", "double")
                )
    trained = [row for row in table if row["update"] is not None]
    assert len({(row["id"], row["update"]) for row in trained}) == len(trained)
    assert {(row["iteration"], row["update"]) for row in trained} == {(0, 1), (0, 2), (1, 3), (1, 4)}


def test_what_a_turn_decided_remembered_and_was_worth(run):
    trainer, _, table = run
    rollout = trainer._buffered_inputs[0].rollout
    last = [row for row in table if row["iteration"] == 1 and row["update"] in (4, None)]
    seen = {row["id"]: row for row in last}
    memory, faults = {}, 0
    for index, turn in enumerate(rollout.turns):
        place, owner = rollout.places[index], int(rollout.trajectory_ids[index])
        row = seen["1-" + "-".join(map(str, place))]
        before = memory.get(place[:2], "No memory yet.")
        assert row["memory"] == ("red" if row["check"] else before)
        memory[place[:2]] = row["memory"]
        assert (row["step"], row["evidence"], row["completion_ids"]) == (turn.step, turn.evidence, turn.completion_ids)
        assert row["check"] == (turn.decision and turn.decision.check) and row["text"] == turn.text
        unparsed = turn.decision is None if turn.step else rollout.trajectories[owner].answer is None
        assert (row["fault"] is not None) == unparsed
        faults += row["fault"] == "0 mod 5"
        assert row["gold"] == ["1", "one"] and row["project"] == "p"
        assert row["last_evidence"] == (1 if row["row_id"] in ("r0", "r2", "r4") else 2)
        # alpha 0.5: the mean of both; the turn's reward is +-1, so that its own step has one of its group or none
        both = (row["trajectory_advantage"] + row["turn_advantage"]) / 2
        assert row["advantage"] == pytest.approx(both, abs=1e-6) == pytest.approx(float(rollout.advantages[index]))
        terms = [value for value in row["rewards"].values() if value is not None]
        assert row["reward"] == pytest.approx(sum(terms)) and row["strict_zero"] is False
        expected = None if turn.step is None else 1.0 if row["check"] == turn.evidence else -1.0
        assert row["turn_reward"] == expected
    assert faults  # the random model made some


def test_numbers_of_an_update_are_those_of_the_run(run):
    """Weights, losses and KL of the rows add up to the loss and the KL that the trainer logged."""
    trainer, _, table = run
    for log in (log for log in trainer.state.log_history if "kl" in log):
        own = [row for row in table if row["update"] == log["step"]]
        objective = sum(r["weight"] * r["tokens"] * (r["surrogate"] + 0.1 * r["kl"]) for r in own)
        assert objective == pytest.approx(log["loss"], abs=2e-4)  # TRL rounds it
        tokens = sum(row["tokens"] for row in own)
        for name, column in (("kl", "kl"), ("entropy", "entropy"), ("ratio/mean", "ratio_mean")):
            assert sum(r["tokens"] * r[column] for r in own) / tokens == pytest.approx(log[name], rel=1e-4, abs=1e-7)
        assert max(row["ratio_max"] for row in own) == pytest.approx(log["ratio/max"])
        assert sum(r["tokens"] * r["clip_active"] for r in own) / tokens == pytest.approx(log["clip/active"], abs=1e-6)
        if log["step"] == 1:
            assert max(row["gap_max"] for row in own) < 1e-5 and max(row["kl"] for row in own) < 1e-9
    moved = [row for row in table if row["update"] == 2]
    assert max(row["gap_max"] for row in moved) > 1e-3 and min(row["kl"] for row in moved) > 0


def test_tokens_add_up_to_their_turn(run):
    _, _, table = run
    for row in (row for row in table if row["update"] in (2, 4)):
        assert len(row["logprobs"]) == row["tokens"] == len(row["completion_ids"])
        ratios = [math.exp(a - b) for a, b in zip(row["logprobs"], row["behavior_logprobs"], strict=True)]
        assert row["token_ratio"] == pytest.approx(ratios, rel=1e-5)
        for name, column in (("ratio_mean", "token_ratio"), ("kl", "token_kl"), ("surrogate", "token_surrogate")):
            assert row[name] == pytest.approx(mean(row[column]), rel=1e-4, abs=1e-7)
        assert row["clip_active"] == pytest.approx(mean(row["token_clipped"]))
        # -min(ratio A, clip(ratio) A): clipped tokens stand at 0.8 A or 1.2 A, all others at ratio A
        for ratio, loss, clipped in zip(row["token_ratio"], row["token_surrogate"], row["token_clipped"], strict=True):
            bound = min(max(ratio, 0.8), 1.2) if clipped else ratio
            assert loss == pytest.approx(-bound * row["advantage"], rel=1e-4, abs=1e-6)
        assert all(value < 0 for value in row["reference_logprobs"])


def test_the_default_keeps_turns_and_no_tokens(tmp_path):
    train(tmp_path, max_steps=1)
    table = read(tmp_path)
    assert "ratio_mean" in table.column_names and "logprobs" not in table.column_names
    assert pc.all(pc.is_valid(table["kl"].filter(pc.is_valid(table["update"])))).as_py()


def test_a_resumed_run_reads_as_the_straight_one(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "ledger": "full"}
    train(tmp_path / "straight", **options)
    train(tmp_path / "killed", **options)  # as if it had been killed after update 4, before any later save than 3
    train(tmp_path / "killed", resume=str(tmp_path / "killed" / "checkpoint-3"), **options)
    ours, theirs = (read(tmp_path / name).drop(["seconds"]) for name in ("straight", "killed"))
    assert ours.equals(theirs)
    aside = list((tmp_path / "killed" / "rollouts" / "updates").glob("abandoned_*/*"))
    assert [path.name for path in aside] == ["update_00004.parquet"]


def test_without_a_ledger_there_is_nothing_to_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no iteration"):
        read(tmp_path)
    with pytest.raises(ValueError, match="ledger is 'some', expected true, false or full"):
        make_trainer(tmp_path, ledger="some")


def test_a_value_without_a_column_is_a_bug():
    with pytest.raises(KeyError, match="secret"):
        columns.as_table([{"secret": 1}], columns.ROLLOUT)


def test_the_readme_has_the_columns():
    readme = Path(__file__).parents[2] / "trainer" / "runs" / "README.md"
    assert columns.markdown() in readme.read_text(encoding="utf-8")
