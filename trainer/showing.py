"""Text of models, corpora and servers on a terminal: what would steer it is shown, and not obeyed."""

import json
import unicodedata
from typing import Any

KEPT = "\n\t\u200c\u200d"  # lines and columns; the joiners that Persian, Hindi and emoji are written with


def _steers(character: str) -> bool:
    """Whether a character is no text: a control, a mark that turns the reading direction, half a pair, unassigned."""
    return character not in KEPT and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")


def visible(text: str) -> str:
    """Return text with everything that would steer a terminal as its escape.

    >>> print(visible("done\\r\\x1b[2Jgone"))
    done\\r\\x1b[2Jgone
    """
    return "".join(repr(character)[1:-1] if _steers(character) else character for character in text)


def visible_json(value: Any) -> str:
    """Return JSON, readable and exact: what would steer a terminal stands in it as JSON's own escape.

    >>> print(visible_json("a\\x9b1m"))
    "a\\u009b1m"
    """
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return "".join(json.dumps(character)[1:-1] if _steers(character) else character for character in text)


def counted(number: int, noun: str) -> str:
    """Return a number of things, as "1 update" or "2 updates"."""
    return f"{number} {noun}{'s' * (number != 1)}"
