"""The stock problems, the words they are put in, the strict verifier of replies, and the reward made of it."""

import doctest
import hashlib
import json
import math
import random
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, word_tokenizer

import turngrpo.rewards.stock
from turngrpo.data_prep import stock_arithmetic
from turngrpo.data_prep.stock_arithmetic import build, canonical, draw, final_stock, operands, score, statement
from turngrpo.rewards import stock_reward
from turngrpo.rewards.stock import score_turn
from turngrpo.trainer import Trajectory, Turn
from turngrpo.trainer.reading.rollout import decode_completion

# 20 + 15 + 5 - 2 - 1 = 37
PROBLEM = {"initial": 20, "deliveries": [15, 5], "withdrawals": [2, 1], "final_stock": 37, "stratum": "ID50"}
RIGHT = '{"final_stock": 37}'
NO_EOS, OVERSIZED, SCHEMA, UNDECODABLE = (
    "completion_without_eos",
    "oversized_or_nontext",
    "invalid_json_schema",
    "undecodable_token",
)
SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def corpora():
    """All rows of ten seeds by split, as plain dicts."""
    return [{split: data.to_list() for split, data in build(seed).items()} for seed in range(10)]


def every_row(corpus):
    return [row for split in SPLITS for row in corpus[split]]


def invalid(reason, expected=37):
    return {"valid": False, "value": None, "reason": reason, "expected": expected, "reward": 0.0}


@pytest.mark.parametrize("module", [stock_arithmetic, turngrpo.rewards.stock])
def test_examples_in_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


# The generator


def test_sizes_uses_and_strata(corpora):
    for corpus in corpora:
        assert list(corpus) == list(SPLITS)
        assert {split: len(rows) for split, rows in corpus.items()} == {"train": 1000, "validation": 200, "test": 200}
        uses = [row["use"] for row in every_row(corpus)]
        assert uses == ["warm_start"] * 128 + ["continued"] * 872 + ["validation"] * 200 + ["test"] * 200
        strata = [row["problem"]["stratum"] for row in every_row(corpus)]
        assert strata == ["ID50"] * 1300 + ["OOD100"] * 100
        ids = [row["id"] for row in every_row(corpus)]
        assert len(set(ids)) == 1400
        assert (ids[0], ids[999], ids[1000], ids[1399]) == ("train-0000", "train-0999", "validation-0000", "test-0199")


def test_operands_keep_to_their_ranges_and_the_stock_is_never_negative(corpora):
    for row in (row for corpus in corpora for row in every_row(corpus)):
        problem = row["problem"]
        numbers = operands(problem)
        assert len(problem["deliveries"]) == len(problem["withdrawals"]) == 2 and len(numbers) == 5
        if problem["stratum"] == "ID50":
            assert all(0 <= number <= 50 for number in numbers)
        else:
            assert all(0 <= number <= 100 for number in numbers) and any(number >= 51 for number in numbers)
        initial, first_in, second_in, first_out, second_out = numbers
        available = initial + first_in + second_in
        assert available - first_out >= 0
        assert available - first_out - second_out == problem["final_stock"] == final_stock(problem) >= 0


def test_problems_are_unique_across_all_splits_whatever_the_order(corpora):
    for corpus in corpora:
        keys = set()
        for row in every_row(corpus):
            initial, first_in, second_in, first_out, second_out = operands(row["problem"])
            keys.add((initial, frozenset(Counter((first_in, second_in)).items()),
                      frozenset(Counter((first_out, second_out)).items())))  # fmt: skip
        assert len(keys) == 1400


def test_canonical_ignores_the_order_of_deliveries_and_of_withdrawals_only():
    key = canonical({"initial": 9, "deliveries": [7, 3], "withdrawals": [5, 1]})
    for deliveries in ([7, 3], [3, 7]):
        for withdrawals in ([5, 1], [1, 5]):
            assert canonical({"initial": 9, "deliveries": deliveries, "withdrawals": withdrawals}) == key
    # Sorting all operands together would take these for the same problem.
    assert canonical({"initial": 7, "deliveries": [9, 3], "withdrawals": [5, 1]}) != key
    assert canonical({"initial": 9, "deliveries": [5, 1], "withdrawals": [7, 3]}) != key


