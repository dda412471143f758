"""Driving a workflow with an engine: who takes part when, with which noise, and how completions become text."""

from types import SimpleNamespace

import pytest
from test_workflows import BYTES, byte_tokenizer
from tiny import tiny_model, word_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from turngrpo.trainer.forward.policy import Policy
from turngrpo.trainer.reading.gates import GateDecision
from turngrpo.trainer.reading.rollout import Completion, NoiseKey, Turn, collect, decode_completion, row_name
from turngrpo.trainer.reading.workflows import GatedMemory, MemAgent, SingleTurn
from turngrpo.trainer.sampling.transformers_engine import TransformersEngine

END = BYTES.eos_token_id


def reply(check="yes", candidate="m", next="continue"):
    return f"<check>{check}</check>\n<update>{candidate}</update>\n<next>{next}</next>"


class Scripted:
    """An engine that says what its script holds for (group, member), turn by turn, and keeps what it was asked."""

    def __init__(self, script):
        self.script, self.calls = script, []

    def generate(self, requests):
        self.calls.append(list(requests))
        completions = []
        for request in requests:
            text = self.script[request.key.group, request.key.member][request.key.turn]
            text, finish = text if isinstance(text, tuple) else (text, "eos")
            ids = BYTES(text)["input_ids"] + [END] * (finish == "eos")
            # A log-probability that tells whose it is: group, member, turn as digits.
            value = -(request.key.group * 100 + request.key.member * 10 + request.key.turn)
            completions.append(Completion(ids, [float(value)] * len(ids), finish))
        return completions


def row(name, *chunks, evidence=()):
    pieces = [{"text": text, "evidence": k in evidence} for k, text in enumerate(chunks, start=1)]
    return {"id": name, "question": f"question {name}", "answers": ["red"], "chunks": pieces}


LONG, SHORT = row("A", "alpha one", "alpha two", "alpha three", evidence=(2,)), row("B", "beta one")
SCRIPT = {
    (4, 0): [reply("yes", "left early", "end"), "\\boxed{red}"],
    (4, 1): [reply("yes", "first"), "no format", reply("no", "unused"), "\\boxed{blue}"],
    (9, 0): [(reply("yes", "cut"), "length"), ("\\boxed{red}", "length")],
    (4, 2): [reply("no", ""), reply("yes", "second"), reply("yes", "third", "end"), "red"],
}
ORDER = [(LONG, 4, 0), (LONG, 4, 1), (SHORT, 9, 0), (LONG, 4, 2)]


def run(workflow=None, order=ORDER, max_memory_tokens=1024, script=SCRIPT, **options):
    workflow = workflow or GatedMemory()
    workflow.bind(BYTES, SimpleNamespace(chat_template_kwargs=None, max_memory_tokens=max_memory_tokens))
    engine = Scripted(script)
    rows, groups, members = (list(column) for column in zip(*order, strict=True))
    return collect(workflow, engine, BYTES, rows, groups, members, seed=7, iteration=3, **options), engine


def prompts(trajectory):
    return [BYTES.decode(turn.prompt_ids) for turn in trajectory.turns]


# ---- who takes part, and with which noise ----


def test_noise_keys_after_early_exits():
    _, engine = run()
    assert [[r.key for r in call] for call in engine.calls] == [
        [NoiseKey(7, 3, 4, 0, 0), NoiseKey(7, 3, 4, 1, 0), NoiseKey(7, 3, 9, 0, 0), NoiseKey(7, 3, 4, 2, 0)],
        [NoiseKey(7, 3, 4, 0, 1), NoiseKey(7, 3, 4, 1, 1), NoiseKey(7, 3, 9, 0, 1), NoiseKey(7, 3, 4, 2, 1)],
        # (4, 0) and (9, 0) have answered. Counted by place in the batch, (4, 2) would be member 1 now.
        [NoiseKey(7, 3, 4, 1, 2), NoiseKey(7, 3, 4, 2, 2)],
        [NoiseKey(7, 3, 4, 1, 3), NoiseKey(7, 3, 4, 2, 3)],
    ]
    assert [r.label for r in engine.calls[2]] == ["row 'A'", "row 'A'"]


def test_progress_is_reported_before_every_call():
    seen = []
    run(on_turn=lambda turn, active: seen.append((turn, active)))
    assert seen == [(0, 4), (1, 4), (2, 2), (3, 2)]


