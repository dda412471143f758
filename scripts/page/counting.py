"""Counts over all trajectories, shown or not: which gate is wrong, on what, and what the reward is made of."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .turns import EARLY, KINDS, LATE, UNPARSED, WRONG_SKIP, WRONG_WRITE

PART = 5  # the first and the last iterations are a fifth of all
ALMOST = 0.05  # a share this near to 0 or 1 is as good as it
FEW = 0.5  # a share of readings that parse: with less, little can be said of the gates


MEANS = {
    ("update", "never"): "whatever it reads: chunks without evidence are right by that alone, and evidence is skipped",
    ("update", "always"): "whatever it reads: evidence is right by that alone, and all other chunks are written too",
    ("exit", "never"): "also after the last evidence: every document is read to its end",
    ("exit", "always"): "also before the last evidence: reading ends at the first chunk",
}


@dataclass(frozen=True)
class Share:
    """`count` of `total`."""

    count: int
    total: int

    @property
    def text(self) -> str:
        return f"{self.count / self.total:.0%}" if self.total else ""

    @classmethod
    def of(cls, values: Iterable[Any]) -> "Share":
        kept = [bool(value) for value in values]
        return cls(sum(kept), len(kept))


@dataclass(frozen=True)
class Gate:
    """How often a gate opened, of the turns that parsed: where it should have, where it should not, and of all."""

    due: Share
    rest: Share
    all: Share

    @property
    def stuck(self) -> str:
        """Return "never" or "always" where it opens so whatever it sees, though that is wrong somewhere; else ""."""
        due, rest = (self.due, self.rest) if self.due.total or self.rest.total else (self.all, self.all)
        opened = [share.count / share.total for share in (due, rest) if share.total]
        if due.total and max(opened) <= ALMOST:
            return "never"
        return "always" if rest.total and min(opened) >= 1 - ALMOST else ""


@dataclass(frozen=True)
class Part:
    """Some trajectories with a name, and the iterations that they are of."""

    label: str
    source: str
    trajectories: Sequence[Mapping[str, Any]]
    iterations: tuple[int, int]  # first and last
    is_last: bool  # of two, which stand beside each other


def parts(trajectories: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return the first and the last iterations of each source, or all that it has where it is one iteration."""
    found = []
    for source in dict.fromkeys(one["source"] for one in trajectories):
        own = [one for one in trajectories if one["source"] == source]
        iterations = sorted({one["iteration"] for one in own})
        size = -(-len(iterations) // PART)
        ends = {"": iterations} if len(iterations) == 1 else {"first": iterations[:size], "last": iterations[-size:]}
        for label, these in ends.items():
            named = " ".join(filter(None, [source, label, span(these) if label else ""]))
            inside = [one for one in own if these[0] <= one["iteration"] <= these[-1]]
            found.append(Part(named, source, inside, (these[0], these[-1]), label == "last"))
    return found


def span(iterations: Sequence[int]) -> str:
    """Return "iteration 3" or "iterations 3-8"."""
    first, last = iterations[0], iterations[-1]
    return f"iteration {first}" if first == last else f"iterations {first}–{last}"


def shares(trajectories: Iterable[Mapping[str, Any]], kind: str | None = None) -> dict[str, Share]:
    """Return what is wrong by name: of the chunks with a label on either side, of all turns, of all that can leave.

    An unparsed turn on a labelled chunk is counted in the total of its side, and wrong by itself.
    """
    counts = {name: [0, 0] for name in (WRONG_SKIP, WRONG_WRITE, EARLY, LATE, UNPARSED)}
    for one in trajectories:
        if kind is None and one.get("last_evidence") is not None:
            for name in (EARLY, LATE):
                counts[name][0] += one["leaving"] == name
                counts[name][1] += 1
        for turn in one["turns"]:
            if kind is not None and kind not in turn["kinds"]:
                continue
            if turn.get("step") is not None and turn.get("evidence") is not None:
                side = WRONG_SKIP if turn["evidence"] else WRONG_WRITE
                counts[side][0] += turn["verdict"] == side
                counts[side][1] += 1
            counts[UNPARSED][0] += turn["verdict"] == UNPARSED
            counts[UNPARSED][1] += 1
    return {name: Share(*pair) for name, pair in counts.items()}


def grouped(
    trajectories: Iterable[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], Any]
) -> dict[Any, list[Mapping[str, Any]]]:
    """Return trajectories by a key, in the order of the keys."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for one in trajectories:
        found.setdefault(key(one), []).append(one)
    return dict(sorted(found.items()))


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    kept = [value for value in values if value is not None]
    return sum(kept) / len(kept) if kept else None


def gates(trajectories: Iterable[Mapping[str, Any]]) -> dict[str, Gate]:
    """Return the gates by name. Reading that ended with the document is no decision of the exit gate."""
    said: dict[str, list[tuple[bool, bool | None]]] = {"update": [], "exit": []}  # opened, should have
    for one in trajectories:
        steps = [turn for turn in one["turns"] if turn.get("step") is not None]
        last = one.get("last_evidence")
        for turn in steps:
            if turn.get("check") is not None:
                said["update"].append((turn["check"], turn.get("evidence")))
            if turn.get("exit") or (turn.get("exit") is not None and turn is not steps[-1]):
                said["exit"].append((turn["exit"], None if last is None else turn["step"] >= last))
    made = {}
    for name, pairs in said.items():
        due, rest = (Share.of(opened for opened, should in pairs if should is wanted) for wanted in (True, False))
        made[name] = Gate(due, rest, Share.of(opened for opened, _ in pairs))
    return {name: gate for name, gate in made.items() if gate.all.total}


def warnings(where: str, trajectories: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each gate that decides nothing in these trajectories, and one where few of them parse."""
    said = []
    parsed = Share.of(one["parsed"] for one in trajectories if one.get("parsed") is not None)
    if parsed.total and parsed.count < FEW * parsed.total:
        said.append(f"{where}: {parsed.count} of {parsed.total} readings parse: the others count as wrong throughout.")
    for name, gate in gates(trajectories).items():
        if gate.stuck:
            almost = "" if gate.all.count in (0, gate.all.total) else "almost "
            counts = f"{gate.all.count} of {gate.all.total} turns that parsed"
            said.append(f"{where}: the {name} gate {almost}{gate.stuck} opens ({counts}), {MEANS[name, gate.stuck]}.")
    return said


def rewards(trajectories: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean reward, that of every function of a trajectory and of a turn, and the share made 0 by format."""
    turns = [turn for one in trajectories for turn in one["turns"]]
    named: dict[str, float | None] = {"reward": mean(one.get("reward") for one in trajectories)}
    for label, records, field in (("", trajectories, "rewards"), ("per turn: ", turns, "turn_rewards")):
        names = dict.fromkeys(name for one in records for name in one.get(field) or {})
        named |= {label + name: mean((one.get(field) or {}).get(name) for one in records) for name in names}
    zero = mean(None if one.get("strict_zero") is None else float(one["strict_zero"]) for one in trajectories)
    return named | {"made 0 because it did not parse": zero}


def kinds_of(trajectories: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the kinds of chunk that were read, in the order of KINDS."""
    found = {kind for one in trajectories for turn in one["turns"] for kind in turn["kinds"]}
    return [kind for kind in KINDS if kind in found]