def test_a_duplicate_is_drawn_again(monkeypatch):
    """With operands 0..4 and 0..5 duplicates are frequent, and the corpus of small splits is still unique."""
    monkeypatch.setattr(stock_arithmetic, "LARGEST_ID_OPERAND", 4)
    monkeypatch.setattr(stock_arithmetic, "LARGEST_OPERAND", {"ID50": 4, "OOD100": 5})
    monkeypatch.setattr(
        stock_arithmetic, "PARTS", (("train", "ID50", 150), ("validation", "ID50", 60), ("test", "OOD100", 60))
    )
    rows = every_row(build(0))
    assert len(rows) == 270 == len({canonical(row["problem"]) for row in rows})
    assert all(max(operands(row["problem"])) > 4 for row in rows[210:])
    generator = random.Random(0)  # 210 draws without the rule: some are the same
    assert len({canonical(draw("ID50", generator)) for _ in range(210)}) < 210


def test_the_same_seed_gives_the_same_bytes_on_every_machine(corpora):
    lines = "\n".join(json.dumps(row, sort_keys=True) for row in every_row(corpora[0]))
    assert hashlib.sha256(lines.encode()).hexdigest() == (
        "7b0ab0afe954ee9bda48b5ce90834622899160160d1bcd1a6f92ebdb26d43b48"
    )
    assert corpora[0]["train"][0]["problem"] == {
        "initial": 22, "deliveries": [3, 12], "withdrawals": [36, 1], "final_stock": 0, "stratum": "ID50"
    }  # fmt: skip


def test_different_seeds_differ(corpora):
    firsts = {canonical(corpus["train"][0]["problem"]) for corpus in corpora}
    assert len(firsts) == 10
    problems = [{canonical(row["problem"]) for row in every_row(corpus)} for corpus in corpora[:2]]
    assert len(problems[0] & problems[1]) < 14  # below a hundredth
    # Seeded by the number alone, random.Random would make 1 and -1 the same corpus.
    assert build(-1)["train"][0]["problem"] != corpora[1]["train"][0]["problem"]


@pytest.mark.parametrize("seed", ["0", 0.0, True, None])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(ValueError, match="expected an integer"):
        build(seed)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from([("ID50", 50), ("OOD100", 100)]))
def test_draws_of_any_seed_are_possible_stocks(seed, stratum):
    name, largest = stratum
    problem = draw(name, random.Random(seed))
    assert all(0 <= number <= largest for number in operands(problem))
    left = problem["initial"]
    for delivery in problem["deliveries"]:
        left += delivery
    for withdrawal in problem["withdrawals"]:
        assert 0 <= withdrawal <= min(largest, left)
        left -= withdrawal
    assert left == problem["final_stock"] >= 0


def test_draws_are_uniform():
    generator = random.Random(3)
    problems = [draw("ID50", generator) for _ in range(40_800)]
    inputs = [Counter(operands(problem)[position] for problem in problems) for position in range(3)]
    full = [problem for problem in problems if problem["initial"] + sum(problem["deliveries"]) >= 50]
    first = Counter(problem["withdrawals"][0] for problem in full)  # 0..50 whatever the stock
    nothing = [p for p in problems if p["initial"] + sum(p["deliveries"]) - p["withdrawals"][0] == 10]
    second = Counter(problem["withdrawals"][1] for problem in nothing)  # 0..10, never more than is left
    for counts, outcomes in [*((counts, 51) for counts in inputs), (first, 51), (second, 11)]:
        assert sorted(counts) == list(range(outcomes))
        mean = counts.total() / outcomes
        # within 4.5 standard deviations of a Poisson count; drawing the larger of two would double the top one
        assert all(abs(count - mean) < 4.5 * mean**0.5 for count in counts.values())


def test_ood_problems_have_the_distribution_of_draws_that_exceed_50(corpora):
    rows = [row["problem"] for corpus in corpora for row in corpus["test"][100:]]
    # An initial stock above 50 has probability 50/101 = 0.495; a draw with five operands up to 50 0.0820 (the three
    # inputs (51/101)^3 = 0.1287, both withdrawals then 0.637). So among the others: 0.495 / 0.918 = 0.5393, and with
    # a withdrawal alone above 50 (0.1287 - 0.0820) / 0.918 = 0.0509. Of 1,000: within 4 standard deviations.
    # Wrong: the initial stock redrawn until it exceeds 50 gives 1 and 0, one operand picked at random 0.6 or so.
    assert sum(problem["initial"] > 50 for problem in rows) / 1000 == pytest.approx(0.5393, abs=0.063)
    withdrawals_alone = sum(max(operands(problem)[:3]) <= 50 for problem in rows) / 1000
    assert withdrawals_alone == pytest.approx(0.0509, abs=0.028)


# The words


