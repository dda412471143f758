"""Calls of users' reward functions: what they are given, and what is said of a wrong return or a failure."""

import asyncio
import copy
import functools
import itertools
import logging
import signal
import threading
import time

import numpy as np
import pytest
import torch
from tiny import word_tokenizer
from training import make_trainer

from turngrpo.trainer import TurnGRPOConfig, reward_calls, watching
from turngrpo.trainer.reading.rollout import Trajectory, Turn
from turngrpo.trainer.reward_calls import RewardError, call_rewards, call_turn_rewards, reward_arguments


def reading(group, member, lengths):
    """A trajectory whose turns have completions of these lengths; the last one is the answer turn."""
    steps = [*range(1, len(lengths)), None]
    return Trajectory(
        {}, group, member, [Turn(s, [5], [6] * n, [-1.0] * n, "eos", "") for s, n in zip(steps, lengths, strict=True)]
    )


TOKENIZER = word_tokenizer()
TWO = {"completions": ["a", "b"]}


@pytest.mark.parametrize(
    "values",
    [
        [0.5, None],
        (value for value in (0.5, None)),
        np.array([0.5, None]),
        [torch.tensor(0.5), None],
        [np.float32(0.5), None],
    ],
    ids=["list", "generator", "array", "tensor", "scalars"],
)
def test_numbers_of_any_kind_are_rewards(values):
    def score(**columns):
        return values

    (numbers,) = call_rewards([score], TWO).T
    assert numbers[0] == 0.5 and numbers[1] != numbers[1]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1.0], "1 numbers, expected 2"),
        (None, "None, expected 2, one number or None for each trajectory"),
        (1.0, "1.0, expected 2"),
        (["good", "bad"], "'good' for completion 0, expected a finite number"),
        (["1", "0"], "'1' for completion 0, expected a finite number"),  # not 1.0: a string is a mistake
        ([0.0, float("nan")], "nan for completion 1, expected a finite number or None"),  # a 0/0 is no None
        (np.array([np.nan, 0.5]), "np.float64\\(nan\\) for completion 0, expected a finite number or None"),
        ([0.0, 10**400], "1000000000000000.*0\\.\\.\\. for completion 1, expected a finite number or None"),
        ({"a": 1.0, "b": 0.0}, "{'a': 1.0, 'b': 0.0}, expected 2"),
        ("ab", "'ab', expected 2"),
        ([1.0] * 3, "3 numbers, expected 2"),
        (itertools.repeat(1.0), "1002 or more numbers, expected 2"),
        ([float("inf"), 0.0], "inf for completion 0, expected a finite number"),
        (torch.ones(2, 2), r"tensor\(\[1., 1.\]\) for completion 0, expected a finite number"),
    ],
)
def test_what_is_no_reward_is_named(values, found):
    def score(**columns):
        return values

    async def score_async(**columns):
        return values

    with pytest.raises(RewardError, match=f"reward function 'score' returned {found}"):
        call_rewards([score], TWO)
    with pytest.raises(RewardError, match=f"reward function 'score_async' returned {found}"):
        call_rewards([score_async], TWO)


def test_a_failure_keeps_its_type_and_names_the_function():
    def broken(**columns):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        call_rewards([broken], TWO)
    assert caught.value.__notes__ == ["raised by the reward function 'broken'"]
    with pytest.raises(KeyError) as caught:
        call_turn_rewards([broken], [], {})
    assert caught.value.__notes__ == ["raised by the reward function 'broken'"]


def test_async_rewards_wait_together_also_inside_a_running_loop():
    meeting = []

    async def judge(completions, **columns):
        meeting.append(len(meeting))
        while len(meeting) < 2:  # one after the other would wait for ever
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    def plain(completions, **columns):
        return [2.0] * len(completions)

    async def notebook():
        return call_rewards([judge, plain, judge], TWO).tolist()

    assert asyncio.run(asyncio.wait_for(notebook(), 20)) == [[1.0, 2.0, 1.0], [1.0, 2.0, 1.0]]


# ---- turn reward functions ----


