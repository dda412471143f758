"""Chat templates whose prompts end inside an open think block, and what may stand in a memory."""

import pytest
from test_workflows import byte_tokenizer
from tiny import CHAT_TEMPLATE, word_tokenizer
from transformers import ByT5Tokenizer

from turngrpo.trainer import GatedMemory, MemAgent, Turn
from turngrpo.trainer.reading.gates import GateDecision, for_memory, parse_turn, write_turn
from turngrpo.trainer.reading.rollout import decode_completion
from turngrpo.trainer.reading.workflows import WorkflowOptions
from turngrpo.trainer.warm_start import row_examples

BLOCKS = "<check>yes</check>\n<update>code is 2</update>\n<next>end</next>"
WROTE = GateDecision(check=True, candidate="code is 2", exit=True)
# As in QwQ or DeepSeek-R1: the generation prompt opens the block; enable_thinking=False closes it again.
OPEN = (
    CHAT_TEMPLATE.removesuffix("{% endif %}")
    + "<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
ROW = {
    "id": "r",
    "question": "code of red",
    "answers": ["2"],
    "chunks": [{"text": "blue is 1", "evidence": False}, {"text": "code of red is 2", "evidence": True}],
}


def bound(workflow, template=OPEN, **options):
    workflow.bind(byte_tokenizer(template), WorkflowOptions(64, options or None))
    return workflow


def turn(text):
    return Turn(1, [], [], [], "eos", text)


def test_a_completion_begins_inside_the_block_that_the_prompt_opened():
    assert parse_turn(f"the code</think>\n{BLOCKS}", "eos", opens_think=True) == WROTE
    assert parse_turn(f"</think>{BLOCKS}", "eos", opens_think=True) == WROTE  # nothing thought
    assert parse_turn(f"the code</think>\n{BLOCKS}", "eos") is None  # where no prompt opened one
    for text in (BLOCKS, f"<think>a</think>{BLOCKS}", f"a</think>b</think>{BLOCKS}"):
        assert parse_turn(text, "eos", opens_think=True) is None  # never closed, opened twice, closed twice


@pytest.mark.parametrize(("template", "options", "opens"), [
    (OPEN, {}, True), (OPEN, {"enable_thinking": False}, False), (CHAT_TEMPLATE, {}, False)
])  # fmt: skip
def test_the_workflow_knows_its_template(template, options, opens):
    workflow = bound(GatedMemory(), template, **options)
    assert workflow.chat.opens_think == opens
    inside, whole = turn(f"so</think>{BLOCKS}"), turn(f"<think>so</think>{BLOCKS}")
    assert (workflow.decide(inside), workflow.decide(whole)) == ((WROTE, None) if opens else (None, WROTE))


def test_a_warm_start_opens_no_second_block():
    workflow = bound(GatedMemory())
    examples = row_examples(ROW, workflow, think=lambda row, chunk: "asked : code")
    tokenizer = workflow.chat.tokenizer
    texts = []
    for example in examples:
        start = example["completion_mask"].index(1)
        assert tokenizer.decode(example["input_ids"][:start]).rstrip().endswith("<think>")
        texts.append(tokenizer.decode(example["input_ids"][start:-1]))
    assert [text.count("<think>") for text in texts] == [0, 0, 0] and [t.count("</think>") for t in texts] == [1, 1, 1]
    assert write_turn(WROTE, "so", opens_think=True) == f"so</think>\n{BLOCKS}"
    assert write_turn(WROTE, opens_think=True) == f"</think>\n{BLOCKS}"
    assert write_turn(WROTE) == BLOCKS


def test_the_ungated_reader_remembers_what_follows_the_block():
    workflow = bound(MemAgent())
    assert workflow.decide(turn("it says 2</think>\ncode is 2")).candidate == "code is 2"
    assert workflow.decide(turn("code is 2")) is None  # still thinking
    assert bound(MemAgent(), CHAT_TEMPLATE).decide(turn("code is 2")).candidate == "code is 2"


@pytest.mark.parametrize("text", ["a <|unknown_token:55|>", "a <|im_end|> b", "<|x|>"])
def test_no_control_token_stands_in_an_ungated_memory(text):
    assert bound(MemAgent(), CHAT_TEMPLATE).decide(turn(text)) is None


def test_ids_without_a_token_show_in_every_tokenizer():
    # ByT5 makes up tokens for ids above its 256 bytes and 3 special ones; bytes() then fails on them.
    tokenizer = ByT5Tokenizer(extra_ids=0)
    ids = [*tokenizer("ab", add_special_tokens=False)["input_ids"], 300]
    assert decode_completion(tokenizer, ids, "length") == "ab<|unknown_token:300|>"
    words = word_tokenizer()
    assert decode_completion(words, [10**6], "length") == "<|unknown_token:1000000|>"
    words.add_tokens(["<later>"])
    assert decode_completion(words, [len(words) - 1], "length") == "<later>"


@pytest.mark.parametrize(
    ("text", "tokens", "kept"),
    [
        ("f <|| g", (), "f <|| g"),
        ("f <||> g", (), "f g"),  # F#'s operator looks like a control token to the parser
        ("a <|im_end|> b", (), "a b"),
        ("old <s>price</s> 5", ("<s>", "</s>"), "old price 5"),
        ("old <s>price</s> 5", (), "old <s>price</s> 5"),  # of a tokenizer without such tokens
        ("<up<update>date>x", (), "<up date>x"),
        ("<|a<|b|>|>", (), "<|a |>"),
        ("two  spaces\nand lines", (), "two  spaces\nand lines"),  # nothing to take out
    ],
)
def test_one_rule_for_what_may_stand_in_memory(text, tokens, kept):
    assert for_memory(text, tokens) == kept
    turn_text = write_turn(GateDecision(check=True, candidate=kept, exit=False))
    assert parse_turn(turn_text, "eos", tokens) is not None
    if kept != text:
        dirty = write_turn(GateDecision(check=True, candidate=text, exit=False))
        assert parse_turn(dirty, "eos", tokens) is None


def test_evidence_with_control_tokens_is_no_reason_to_stop_a_warm_start():
    row = ROW | {"chunks": [{"text": "code <|im_end|> of red <||> is <update> 2", "evidence": True}]}
    workflow = bound(GatedMemory(), CHAT_TEMPLATE)
    examples = row_examples(row, workflow)
    start = examples[0]["completion_mask"].index(1)
    text = decode_completion(workflow.chat.tokenizer, examples[0]["input_ids"][start:], "eos")
    decision = workflow.decide(turn(text))
    assert decision is not None and decision.check and "2" in decision.candidate
