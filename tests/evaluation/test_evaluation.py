"""Evaluation: forced gates leave where they must, the bootstrap is the same every time, the breakdown adds up."""

import math

import numpy as np
import pytest
from tiny import tiny_model, word_tokenizer

from turngrpo.rewards import answer_reward, exit_reward, format_reward, update_reward
from turngrpo.trainer import GatedMemory, Trajectory, TurnGRPOConfig
from turngrpo.trainer.evaluation.evaluate import evaluate_policy, evidence_place, paired_difference, try_rewards
from turngrpo.trainer.evaluation.forced_gates import TRIVIAL_GATES, ForcedGates
from turngrpo.trainer.evaluation.intervals import Observations, bootstrap_intervals, share_intervals, wilson
from turngrpo.trainer.reward_calls import RewardError

REWARDS = [answer_reward, exit_reward, format_reward]


def make_rows(places, chunks=6):
    """One row per place (from 1) of the only evidence chunk; place 0: no evidence."""
    return [
        {
            "id": f"r{index}",
            "question": "code of red",
            "answers": ["1"],
            "chunks": [
                {"text": "code of red is 1" if step == place else "code of blue is 2", "evidence": step == place}
                for step in range(1, chunks + 1)
            ],
        }
        for index, place in enumerate(places)
    ]


@pytest.fixture(scope="module")
def policy():
    tokenizer = word_tokenizer()
    return tiny_model(len(tokenizer)), tokenizer


def config(**values):
    values = {"max_completion_length": 8, "max_memory_tokens": 8, "max_prompt_length": 200} | values
    return TurnGRPOConfig(
        "unused", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, report_to=[], **values
    )


def run(policy, workflow, rows, **options):
    model, tokenizer = policy
    return evaluate_policy(model, tokenizer, workflow, rows, config(), REWARDS, [update_reward], **options)


@pytest.mark.parametrize(
    ("name", "exits", "evidence_accuracy"),
    [("stop at once", [1, 1, 1], None), ("read to the end", [6, 6, 6], None), ("always yes", None, 1.0)],
)
def test_forced_gates_leave_where_they_must(policy, name, exits, evidence_accuracy):
    result = run(policy, ForcedGates(**TRIVIAL_GATES[name]), make_rows([1, 3, 6]))
    if exits is not None:
        assert [trajectory.exit_step for trajectory in result.trajectories] == exits
    if evidence_accuracy is not None:
        assert result.metrics["update_accuracy/evidence"] == evidence_accuracy
        assert result.metrics["update_accuracy/evidence_free"] == 0.0  # every chunk without evidence was written


def test_forced_gates_still_count_as_unparsed(policy):
    """The random model never writes a parsable turn; forcing its gates must not make it look well-formed."""
    result = run(policy, ForcedGates(check=False, exit=True), make_rows([1, 2]))
    assert result.metrics["format/parsed"] == 0.0
    assert result.metrics["reward"] == 0.0  # strict format


def test_forced_gates_none_is_the_policy_itself(policy):
    rows = make_rows([1, 3])
    own, forced = run(policy, GatedMemory(), rows), run(policy, ForcedGates(), rows)
    texts = [[[turn.text for turn in t.turns] for t in result.trajectories] for result in (own, forced)]
    assert texts[0] == texts[1]


def test_evaluation_is_deterministic_and_rows_keep_their_noise(policy):
    rows = make_rows([1, 3, 6])
    first, again = run(policy, GatedMemory(), rows, members=2), run(policy, GatedMemory(), rows, members=2)
    assert first.metrics == again.metrics and first.intervals == again.intervals
    alone = run(policy, GatedMemory(), rows[:1], members=2)
    assert [t.turns[0].completion_ids for t in alone.trajectories] == [
        t.turns[0].completion_ids for t in first.trajectories[:2]
    ]
    members = first.trajectories[0].turns[0].completion_ids, first.trajectories[1].turns[0].completion_ids
    assert members[0] != members[1]


