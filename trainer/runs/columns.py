"""What the ledger holds, column by column: types of its files, and the README's tables (`python -m` prints them)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

VERSION = 1  # of these columns; in the metadata of every file


class Column(NamedTuple):
    """`kind` is a type of Arrow by name, "list<...>" of one, or "by function": a number for each reward function."""

    name: str
    kind: str
    unit: str
    meaning: str


PLACE = (
    Column("id", "string", "", "iteration-group-member-turn"),
    Column("iteration", "int32", "", "rollout collection, from 0"),
    Column("group", "int32", "", "prompt of the iteration, over all processes, from 0"),
    Column("member", "int32", "", "reading of the group, from 0"),
    Column("turn", "int32", "", "turn of the trajectory, from 0"),
)
ROLLOUT = (
    *PLACE,
    Column("row_id", "string", "", "id of the dataset's row"),
    Column("project", "string", "", "project of the row, where it has one"),
    Column("step", "int32", "chunks", "chunk that the turn read, from 1; null for the answer"),
    Column("prompt_ids", "list<int32>", "token ids", "what the model read"),
    Column("prompt_tokens", "int32", "tokens", "how long that is"),
    Column("completion_ids", "list<int32>", "token ids", "what was sampled, the end of text included"),
    Column("behavior_logprobs", "list<float64>", "nats", "log-probability of each when it was sampled"),
    Column("text", "string", "", "the completion as text"),
    Column("finish_reason", "string", "", "eos or length"),
    Column("evidence", "bool", "", "label of the chunk"),
    Column("check", "bool", "", "update gate: whether the candidate was written; null where nothing parsed"),
    Column("candidate", "string", "", "what the update block held"),
    Column("exit", "bool", "", "exit gate: whether reading ends"),
    Column("fault", "string", "", "why the turn did not parse; null where it did"),
    Column("memory", "string", "", "memory after the turn"),
    Column("memory_cut", "bool", "", "whether the candidate was cut at max_memory_tokens"),
    Column("turn_rewards", "by function", "reward", "turn reward of every function, null for not applicable"),
    Column("turn_reward", "float64", "reward", "their weighted sum"),
    Column("turn_advantage", "float64", "reward", "of the turn, against the group at the same step"),
    Column("trajectory_advantage", "float64", "reward", "of the trajectory, against the group"),
    Column("advantage", "float64", "reward", "both mixed by alpha: what is trained"),
    Column("last_evidence", "int32", "chunks", "T*, the last chunk with evidence; null without labels"),
    Column("exit_step", "int32", "chunks", "last chunk that the trajectory read"),
    Column("parsed", "bool", "", "whether every turn of the trajectory parsed"),
    Column("answer", "string", "", "answer of the trajectory"),
    Column("gold", "list<string>", "", "answers of the row"),
    Column("rewards", "by function", "reward", "trajectory reward of every function, null for not applicable"),
    Column("reward", "float64", "reward", "their weighted sum, after strict format"),
    Column("strict_zero", "bool", "", "whether strict format made the reward 0"),
    Column("policy", "string", "", "in an evaluation's file: who read"),
    Column("seconds", "float64", "s", "of the whole rollout's sampling, on this process"),
    Column("policy_digest", "string", "", "digest of the weights that sampled"),
)
UPDATE = (
    *PLACE,
    Column("update", "int32", "", "optimizer step, from 1"),
    Column("tokens", "int32", "tokens", "response tokens of the turn"),
    Column("weight", "float64", "", "of every token of the turn in the objective"),
    Column("ratio_mean", "float64", "", "importance ratio current / behavior, mean over the tokens"),
    Column("ratio_max", "float64", "", "the largest"),
    Column("clip_active", "float64", "share", "tokens whose clipped branch was taken"),
    Column("kl", "float64", "nats", "KL(current || reference), mean over the tokens; null without a reference"),
    Column("entropy", "float64", "nats", "of the current policy, mean over the tokens"),
    Column("surrogate", "float64", "reward", "clipped loss, mean over the tokens"),
    Column(
        "gap_mean", "float64", "nats", "|current - recorded| log-probability, mean; at a first update the behavior gap"
    ),
    Column("gap_max", "float64", "nats", "the largest"),
)
TOKENS = (
    Column("logprobs", "list<float64>", "nats", "log-probability of every token under the current policy"),
    Column("reference_logprobs", "list<float64>", "nats", "and under the reference"),
    Column("token_ratio", "list<float64>", "", "importance ratio of every token"),
    Column("token_kl", "list<float64>", "nats", "KL(current || reference) at every token"),
    Column("token_surrogate", "list<float64>", "reward", "clipped loss of every token"),
    Column("token_clipped", "list<bool>", "", "whether its clipped branch was taken"),
)
TABLES = {
    "`rollouts/iteration_*.parquet`": ROLLOUT,
    "`rollouts/updates/update_*.parquet`": UPDATE,
    "the same, with `ledger: full`": TOKENS,
}


def as_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> pa.Table:
    """Return rows as an Arrow table with the columns' types; a column that no row has is left out.

    Raises KeyError for a value that has no column.
    """
    known = {column.name: column for column in columns}
    unknown = {name for row in rows for name in row} - known.keys()
    if unknown:
        raise KeyError(f"no column of the ledger is named {sorted(unknown)}")
    held = [column for column in columns if any(column.name in row for row in rows)]
    arrays = {column.name: pa.array([row.get(column.name) for row in rows], _type(column, rows)) for column in held}
    return pa.table(arrays, metadata={"turngrpo_ledger": str(VERSION)})


def _type(column: Column, rows: Sequence[Mapping[str, Any]]) -> pa.DataType:
    if column.kind == "by function":
        names = dict.fromkeys(name for row in rows for name in row.get(column.name) or {})
        return pa.struct([(name, pa.float64()) for name in names]) if names else pa.null()
    if column.kind.startswith("list<"):
        return pa.list_(pa.type_for_alias(column.kind[5:-1]))
    return pa.type_for_alias(column.kind)


def markdown() -> str:
    """Return the tables of the README."""
    parts = []
    for name, columns in TABLES.items():
        lines = [f"`{one.name}` | `{one.kind}` | {one.unit} | {one.meaning}" for one in columns]
        lines = [
            "column | type | unit | meaning",
            "--- | --- | --- | ---",
            *(line.replace("||", "\\|\\|") for line in lines),
        ]
        parts.append(f"**{name}**\n\n" + "\n".join(f"| {line} |" for line in lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
