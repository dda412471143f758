"""Streams of prompts: a resume in any pass reads on where the run stood, and a stream too short is an error."""

from pathlib import Path

import pytest
from datasets import IterableDataset
from test_resume import StopAt
from training import make_trainer, token_reward

from turngrpo.trainer.runs.compare import compare_states
from turngrpo.trainer.runs.proof import ResumeError


def stream(rows):
    return IterableDataset.from_generator(prompts, gen_kwargs={"rows": rows})


def prompts(rows):
    yield from ({"prompt": "code of red", "id": f"r{i}"} for i in range(rows))


def run(folder, rows, stop=None, resume=None, **options):
    """Train 6 rollouts of 2 prompts; return the ids of the rows in the order of training."""
    read = []

    def watching(completion_ids, trajectories, **columns):
        read.extend(dict.fromkeys(trajectory.row["id"] for trajectory in trajectories))
        return token_reward(completion_ids, trajectories)

    watching_options = {"reward_funcs": watching, "shuffle_dataset": False, "dataset": stream(rows)}
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    callbacks = [StopAt(stop)] if stop else None
    trainer = make_trainer(folder, callbacks=callbacks, **(watching_options | saving | options))
    trainer.train(None if resume is None else str(Path(folder) / f"checkpoint-{resume}"))
    return read


# A stream of 7 rows: 3 rollouts of 2 prompts a pass, and one row over.
READ = ["r0", "r1", "r2", "r3", "r4", "r5"] * 2


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert run(folder, 7) == READ
    return folder


# In the first pass, at its end, in the second, at its end too; once stopped in mid-rollout and shuffled below.
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_resume_reads_on_in_the_pass_where_the_run_stood(stop, straight, tmp_path):
    first = run(tmp_path, 7, stop=stop)
    second = run(tmp_path, 7, resume=stop)
    assert first + second == READ  # TRL alone reads r0 again after a stop in the second pass
    assert compare_states(straight / "checkpoint-6", tmp_path / "checkpoint-6") == []


@pytest.mark.parametrize("stop", [3, 6, 7, 9])
def test_a_shuffled_stream_with_several_updates_a_rollout_too(stop, tmp_path):
    options = {"num_iterations": 2, "shuffle_dataset": True, "max_steps": 12}
    rows = run(tmp_path / "a", 7, **options)
    assert rows[:6] != rows[6:12]  # another order in the second pass
    first = run(tmp_path / "b", 7, stop=stop, **options)
    assert first + run(tmp_path / "b", 7, resume=stop, **options) == rows


def test_a_stream_too_short_for_one_rollout_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the train stream ends after 1 rows, but one rollout takes 2 prompts"):
        run(tmp_path, 1)


def test_another_stream_is_refused(tmp_path):
    run(tmp_path, 7, stop=1)
    other = IterableDataset.from_generator(lambda: ({"prompt": "red is", "id": f"r{i}"} for i in range(7)))
    with pytest.raises(ResumeError, match="corpus: other rows .the first 2 rows: "):
        run(tmp_path, 7, resume=1, dataset=other)
