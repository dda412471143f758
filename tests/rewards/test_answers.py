import pytest

from turngrpo.rewards import answer_contains, answer_f1, answer_reward, normalize_answer
from turngrpo.trainer.reading.rollout import Trajectory


def score(function, answer, *golds):
    trajectories = [Trajectory(row={}, group=0, member=0, answer=answer)]
    return function([None], [None], [None], trajectories=trajectories, answers=[list(golds)], question=["?"])[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  The\tEiffel \n Tower.", "eiffel tower"),
        ("An apple a day", "apple day"),
        ("Anthem, theatre, a.", "anthem theatre"),  # articles are whole words
        ("well-known U.S. don't", "wellknown us dont"),
        ("«Łódź» — „Kraków“…", "łódź kraków"),  # punctuation outside ASCII
        ("don\u2019t", "dont"),
        ("cafe\u0301", "caf\u00e9"),  # combining accent
        ("`utf-8`", "utf8"),
        ("-5", "-5"),
        ("(\u22125)", "-5"),  # typeset minus
        ("x = -5.", "x -5"),
        ("-$5", "-5"),
        ("+5", "5"),
        ("3.5", "3.5"),
        ("-.5", "-.5"),
        ("35.", "35"),
        ("3,5", "3 5"),
        ("1,234,567.5", "1234567.5"),
        ("1e-5", "1e-5"),
        ("2019-2020", "2019 2020"),
        ("2019\u20132020", "2019 2020"),
        ("1/2", "1 2"),
        ("[1,-2]", "1 -2"),
        ("5)(3", "5 3"),
        ("v1.2.3", "v1.2.3"),
        ("50%", "50"),
        ("the", ""),
        ("!!!", ""),
        ("-", ""),
        ("", ""),
    ],
)
def test_normalize_answer(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("answer", "golds", "exact", "f1", "contains"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1, 1, 1),
        ("Paris", ["London", "paris."], 1, 1, 1),  # the best gold counts
        ("in Paris, France", ["Paris"], 0, 0.5, 1),  # 2 * 1 common / (3 + 1)
        ("Parisian", ["Paris"], 0, 0, 0),  # whole words only
        ("York New", ["New York"], 0, 1, 0),  # words adjacent and in order
        ("new new york", ["new york"], 0, 0.8, 1),  # 2 * 2 / (3 + 2), words counted with multiplicity
        ("Paris", ["Paris France"], 0, 2 / 3, 0),  # the answer inside the gold is no containment
        ("5", ["-5"], 0, 0, 0),
        ("-5", ["5"], 0, 0, 0),
        ("35", ["3.5"], 0, 0, 0),
        ("3,5", ["35"], 0, 0, 0),
        ("1,000", ["1000"], 1, 1, 1),
        (None, ["Paris"], 0, 0, 0),  # no boxed answer
        ("", ["Paris"], 0, 0, 0),
        ("", [""], 0, 0, 0),  # nothing never equals nothing
        # Golds of articles or punctuation alone are compared as they are, and match nothing else.
        ("anything at all", ["the"], 0, 0, 0),
        ("The", ["the"], 1, 1, 1),
        ("a", ["the"], 0, 0, 0),
        ("A", ["A", "B"], 1, 1, 1),
        ("->", ["-"], 0, 0, 0),
        ("!!!", ["!!!"], 1, 1, 1),
        ("the", ["!!!"], 0, 0, 0),
        ("Paris", ["!!!", "-", ""], 0, 0, 0),
    ],
)
def test_scores(answer, golds, exact, f1, contains):
    found = [score(f, answer, *golds) for f in (answer_reward, answer_f1, answer_contains)]
    assert found == pytest.approx([exact, f1, contains])


def test_no_gold_answer_is_not_gradable_and_a_text_is_refused():
    assert score(answer_reward, "Paris") is None
    trajectories = [Trajectory(row={}, group=0, member=0, answer="p")]
    with pytest.raises(ValueError, match="answers holds the text 'Paris', expected a list"):
        answer_reward([None], [None], [None], trajectories=trajectories, answers=["Paris"])  # type: ignore[list-item]
    with pytest.raises(ValueError):
        answer_reward([None], [None], [None], trajectories=trajectories, answers=[["a"], ["b"]])