def test_breakdown_counts_add_up(policy):
    """T* of 6 chunks: 1, 2 lie in the first third, 3 in the middle, 5, 6 in the last; 0 is no evidence."""
    result = run(policy, GatedMemory(), make_rows([1, 2, 3, 5, 6, 0]), members=2)
    places = {name: table["rows"] for name, table in result.breakdown["evidence"].items()}
    assert places == {"first third": 2, "middle third": 1, "last third": 2, "no evidence": 1}
    assert sum(table["rows"] for table in result.breakdown["context_tokens"].values()) == 6
    parsed = [table["format/parsed"] * table["rows"] for table in result.breakdown["evidence"].values()]
    assert sum(parsed) / 6 == pytest.approx(result.metrics["format/parsed"])


def test_evidence_place_of_few_chunks():
    """Of two chunks the first begins the document (0/2), the second begins at its half: the middle third."""
    chunks = [{"evidence": True}, {"evidence": False}]
    assert evidence_place(Trajectory({"chunks": chunks}, 0, 0, last_evidence=1)) == "first third"
    assert evidence_place(Trajectory({"chunks": chunks[::-1]}, 0, 0, last_evidence=2)) == "middle third"


def test_bootstrap_resamples_rows_with_all_their_observations():
    """Two rows, one all right (3 of 3) and one all wrong (0 of 1): a resample holds one of 1, 3/4, 0, never 1/4."""
    observations = Observations(["m"], np.array([[3.0], [0.0]]), np.array([[3.0], [1.0]]))
    means = observations.means(np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]]))
    assert means[:, 0].tolist() == [1.0, 0.75, 0.0]
    assert bootstrap_intervals(observations, 500, seed=1)["m"] == (0.0, 1.0)


def test_bootstrap_is_seeded_and_narrows_with_rows():
    def interval(rows, seed):
        ones = np.arange(rows)[:, None] % 2
        return bootstrap_intervals(Observations(["m"], ones.astype(float), np.ones((rows, 1))), 400, seed)["m"]

    assert interval(64, 0) == interval(64, 0)
    assert interval(64, 0) != interval(64, 1)
    low, high = interval(400, 0)
    # standard error sqrt(0.25 / 400) = 0.025, times 1.96 on either side of 0.5
    assert low == pytest.approx(0.451, abs=0.01) and high == pytest.approx(0.549, abs=0.01)


def test_a_share_is_no_single_point_where_all_rows_agree():
    """20 of 20: the bootstrap knows no other row, [1, 1]; Wilson: 1 / (1 + z^2/20) = 0.8389."""
    observations = Observations(["format/parsed"], np.ones((20, 1)), np.ones((20, 1)))
    assert bootstrap_intervals(observations)["format/parsed"] == (1.0, 1.0)
    assert share_intervals(observations, ["format/parsed"])["format/parsed"] == pytest.approx((0.83887, 1.0), abs=1e-5)


def test_wilson_by_hand():
    """8 of 10, z = 1.96: (0.8 + 0.19208 +- 1.96 sqrt(0.016 + 0.0096040)) / 1.38416 = 0.71674 +- 0.22657."""
    assert wilson(0.8, 10) == pytest.approx((0.49016, 0.94331), abs=1e-4)


def test_readings_of_one_row_count_as_far_as_they_differ():
    """100 rows, half right, R - 1 = 99 effective observations; each read five times alike: still 99, not 500.

    Read twice, once right and once wrong in every row: no variance between rows was seen, and a row counts once.
    """
    halves = (np.arange(100) % 2)[:, None].astype(float)
    for readings in (1.0, 5.0):
        observations = Observations(["m"], readings * halves, np.full((100, 1), readings))
        assert share_intervals(observations, ["m"])["m"] == pytest.approx(wilson(0.5, 99))
    mixed = Observations(["m"], np.ones((100, 1)), np.full((100, 1), 2.0))
    assert share_intervals(mixed, ["m"])["m"] == pytest.approx(wilson(0.5, 100))


