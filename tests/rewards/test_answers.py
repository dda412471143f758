import sys
import time
import unicodedata

import pytest

from turngrpo.rewards import answer_contains, answer_f1, answer_reward, normalize_answer
from turngrpo.trainer.reading.rollout import Trajectory

# hyphen-minus, hyphen, no-break hyphen, figure, en and em dash, bar, minus, vertical em and en dash, small, full width
MINUSES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe31\ufe32\ufe58\ufe63\uff0d"


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
        # Whatever dash was typed, it is a minus right before a number that no letter or digit stands before.
        *((f"{dash}5", "-5") for dash in MINUSES),
        *((f"x ={dash}3.5", "x -3.5") for dash in MINUSES),
        *((f"{dash} 5", "-5") for dash in MINUSES),
        *((f"well{dash}known", "wellknown") for dash in MINUSES),
        *((f"1990{dash}1995", "1990 1995") for dash in MINUSES),
        *((f"1990 {dash} 1995", "1990 1995") for dash in MINUSES),
        *((f"COVID{dash}19", "covid19") for dash in MINUSES),
        *((f"Paris {dash} the city", "paris city") for dash in MINUSES),
        *((f"1e{dash}5", "1e-5") for dash in MINUSES),
        *((f"-{currency}5", f"-{currency}5") for currency in "\u20b9\u00a3\u20ac\u20a9\u20bf\U0001ecb0"),
        ("\u20b95", "\u20b95"),
        ("\u20b9-5", "\u20b9-5"),
        ("- \u20b95", "-\u20b95"),
        ("\u2212\u20b9\u00a05", "-\u20b95"),  # no-break space
        ("-$ 5", "-5"),
        ("-\\$5", "-5"),
        ("-(5)", "-5"),
        ("-|5|", "-5"),
        ("**-5**", "-5"),
        ("__-5__", "-5"),
        ("-**5**", "-5"),
        ("$-5$", "-5"),
        ("-\\,5", "-5"),
        ("-\\frac{1}{2}", "-frac1 2"),
        ("-\u00bd", "-\u00bd"),
        ("-\u221e", "-\u221e"),
        ("-\uff15", "-\uff15"),  # full-width 5
        ("-\0005", "-5"),
        ("x = - 5", "x -5"),
        ("x \u2265 - 5", "x \u2265 -5"),
        ("[1, - 2]", "1 -2"),
        ("(- 5)", "-5"),
        ("3 - 5", "3 5"),
        ("page - 5", "page 5"),
        ("(1990)-(1995)", "1990 1995"),
        ("-> 5", "5"),
        ("\u2022 5", "5"),  # a bullet that is no dash
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


def test_every_currency_sign_keeps_the_minus_before_it():
    signs = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Sc"]
    assert len(signs) > 60
    assert [sign for sign in signs if not normalize_answer(f"-{sign}5").startswith("-")] == []


def test_accents_are_the_same_in_any_order_and_the_first_30_of_a_row_count():
    # The acute (class 230) and the dot below (220) are sorted: both orders are the same text.
    assert normalize_answer("a\u0301\u0323") == normalize_answer("a\u0323\u0301") == "\u1ea1\u0301"
    assert normalize_answer("b" + "\u0301" * 30) == "b" + "\u0301" * 30 == normalize_answer("b" + "\u0301" * 31)
    assert normalize_answer(("b" + "\u0301" * 20) * 2) == ("b" + "\u0301" * 20) * 2  # each row by itself


@pytest.mark.parametrize(
    "marks", ["\u0301\u0323", "\u0f73", "\u0344\u0323"]
)  # U+0F73 is of class 0, its parts are not
def test_no_long_row_of_marks_is_sorted(marks, monkeypatch):
    given, normalize = [], unicodedata.normalize
    monkeypatch.setattr(unicodedata, "normalize", lambda form, text: given.append(text) or normalize(form, text))
    normalize_answer("a" + marks * 5000 + "b")
    assert [len(text) for text in given] == [1 + 30 + 1]  # sorting all 10,000 would take their square


HOSTILE = [
    "\u0301\u0323", "\u0f73", "\u00e9\u0323", "1,111,", "1,11", "-", "- ", "-(", "-$ ", "-\u20b9", "_", "_ ", "!",
    "\0", "5!", "5-", ". ", "the ", "-|(", "=-", "e-", "\u2014 ", "\u03a3'",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("ends", [("", ""), ("5", "x")])
def test_the_time_grows_with_the_length(piece, ends):
    def seconds(pieces):
        text, found = ends[0] + piece * pieces + ends[1], []
        for _ in range(4):
            started = time.process_time()  # what other processes take of the cores does not count
            normalize_answer(text)
            found.append(time.process_time() - started)
        return min(found)

    # Ten times the text takes some ten times as long; with the square of the length it would be a hundred times.
    assert any(seconds(40_000) < 50 * seconds(4000) for _ in range(3))


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
        *((f"{dash}5", ["5"], 0, 0, 0) for dash in MINUSES),
        *((f"{dash} 5", ["5"], 0, 0, 0) for dash in MINUSES),
        *((f"{dash}5", ["-5"], 1, 1, 1) for dash in MINUSES),
        ("-\u20b95", ["\u20b95"], 0, 0, 0),
        ("-\u20b9 5", ["\u20b9 5", "5"], 0, 0, 0),
        ("\u2212 \u20b9 5", ["-\u20b95"], 1, 1, 1),
        ("-\u00bd", ["\u00bd"], 0, 0, 0),
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
    with pytest.raises(ValueError, match=r"answers holds 'Paris' \(string\), expected a list"):
        answer_reward([None], [None], [None], trajectories=trajectories, answers=["Paris"])  # type: ignore[list-item]
    assert answer_reward([], [], [], trajectories, answers=[None]) == [None]  # type: ignore[list-item]
    assert answer_reward([], [], [], trajectories, answers=[("x", "p")]) == [1.0]
    with pytest.raises(ValueError):
        answer_reward([None], [None], [None], trajectories=trajectories, answers=[["a"], ["b"]])


@pytest.mark.parametrize("function", [answer_reward, answer_f1, answer_contains])
@pytest.mark.parametrize(
    "golds",
    [
        {"text": ["Paris"], "answer_start": [3]},  # SQuAD's column: its names were compared, and "text" got 1
        {},
        {"Paris"},
        0,  # passed for no gold answer
        False,
        5,
        [5],
        [None],
        [["Paris"]],
        ["Paris", float("nan")],
        [b"Paris"],
        b"",
    ],
)
def test_gold_answers_of_another_type_are_refused(function, golds):
    for answer in ("text", None):
        trajectories = [Trajectory(row={}, group=0, member=0, answer=answer)]
        with pytest.raises(ValueError, match=r"answers holds .* expected a list of gold answers, each a text"):
            function([None], [None], [None], trajectories=trajectories, answers=[golds])