def test_a_prompt_holds_the_five_operands_and_no_other_number(corpora):
    for row in (row for corpus in corpora for row in every_row(corpus)):
        [message] = row["prompt"]
        assert message["role"] == "user"
        numbers = [int(number) for number in re.findall(r"\d+", message["content"])]
        assert numbers == list(operands(row["problem"]))  # so neither the answer nor a sum on the way to it
        assert "final_stock" in message["content"] and message["content"].isascii()


def test_targets_are_valid_and_right(corpora):
    for row in (row for corpus in corpora for row in every_row(corpus)):
        [message] = row["completion"]
        assert message["role"] == "assistant"
        assert message["content"] == f'{{"final_stock": {row["problem"]["final_stock"]}}}'
        assert score(message["content"], "eos", row["problem"])["reward"] == 1.0


def test_wordings_are_many_short_and_independent_of_the_operands(corpora):
    large = {"initial": 100, "deliveries": [100, 100], "withdrawals": [100, 100]}
    wordings = [statement(large, wording) for wording in range(stock_arithmetic.WORDINGS)]
    assert len(set(wordings)) == 96
    # Fewer characters than the 256 tokens of a prompt, whatever the tokenizer; no brace or slot is left over.
    assert max(map(len, wordings)) + 1 + len(stock_arithmetic.INSTRUCTION) <= 220
    assert not any(re.search(r"[{}]", wording) for wording in wordings)
    used = Counter(re.sub(r"\d+", "#", row["prompt"][0]["content"]) for corpus in corpora for row in every_row(corpus))
    assert len(used) == 96 and min(used.values()) > 96  # 14,000 rows, 146 expected of each
    with pytest.raises(ValueError, match="expected 0 to 95"):
        statement(large, 96)
    for wording in (-1, True, 1.0, math.nan, "1"):  # True would be wording 1
        with pytest.raises(ValueError, match=f"wording is {wording!r}: expected 0 to 95"):
            statement(large, wording)


def test_prompt_and_completion_fit_a_chat_of_a_word_tokenizer(corpora):
    tokenizer = word_tokenizer()
    assert tokenizer.chat_template == CHAT_TEMPLATE
    for row in corpora[0]["test"]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
        assert 20 < len(prompt["input_ids"]) < 64


def test_a_stage_that_generates_sees_no_label():
    labelled = build(0)
    bare = stock_arithmetic.without_labels(labelled)
    assert {split: data.column_names for split, data in bare.items()} == dict.fromkeys(SPLITS, ["id", "prompt"])
    assert bare["test"].to_list() == [{"id": row["id"], "prompt": row["prompt"]} for row in labelled["test"]]
    test = stock_arithmetic.without_labels(labelled["test"])
    assert test.data.column_names == ["id", "prompt"]  # the table under it holds no more either


# The verifier


@pytest.mark.parametrize(
    "text",
    [
        RIGHT,
        '{"final_stock":37}',
        ' \t\r\n{ \n"final_stock"\t:\r 37 } \n\n',
        '{"final\\u005fstock": 37}',  # the same key, escaped
        '{"final_stock": 37' + " " * 237 + "}",  # 256 characters
        " " * 237 + RIGHT,  # 237 + 19 = 256 characters
        " " * 100 + RIGHT + "\n\t\r" * 45 + "  ",  # 100 + 19 + 135 + 2 = 256
    ],
)
def test_right_answers(text):
    assert score(text, "eos", PROBLEM) == {"valid": True, "value": 37, "reason": None, "expected": 37, "reward": 1.0}


def test_every_integer_from_0_to_300_is_valid_and_one_is_right():
    for number in range(301):
        reply = score(f'{{"final_stock": {number}}}', "eos", PROBLEM)
        assert reply == {"valid": True, "value": number, "reason": None, "expected": 37, "reward": float(number == 37)}
    for number in (-1, 301, -37, 1000):
        assert score(f'{{"final_stock": {number}}}', "eos", PROBLEM) == invalid(SCHEMA)
    empty = {"initial": 0, "deliveries": [0, 0], "withdrawals": [0, 0]}
    assert score('{"final_stock": -0}', "eos", empty)["reward"] == 1.0  # JSON knows -0, the integer 0


