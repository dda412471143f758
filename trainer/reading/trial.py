"""What a workflow must be, checked when it is handed over: its shape, then dry turns on one row. Plain Python."""

import copy
import sys
import traceback
from collections.abc import Callable
from typing import Any

from turngrpo.trainer.reading.gates import GateDecision, write_turn
from turngrpo.trainer.reading.rollout import Turn, check_goes_on, check_segments, row_name

METHODS = {"bind": "tokenizer, config", "start": "row", "prompt": "state", "advance": "state, turn"}
# Of a model that says nothing, of one that knows the gates, and of one that answers.
REPLIES = ("", write_turn(GateDecision(check=True, candidate="a note", exit=False)), "The answer is \\boxed{4}.")


def hand_over(workflow: Any, tokenizer: Any, config: Any, row: dict[str, Any] | None = None) -> None:
    """Bind a workflow after a check of its shape, and let a copy of it take dry turns on `row`, where there is one.

    Raises ValueError that says what was found, what was expected, and where the workflow failed.
    """
    check_shape(workflow)
    _call(workflow, "bind", tokenizer, config)
    if row is not None:
        try_turns(copy.copy(workflow), tokenizer, row)


def check_shape(workflow: Any) -> None:
    """Refuse a class in the place of its instance, and anything that lacks a method or `strict_format`."""
    if isinstance(workflow, type):
        name = workflow.__name__
        raise ValueError(f"workflow is the class {name}, expected an instance of it: workflow={name}(...)")
    name = type(workflow).__name__
    missing = [f"{m}({given})" for m, given in METHODS.items() if not callable(getattr(workflow, m, None))]
    if missing:
        raise ValueError(
            f"workflow is a {name} without {', '.join(missing)}: expected {_methods()} (trainer/reading/README.md)"
        )
    strict = getattr(workflow, "strict_format", None)
    if not isinstance(strict, bool):
        raise ValueError(
            f"{name}.strict_format is {strict!r}, expected True (a trajectory that ends unparsed is rewarded 0) or "
            "False: set it on the class or in __init__"
        )


def _methods() -> str:
    return ", ".join(f"{name}({given})" for name, given in METHODS.items())


def try_turns(workflow: Any, tokenizer: Any, row: dict[str, Any]) -> None:
    """Let a bound workflow start on a row, ask, take a reply and, where it goes on, ask again; for every reply."""
    name, eos = type(workflow).__name__, tokenizer.eos_token_id
    place, columns = row_name(row, 0), f"; the row has the columns {', '.join(map(str, row))}"
    for text in REPLIES:
        state = _call(workflow, "start", row, after=columns)
        segments = _call(workflow, "prompt", state, after=columns)
        check_segments(segments, f"{name}.prompt, {place}")
        turn = Turn(
            step=1,
            prompt_ids=[token for segment in segments for token in segment],
            completion_ids=[*tokenizer(text, add_special_tokens=False)["input_ids"], eos],
            behavior_logprobs=[],
            finish_reason="eos",
            text=text,
        )
        turn.behavior_logprobs = [0.0] * turn.completion_tokens
        for method in ("messages",) if hasattr(workflow, "messages") else ():
            _call(workflow, method, state)
        goes_on = _call(workflow, "advance", state, turn, after=f"; the reply was {text!r}{columns}")
        check_goes_on(goes_on, f"{name}.advance, {place}")
        if goes_on:
            segments = _call(workflow, "prompt", state, after=f"; the first reply was {text!r}{columns}")
            check_segments(segments, f"{name}.prompt, {place}, second turn")


def _call(workflow: Any, method: str, *given: Any, after: str = "") -> Any:
    """Call a method; whatever it raises becomes a ValueError that names it and its line."""
    call: Callable[..., Any] = getattr(workflow, method)
    try:
        return call(*given)
    except Exception as error:
        frames = traceback.extract_tb(sys.exc_info()[2])[1:]
        own = next((f for f in reversed(frames) if f.name == method), None)
        at = f" at {own.filename}:{own.lineno}" if own else f"; it is called with ({METHODS.get(method, 'state')})"
        raise ValueError(
            f"{type(workflow).__name__}.{method} raised {type(error).__name__}: {error}{at}{after}"
        ) from error
