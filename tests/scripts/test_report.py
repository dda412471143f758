"""The page of report.py: its numbers are the ledger's, its text is text, and it fits, whatever it is made from."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report
from datasets import Dataset
from jobs.evaluating import EvaluateArguments
from lib.reporting import RunLog, make_console
from lib.running import SetupError
from page import charts, counting, sources, texts, tiles, turns, writing
from tiny import word_tokenizer
from training import make_trainer

from turngrpo.data_prep import write_corpus
from turngrpo.rewards import answer_reward, exit_reward, update_reward
from turngrpo.trainer import GatedMemory
from turngrpo.trainer.reading.gates import INITIAL_MEMORY, GateDecision
from turngrpo.trainer.runs.columns import ROLLOUT, as_table
from turngrpo.trainer.runs.ledger import read, write_rows

HOSTILE = (
    '</script><script>document.title="owned"</script><img src=x onerror=document.title="owned">{{ 7*7 }} & "\' '
    "\x00\x1b[2J \u202egnitirw\u2066 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u2028 "
    "\U0001f600 \u200b__proto__"
)
SEEN = HOSTILE.replace("\x00", "\\x00").replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
SEEN = SEEN.replace("\u2066", "\\u2066").replace("\u2028", "\\u2028").replace("\u200b", "\\u200b")
BOUNDS = (("low", 0.25), ("high", 0.75))
LABELS = [[True, False, False], [False, True, True], [False, False, False]]


class Parsing(GatedMemory):
    """Takes any reply as gates, by its first token: 0 mod 5 does not parse, an even one writes, 0 mod 3 leaves."""

    def decide(self, turn):
        first = turn.completion_ids[0]
        if first % 5 == 0:
            turn.fault = f"0 mod 5 {HOSTILE}"
            return None
        return GateDecision(first % 2 == 0, f"red {HOSTILE}", first % 3 == 0)


def corpus_rows():
    chunk = f"code of red is {HOSTILE}"
    return [
        {
            "id": "__proto__" if i == 0 else f"r{i} {HOSTILE}",
            "project": f"p{i % 2} {HOSTILE}",
            "question": f"code of red {HOSTILE}",
            "answers": ["1", HOSTILE],
            "chunks": [{"text": f"{k} {chunk}", "evidence": label} for k, label in enumerate(LABELS[i % 3])],
        }
        for i in range(6)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a full ledger, two updates on each rollout, and everything that train.py leaves."""
    folder = tmp_path_factory.mktemp("run") / "out"
    folder.mkdir()
    manifest = {"format": "turngrpo-corpus/1", "name": f"hostile {HOSTILE}", "created": "2026-05-01"}
    manifest |= {"label_source": "computed", "license": "CC0-1.0"}
    write_corpus(folder / "corpus.jsonl", manifest, corpus_rows())
    trainer = make_trainer(
        folder,
        Parsing(),
        dataset=Dataset.from_list(corpus_rows()),
        reward_funcs=[answer_reward, exit_reward],
        turn_reward_funcs=update_reward,
        callbacks=[RunLog(folder / "metrics.jsonl", make_console())],
        **{"num_iterations": 2, "max_steps": 4, "beta": 0.1, "alpha": 0.5, "max_prompt_length": 900},
        ledger="full",
    )
    trainer.train()
    word_tokenizer().save_pretrained(folder / "model")
    corpus = manifest | {"digest": sources.ledger.sha256(folder / "corpus.jsonl")}
    files = {"corpus": str(folder / "corpus.jsonl"), "model": HOSTILE}
    (folder / "run.json").write_text(json.dumps({"files": files, "corpus": corpus, "config": {"note": HOSTILE}}))
    policies = {
        f"before {HOSTILE}": {"metrics": {"reward": 0.125}, "intervals": {"reward": [0.0625, 0.25]}, "seconds": 1.5},
        "after": {"metrics": {"reward": 0.875, "kl": 0.0078125}, "intervals": {}, "seconds": 2.5},
    }
    summary = {"policies": policies, "seconds": {"training": 12.25}, "converged": {"slope": 0.03125, "who": HOSTILE}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def written(source, output, *more):
    assert report.main(["--run", str(source), "--output", str(output), *map(str, more)]) == 0
    return output.read_text(encoding="utf-8")


class Page(HTMLParser):
    """The tables of a page by the heading before them, its elements, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.attributes, self.text, self.heading = {}, Counter(), [], "", ""
        self.open, self.cell, self.raw = [], None, {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.attributes += [name for name, _ in attributes]
        self.open.append(tag)
        if tag in ("h2", "h3", "h4"):
            self.heading = ""
        if tag == "table":
            self.rows = self.tables.setdefault(self.heading, [])
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            self.raw[self.open[-1]] = self.raw.get(self.open[-1], []) + [data]
            return
        self.text += data
        if {"h2", "h3", "h4"} & set(self.open):
            self.heading += data
        elif {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def table(self, heading):
        return {row[0].strip(): [" ".join(cell.split()) for cell in row[1:]] for row in self.tables[heading]}


def embedded(page):
    packed = re.search(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>', page)[1]
    lines = gzip.decompress(base64.b64decode(packed)).decode().split("\n")
    batches = [json.loads(line) for line in lines if line]
    data = {"rows": {}, "texts": [], "tokens": {}, "trajectories": []}
    for batch in batches:
        data["trajectories"] += batch["trajectories"]
        data["texts"] += batch.get("texts", [])
        data["rows"] |= batch.get("rows", {})
        data["tokens"] |= batch.get("tokens", {})
    return data


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    return written(run, tmp_path_factory.mktemp("page") / "page.html")


def short(values):
    return [value if isinstance(value, bool) else float(f"{value:.3g}") for value in values]


# ---- numbers ----


def test_every_number_of_every_turn_is_the_ledgers(run, page):
    data = embedded(page)
    shown = {turn["id"]: (one, turn) for one in data["trajectories"] for turn in one["turns"]}
    table, seen = read(run).to_pylist(), set()
    for row in table:
        one, turn = shown[row["id"]]
        for name in turns.OF_TRAJECTORY:
            assert one[name] == row[name], (row["id"], name)
        for name in set(turns.OF_TURN) - {"prompt_ids"}:
            assert turn[name] == (short(row[name]) if name in turns.OF_TOKENS else row[name]), (row["id"], name)
        (update,) = [update for update in turn["updates"] if update["update"] == row["update"]]
        for name in turns.OF_UPDATE:
            assert update[name] == (short(row[name]) if name in turns.OF_TOKENS else row[name]), (row["id"], name)
        seen.add((row["id"], row["update"]))
    assert len(seen) == sum(len(turn["updates"]) for _, turn in shown.values()) == 2 * len(shown)
    assert {len(one["behavior_logprobs"]) for _, one in shown.values()} >= {6}


def test_the_verdicts_are_those_of_the_labels(run, page):
    """By hand from the ledger's own columns: skipped with evidence, written without, T* against the exit."""
    counts, exits = Counter(), Counter()
    rows = {
        row["id"]: row
        for row in read(
            run, ["fault", "step", "evidence", "check", "exit_step", "last_evidence", "parsed"]
        ).to_pylist()
    }
    for one in embedded(page)["trajectories"]:
        last = max(turn["step"] or 0 for turn in one["turns"])
        for turn in one["turns"]:
            row = rows[turn["id"]]
            expected = [
                kind
                for kind, holds in {
                    "unparsed": row["fault"] is not None,
                    "wrongly skipped": row["evidence"] is True and row["check"] is False,
                    "wrongly written": row["evidence"] is False and row["check"] is True,
                    "left early": turn["step"] == last and row["exit_step"] < row["last_evidence"],
                    "left late": turn["step"] == last and row["exit_step"] > row["last_evidence"],
                }.items()
                if holds
            ]
            assert sorted(turn["faults"]) == sorted(expected), turn["id"]
            counts.update(expected)
        exits[one["leaving"]] += 1
    assert min(counts[name] for name in turns.FAULTS) > 0, counts  # the run has every fault
    assert counts["left early"] == exits["left early"] and counts["left late"] == exits["left late"]


def share(count, total):
    return f"{count / total:.0%} {count}/{total}" if total else ""


def test_the_tables_count_all_turns(run, page):
    rows = list({row["id"]: row for row in read(run).to_pylist()}.values())
    lines = Page(page).table("By iteration")
    assert lines.keys() == {"iteration", "0", "1"}
    for iteration in (0, 1):
        own = [row for row in rows if row["iteration"] == iteration]
        readings = {(row["group"], row["member"]): row for row in own}.values()
        evidence = [row for row in own if row["evidence"] is True]
        free = [row for row in own if row["evidence"] is False]
        assert lines[str(iteration)] == [
            f"{sum(row['reward'] for row in readings) / len(readings):.4g}",
            share(sum(row["check"] is False for row in evidence), len(evidence)),
            share(sum(row["check"] is True for row in free), len(free)),
            share(sum(row["exit_step"] < row["last_evidence"] for row in readings), len(readings)),
            share(sum(row["exit_step"] > row["last_evidence"] for row in readings), len(readings)),
            share(sum(row["fault"] is not None for row in own), len(own)),
        ]
    made = Page(page).table("What the reward is made of")
    means = [
        counting.mean(r["rewards"]["exit_reward"] for r in rows if r["iteration"] == i and r["turn"] == 0)
        for i in (0, 1)
    ]
    assert made["exit_reward"] == [f"{means[0]:.4g}", f"{means[1]:.4g}", f"{means[1] - means[0]:+.3f}"]


def test_policies_curves_costs_and_outcome_are_those_of_the_files(run, page):
    found = Page(page)
    policies = found.table("Policies")
    assert policies["after"][0] == "0.875" and policies[f"before {SEEN}"][0] == "0.1250.06 – 0.25"
    assert "0.007812" in found.table("Policies")["kl"][1]  # in the table of all metrics
    logs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [log["reward"] for log in logs if "reward" in log]
    assert f"training {rewards[0]:.4g} → {rewards[-1]:.4g}" in found.text
    assert found.table("stages")["training"] == ["12.25 s", ""]
    spent = sum(log.get("tokens/generation", 0) for log in logs if "train_runtime" not in log)
    assert found.table("updates")["tokens/generation"][0] == f"{spent:,.0f}" and spent > 0
    assert "converged · slope" in found.text and "0.03125" in found.text
    assert page.count("<svg") >= 10 and "finished, 4 updates" in found.text


def test_curves_have_the_intervals_that_were_logged():
    logs = [{"update": n, "eval_reward": 0.5} | {f"eval_interval/reward/{s}": v for s, v in BOUNDS} for n in (1, 2)]
    bare = [{"update": log["update"], "eval_reward": 0.5} for log in logs]
    before = {"before": {"metrics": {"reward": 0.25}, "intervals": {"reward": [0.125, 0.5]}}}
    assert list(charts.curves(logs)) == ["reward"] and charts.ends(logs, "reward") == "validation 0.5 → 0.5"
    bands = [charts.curves(history)["reward"].count("fill-opacity: 0.15") for history in (logs, bare)]
    assert bands[0] > bands[1] == 0
    assert len(charts.curves(bare, before)["reward"]) > len(charts.curves(bare)["reward"])


def test_kinds_of_chunks_by_hand():
    turn = lambda step, evidence: {"step": step, "evidence": evidence}  # noqa: E731
    read_turns = [turn(1, False), turn(2, True), turn(3, False), turn(9, True), turn(10, False), turn(None, None)]
    assert turns.chunk_kinds(read_turns, 9) == [
        ["before any evidence", "chunk 1"],
        ["evidence before others", "chunk 2"],
        ["between evidence", "chunk 3"],
        ["last evidence", "after chunk 8"],
        ["after the last evidence", "after chunk 8"],
        [],
    ]
    assert turns.chunk_kinds([turn(2, True)], 2) == [["the only evidence", "chunk 2"]]
    assert turns.chunk_kinds([turn(1, None)], None) == [[]]


def reading(checks, exits, labels, **more):
    """A reading of len(checks) chunks; its T* is the last evidence."""
    told = zip(checks, exits, labels, strict=False)
    read_turns = [
        {"step": step, "check": check, "exit": leaves, "evidence": label, "faults": [], "kinds": [], "verdict": ""}
        for step, (check, leaves, label) in enumerate(told, 1)
    ]
    last = (
        max((step for step, label in enumerate(labels, 1) if label), default=len(labels))
        if labels[0] in (0, 1)
        else None
    )
    place = {"source": "", "iteration": 0, "project": "p", "leaving": None, "parsed": True, "last_evidence": last}
    return place | {"turns": read_turns} | more


def test_how_often_gates_open_by_hand():
    """Evidence in chunks 1 and 3 of 4. Not parsed: chunk 2 of the second. The end of the document is no decision."""
    told = [
        reading([True, False, True, True], [False, False, True, False], [True, False, True, False]),
        reading([False, None, True, False], [False, None, False, False], [True, False, True, False]),
    ]
    found = counting.gates(told)
    share = counting.Share
    assert found["update"] == counting.Gate(share(3, 4), share(1, 3), share(4, 7))
    # at T* = 3: left once, once not; before it never in 3 turns that parsed; chunk 4 is the document's last
    assert found["exit"] == counting.Gate(share(1, 2), share(0, 3), share(1, 5))
    assert counting.warnings("here", told) == []
    assert counting.gates([reading([None], [None], [None])]) == {}  # a workflow without gates


@pytest.mark.parametrize(
    ("checks", "exits", "labels", "said"),
    [
        ("nnn", "nnn", [0, 1, 0], ["the update gate never opens (0 of 60", "the exit gate never opens (0 of 40"]),
        ("yyy", "nyn", [0, 1, 0], ["the update gate always opens (60 of 60"]),
        ("y", "y", [1, 0, 1], ["the exit gate always opens (20 of 20"]),
        ("nyn", "nyn", [0, 1, 0], []),
        ("nn", "nn", [0, 0], []),  # no evidence: T* is the end, both are right
        ("y", "y", [1], []),
        ("nn", "nn", [None, None], ["the update gate never opens (0 of 40", "the exit gate never opens (0 of 20"]),
    ],
)
def test_a_gate_that_decides_nothing_is_said(checks, exits, labels, said):
    """Where nothing is written, two of three chunks are right: an update accuracy of .67 that is no success."""
    labels = [None if label is None else bool(label) for label in labels]
    one = reading([c == "y" for c in checks], [c == "y" for c in exits], labels)
    told = counting.warnings("iteration 3", [one] * 20)
    assert [line.removeprefix("iteration 3: ").split(" turns that parsed")[0] for line in told] == said
    assert "almost" not in "".join(told)
    if said and "update" in said[0] and labels[0] is not None:
        wrong = reading([not turn["check"] for turn in one["turns"]], [c == "y" for c in exits], labels)
        (told, *_) = counting.warnings("iteration 3", [one] * 39 + [wrong])
        assert "gate almost" in told
        assert not [line for line in counting.warnings("", [one] * 15 + [wrong]) if "update" in line]  # 6% otherwise


def test_what_is_wrong_as_a_whole_stands_at_the_top():
    collapsed = reading([False, False], [False, True], [False, True], iteration=1)
    everything = [reading([False, True], [False, True], [False, True]), collapsed, collapsed | {"parsed": False}]
    (line,) = tiles.warnings(everything)  # of the last iteration alone
    assert line.startswith("iteration 1: the update gate never opens (0 of 4 turns that parsed), whatever it reads")
    mute = [collapsed | {"parsed": False}] * 2
    assert tiles.warnings([*everything, *mute])[0].startswith("iteration 1: 1 of 4 readings parse")
    forced = [one | {"source": source, "iteration": -1} for source in ("always no", "adapter") for one in everything]
    assert [line.split(":")[0] for line in tiles.warnings(forced[3:])] == []
    assert tiles.warnings([collapsed | {"source": "always no"}]) == []
    found = sources.Found("training", Path("run"))
    found.history = {"": [{"update": n, "update_accuracy/balanced": v, "update_accuracy/evidence": v - 0.5,
                           "update_accuracy/evidence_free": v + 0.25} for n, v in ((1, 0.75), (2, 0.5))]}  # fmt: skip
    shown = {tile.label: tile.numbers for tile in tiles.tiles(found, everything)}
    accuracies = [("balanced", "0.75 → 0.50"), ("evidence", "0.25 → 0.00"), ("evidence-free", "1.00 → 0.75")]
    assert shown["update accuracy"] == accuracies
    assert shown["gates open"] == [("update gate", "50% → 0%"), ("exit gate", "50% → 50%")]


def test_a_project_has_a_row_where_it_was_read_in_a_part_that_is_shown():
    """Of ten iterations the first and the last two are shown: "forest", read in the fifth, has nothing to say."""
    everything = [
        reading([True], [True], [True], iteration=i, project="forest" if i == 5 else "farm") for i in range(10)
    ]
    assert list(writing.tables(everything)["projects"]) == ["farm"]


# ---- texts ----


def test_hostile_text_is_text(page):
    found = Page(page)
    assert found.tags["script"] == 2 and found.tags["img"] == found.tags["iframe"] == 0
    assert not [
        name for name in found.attributes if name.startswith("on") or name in ("href", "src") and name == "src"
    ]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert (
        policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy.split("style-src")[0]
    )
    assert found.raw["script"][1].startswith('"use strict"') and not re.search(
        r"innerHTML|insertAdjacent|eval\(", found.raw["script"][1]
    )
    assert SEEN in found.text and f"p0 {SEEN}" in found.table("By project") and HOSTILE not in page
    assert not set(found.text) & set(HOSTILE[HOSTILE.index("\x00") :]) & {"\x00", "\x1b", "\u202e", "\u2066", "\u2028"}
    assert "49" not in found.table("By project")


def test_chunks_prompts_and_memories_are_what_was_read(run, page):
    data, rows = embedded(page), {row["id"]: row for row in read(run).to_pylist()}
    corpus = {row["id"]: row for row in corpus_rows()}
    tokenizer, with_chunk = word_tokenizer(), 0
    for one in data["trajectories"]:
        chunks = data["rows"][one["row_id"]]["chunks"]
        assert [data["texts"][chunk["text"]] for chunk in chunks] == [
            c["text"] for c in corpus[one["row_id"]]["chunks"]
        ]
        assert [chunk["evidence"] for chunk in chunks] == [c["evidence"] for c in corpus[one["row_id"]]["chunks"]]
        before = INITIAL_MEMORY
        for turn in one["turns"]:
            assert turn["memory_before"] == before
            before = turn["memory"]
            parts = {"chunk": data["texts"][chunks[(turn["step"] or 1) - 1]["text"]], "memory": turn["memory_before"]}
            text = "".join(parts[p] if isinstance(p, str) else data["texts"][p] for p in turn["prompt"])
            assert text == tokenizer.decode(rows[turn["id"]]["prompt_ids"])
            with_chunk += "chunk" in turn["prompt"]
    assert with_chunk == 0  # the word tokenizer knows no hostile word: its prompts hold <unk> instead of the chunk


def test_parts_of_a_prompt():
    store = texts.Texts()
    ids = word_tokenizer()("code of red is 1 No memory yet . code of red")["input_ids"]
    text, other = word_tokenizer().decode(ids), word_tokenizer().decode(ids[:2])
    assert texts.decoded(word_tokenizer()._tokenizer, [ids, None, ids[:2], ids]) == [text, None, other, text]
    chunk, memory = text[: text.index("1") + 1], "No" + text.partition("No")[2].partition("code")[0]
    assert texts.prompt_parts(text, chunk, memory, store) == ["chunk", "memory", 0]
    assert store.all == [text.removeprefix(chunk + memory)]
    assert texts.prompt_parts(text, "not there", None, store) == [1] and store.all[1] == text


def test_documents_are_cut_as_the_run_did_and_spans_are_counted_as_javascript_does(tmp_path):
    document = "\U0001f600 code of red is 1 no code of blue"
    row = {"id": "d", "project": "p", "question": "q", "answers": ["1"], "document": document}
    start = document.index("red")
    row["evidence_spans"] = [[start, document.index(" no")]]
    (tmp_path / "c.jsonl").write_text(json.dumps({"format": "x"}) + "\n" + json.dumps(row) + "\n")
    word_tokenizer("\U0001f600").save_pretrained(tmp_path)
    found = sources.Found("training", tmp_path, config={"trainer": {"chunk_size": 4}})
    found.corpus_file, found.tokenizer = tmp_path / "c.jsonl", tmp_path / "tokenizer.json"
    chunks = texts.corpus_rows(found, {"d"})["d"]["chunks"]
    assert "".join(chunk["text"] for chunk in chunks) == document
    assert [chunk["evidence"] for chunk in chunks] == [True, True, False]
    first = chunks[0]["text"].encode("utf-16-le")
    (span,) = chunks[0]["spans"]
    assert first[2 * span[0] : 2 * span[1]].decode("utf-16-le").strip() == "red"
    assert span[0] == start + 1  # the smiling face is two units in UTF-16
    (span,) = chunks[1]["spans"]
    assert chunks[1]["text"][: span[1]] == "is 1" or chunks[1]["text"][: span[1]] == " is 1"
    assert chunks[2]["spans"] == [] and found.notes == []


def test_another_corpus_is_not_taken_for_the_runs(run, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text((run / "corpus.jsonl").read_text() + "\n")
    found = sources.find(run, str(other))
    assert texts.corpus_rows(found, {"__proto__"}) == {}
    assert found.notes == [
        "other.jsonl is not the corpus that the run read (SHA-256); chunks are shown inside their prompts."
    ]


# ---- what the page is made from ----


def test_a_run_that_goes_on(run, page, tmp_path):
    going = tmp_path / "going"
    shutil.copytree(run, going)
    (going / "summary.json").unlink()
    (going / "run.json").unlink()
    (going / "rollouts" / "updates" / "update_00004.parquet").unlink()
    (going / "rollouts" / "iteration_00002.partial").write_bytes(b"PAR1")
    with open(going / "metrics.jsonl", "a") as file:
        file.write('{"update": 5, "rew')
    shown = written(going, tmp_path / "page.html")
    assert "going on or ended early" in shown and "There is no summary.json" in shown
    updates = Counter(len(turn["updates"]) for one in embedded(shown)["trajectories"] for turn in one["turns"])
    assert set(updates) == {1, 2}  # of the second rollout the first update alone
    shutil.rmtree(going / "rollouts" / "updates")
    found = sources.find(going)
    without = turns.whole(found, turns.overview(found))
    assert [one["reward"] for one in without] == [one["reward"] for one in embedded(page)["trajectories"]]
    assert not any("updates" in turn for one in without for turn in one["turns"])
    shutil.rmtree(going / "rollouts")
    assert "no trajectories" in " ".join(sources.find(going).notes)


@pytest.fixture
def evaluation(run, tmp_path):
    """Both files of an evaluation of two policies, whose turns are those of the run."""
    known = {column.name for column in ROLLOUT}
    once = {row["id"]: row for row in read(run).to_pylist()}.values()
    rows = [
        {name: value for name, value in row.items() if name in known} | {"policy": policy}
        for policy in ("model", "base")
        for row in once
    ]
    policies = {
        name: {"metrics": {"reward": 0.5}, "intervals": {"reward": [0.25, 0.75]}, "seconds": 3.0}
        for name in ("base", "model")
    }
    options = vars(EvaluateArguments()) | {"corpus": str(run / "corpus.jsonl"), "model": str(run / "model")}
    kept = {
        "options": options | {"trajectories": "elsewhere/rows.parquet"},
        "corpus_digest": sources.ledger.sha256(run / "corpus.jsonl"),
        "rows": 6,
        "policies": policies,
        "model_minus_base": {"reward": {"difference": 0.0, "interval": [-0.375, 0.4375]}},
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(kept))
    write_rows(rows, tmp_path / "rows.parquet")
    lines = [json.dumps(row) for row in as_table(rows, ROLLOUT).to_pylist()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_an_evaluation_from_any_of_its_files(run, page, evaluation):
    pages = {
        name: written(evaluation / name, evaluation / "page.html")
        for name in ("evaluation.json", "rows.parquet", "rows.jsonl")
    }
    shown = {name: embedded(text) for name, text in pages.items()}
    assert shown["evaluation.json"] == shown["rows.parquet"]
    trajectories = shown["rows.parquet"]["trajectories"]
    for one in trajectories:
        for turn in one["turns"]:
            assert turn.pop("prompt")
    assert shown["rows.jsonl"]["trajectories"] == trajectories  # without the JSON file no tokenizer is known
    assert [one["source"] for one in trajectories] == ["model"] * (len(trajectories) // 2) + ["base"] * (
        len(trajectories) // 2
    )
    assert [one["reward"] for one in trajectories[len(trajectories) // 2 :]] == [
        one["reward"] for one in embedded(page)["trajectories"]
    ]
    assert "-0.375 – 0.4375" in pages["rows.parquet"] and shown["rows.parquet"]["rows"]
    assert "JSON file is not beside" in pages["rows.jsonl"]  # which names the Parquet file alone


def many(run, folder, count):
    """Write a ledger of `count` readings of the run, and let all but every 13th skip evidence."""
    known = {column.name for column in ROLLOUT}
    readings = {}
    for row in read(run).to_pylist():
        if row["iteration"] == row["group"] == 0:
            kept = {name: value for name, value in row.items() if name in known}
            readings.setdefault(row["member"], {})[row["turn"]] = kept
    rows = []
    for number in range(count):
        place = {"iteration": 0, "group": number // 4, "member": number % 4}
        for turn, row in readings[number % 4].items():
            right = {"fault": None, "evidence": True, "check": number % 13 == 0, "last_evidence": 1, "exit_step": 1}
            named = {"id": f"0-{place['group']}-{place['member']}-{turn}", **place, "parsed": True}
            rows.append(row | named | (right if row["step"] else {"fault": None, "last_evidence": 1, "exit_step": 1}))
    folder.mkdir()
    write_rows(rows, folder / "rollouts" / "iteration_00000.parquet")


def test_more_than_fit_are_chosen_by_the_rule(run, tmp_path):
    """Of 1,200 readings every 13th, 93 in all, has no fault: the 1,107 others come before them."""
    many(run, tmp_path / "big", 1200)
    overview = turns.overview(sources.find(tmp_path / "big"))
    faulty = {turns.key_of(one) for one in overview if turns.is_faulty(one)}
    assert len(overview) == 1200 and len(faulty) == 1107
    shown = written(tmp_path / "big", tmp_path / "page.html")
    assert len(shown.encode()) <= 20e6 and "Shown are 1000 of 1200: those with a fault first" in Page(shown).text
    chosen = {turns.key_of(one) for one in embedded(shown)["trajectories"]}
    assert len(chosen) == 1000 and chosen < faulty
    assert {turns.key_of(one) for one in turns.choose(overview, 1000)} == chosen  # the same every time
    more = {turns.key_of(one) for one in turns.choose(overview, 1150)}
    assert len(more) == 1150 and more > faulty
    small = written(tmp_path / "big", tmp_path / "small.html", "--megabytes", "0.1")
    assert len(small.encode()) <= 1e5
    part = {turns.key_of(one) for one in embedded(small)["trajectories"]}
    assert 100 < len(part) < 1000 and part < chosen


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({}, "holds no rollouts/, metrics.jsonl or summary.json: expected the output_dir of train.py"),
        ({"summary.json": "[1]"}, "summary.json holds a list: expected a JSON object"),
        (
            {"rollouts/iteration_00000.parquet": "no"},
            "iteration_00000.parquet is no file of a ledger: expected Parquet",
        ),
    ],
)
def test_what_is_no_run_is_named(tmp_path, made, message):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in made.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(SetupError, match=message):
        report.main(["--run", str(folder)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--run", "nowhere"], "--run is 'nowhere': there is no such file or folder"),
        (["--run", __file__], "expected the output_dir of train.py"),
        (["--run", ".", "--trajectories", "0"], "--trajectories is 0"),
        (["--run", ".", "--megabytes", "0"], "--megabytes is 0.0"),
    ],
)
def test_wrong_options_are_named(given, message):
    with pytest.raises(SetupError, match=re.escape(message)):
        report.main(given)


# ---- in a browser, where there is one ----


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_a_browser_shows_hostile_text_as_text(page, tmp_path):
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    one = next(one for one in embedded(page)["trajectories"] if len(one["turns"]) > 1 and one["row_id"] != "__proto__")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    url = f"file://{tmp_path / 'page.html'}#turn={one['turns'][0]['id']}"
    command = ["chromium", *options, "--virtual-time-budget=10000", "--dump-dom", url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = Page(shown)
    assert "<title>out – training</title>" in shown and found.tags["img"] == 0 and found.tags["script"] == 2
    panel = Page(shown[shown.index("<aside") : shown.index("</aside>")])
    assert f"0 code of red is {SEEN}" in panel.text and f"code of red {SEEN}" in panel.text
    assert panel.tags["bdi"] >= 2 and panel.tags["mark"] >= 1
    assert found.tags["section"] > len({(t["iteration"], t["group"]) for t in embedded(page)["trajectories"]})