def test_rows_without_an_observation_say_nothing():
    """Of 20 rows two hold a chunk of this side, both right: Wilson of 2 of 2, 1 / (1 + z^2/2) = 0.342, not of 20."""
    counts = np.zeros((20, 1))
    counts[:2] = 1.0
    observations = Observations(["format/parsed"], counts.copy(), counts)
    assert observations.rows_with("format/parsed") == 2
    low, _ = share_intervals(observations, ["format/parsed"])["format/parsed"]
    assert low == pytest.approx(0.3424, abs=1e-4)


def test_rows_of_one_project_count_as_far_as_projects_differ():
    """20 rows in 4 projects that agree within: 0, 0, 1, 1. Over rows 19 effective observations, over projects 3."""
    values = np.repeat([0.0, 0.0, 1.0, 1.0], 5)[:, None]
    rows = Observations(["m"], values, np.ones((20, 1)))
    projects = rows.clustered(np.repeat(["a", "b", "c", "d"], 5).tolist())
    assert (projects.sums[:, 0].tolist(), projects.counts[:, 0].tolist()) == ([0, 0, 5, 5], [5, 5, 5, 5])
    assert share_intervals(rows, ["m"])["m"] == pytest.approx(wilson(0.5, 19))
    assert share_intervals(projects, ["m"])["m"] == pytest.approx(wilson(0.5, 3))
    assert bootstrap_intervals(projects)["m"] == (0.0, 1.0)  # all four of one kind: 2 in 16 draws


def test_an_evaluation_clusters_by_a_column(policy):
    """Three rows of two projects: the means stay, the intervals are over two; a row without a project is an error."""
    rows = [row | {"project": name} for row, name in zip(make_rows([1, 3, 6]), "xyx", strict=True)]
    by_row, by_project = (run(policy, GatedMemory(), rows, cluster=cluster) for cluster in (None, "project"))
    assert by_project.metrics == by_row.metrics
    assert (len(by_row.observations.sums), len(by_project.observations.sums)) == (3, 2)
    assert by_project.intervals["format/parsed"] == pytest.approx(wilson(by_row.metrics["format/parsed"], 2))
    with pytest.raises(ValueError, match="1 of 3 rows have no project"):
        run(policy, GatedMemory(), [*rows[:2], rows[2] | {"project": None}], cluster="project")


def test_balanced_accuracy_has_the_interval_of_a_mean_of_shares():
    """Four rows with one chunk of each side; evidence right in 3, evidence-free in 2; balanced (3/4 + 2/4) / 2 = 5/8.

    Influences ((s - p)/4 + (t - q)/4) / 2 of (1,1) (1,1) (1,0) (0,0): 3/32, 3/32, -1/32, -5/32; squares sum
    to 44/1024; variance 4/3 of it = 0.057292, n = (15/64) / 0.057292 = 4.0909.
    """
    names = ["update_accuracy/evidence", "update_accuracy/evidence_free"]
    observations = Observations(names, np.array([[1.0, 1], [1, 1], [1, 0], [0, 0]]), np.ones((4, 2)))
    found = share_intervals(observations, names)
    assert found["update_accuracy/balanced"] == pytest.approx(wilson(0.625, 45 / 11))
    assert set(found) == {*names, "update_accuracy/balanced"}


def test_unobserved_metric_has_no_interval():
    observations = Observations(["m", "none"], np.array([[1.0, 0.0]]), np.array([[1.0, 0.0]]))
    assert set(bootstrap_intervals(observations, 10)) == {"m"}


def test_paired_difference_of_a_policy_with_itself_is_exactly_zero(policy):
    result = run(policy, GatedMemory(), make_rows([1, 3, 6]))
    difference = paired_difference(result, result)
    assert difference["reward"] == {"difference": 0.0, "interval": [0.0, 0.0]}
    # That three rows agree does not say that a fourth would: z^2/3 / (1 + z^2/3) = 0.5615
    parsed = difference["format/parsed"]
    assert parsed["difference"] == 0.0 and parsed["interval"] == pytest.approx([-0.5615, 0.5615], abs=1e-4)
    with pytest.raises(ValueError, match="3 and 1 rows"):
        paired_difference(result, run(policy, GatedMemory(), make_rows([1])))