@pytest.mark.parametrize(
    "text",
    [
        # no JSON, or not JSON alone
        "",
        " \n",
        "37",
        "The final stock is 37.",
        "```json\n" + RIGHT + "\n```",
        "`" + RIGHT + "`",
        "Answer: " + RIGHT,
        RIGHT + ".",
        RIGHT + RIGHT,
        RIGHT + "\n" + RIGHT,
        RIGHT + "," + RIGHT,
        RIGHT[:-1],
        RIGHT + "}",
        "{'final_stock': 37}",
        "{final_stock: 37}",
        '{"final_stock": 37,}',
        '{"final_stock": 37} // done',
        RIGHT + "<|im_end|>",
        "<|im_start|>" + RIGHT,
        "\ufeff" + RIGHT,  # byte order mark
        "\u00a0" + RIGHT,  # no-break space
        RIGHT + "\u2003",
        RIGHT + "\x0b",
        RIGHT + "\x0c",
        RIGHT + "\x00",
        '{"final_stock":\u00a037}',
        '{"final_stock": \uff13\uff17}',  # full-width digits
        '{"final_stock": \u0663\u0667}',  # Arabic digits
        "\ud800" + RIGHT,
        # another shape
        "[]",
        "{}",
        "null",
        '"' + '{\\"final_stock\\": 37}' + '"',
        "[" + RIGHT + "]",
        '[["final_stock", 37]]',
        '{"answer": ' + RIGHT + "}",
        '{"final_stock": {"final_stock": 37}}',
        "[" * 256,
        '{"a":' * 51,
        # another key
        '{"Final_Stock": 37}',
        '{"final_stock ": 37}',
        '{"final stock": 37}',
        '{"stock": 37}',
        '{"final_stock": 37, "unit": "boxes"}',
        '{"reasoning": "20 + 20 - 3", "final_stock": 37}',
        '{"final_stock": 37, "final_stock": 37}',
        '{"final_stock": 36, "final_stock": 37}',
        '{"final_stock": 37, "x": NaN}',
        # another value
        '{"final_stock": true}',
        '{"final_stock": false}',
        '{"final_stock": null}',
        '{"final_stock": "37"}',
        '{"final_stock": [37]}',
        '{"final_stock": 37.0}',
        '{"final_stock": 37.5}',
        '{"final_stock": 3.7e1}',
        '{"final_stock": 37e0}',
        '{"final_stock": 370E-1}',
        '{"final_stock": NaN}',
        '{"final_stock": Infinity}',
        '{"final_stock": -Infinity}',
        '{"final_stock": 1e999}',
        '{"final_stock": 037}',
        '{"final_stock": +37}',
        '{"final_stock": 0x25}',
        '{"final_stock": 3_7}',
        '{"final_stock": 20+17}',
        '{"final_stock": -37}',
        '{"final_stock": 301}',
        '{"final_stock": ' + "9" * 239 + "}",
    ],
)
def test_everything_else_is_no_answer(text):
    assert len(text) <= 256
    assert score(text, "eos", PROBLEM) == invalid(SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        '{"final_stock": 37' + " " * 238 + "}",  # 257 characters
        # White space around the object counts: only the 19 characters of the object themselves would be short enough.
        " " * 300 + RIGHT,
        " " * 238 + RIGHT,  # 238 + 19 = 257
        RIGHT + "\n" * 238,
        " " * 119 + RIGHT + "\n" * 119,
        " " * 257,
        '{"final_stock": ' + "9" * 5000 + "}",  # more digits than int() reads
        "[" * 100_000,  # deeper than Python can recurse
        "x" * 257,
        None,
        37,
        RIGHT.encode(),
        {"final_stock": 37},
    ],
)
def test_too_long_or_no_text(text):
    assert score(text, "eos", PROBLEM) == invalid(OVERSIZED)


def test_reasons_have_an_order():
    long = "x" * 257
    for text in (RIGHT, "no JSON", long, None):
        assert score(text, "length", PROBLEM) == invalid(NO_EOS)
        for finish_reason in ("eos", "length"):
            assert score(text, finish_reason, PROBLEM, token_ids_valid=False) == invalid(UNDECODABLE)
    assert score(long, "eos", PROBLEM) == invalid(OVERSIZED)
    assert score("no JSON", "eos", PROBLEM) == invalid(SCHEMA)


def test_nesting_that_exceeds_the_stack_is_no_answer():
    def at_depth(depth):
        return score("[" * 256, "eos", PROBLEM) if depth == 0 else at_depth(depth - 1)

    for depth in (100, 400, 700):  # Python's limit is 1,000; the last one leaves too few levels for 256 brackets
        assert at_depth(depth) == invalid(SCHEMA)