def test_turns_are_unequal_and_stay_with_their_trajectory():
    trajectories, _ = run()
    assert [(t.group, t.member, t.row["id"]) for t in trajectories] == [
        (4, 0, "A"),
        (4, 1, "A"),
        (9, 0, "B"),
        (4, 2, "A"),
    ]
    assert [[turn.step for turn in t.turns] for t in trajectories] == [
        [1, None],
        [1, 2, 3, None],
        [1, None],
        [1, 2, 3, None],
    ]
    # After the first exits the rows of the batch moved up; what each was told and said did not.
    assert [[turn.behavior_logprobs[0] for turn in t.turns] for t in trajectories] == [
        [-400.0, -401.0],
        [-410.0, -411.0, -412.0, -413.0],
        [-900.0, -901.0],
        [-420.0, -421.0, -422.0, -423.0],
    ]
    for t in trajectories:
        script = [s if isinstance(s, tuple) else (s, "eos") for s in SCRIPT[t.group, t.member]]
        assert [(turn.text, turn.finish_reason) for turn in t.turns] == script
        assert all(turn.completion_ids[-1] == END for turn in t.turns if turn.finish_reason == "eos")


def test_every_turn_has_its_own_context():
    trajectories, _ = run()
    texts = prompts(trajectories[1])
    for step, text in enumerate(texts[:3], start=1):
        names = {name for name in ("alpha one", "alpha two", "alpha three") if name in text}
        assert names == {("alpha one", "alpha two", "alpha three")[step - 1]}
        assert text.count("<check>") == 1  # the instruction's; no earlier completion is in the prompt
    assert "alpha" not in texts[3] and "<check>" not in texts[3] and "question A" in texts[3]
    assert "beta" not in "".join(texts) and "question B" in prompts(trajectories[2])[0]


def test_memory_follows_the_gates():
    trajectories, _ = run()

    def memories(trajectory):
        return [text.split("<memory>\n")[1].split("\n</memory>")[0] for text in prompts(trajectory)]

    assert memories(trajectories[0]) == ["No memory yet.", "left early"]
    # Unparsed at 2 and check=no at 3 keep what check=yes wrote at 1; "unused" is never seen.
    assert memories(trajectories[1]) == ["No memory yet.", "first", "first", "first"]
    assert memories(trajectories[2]) == ["No memory yet.", "No memory yet."]  # cut by length: not written
    assert memories(trajectories[3]) == ["No memory yet.", "No memory yet.", "second", "third"]
    assert [t.memory for t in trajectories] == ["left early", "first", "No memory yet.", "third"]
    assert [t.memory_tokens for t in trajectories] == [
        len(BYTES(text)["input_ids"]) for text in ("left early", "first", "No memory yet.", "third")
    ]


def test_outcome_of_every_trajectory():
    trajectories, _ = run()
    assert [t.exit_step for t in trajectories] == [1, 3, 1, 3]
    assert [t.last_evidence for t in trajectories] == [2, 2, 1, 2]  # B has no evidence: its last chunk
    # (4, 1) had an unparsed turn; (9, 0) was cut by length, its answer too; (4, 2) did not box its answer.
    assert [t.parsed for t in trajectories] == [True, False, False, False]
    assert [t.answer for t in trajectories] == ["red", "blue", None, None]
    assert [[turn.evidence for turn in t.turns] for t in trajectories[:2]] == [
        [False, None],
        [False, True, False, None],
    ]
    assert trajectories[1].turns[0].decision == GateDecision(True, "first", False)
    assert trajectories[1].turns[1].decision is None and trajectories[2].turns[0].decision is None
    # The last turn's prompt in TRL's form.
    assert [t.prompt[0]["role"] for t in trajectories] == ["user"] * 4
    assert (
        "question A" in trajectories[0].prompt[0]["content"] and "left early" in trajectories[0].prompt[0]["content"]
    )


def test_states_are_fresh_at_every_call():
    workflow = GatedMemory()
    first, _ = run(workflow)
    second, _ = run(workflow)
    assert [prompts(t) for t in second] == [prompts(t) for t in first]
    assert [t.memory for t in second] == ["left early", "first", "No memory yet.", "third"]
    assert [len(t.turns) for t in second] == [2, 4, 2, 4]