def test_metrics_hold_rewards_and_answers_and_no_nan(policy):
    result = run(policy, GatedMemory(), make_rows([1, 3]))
    expected = [
        "reward",
        "rewards/update_reward/mean",
        "answer/accuracy",
        "answer/f1",
        "answer/contains",
        "exit/exact",
    ]
    assert set(expected) <= set(result.metrics)
    assert not any(math.isnan(value) for value in result.metrics.values())
    assert set(result.summary()) == {"metrics", "intervals", "breakdown", "seconds"}


def test_rewards_get_what_the_trainer_gives_them_async_ones_too(policy):
    async def judge(completions, trajectories, answers, trainer_state, log_extra, log_metric, **columns):
        log_metric("judged", 1.0)
        log_extra(column="judged", values=[trainer_state.global_step] * len(answers))
        return [1.0 for _ in zip(trajectories, completions, strict=True)]

    model, tokenizer = policy
    evaluation = evaluate_policy(
        model, tokenizer, GatedMemory(strict_format=False), make_rows([1, 2]), config(), [judge]
    )
    assert evaluation.metrics["rewards/judge/mean"] == 1.0


def test_rewards_are_tried_without_a_model(policy):
    seen = []

    def look(trajectories, **columns):
        seen.extend([turn.text for turn in trajectory.turns] for trajectory in trajectories)
        return [0.0] * len(trajectories)

    _, tokenizer = policy
    workflow = GatedMemory()
    workflow.bind(tokenizer, config())
    try_rewards(make_rows([1], chunks=3)[0], 2, workflow, tokenizer, config(), [look], [update_reward])
    assert seen == [[""] * 4] * 2  # every chunk and the answer, each reply empty
    with pytest.raises(RewardError, match="'short_reward' returned 1 numbers, expected 2"):
        try_rewards(make_rows([1])[0], 2, workflow, tokenizer, config(), [short_reward], [])


def test_errors(policy):
    with pytest.raises(ValueError, match="0 rows"):
        run(policy, GatedMemory(), [])
    model, tokenizer = policy
    with pytest.raises(ValueError, match="short_reward.*1 numbers, expected 2"):
        evaluate_policy(model, tokenizer, GatedMemory(), make_rows([1, 2]), config(), [short_reward])
    for weights in ([0.7], [1.0, 1.0, 1.0]):  # the first would be broadcast
        given = make_rows([1]), config(reward_weights=weights), [answer_reward, exit_reward]
        with pytest.raises(ValueError, match=f"reward_weights has {len(weights)} numbers, expected one for each of 2"):
            evaluate_policy(model, tokenizer, GatedMemory(), *given)


def test_reward_functions_are_called_as_in_training(policy):
    def logging_reward(completion_ids, log_metric, log_extra, trainer_state, **columns):
        log_metric("mine", 2.0)
        log_metric("mine", 4.0)
        log_extra("note", ["text"] * len(completion_ids))
        for ids in completion_ids:
            ids.clear()
        return [float(trainer_state.global_step)] * len(completion_ids)

    async def async_reward(completions, **columns):
        return [0.5] * len(completions)

    async def async_turn_reward(trajectories, **columns):
        return [[1.0] * len(trajectory.turns) for trajectory in trajectories]

    model, tokenizer = policy
    given = [logging_reward, async_reward], [async_turn_reward]
    result = evaluate_policy(model, tokenizer, GatedMemory(strict_format=False), make_rows([1]), config(), *given)
    assert result.metrics["mine"] == 3.0 and result.metrics["reward"] == 0.5
    assert result.metrics["rewards/async_turn_reward/mean"] == 1.0
    assert all(turn.completion_ids for turn in result.trajectories[0].turns)
    with pytest.raises(ValueError, match="named \\['async_reward'\\]"):
        evaluate_policy(model, tokenizer, GatedMemory(), make_rows([1]), config(), [async_reward] * 2)


def short_reward(completions, **columns):
    return [0.0]
