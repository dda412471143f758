"""Trajectories from the ledger's turns: what each turn's gate did against its label, and those that the page holds."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from .sources import Found

SEED = 0
FEW = (  # columns that every trajectory is counted and chosen by
    "id iteration group member turn row_id project step evidence check exit fault memory_cut finish_reason "
    "turn_rewards turn_reward last_evidence exit_step parsed rewards reward strict_zero policy"
).split()
OF_TRAJECTORY = (
    "iteration group member row_id project last_evidence exit_step parsed answer gold rewards reward strict_zero "
    "trajectory_advantage seconds policy_digest"
).split()
OF_TURN = (
    "id turn step evidence check candidate exit fault memory memory_cut text finish_reason prompt_ids prompt_tokens "
    "completion_ids behavior_logprobs turn_rewards turn_reward turn_advantage advantage"
).split()
OF_UPDATE = (
    "update tokens weight ratio_mean ratio_max clip_active kl entropy surrogate gap_mean gap_max logprobs token_kl "
    "token_clipped"
).split()
OF_TOKENS = ("behavior_logprobs", "logprobs", "token_kl")  # numbers
DIGITS = 3  # significant ones of these, of which there are many

RIGHT_WRITE, RIGHT_SKIP, WRONG_SKIP, WRONG_WRITE = "right write", "right skip", "wrongly skipped", "wrongly written"
UNPARSED, UNLABELLED, ANSWER = "unparsed", "no label", "answer"
EARLY, LATE, EXACT = "left early", "left late", "left at T*"
ONLY, BEFORE_OTHERS, LAST = "the only evidence", "evidence before others", "last evidence"
BEFORE_ANY, BETWEEN, AFTER_LAST = "before any evidence", "between evidence", "after the last evidence"
NUMBERED = 8  # chunks with a kind of their own by number
KINDS = (
    *(ONLY, BEFORE_OTHERS, LAST, BEFORE_ANY, BETWEEN, AFTER_LAST),
    *(f"chunk {number + 1}" for number in range(NUMBERED)),
    f"after chunk {NUMBERED}",
)
FAULTS = (WRONG_SKIP, WRONG_WRITE, EARLY, LATE, UNPARSED)


def verdict(turn: Mapping[str, Any]) -> str:
    """Return what a turn's check was against the label of its chunk."""
    if turn.get("fault") is not None:
        return UNPARSED
    if turn.get("step") is None:
        return ANSWER
    if turn.get("evidence") is None or turn.get("check") is None:
        return UNLABELLED
    if turn["evidence"]:
        return RIGHT_WRITE if turn["check"] else WRONG_SKIP
    return WRONG_WRITE if turn["check"] else RIGHT_SKIP


def leaving(trajectory: Mapping[str, Any]) -> str | None:
    """Return how a trajectory left against T*, as `measuring.metrics.exit_kind` counts it."""
    last, step = trajectory.get("last_evidence"), trajectory.get("exit_step")
    if last is None or step is None:
        return None
    if step == last:
        return EXACT if trajectory.get("parsed") else None
    return EARLY if step < last else LATE


def chunk_kinds(turns: Sequence[Mapping[str, Any]], last_evidence: int | None) -> list[list[str]]:
    """Return of every turn the kinds of its chunk: where it lies among the evidence read so far, and its number."""
    kinds: list[list[str]] = []
    seen = False
    for turn in turns:
        step, evidence = turn.get("step"), turn.get("evidence")
        if step is None or evidence is None:
            kinds.append([])
            continue
        if evidence:
            kind = BEFORE_OTHERS if step != last_evidence else LAST if seen else ONLY
        elif last_evidence is not None and step > last_evidence:
            kind = AFTER_LAST
        else:
            kind = BETWEEN if seen else BEFORE_ANY
        seen |= evidence
        kinds.append([kind, f"chunk {step}" if step <= NUMBERED else f"after chunk {NUMBERED}"])
    return kinds


