"""The inference stages, which see no labels; the scoring, which sees no model; and comparisons of full states."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from lib.options import evaluation_config
from lib.output import write_json

from turngrpo.data_prep.stock_arithmetic import ID50, OOD100
from turngrpo.rewards.stock import score_turn
from turngrpo.trainer import SingleTurn, Turn
from turngrpo.trainer.evaluation.evaluate import evaluate_policy
from turngrpo.trainer.runs.compare import checkpoint_fields, compare_states

from .archive import unpacked_state
from .config import LabConfig
from .data import read_rows
from .training import COSTS, load

RESPONSES, SCORES = "responses.parquet", "scores.json"
STRATA = (ID50, OOD100, "all")
GREEDY, DRAWS = "greedy", "draws"


def respond(folder: Path, config: LabConfig, *, model: Path, prompts: Path) -> None:
    """Answer every test prompt once greedily and `draws` times at temperature 1, on noise common to all policies.

    The strata are answered one after the other, so that each has its time.
    """
    policy, tokenizer = load(model)
    rows, responses, costs = read_rows(prompts), [], {}
    asked = [(kind, stratum) for kind in ((GREEDY, 0.0, 1), (DRAWS, 1.0, config.draws)) for stratum in (ID50, OOD100)]
    for (kind, temperature, members), stratum in asked:
        started = time.perf_counter()
        options = evaluation_config(
            eval_temperature=temperature,
            eval_top_p=1.0,
            eval_seed=config.seed,
            max_prompt_length=config.max_prompt_length,
            max_completion_length=config.max_completion_length,
        )
        own = [row for row in rows if row["stratum"] == stratum]
        label = f"{kind}, {stratum}"
        found = evaluate_policy(policy, tokenizer, SingleTurn(), own, options, members=members, label=label)
        costs[f"time/{label}"] = time.perf_counter() - started
        costs[f"time/{label}, per response"] = costs[f"time/{label}"] / len(found.trajectories)
        costs[f"tokens/{label}"] = sum(len(t.turns[0].completion_ids) for t in found.trajectories)
        responses += [
            {
                "id": trajectory.row["id"],
                "kind": kind,
                "draw": trajectory.member,
                "text": trajectory.turns[0].text.encode("utf-8", "replace").decode(),
                "finish_reason": trajectory.turns[0].finish_reason,
                "completion_ids": trajectory.turns[0].completion_ids,
                "logprobs": trajectory.turns[0].behavior_logprobs,
            }
            for trajectory in found.trajectories
        ]
    pq.write_table(pa.Table.from_pylist(responses), folder / RESPONSES, compression="zstd")
    write_json(folder / COSTS, costs)


def score_responses(folder: Path, config: LabConfig, *, labels: Path, **responses: Path) -> None:
    """Verify every response of every policy against the labels; nothing is selected, every response counts."""
    problems = {row["id"]: row["problem"] for row in read_rows(labels)}
    scored, tables = [], {}
    for policy, path in responses.items():
        rows = pq.read_table(path).to_pylist()
        expected = {(row_id, kind, draw) for row_id in problems for kind, draw in numbered(config.draws)}
        assert len(rows) == len(expected) and {(r["id"], r["kind"], r["draw"]) for r in rows} == expected
        for row in rows:
            turn = Turn(None, [], row["completion_ids"], row["logprobs"], row["finish_reason"], row["text"])
            row |= {"policy": policy, "tokens": len(turn.completion_ids), **score_turn(turn, problems[row["id"]])}
            row["stratum"] = problems[row["id"]]["stratum"]
        scored += rows
        tables[policy] = {stratum: summary(rows, stratum, config.draws) for stratum in STRATA}
    pq.write_table(pa.Table.from_pylist(scored), folder / "scored.parquet", compression="zstd")
    write_json(folder / SCORES, tables)


def numbered(draws: int) -> list[tuple[str, int]]:
    """Return (kind, draw) of every response to one problem."""
    return [(GREEDY, 0), *((DRAWS, draw) for draw in range(draws))]


def summary(rows: list[dict[str, Any]], stratum: str, draws: int) -> dict[str, Any]:
    """Return counts of one policy on one stratum: greedy over one response each, draws over all of them."""
    rows = [row for row in rows if stratum in ("all", row["stratum"])]
    table = {}
    for kind in (GREEDY, DRAWS):
        of_kind = [row for row in rows if row["kind"] == kind]
        table[kind] = {
            "responses": len(of_kind),
            "correct": int(sum(row["reward"] for row in of_kind)),
            "valid_json": sum(row["valid"] for row in of_kind),
            "without_eos": sum(row["finish_reason"] != "eos" for row in of_kind),
            "mean_tokens": sum(row["tokens"] for row in of_kind) / len(of_kind),
            "reasons": dict(sorted(Counter(row["reason"] for row in of_kind if row["reason"]).items())),
        }
    by_draw = [[r["reward"] for r in rows if r["kind"] == DRAWS and r["draw"] == draw] for draw in range(draws)]
    table[DRAWS]["correct_by_draw"] = [int(sum(rewards)) for rewards in by_draw]
    return table


def compare(
    folder: Path,
    config: LabConfig,
    *,
    straight: Path,
    resumed: Path,
    straight_rollouts: Path | None = None,
    resumed_rollouts: Path | None = None,
) -> None:
    """Compare the final states of the straight and the resumed branch, and their ledgers, value by value."""
    with unpacked_state(straight, folder) as first, unpacked_state(resumed, folder) as second:
        fields, differences = len(checkpoint_fields(first)), compare_states(first, second)
    differences = [line.replace(str(first), "straight").replace(str(second), "resumed") for line in differences]
    result: dict[str, Any] = {"identical": not differences, "fields": fields, "differences": differences}
    if straight_rollouts is not None and resumed_rollouts is not None:
        result["rollouts"] = len(list(straight_rollouts.glob("*.parquet")))
        result["rollouts_identical"] = same_ledgers(straight_rollouts, resumed_rollouts)
        result["identical"] &= result["rollouts_identical"]
    write_json(folder / "comparison.json", result)


def same_ledgers(first: Path, second: Path) -> bool:
    """Whether two ledgers hold the same rollouts and updates to the last bit, their seconds left out."""
    ours, theirs = ledger_tables(first), ledger_tables(second)
    return ours.keys() == theirs.keys() and all(table.equals(theirs[name]) for name, table in ours.items())


def ledger_tables(folder: Path) -> dict[str, Any]:
    """Return the tables of a ledger by file name, without what a resume set aside and without seconds."""
    paths = [path for path in folder.rglob("*.parquet") if not path.parent.name.startswith("abandoned_")]
    tables = {path.name: pq.read_table(path) for path in paths}
    return {
        name: table.drop([column for column in table.column_names if column == "seconds"])
        for name, table in tables.items()
    }