def test_a_trajectory_is_the_same_alone():
    together, _ = run()
    for index, one in enumerate(ORDER):
        (alone,), _ = run(order=[one])
        assert alone.turns == together[index].turns and alone.memory == together[index].memory


def test_ungated_reading_ignores_the_gates():
    script = {(4, 0): [reply("no", "x", "end"), "note two", "note three", "\\boxed{red}"]}
    (trajectory,), engine = run(MemAgent(), ORDER[:1], script=script)
    assert (trajectory.exit_step, trajectory.memory, trajectory.answer) == (3, "note three", "red")
    assert reply("no", "x", "end") in BYTES.decode(engine.calls[1][0].prompt_ids)


def test_candidate_is_cut_and_counted():
    script = {(4, 0): [reply("yes", "red " * 30), reply("no", "red " * 30, "end"), "\\boxed{red}"]}
    (trajectory,), engine = run(order=ORDER[:1], max_memory_tokens=5, script=script)
    assert [turn.memory_cut for turn in trajectory.turns] == [True, False, False]
    assert (trajectory.memory, trajectory.memory_tokens) == ("red red red red red", 5)
    assert "<memory>\nred red red red red\n</memory>" in BYTES.decode(engine.calls[1][0].prompt_ids)
    assert trajectory.parsed  # cut, not refused


def test_single_turn():
    workflow = SingleTurn()
    workflow.bind(BYTES, SimpleNamespace(chat_template_kwargs=None))
    rows = [{"prompt": "hello"}, {"prompt": [{"role": "user", "content": "world"}]}]
    engine = Scripted({(0, 0): ["one"], (1, 0): ["two"]})
    first, second = collect(workflow, engine, BYTES, rows, [0, 1], [0, 0], seed=0, iteration=0)
    assert (first.prompt, second.prompt) == ("hello", rows[1]["prompt"])
    assert [t.turns[0].text for t in (first, second)] == ["one", "two"] and len(engine.calls) == 1
    assert (first.memory, first.exit_step, first.last_evidence, first.answer, first.parsed) == (None,) * 4 + (True,)
    assert first.turns[0].step == 1 and first.turns[0].prompt_ids == BYTES("hello")["input_ids"]


def test_a_real_engine_reads_to_the_end():
    tokenizer = word_tokenizer("alpha beta one two three")
    workflow = GatedMemory()
    workflow.bind(tokenizer, SimpleNamespace(chat_template_kwargs=None, max_memory_tokens=16))
    engine = TransformersEngine(Policy(tiny_model(len(tokenizer)).eval()), [3, 20, 21], 1, 6)
    order = [(LONG, 0, 0), (LONG, 0, 1), (SHORT, 1, 0)]
    rows, groups, members = (list(column) for column in zip(*order, strict=True))
    trajectories = collect(workflow, engine, tokenizer, rows, groups, members, seed=0, iteration=0)
    # Random weights never keep the format: every chunk is read, the memory stays, everything is unparsed.
    assert [len(t.turns) for t in trajectories] == [4, 4, 2]
    assert [t.exit_step for t in trajectories] == [3, 3, 1] and not any(t.parsed for t in trajectories)
    assert {t.memory for t in trajectories} == {"No memory yet."}
    assert {turn.finish_reason for t in trajectories for turn in t.turns} == {"eos", "length"}
    assert all(len(turn.behavior_logprobs) == len(turn.completion_ids) for t in trajectories for turn in t.turns)
    for place, one in enumerate(zip(rows, groups, members, strict=True)):
        (alone,) = collect(workflow, engine, tokenizer, *([x] for x in one), seed=0, iteration=0)
        assert [t.completion_ids for t in alone.turns] == [t.completion_ids for t in trajectories[place].turns]


def test_rows_groups_and_members_must_have_one_length():
    workflow = SingleTurn()
    workflow.bind(BYTES, SimpleNamespace(chat_template_kwargs=None))
    with pytest.raises(ValueError):
        collect(workflow, Scripted({}), BYTES, [{"prompt": "a"}], [0, 1], [0], seed=0, iteration=0)


def test_row_name():
    assert row_name({"id": "x"}, 4) == "row 'x'" and row_name({"prompt": "x"}, 4) == "row 4"


# ---- text of a completion ----


