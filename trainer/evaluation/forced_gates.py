"""The same model with its gates forced: what trivial policies reach."""

from typing import Any

from turngrpo.trainer.reading.gates import GateDecision
from turngrpo.trainer.reading.rollout import Turn
from turngrpo.trainer.reading.workflows import GatedMemory


class ForcedGates(GatedMemory):
    """The same model with its gates overridden: `check` and `exit` are True, False, or None (the model decides).

    check=True writes the turn's candidate where it has one, else memory stays; a turn that does not parse obeys the
    forced gates too, and still counts as unparsed.
    """

    def __init__(self, check: bool | None = None, exit: bool | None = None, **options: Any):
        super().__init__(**options)
        self.check, self.exit = check, exit

    def decide(self, turn: Turn) -> GateDecision:
        own = super().decide(turn) or GateDecision(check=False, candidate="", exit=False)
        check = own.check if self.check is None else self.check
        return GateDecision(check, own.candidate, own.exit if self.exit is None else self.exit)

    def write(self, state: Any, turn: Turn, candidate: str) -> None:
        if candidate:
            super().write(state, turn, candidate)

    def advance(self, state: Any, turn: Turn) -> bool:
        reading = not state.answering
        goes_on = super().advance(state, turn)
        state.parsed &= not reading or super().decide(turn) is not None
        return goes_on


TRIVIAL_GATES: dict[str, dict[str, bool]] = {
    "always no": {"check": False},
    "always yes": {"check": True},
    "read to the end": {"exit": False},
    "stop at once": {"exit": True},
}
