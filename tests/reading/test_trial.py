"""What is wrong with a workflow is said when it is handed over, and a dry turn leaves no trace."""

import random

import pytest
import torch
from datasets import Dataset
from tiny import word_tokenizer
from training import ParityWorkflow, make_trainer

from turngrpo.trainer import GatedMemory, MemAgent, SingleTurn
from turngrpo.trainer.reading.chat_format import ChatFormat
from turngrpo.trainer.reading.rollout import Completion, TokenCounts, collect
from turngrpo.trainer.reading.trial import REPLIES, hand_over
from turngrpo.trainer.reading.workflows import WorkflowOptions

TOKENIZER = word_tokenizer()
ROW = {"id": "r-1", "prompt": "code of red"}


class Prompts(ParityWorkflow):
    """Its prompt is whatever it was made with."""

    def __init__(self, value):
        self.value = value

    def prompt(self, state):
        return self.value


class Advances(Prompts):
    """Its advance returns whatever it was made with."""

    def prompt(self, state):
        return [[4]]

    def advance(self, state, turn):
        return self.value


class WithoutBind:
    strict_format = False
    start = prompt = advance = lambda self, *given: None


class WithoutStrictFormat(ParityWorkflow):
    strict_format = None


class WrongColumn(ParityWorkflow):
    def start(self, row):
        return {"prompt": row["question"]}


class TooFewArguments(ParityWorkflow):
    def advance(self, state):
        return False


class FailsOnBoxes(ParityWorkflow):
    def advance(self, state, turn):
        return 1 / ("boxed" not in turn.text) > 1


class FailsAtTheSecondTurn(ParityWorkflow):
    def prompt(self, state):
        return [[4]] if not state["said"] else "read on"

    def advance(self, state, turn):
        state["said"] = turn.completion_ids
        return True