def test_decoding_keeps_control_tokens_and_drops_the_final_eos_only():
    ids = BYTES("hello")["input_ids"]
    start = BYTES.convert_tokens_to_ids("<|im_start|>")
    assert decode_completion(BYTES, [*ids, END], "eos") == "hello"
    assert decode_completion(BYTES, [*ids, END], "length") == "hello<|im_end|>"
    assert decode_completion(BYTES, [*ids, END, END], "eos") == "hello<|im_end|>"
    assert decode_completion(BYTES, [start, *ids, BYTES.pad_token_id, END], "eos") == "<|im_start|>hello<|pad|>"
    # What TRL hands to reward functions has lost them: such a completion would look like "hello".
    assert BYTES.decode([start, *ids, BYTES.pad_token_id, END], skip_special_tokens=True) == "hello"
    assert decode_completion(BYTES, [END], "eos") == "" and decode_completion(BYTES, [], "length") == ""


def test_decoding_does_not_tidy_spaces():
    text = "it 's a . test , n't ok ?"
    assert decode_completion(BYTES, [*BYTES(text)["input_ids"], END], "eos") == text


def test_decoding_of_characters_that_span_tokens():
    text = "日本 🙂é"
    ids = BYTES(text)["input_ids"]
    assert len(ids) == 3 + 3 + 1 + 4 + 2  # one token per byte: decoded one by one every part would be broken
    assert decode_completion(BYTES, [*ids, END], "eos") == text
    assert "".join(BYTES.decode([i]) for i in ids) != text
    assert decode_completion(BYTES, [*ids[:-1], END], "eos") == "日本 🙂\ufffd"  # an unfinished character shows


def test_decoding_shows_ids_beyond_the_vocabulary():
    unknown = len(BYTES) + 7
    ids = BYTES(reply("no", ""))["input_ids"]
    text = decode_completion(BYTES, [*ids, unknown, END], "eos")
    assert text == f"{reply('no', '')}<|unknown_token:{unknown}|>"
    assert BYTES.decode([*ids, unknown]) == reply("no", "")  # the tokenizer drops it: the answer would be valid
    assert decode_completion(BYTES, [unknown, *ids, unknown, unknown], "length").startswith(
        f"<|unknown_token:{unknown}|>"
    )
    assert decode_completion(BYTES, [unknown], "length") == f"<|unknown_token:{unknown}|>"


def gap_tokenizer():
    """Five tokens whose ids leave gaps: len() is 5, the largest id 9."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 7, "</s>": 9}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def test_decoding_shows_an_id_in_a_gap():
    assert decode_completion(gap_tokenizer(), [1, 4, 2, 9], "eos") == "a<|unknown_token:4|>b"
    assert decode_completion(gap_tokenizer(), [1, 12], "length") == "a<|unknown_token:12|>"


def test_decoding_knows_ids_behind_a_gap():
    assert len(gap_tokenizer()) == 5  # so 7 and 9 lie beyond the number of tokens, and are known all the same
    assert decode_completion(gap_tokenizer(), [1, 7, 2, 9], "eos") == "a c b"
    assert decode_completion(gap_tokenizer(), [1, 9, 2], "length") == "a </s> b"


def test_word_tokenizer_decodes_tags():
    tokenizer = word_tokenizer()
    ids = tokenizer("<check> yes </check> <update> code red </update> <next> end </next> <|im_end|>")["input_ids"]
    assert decode_completion(tokenizer, ids, "eos") == "<check>yes</check><update>codered</update><next>end</next>"


def test_messages_hold_no_token_lists():
    turn = Turn(1, list(range(10_000)), [7], [-0.5], "eos", "a text")
    assert "a text" in repr(turn) and "_ids" not in repr(turn) and "logprobs" not in repr(turn)


def test_prompt_without_messages_is_its_text():
    workflow = GatedMemory()
    tokenizer = byte_tokenizer(template=None)
    workflow.bind(tokenizer, SimpleNamespace(chat_template_kwargs=None, max_memory_tokens=9))
    (trajectory,) = collect(workflow, Scripted(SCRIPT), tokenizer, [SHORT], [9], [0], seed=7, iteration=3)
    assert isinstance(trajectory.prompt, str) and trajectory.prompt == tokenizer.decode(
        trajectory.turns[-1].prompt_ids
    )
    assert isinstance(trajectory.turns[0], Turn)
