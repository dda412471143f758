"""What is seen first: a few numbers of the run side by side, and a warning where a gate decides nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lib.curves import COLUMNS, points

from turngrpo.trainer.evaluation.forced_gates import TRIVIAL_GATES

from . import counting
from .sources import Found
from .turns import is_faulty

MEASURED = {
    "reward": ("reward",),
    "update accuracy": ("update_accuracy/balanced", "update_accuracy/evidence", "update_accuracy/evidence_free"),
    "exact exits": ("exit/exact",),
    "right answers": ("answer/accuracy",),
    "parsed": ("format/parsed",),
}
PAIRS = (("before", "after"), ("base", "adapter"))  # policies that are compared

Trajectories = Sequence[Mapping[str, Any]]


class Tile(NamedTuple):
    """Numbers with their names; a tile's only number has none."""

    label: str
    numbers: list[tuple[str, str]]
    remark: str


def tiles(found: Found, everything: Trajectories) -> list[Tile]:
    """Return what the policies or else the logs measured, how often the gates opened, and how many are faulty."""
    policies = next((pair for pair in PAIRS if all(name in found.policies for name in pair)), [*found.policies][:1])
    remark = " and ".join(policies) if policies else "first and last update"
    remark = {"training": f"{'validation' if policies else 'training'}, {remark}"}.get(found.kind, remark)
    made = []
    for label, names in MEASURED.items():
        numbers = []
        for name in names:
            values = [value for _, value in points(found.history.get("", ()), name)]
            if policies:
                values = [found.policies[policy].get("metrics", {}).get(name) for policy in policies]
            if values and None not in values:
                numbers.append(("" if len(names) == 1 else COLUMNS[name], _ends(f"{value:.2f}" for value in values)))
        if numbers:
            made.append(Tile(label, numbers, remark))
    gates = [counting.gates(trajectories) for trajectories in stages(found, everything, policies)]
    opened = {name: _ends(one[name].all.text for one in gates if name in one) for name in ("update", "exit")}
    if any(opened.values()):
        numbers = [(f"{name} gate", text) for name, text in opened.items() if text]
        of = " and ".join(policies) if found.kind == "evaluation" else "training, first and last iteration"
        made.insert(2, Tile("gates open", numbers, f"of the turns that parsed; {of}"))
    for kind, label in (("greedy", "right, greedy"), ("draws", "right, per draw")):
        shares = [one for one in found.tests if (one["kind"], one["problems"]) == (kind, "all")]
        numbers = [(one["policy"], f"{one['correct']}/{one['responses']}") for one in shares]
        if numbers:
            made.append(Tile(label, numbers, "responses to the test problems"))
    if everything:
        faulty, rewarded = sum(map(is_faulty, everything)), sum((one.get("reward") or 0) > 0 for one in everything)
        remark = f"{rewarded:,} with a reward" if found.kind == "laboratory" else f"{faulty:,} with a fault"
        made.append(Tile("trajectories", [("", f"{len(everything):,}")], remark))
    return made


def stages(found: Found, everything: Trajectories, policies: Iterable[str]) -> list[Trajectories]:
    """Return what is compared: the trajectories of each policy, or of the first and the last iteration."""
    if found.kind == "evaluation":
        return [[one for one in everything if one["source"] == policy] for policy in policies]
    iterations = [one["iteration"] for one in everything]
    ends = sorted({min(iterations, default=0), max(iterations, default=0)})
    return [[one for one in everything if one["iteration"] == end] for end in ends]


def warnings(everything: Trajectories) -> list[str]:
    """Return what is wrong with the last iteration as a whole, of each source whose gates are its own."""
    said = []
    for source, own in counting.grouped(everything, lambda one: one["source"]).items():
        last = max(one["iteration"] for one in own)
        where = " ".join(filter(None, [source, "" if last < 0 else f"iteration {last}"]))
        if source not in TRIVIAL_GATES:
            said += counting.warnings(where, [one for one in own if one["iteration"] == last])
    return said


def _ends(texts: Iterable[str]) -> str:
    """Return the first and the last text with an arrow between, or the only one."""
    first, *rest = [*texts] or [""]
    return " → ".join([first, *rest[-1:]])