EXPECTED = r"expected a list of segments, each a list of token ids, as in \[\[1, 2\], \[3\]\]"
FAULTS = {
    "a class": (ParityWorkflow, r"workflow is the class ParityWorkflow, expected an instance of it: .*ParityWorkflow"),
    "no bind": (WithoutBind(), r"workflow is a WithoutBind without bind\(tokenizer, config\): expected bind"),
    "nothing of it": (3, r"a int without bind\(.*start\(row\), prompt\(state\), advance\(state, turn\)"),
    "no strict_format": (
        WithoutStrictFormat(),
        r"WithoutStrictFormat.strict_format is None, expected True .* or False",
    ),
    "text": (Prompts("code of red"), rf"Prompts.prompt, row 'r-1': found a str, {EXPECTED}"),
    "flat ids": (Prompts([4, 5]), "found one flat list of token ids, expected a list of segments"),
    "texts": (Prompts(["code", "of"]), "found a list of texts, expected"),
    "a tensor": (Prompts(torch.tensor([[4, 5]])), r"found a Tensor, expected .* a tensor as \[tensor.tolist\(\)\]"),
    "tensors": (Prompts([torch.tensor([4, 5])]), "found a list that holds a Tensor"),
    "texts in segments": (Prompts([["code"]]), r"found segments that hold 'code' \(str\)"),
    "nothing": (Prompts(None), "found a NoneType"),
    "a wrong column": (
        WrongColumn(),
        r"WrongColumn.start raised KeyError: 'question' at .*test_trial.py:\d+; the row has the columns id, prompt$",
    ),
    "None": (Advances(None), "Advances.advance, row 'r-1': returned None, expected True while the trajectory goes on"),
    "a number": (Advances(1), "returned 1, expected True"),
    "arguments": (TooFewArguments(), r"TooFewArguments.advance raised TypeError.*it is called with \(state, turn\)"),
    "a typical reply": (
        FailsOnBoxes(),
        r"raised ZeroDivisionError: .*test_trial.py:\d+; the reply was 'The answer is",
    ),
    "later": (FailsAtTheSecondTurn(), "FailsAtTheSecondTurn.prompt, row 'r-1', second turn: found a str"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_every_fault_is_named_with_what_was_expected(case):
    workflow, message = FAULTS[case]
    with pytest.raises(ValueError, match=message):
        hand_over(workflow, TOKENIZER, WorkflowOptions(), ROW)


@pytest.mark.parametrize("workflow", [ParityWorkflow(), SingleTurn(), GatedMemory(), MemAgent()])
def test_sound_workflows_pass(workflow):
    chunks = [{"text": "code of red is 1", "evidence": True}, {"text": "no code"}]
    hand_over(workflow, TOKENIZER, WorkflowOptions(), ROW | {"question": "red", "answers": ["1"], "chunks": chunks})


def test_the_typical_replies_are_read_by_the_gates_and_by_an_answer():
    workflow = GatedMemory()
    decisions = []
    workflow.decide = lambda turn: decisions.append(GatedMemory.decide(workflow, turn)) or decisions[-1]
    hand_over(
        workflow, TOKENIZER, WorkflowOptions(), ROW | {"question": "q", "answers": [], "chunks": [{"text": "a"}]}
    )
    assert [decision and decision.check for decision in decisions] == [None, True, None]
    assert r"\boxed{" in REPLIES[2]


class Counting(ParityWorkflow):
    """Counts its trajectories, and draws from the global generators."""

    started = 0

    def start(self, row):
        self.started += 1
        random.random(), torch.rand(())
        return super().start(row)


def test_a_trainer_tries_its_workflow_and_nothing_moves(tmp_path):
    with pytest.raises(ValueError, match=r"WrongColumn.start raised KeyError: 'question'.*the columns prompt$"):
        make_trainer(tmp_path, workflow=WrongColumn())
    numbers = []
    for data in (None, Dataset.from_dict({"prompt": []})):  # without a row there is no dry turn
        workflow = Counting()
        make_trainer(tmp_path, workflow=workflow, dataset=data)
        numbers.append((workflow.started, random.random(), float(torch.rand(()))))
    assert numbers[0] == numbers[1] and numbers[0][0] == 0


class Scripted:
    """Always completes with the same two tokens."""

    prompt_limit, share_prefix = 100, False

    def __init__(self):
        self.counts = TokenCounts()

    def generate(self, requests):
        return [Completion([4, 3], [0.0, 0.0], "eos") for _ in requests]


def read(workflow, max_turns):
    rows = [{"id": "short", "prompt": "red"}, {"id": "long", "prompt": "blue"}]
    workflow.bind(TOKENIZER, WorkflowOptions())
    return collect(workflow, Scripted(), TOKENIZER, rows, [0, 1], [0, 0], 0, 0, None, max_turns)


class Endless(ParityWorkflow):
    def advance(self, state, turn):
        return state["prompt"] == "blue"


def test_a_row_that_reads_for_ever_is_named():
    with pytest.raises(
        ValueError, match=r"row 'long' still goes on after 3 turns, as many as max_turns=3 allows: let"
    ):
        read(Endless(), 3)
    # Parity's four turns are as many as are allowed, and one too many of three.
    assert [len(t.turns) for t in read(ParityWorkflow(), 4)] == [4, 4]
    with pytest.raises(ValueError, match="row 'short' still goes on after 3 turns"):
        read(ParityWorkflow(), 3)


class ForgetsItsReturn(ParityWorkflow):
    def advance(self, state, turn):
        return super().advance(state, turn) or None


def test_what_only_a_later_turn_shows_is_named_in_the_rollout():
    with pytest.raises(ValueError, match=r"ForgetsItsReturn.advance, row 'short', turn 3: returned None"):
        read(ForgetsItsReturn(), None)


def test_a_bare_string_is_no_list_of_segments():
    with pytest.raises(ValueError, match=r"encode got the text 'code of red', expected a list of texts"):
        ChatFormat(TOKENIZER).encode("code of red")