def test_turn_rewards_are_called_with_the_columns_and_flattened():
    trajectories = [reading(0, 0, [1, 1]), reading(0, 1, [1, 1, 1])]

    def one(trajectories, hint, **columns):
        return [[hint] + [None] * (len(t.turns) - 1) for t in trajectories]

    def two(**columns):
        return [[True, 0], [torch.tensor(0.5), -1, None]]

    table = call_turn_rewards([one, two], trajectories, {"trajectories": trajectories, "hint": 3})
    assert table.nan_to_num(-99).tolist() == [[3, 1], [-99, 0], [3, 0.5], [-99, -1], [-99, -99]]
    assert call_turn_rewards([], trajectories, {}).shape == (5, 0)


class Sparse:
    def __call__(self, **columns):
        return [[1.0], [1.0, 1.0, 1.0]]


def test_turn_rewards_of_a_wrong_shape_are_an_error_by_name():
    trajectories = [reading(0, 0, [1, 1]), reading(0, 1, [1, 1, 1])]

    def one_list(**columns):
        return [[1.0] * 5]

    with pytest.raises(RewardError, match=r"'Sparse' returned lists of lengths \[1, 3\].*per turn: lengths \[2, 3\]"):
        call_turn_rewards([Sparse()], trajectories, {})
    with pytest.raises(RewardError, match=r"'one_list' returned lists of lengths \[5\]"):
        call_turn_rewards([one_list], trajectories, {})


@pytest.mark.parametrize("value", [[1.0, 0.5], None], ids=["one number per trajectory", "nothing"])
def test_turn_rewards_that_are_no_lists_are_an_error_by_name(value):
    def flat(**columns):
        return value

    with pytest.raises(RewardError, match="'flat' returned"):
        call_turn_rewards([flat], [reading(0, 0, [1, 1]), reading(0, 1, [1])], {})


@pytest.mark.parametrize("kind", [np.ones, torch.ones])
def test_turn_rewards_may_be_arrays(kind):
    def ones(trajectories, **columns):
        return [kind(len(t.turns)) for t in trajectories]

    trajectories = [reading(0, 0, [1, 1]), reading(0, 1, [1, 1, 1])]
    assert call_turn_rewards([ones], trajectories, {"trajectories": trajectories}).tolist() == [[1.0]] * 5


def test_turn_rewards_that_are_no_numbers_are_named():
    def words(trajectories, **columns):
        return [["good"] * len(t.turns) for t in trajectories]

    trajectories = [reading(0, 0, [1, 1])]
    named = r"trajectory 0 \(group 0, member 0\), turn 0"
    with pytest.raises(RewardError, match=f"'words' returned 'good' for {named}, expected a finite number or None"):
        call_turn_rewards([words], trajectories, {"trajectories": trajectories})


def test_a_nan_is_named_with_its_trajectory():
    trajectories = [reading(4, 0, [1, 1]), reading(4, 1, [1, 1, 1])]
    trajectories[1].row["id"] = "contract-7"

    def ratio(trajectories, **columns):
        return [0.0, float("nan")]

    def by_turn(trajectories, **columns):
        return [[0.0, None], [0.0, float("nan"), None]]

    arguments = {"trajectories": trajectories, "completions": ["", ""]}
    named = r"trajectory 1 \(row 'contract-7', group 4, member 1\)"
    with pytest.raises(RewardError, match=f"'ratio' returned nan for {named}, expected a finite number or None"):
        call_rewards([ratio], arguments)
    with pytest.raises(RewardError, match=f"'by_turn' returned nan for {named}, turn 1, expected"):
        call_turn_rewards([by_turn], trajectories, arguments)


class Unspeakable:
    def __float__(self):
        raise LookupError("no number")


def test_a_number_that_cannot_be_read_names_the_function():
    def odd(**columns):
        return [1.0, Unspeakable()]

    with pytest.raises(LookupError) as caught:
        call_rewards([odd], TWO)
    assert caught.value.__notes__ == ["raised by the reward function 'odd'"]


class Words:
    """A tokenizer whose ids are their own text; the end token 3 is not marked special."""

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]


def arguments_of(trajectories):
    return reward_arguments(trajectories, Words(), None, None, None)