def test_the_expected_answer_comes_from_the_operands():
    tampered = PROBLEM | {"final_stock": 99}
    assert score('{"final_stock": 99}', "eos", tampered) == {
        "valid": True, "value": 99, "reason": None, "expected": 37, "reward": 0.0
    }  # fmt: skip
    del tampered["final_stock"]
    assert score(RIGHT, "eos", tampered)["reward"] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initial": True}, r"initial is True \(boolean\): expected an integer from 0 to 100"),  # True + 20 - 3 = 18
        ({"initial": 20.0}, r"initial is 20.0 \(number\): expected an integer"),  # 37.0 == 37
        ({"initial": "20"}, r"initial is '20' \(string\)"),
        ({"initial": math.nan}, r"initial is nan \(number\)"),  # no value equals it: every reply would get 0
        ({"initial": None}, "initial is null"),
        ({"initial": -1}, r"initial is -1 \(integer\): expected an integer from 0 to 100"),
        ({"initial": 101}, r"initial is 101 \(integer\)"),
        ({"initial": 10**30}, "initial is 1000000000"),
        ({"initial": np.int8(100)}, r"initial is np.int8\(100\)"),  # int8: 100 + 100 is -56
        ({"deliveries": [15, False]}, r"deliveries\[1\] is False \(boolean\)"),
        ({"deliveries": [15.5, 5]}, r"deliveries\[0\] is 15.5 \(number\)"),
        ({"withdrawals": [2, -1]}, r"withdrawals\[1\] is -1"),  # taking out -1 would put one in
        ({"withdrawals": [101, 1]}, r"withdrawals\[0\] is 101"),
        ({"deliveries": [20]}, r"deliveries is \[20\] \(list\): expected a list of two integers"),
        ({"deliveries": [15, 3, 2]}, r"deliveries is \[15, 3, 2\] \(list\): expected a list of two"),
        ({"deliveries": 20}, r"deliveries is 20 \(integer\): expected a list of two"),
        ({"withdrawals": {2: 0, 1: 0}}, r"withdrawals is \{2: 0, 1: 0\} \(object\): expected a list of two"),
        ({"withdrawals": None}, "withdrawals is null: expected a list of two"),
        # 20 + 20 = 40: the first takes out more, or the second more than the 10 that the first leaves.
        ({"withdrawals": [41, 0]}, r"withdrawals\[0\] is 41 and 40 are in stock: expected a running stock"),
        ({"withdrawals": [30, 11]}, r"withdrawals\[1\] is 11 and 10 are in stock"),
    ],
)
def test_a_structure_that_is_no_problem_is_refused(change, message):
    problem = PROBLEM | change
    for use in (
        final_stock, operands, canonical, statement, stock_arithmetic.target,
        lambda it: score(RIGHT, "eos", it),
        lambda it: score(None, "length", it, token_ids_valid=False),  # whatever the reply
        lambda it: stock_reward([], [], [], [trajectory(RIGHT)], problem=[it]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^problem: {message}"):
            use(problem)


def test_the_largest_and_the_emptiest_problem_are_problems():
    assert final_stock({"initial": 100, "deliveries": [100, 100], "withdrawals": [0, 0]}) == 300
    assert final_stock({"initial": 0, "deliveries": (1, 2), "withdrawals": (3, 0)}) == 0  # all that is there
    for no_problem in (None, 37, [20, [15, 5], [2, 1]]):
        with pytest.raises(ValueError, match="^problem is .*: expected initial, deliveries and withdrawals"):
            score(RIGHT, "eos", no_problem)
    for name in ("initial", "deliveries", "withdrawals"):
        with pytest.raises(ValueError, match=f"^problem: {name} is null"):
            score(RIGHT, "eos", {field: value for field, value in PROBLEM.items() if field != name})


@pytest.mark.parametrize("known", [None, 1, 0, "no", "", np.True_])
def test_whether_the_ids_are_known_is_said_by_a_boolean(known):
    # None and 0 would pass for False (reward 0), 1 and "no" for True (reward 1).
    with pytest.raises(ValueError, match="token_ids_valid is .*: expected True or False"):
        score(RIGHT, "eos", PROBLEM, token_ids_valid=known)


@pytest.mark.parametrize("reason", ["stop", "EOS", "", None, True])
def test_another_finish_reason_is_no_reply_without_eos(reason):
    with pytest.raises(ValueError, match='finish_reason is .*: expected "eos" or "length"'):
        score(RIGHT, reason, PROBLEM)


def is_answer(text):
    """An independent reading of the rule, for text without escapes; -0 aside every number is in plain decimal."""
    match = re.fullmatch(r'[ \t\n\r]*\{[ \t\n\r]*"final_stock"[ \t\n\r]*:[ \t\n\r]*(-0|0|[1-9][0-9]*)[ \t\n\r]*\}'
                         r"[ \t\n\r]*", text)  # fmt: skip
    return match is not None and len(text) <= 256 and int(match[1][:9]) <= 300


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(), max_size=400), st.sampled_from(["eos", "length"]), st.booleans())
@example('{"final_stock": \udfff}', "eos", True)
@example('{"\ud800": 37}', "eos", True)
@example("{" * 300, "eos", True)
def test_no_text_raises(text, finish_reason, token_ids_valid):
    reply = score(text, finish_reason, PROBLEM, token_ids_valid)
    assert list(reply) == ["valid", "value", "reason", "expected", "reward"]
    assert reply["valid"] == (reply["reason"] is None) == (reply["value"] is not None)
    assert reply["reward"] == (1.0 if reply["value"] == 37 else 0.0)
    assert reply["reason"] in (None, NO_EOS, OVERSIZED, SCHEMA, UNDECODABLE)