def trajectories(rows: Iterable[Mapping[str, Any]], source: str = "") -> list[dict[str, Any]]:
    """Return trajectories of turns from the ledger's rows, a row being a turn, or a turn as one update trained it."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        place = row.get("policy") or source
        key = (place, row["iteration"], row["group"], row["member"])
        one = found.setdefault(key, {"source": place, "turns": {}})
        one |= {name: row[name] for name in OF_TRAJECTORY if name in row}
        turn = one["turns"].setdefault(row["turn"], {name: row[name] for name in OF_TURN if name in row})
        if row.get("update") is not None:
            turn.setdefault("updates", []).append({name: row[name] for name in OF_UPDATE if row.get(name) is not None})
    for one in found.values():
        one["turns"] = [one["turns"][number] for number in sorted(one["turns"])]
        one["leaving"] = leaving(one)
        kinds = chunk_kinds(one["turns"], one.get("last_evidence"))
        last = max((index for index, turn in enumerate(one["turns"]) if turn.get("step") is not None), default=None)
        for index, (turn, of_chunk) in enumerate(zip(one["turns"], kinds, strict=True)):
            turn["verdict"], turn["kinds"] = verdict(turn), of_chunk
            left = [one["leaving"]] if index == last and one["leaving"] in (EARLY, LATE) else []
            turn["faults"] = [name for name in [turn["verdict"], *left] if name in FAULTS]
    sources = list(dict.fromkeys(one["source"] for one in found.values()))
    return sorted(found.values(), key=lambda one: (sources.index(one["source"]), *key_of(one)))


def key_of(trajectory: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """Return what tells a trajectory from all others."""
    return trajectory["source"], trajectory["iteration"], trajectory["group"], trajectory["member"]


def overview(found: Found) -> list[dict[str, Any]]:
    """Return every trajectory without what is long: enough to count and to choose."""
    return [one for label, read in found.readers.items() for one in trajectories(read(FEW).to_pylist(), label)]


def choose(all_of_them: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return at most `limit` trajectories: those with a fault first, then the others, each part in a seeded order.

    With room for all, all come.
    """
    if len(all_of_them) <= limit:
        return list(all_of_them)
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for one in all_of_them:
        parts[not is_faulty(one)].append(one)
    draw = random.Random(SEED)
    return [one for part in parts for one in draw.sample(part, len(part))][:limit]


def is_faulty(trajectory: Mapping[str, Any]) -> bool:
    """Whether a gate of a trajectory was wrong, or a turn did not parse."""
    return any(turn["faults"] for turn in trajectory["turns"])


def whole(found: Found, chosen: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the chosen trajectories, in their order, with everything that the page shows of them."""
    places = {key_of(one): place for place, one in enumerate(chosen)}
    ids = {turn["id"] for one in chosen for turn in one["turns"]}
    columns = {*FEW, *OF_TRAJECTORY, *OF_TURN, *OF_UPDATE}
    read = [one for label, read in found.readers.items() for one in trajectories(_rows(read(columns, ids)), label)]
    return sorted((one for one in read if key_of(one) in places), key=lambda one: places[key_of(one)])


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a table; the values of lists in one piece, tokens' numbers in a few digits."""
    columns = {name: _values(table[name].combine_chunks(), name in OF_TOKENS) for name in table.column_names}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _values(column: pa.Array, is_rounded: bool) -> list[Any]:
    if not pa.types.is_list(column.type) or pa.types.is_string(column.type.value_type):
        return column.to_pylist()
    inner = column.values.to_numpy(zero_copy_only=False)
    values, ends = (rounded(inner) if is_rounded else inner).tolist(), column.offsets.tolist()
    places = zip(ends, ends[1:], column.is_valid().tolist(), strict=False)
    return [values[start:end] if is_known else None for start, end, is_known in places]


def rounded(values: np.ndarray) -> np.ndarray:  # (N,)
    """Return numbers in DIGITS significant digits; what is 0 or not finite as it is."""
    with np.errstate(all="ignore"):
        places = DIGITS - 1 - np.floor(np.log10(np.abs(values)))
        power = 10.0 ** np.abs(places)
        kept = np.where(places < 0, np.rint(values / power) * power, np.rint(values * power) / power)
    return np.where(np.isfinite(places), kept, values)