CHANGES = {
    "group": lambda t: setattr(t, "group", 1),
    "step": lambda t: setattr(t.turns[0], "step", 2),
    "parsed": lambda t: setattr(t, "parsed", False),
    "a turn less": lambda t: t.turns.pop(),
    "a log-probability": lambda t: t.turns[0].behavior_logprobs.__setitem__(0, -1.0001),
    "an id": lambda t: t.turns[0].completion_ids.append(9),
    "in place": lambda t: t.turns[0].prompt_ids.__iadd__([9]),
    "a field that goes": lambda t: delattr(t, "memory"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_reward_that_changes_the_records_is_named_and_changes_nothing(change):
    trajectories = [reading(0, 0, [1, 2]), reading(0, 1, [1, 1])]
    before = copy.deepcopy(trajectories)

    def meddling(trajectories, **columns):
        change(trajectories[0])
        return [0.0, 0.0]

    with pytest.raises((AttributeError, TypeError), match="read-only") as caught:
        call_rewards([meddling], arguments_of(trajectories))
    assert caught.value.__notes__ == ["raised by the reward function 'meddling'"]
    assert trajectories == before


def test_rows_ids_and_columns_are_copies():
    trajectories = [reading(0, 0, [1, 2]), reading(0, 1, [1, 1])]
    trajectories[0].row["answers"] = trajectories[1].row["answers"] = ["Bonn"]
    trajectories[0].prompt = trajectories[1].prompt = ""
    before = copy.deepcopy(trajectories)

    def meddling(trajectories, completion_ids, answers, **columns):
        completion_ids[0].append(7)
        answers[0].append("Ulm")
        trajectories[0].row["answers"].append("Trier")
        assert trajectories[0].turns[0].completion_ids == [6]  # still a list to every reader
        return [0.0, 0.0]

    call_rewards([meddling], arguments_of(trajectories))
    assert trajectories == before


def test_an_end_that_is_not_marked_special_is_no_text():
    ended, cut = reading(0, 0, [1, 2]), reading(0, 1, [1, 2])
    ended.turns[-1].completion_ids, cut.turns[-1].completion_ids = [5, 3], [5, 4]
    cut.turns[-1].finish_reason = "length"
    ended.prompt = cut.prompt = ""
    arguments = arguments_of([ended, cut])
    assert arguments["completions"] == ["5", "5 4"]  # "5 3" would show the end token
    assert arguments["completion_ids"] == [[5, 3], [5, 4]]


# ---- rewards that hang ----

HANGING = 600.0  # seconds: longer than any test may take


def asleep(**columns):
    time.sleep(HANGING)


def retrying(**columns):
    while True:
        try:
            time.sleep(HANGING)
        except Exception:  # as a client does that takes every failure for the server's
            pass


def spinning(**columns):
    while True:
        pass


def computed_as_it_is_read(**columns):
    return (time.sleep(HANGING) for _ in range(2))


async def waiting(**columns):
    await asyncio.sleep(HANGING)


@pytest.mark.parametrize("function", [asleep, retrying, spinning, computed_as_it_is_read, waiting])
def test_a_reward_that_takes_too_long_is_ended_and_named(function):
    def quick(**columns):
        return [1.0, 1.0]

    before = signal.getsignal(signal.SIGVTALRM)
    message = f"reward function '{function.__name__}' took longer than reward_timeout, 0.2 seconds"
    with pytest.raises(RewardError, match=message):
        call_rewards([quick, function], TWO, timeout=0.2)
    with pytest.raises(RewardError, match=message):
        call_turn_rewards([function], [reading(0, 0, [1]), reading(0, 1, [1])], {}, timeout=0.2)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "turngrpo-watching"]
    assert call_rewards([quick], TWO, timeout=HANGING).tolist() == [[1.0], [1.0]]


def test_the_slow_one_of_the_async_rewards_is_named_and_the_others_are_cancelled():
    ended = []

    async def other(**columns):
        try:
            await asyncio.sleep(0.1)
            ended.append("other")
            await asyncio.sleep(HANGING)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def quick(**columns):
        return [1.0, 1.0]

    async def own_timeout(**columns):
        raise TimeoutError("of its own")

    with pytest.raises(RewardError, match="reward function 'other' took longer"):
        call_rewards([quick, other], TWO, timeout=0.3)
    assert ended == ["other", "cancelled"]
    with pytest.raises(TimeoutError, match="of its own"):
        call_rewards([own_timeout], TWO, timeout=HANGING)


def test_an_async_reward_that_never_gives_way_is_not_waited_for(monkeypatch):
    free = threading.Event()

    async def blocking(**columns):
        free.wait()  # holds the loop of all async functions

    monkeypatch.setattr(reward_calls, "GRACE", 0.1)
    try:
        with pytest.raises(RewardError, match="reward function 'blocking' took longer"):
            call_rewards([blocking], TWO, timeout=0.2)
    finally:
        free.set()


@pytest.mark.parametrize("kind", ["reward_funcs", "turn_reward_funcs"])
def test_the_limit_holds_in_training(kind, tmp_path):
    with pytest.raises(RewardError, match="'asleep' took longer than reward_timeout, 0.1 seconds"):
        make_trainer(tmp_path, **{kind: asleep}, reward_timeout=0.1).train()


def test_outside_of_the_main_thread_a_slow_reward_is_named_when_it_ends():
    def slow(**columns):
        time.sleep(0.2)
        return [1.0, 1.0]

    found = []

    def call():
        try:
            call_rewards([slow], TWO, timeout=0.1)
        except RewardError as error:
            found.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(found) == 1 and "'slow' took longer" in found[0]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_line_says_which_reward_has_been_running(is_async, monkeypatch):
    lines, enough = [], threading.Event()

    class Kept(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
            if len(lines) == 3:
                enough.set()

    def judge(**columns):
        assert enough.wait(HANGING)
        return [1.0, 0.0]

    async def judge_async(**columns):
        return await asyncio.to_thread(judge)

    async def quick(**columns):
        return [1.0, 1.0]

    monkeypatch.setattr(watching, "FIRST_LINE", 0.05)
    handler = Kept()
    watching.logger.addHandler(handler)
    try:
        call_rewards([quick, judge_async if is_async else judge], TWO)
    finally:
        watching.logger.removeHandler(handler)
    name = "judge_async" if is_async else "judge"
    assert set(lines) <= {f"the reward function '{name}' has been running for {n} seconds" for n in range(60)}


def test_the_lines_grow_rare():
    assert list(itertools.islice(watching.line_times(), 4)) == [30, 90, 210, 450]  # at equal distances 30, 60, 90, 120


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_a_limit_is_a_number_of_seconds(value):
    with pytest.raises(ValueError, match=f"reward_timeout is {value}, expected None or a number of seconds above 0"):
        TurnGRPOConfig("out", reward_timeout=value, use_cpu=True, bf16=False)


# ---- columns ----


def asks(prompts, answer, **columns):
    return [0.0] * len(prompts)


def takes_only(completions):
    return [0.0] * len(completions)


def has_a_default(completions, answer=None, *, level=1, **columns):
    return [0.0] * len(completions)


def test_columns_that_exist_are_named_where_one_does_not():
    given = reward_arguments([reading(0, 0, [1])], TOKENIZER, None, None, None) | {
        "question": ["q"],
        "answers": [["a"]],
    }
    message = (
        r"'asks' asks for answer, expected columns of the rows \(question, answers\) or one of prompts, completions, "
        r"completion_ids, trajectories, trainer_state, log_extra, log_metric$"
    )
    with pytest.raises(RewardError, match=message):
        call_rewards([has_a_default, asks], given)
    with pytest.raises(RewardError, match=r"'takes_only' takes no answers, .*every reward function is given: end its"):
        call_rewards([takes_only], given)
    assert call_rewards([has_a_default], given).tolist() == [[0.0]]
    wrapped = functools.wraps(takes_only)(lambda completions, **columns: [1.0] * len(completions))
    assert call_rewards([wrapped], given).tolist() == [[1.0]]  # it takes what the one inside does not
    with pytest.raises(RewardError, match="asks for answer"):
        call_turn_rewards([asks], given["trajectories"], given)