NEAR = st.sampled_from(
    [*' \t\n\r{}[]":,+-.0123456789eE_aN', "\u00a0", "\ufeff", "\x00", "\x0b", "\ud800", "\u0663", "  "]
)


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 320), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), NEAR), max_size=3))
def test_edits_of_an_answer_are_read_as_the_rule_says(number, edits):
    text = f'{{"final_stock": {number}}}'
    for place, removed, inserted in edits:
        position = round(place * len(text))
        text = text[:position] + inserted + text[position + removed :]
    assert score(text, "eos", PROBLEM)["valid"] == is_answer(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-400, 400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("final_stock") | st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON | JSON.map(lambda value: {"final_stock": value}), st.sampled_from([None, 2]))
def test_json_values_are_answers_only_in_one_shape(value, indent):
    text = json.dumps(value, indent=indent)
    is_dict = isinstance(value, dict) and list(value) == ["final_stock"]
    right_shape = is_dict and type(value["final_stock"]) is int and 0 <= value["final_stock"] <= 300
    assert score(text, "eos", PROBLEM)["valid"] == right_shape


# The reward


def trajectory(text, finish_reason="eos", before=()):
    turns = [Turn(None, [1], [2], [-0.5], reason, earlier) for earlier, reason in (*before, (text, finish_reason))]
    return Trajectory(row={}, group=0, member=0, turns=turns)


def test_stock_reward_reads_the_last_turn_and_its_own_problem():
    other = {"initial": 3, "deliveries": [0, 0], "withdrawals": [1, 2], "final_stock": 0, "stratum": "ID50"}
    wrong = '{"final_stock": 0}'
    trajectories = [
        trajectory(RIGHT),
        trajectory(wrong),
        trajectory(RIGHT, "length"),
        trajectory(wrong),  # right for the other problem
        trajectory(RIGHT),  # wrong for it
        trajectory(wrong, before=[(RIGHT, "eos")]),
        trajectory(RIGHT, before=[(wrong, "length")]),
    ]
    problems = [PROBLEM] * 3 + [other] * 2 + [PROBLEM] * 2
    nothing = [None] * 7
    rewards = stock_reward(nothing, nothing, nothing, trajectories, problem=problems, id=nothing, use=nothing)
    assert rewards == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError):  # a column of another length would pair rewards with the wrong problems
        stock_reward(nothing, nothing, nothing, trajectories, problem=problems[1:])


def test_an_id_that_the_tokenizer_does_not_know_cannot_vanish():
    tokenizer = word_tokenizer('{"final_stock": 37}')
    known = tokenizer('{"final_stock": 37}')["input_ids"]
    unknown, eos = len(tokenizer) + 5, tokenizer.eos_token_id
    for position in range(len(known) + 1):
        ids = [*known[:position], unknown, *known[position:], eos]
        text = decode_completion(tokenizer, ids, "eos")
        for finish_reason in ("eos", "length"):
            turn = Turn(None, [1], ids, [-0.5] * len(ids), finish_reason, text)
            assert score_turn(turn, PROBLEM) == invalid(UNDECODABLE)
            assert stock_reward([], [], [], [Trajectory({}, 0, 0, [turn])], problem=[PROBLEM]) == [0.0]
    # Decoded without it the reply would have been right.
    assert score_turn(trajectory(decode_completion(tokenizer, [*known, eos], "eos")).turns[0], PROBLEM)["reward"] == 1
