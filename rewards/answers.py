"""Rewards of the answer: exact match, token F1 and containment, each the best over the gold answers of the row."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from turngrpo.data_prep.corpus_format import describe

if TYPE_CHECKING:  # rewards run without torch and without the trainer
    from turngrpo.trainer.reading.rollout import Trajectory

_ARTICLES = {"a", "an", "the"}
# Hyphens, dashes and minus signs that are written for "-", and the character that this module uses for a mark.
_AS_TYPED = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2e3a\u2e3b\ufe31\ufe32\ufe58\ufe63\uff0d", "-")
    | {"\0": " "}
)
_CURRENCY = (  # the characters of category Sc
    "$\u00a2-\u00a5\u058f\u060b\u07fe\u07ff\u09f2\u09f3\u09fb\u0af1\u0bf9\u0e3f\u17db\u20a0-\u20cf\ua838\ufdfc\ufe69"
    "\uff04\uffe0\uffe1\uffe5\uffe6\U00011fdd-\U00011fe0\U0001e2ff\U0001ecb0"
)
_NUMBER = r"(?:\.?\d|[\u00bc-\u00be\u2150-\u215f\u2189\u221e]|\\)"  # or a fraction, infinity, LaTeX: "-\frac", "-\$5"
_OPENING = rf"[(\[{{|*_`{_CURRENCY}]"  # may stand between a sign and its number: "-$5", "-(5)"
_BEFORE_SIGN = r"=<>\u2248\u2260\u2264\u2265:;,(\[{"
_FREE = r"(?<![^\W_])-"  # no letter and no digit before it: neither a hyphen nor a range
_SIGN_SPACE = re.compile(
    rf"(?:\A[\W_]*|(?<=[{_BEFORE_SIGN}{_CURRENCY}])|(?<=[{_BEFORE_SIGN}] ))- {_OPENING}{{0,3}} ?(?={_NUMBER})"
    rf"|{_FREE}[{_CURRENCY}] (?={_NUMBER})"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# A minus and a point that belong to a number: "-5", "-.5", "-$5", "1e-5"; "3.5", ".5".
_NUMBER_MARK = re.compile(
    rf"{_FREE}(?=[{_CURRENCY}]?{_NUMBER}|(?<![)\]}}]-){_OPENING}{{1,3}}{_NUMBER})"
    r"|(?<=\de)-(?=\d)|(?<!\w)\.(?=\d)|(?<=\d)\.(?=\d)"
)
_DROPPED = "\0"
_BETWEEN_NUMBERS = re.compile(r"(?<=\d)\0+(?=[-.]?\d)")
_MARKS_KEPT = 30  # combining marks in a row, as in Unicode's stream-safe format; to sort n of them takes n * n steps


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def _composed(text: str) -> str:
    """Canonical composition (NFC) of text whose runs of combining marks are cut after the 30th."""
    if text.isascii():
        return text
    kept, run = [], 0
    for character in text:
        run = run + 1 if unicodedata.category(character).startswith("M") else 0  # some sort with class 0: U+0F73
        if run <= _MARKS_KEPT:
            kept.append(character)
    return unicodedata.normalize("NFC", "".join(kept))


def normalize_answer(text: str) -> str:
    """Lower case, punctuation and the articles a/an/the dropped, white space folded, numbers kept what they are.

    As SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250) but for numbers and for punctuation outside ASCII. Inside a
    number sign and decimal point stay and the commas of thousands go; other punctuation between two numbers becomes a
    space: "-5" never turns into "5", nor "3.5" or "3,5" into "35". Text of articles and punctuation alone gives "".
    A dash of any kind is a minus where no letter or digit stands right before it and a number right after it, or after
    a currency sign, an opening bracket or a backslash of LaTeX. Followed by a space it is one only where nothing but
    punctuation precedes, or after one of = < > : ; , ( [ {: "- 5" is "-5" (a bullet too, rather than reward answers
    without their sign), and "3 - 5" is "3 5". The time grows with the length: of combining marks in a row the first 30
    count.

    >>> normalize_answer("The  «Well-Known» U.S. dog!"), normalize_answer("-5"), normalize_answer("$1,234.50.")
    ('wellknown us dog', '-5', '1234.50')
    >>> normalize_answer("- \u20b9 5"), normalize_answer("\u20145"), normalize_answer("1990 \u2013 1995")
    ('-₹5', '-5', '1990 1995')
    """
    text = " ".join(_composed(text.lower()).translate(_AS_TYPED).split())
    text = _SIGN_SPACE.sub(lambda match: match[0].replace(" ", ""), text)
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    marks = {match.start() for match in _NUMBER_MARK.finditer(text)}
    marked = "".join(
        _DROPPED if position not in marks and _is_punctuation(character) else character
        for position, character in enumerate(text)
    )
    text = _BETWEEN_NUMBERS.sub(" ", marked).replace(_DROPPED, "")
    return " ".join(word for word in text.split() if word not in _ARTICLES)


def _comparable(text: str) -> str:
    """Normalise, or fall back to the raw text where nothing would be left ("A", "the", "!!!", "->")."""
    return normalize_answer(text) or " ".join(text.lower().split())


def _best(
    score: Callable[[str, str], float], trajectories: list[Trajectory], answers: list[list[str]]
) -> list[float | None]:
    """Return the best score(answer, gold) per trajectory: 0 without an answer, None without a gold answer.

    Raises ValueError for gold answers that are no list of texts: of an object only the names would be compared.
    """
    rewards: list[float | None] = []
    for trajectory, golds in zip(trajectories, answers, strict=True):
        if golds is not None and not (isinstance(golds, list | tuple) and all(isinstance(g, str) for g in golds)):
            raise ValueError(
                f"answers holds {describe(golds)}, expected a list of gold answers, each a text: wrap a single one in "
                "a list, write numbers as text, and take the texts out of an object"
            )
        if not golds:
            rewards.append(None)
        elif trajectory.answer is None:
            rewards.append(0.0)
        else:
            answer = _comparable(trajectory.answer)
            rewards.append(max(score(answer, _comparable(gold)) for gold in golds))
    return rewards


def _exact_match(answer: str, gold: str) -> float:
    return float(bool(gold) and answer == gold)


def _token_f1(answer: str, gold: str) -> float:
    answer_words, gold_words = answer.split(), gold.split()
    common = sum((Counter(answer_words) & Counter(gold_words)).values())
    return 2 * common / (len(answer_words) + len(gold_words)) if common else 0.0


def _contains(answer: str, gold: str) -> float:
    return float(bool(gold) and f" {gold} " in f" {answer} ")


def answer_reward(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[Any],
    trajectories: list[Trajectory],
    answers: list[list[str]],
    **columns: Any,
) -> list[float | None]:
    """Trajectory reward: 1 where the boxed answer equals a gold answer after `normalize_answer`, else 0.

    >>> from turngrpo.trainer.reading.rollout import Trajectory
    >>> trajectories = [Trajectory({}, 0, 0, answer=text) for text in ("The Eiffel Tower.", "a tower", None)]
    >>> answer_reward([], [], [], trajectories, answers=[["Eiffel Tower", "Tour Eiffel"]] * 3)
    [1.0, 0.0, 0.0]
    """
    return _best(_exact_match, trajectories, answers)


def answer_f1(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[Any],
    trajectories: list[Trajectory],
    answers: list[list[str]],
    **columns: Any,
) -> list[float | None]:
    """Trajectory reward: F1 of the normalised words of the boxed answer against the best gold answer.

    2 * common / (words of the answer + words of the gold), words counted with multiplicity.

    >>> from turngrpo.trainer.reading.rollout import Trajectory
    >>> answer_f1([], [], [], [Trajectory({}, 0, 0, answer="the old tower")], answers=[["Eiffel Tower"]])
    [0.5]
    """
    return _best(_token_f1, trajectories, answers)


def answer_contains(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[Any],
    trajectories: list[Trajectory],
    answers: list[list[str]],
    **columns: Any,
) -> list[float | None]:
    """Trajectory reward: 1 where a gold answer stands in the boxed answer as whole, adjacent words, else 0.

    >>> from turngrpo.trainer.reading.rollout import Trajectory
    >>> trajectories = [Trajectory({}, 0, 0, answer=text) for text in ("the Eiffel Tower in Paris", "Parisian")]
    >>> answer_contains([], [], [], trajectories, answers=[["Paris"]] * 2)
    [1.0, 0.0]
    """
    return _best(_contains, trajectories, answers)
