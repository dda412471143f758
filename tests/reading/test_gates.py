"""The strict format of a turn and of an answer: every way to keep it and every way to break it."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngrpo.trainer.reading.gates import (
    GateDecision,
    answer_segments,
    parse_answer,
    parse_turn,
    read_turn,
    turn_segments,
)

GOOD = "<think>t</think>\n<check>yes</check>\n<update>new memory</update>\n<next>continue</next>"


def blocks(check="yes", update="m", next="continue", think=None):
    """A turn in the canonical form."""
    head = "" if think is None else f"<think>{think}</think>\n"
    return f"{head}<check>{check}</check>\n<update>{update}</update>\n<next>{next}</next>"


ACCEPTED = {
    "all four blocks": (GOOD, GateDecision(True, "new memory", False)),
    "think absent": (blocks(), GateDecision(True, "m", False)),
    "think empty": (blocks(think=""), GateDecision(True, "m", False)),
    "think of several lines": (blocks(think="a\n\nb < c > d"), GateDecision(True, "m", False)),
    "end": (blocks(next="end"), GateDecision(True, "m", True)),
    "no with a candidate": (blocks("no", "kept aside"), GateDecision(False, "kept aside", False)),
    "no without a candidate": (blocks("no", "", "end"), GateDecision(False, "", True)),
    "no with a blank candidate": (blocks("no", " \n"), GateDecision(False, "", False)),
    "white space everywhere": (
        " \n<think> t </think>\t<check>\n yes </check>\n\n<update> a\n b </update> <next> end\t</next>\n ",
        GateDecision(True, "a\n b", True),
    ),
    "no white space": (
        "<think></think><check>no</check><update></update><next>end</next>",
        GateDecision(False, "", True),
    ),
    "other angle brackets": (blocks(update="List<int> <b>x</b> </p> a<|b x|> "), None),
    "words of the protocol": (blocks(think="check yes next end", update="update no"), None),
    "unicode": (blocks(update="Łódź 東京 🙂"), GateDecision(True, "Łódź 東京 🙂", False)),
}

REJECTED = {
    "empty": "",
    "plain text": "yes, this matters",
    "text before": "Sure. " + GOOD,
    "text after": GOOD + " done",
    "text between think and check": blocks().replace("<check>", "<think></think> so <check>"),
    "text between check and update": GOOD.replace("<update>", "and <update>"),
    "text between update and next": GOOD.replace("<next>", "; <next>"),
    "check missing": GOOD.replace("<check>yes</check>", ""),
    "update missing": GOOD.replace("<update>new memory</update>", ""),
    "next missing": GOOD.replace("<next>continue</next>", ""),
    "only think": "<think>t</think>",
    "think twice": "<think>a</think>" + GOOD,
    "check twice": GOOD.replace("<update>", "<check>yes</check><update>"),
    "update twice": GOOD.replace("<next>", "<update>m</update><next>"),
    "next twice": GOOD + "<next>continue</next>",
    "everything twice": GOOD + GOOD,
    "update before check": "<update>m</update><check>yes</check><next>end</next>",
    "next before update": "<check>yes</check><next>end</next><update>m</update>",
    "think after check": "<check>yes</check><think>t</think><update>m</update><next>end</next>",
    "think at the end": blocks() + "<think>t</think>",
    "Yes": blocks("Yes"),
    "NO": blocks("NO"),
    "check empty": blocks(""),
    "check with a full stop": blocks("yes."),
    "check with both": blocks("yes no"),
    "check true": blocks("true"),
    "next Continue": blocks(next="Continue"),
    "next stop": blocks(next="stop"),
    "next empty": blocks(next=""),
    "tag in capitals": GOOD.replace("check", "CHECK"),
    "tag with a space": GOOD.replace("<check>", "<check >"),
    "tag with an attribute": GOOD.replace("<next>", '<next to="x">'),
    "closing tag missing": GOOD.replace("</update>", ""),
    "opening tag missing": GOOD.replace("<update>", ""),
    "closing tag of another block": GOOD.replace("</check>", "</next>"),
    "last tag cut off": GOOD[:-1],
    "yes without a candidate": blocks("yes", ""),
    "yes with a blank candidate": blocks("yes", " \n\t"),
    "code fence": f"```\n{GOOD}\n```",
    "control token before": "<|im_start|>" + GOOD,
    "control token after": GOOD + "<|im_end|>",
    "second EOS after": GOOD + "<|endoftext|>",
    "token that the tokenizer does not know": GOOD + "<|unknown_token:9|>",
}
for tag in ("think", "check", "update", "next"):
    for mark in (f"<{tag}>", f"</{tag}>"):
        REJECTED[f"{mark} inside think"] = blocks(think=f"a {mark} b")
        REJECTED[f"{mark} inside update"] = blocks(update=f"a {mark} b")
        REJECTED[f"{mark} inside a no's update"] = blocks("no", update=mark)
for token in ("<|im_end|>", "<|unknown_token:151700|>"):
    REJECTED[f"{token} inside think"] = blocks(think=token)
    REJECTED[f"{token} inside update"] = blocks(update=f"a {token}")


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_turn(name):
    text, decision = ACCEPTED[name]
    parsed = parse_turn(text, "eos")
    assert isinstance(parsed, GateDecision) and decision in (None, parsed)
    assert parse_turn(text, "length") is None  # the same text stopped by the length limit is unparsed


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_turn(name):
    assert parse_turn(REJECTED[name], "eos") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the tags are not those of a turn, once each and in order"),
        (blocks().replace("<check>yes</check>\n", ""), "the tags are not those of a turn, once each and in order"),
        (f"so: {blocks()}", "text outside the blocks"),
        (blocks(update="a <|im_end|> b"), "a control token in think or update"),
        (blocks(think="[END]"), "a control token in think or update"),
        (blocks(check="maybe"), "check is neither yes nor no"),
        (blocks(next="stop"), "next is neither continue nor end"),
        (blocks(update=" "), "check is yes and update is empty"),
    ],
)
def test_why_a_turn_does_not_parse(text, reason):
    assert read_turn(text, "eos", ("[END]",)) == (None, reason)
    assert read_turn(text, "length") == (None, "cut before its end")


def test_decision_values():
    assert parse_turn(GOOD, "eos") == GateDecision(check=True, candidate="new memory", exit=False)
    assert parse_turn(blocks("no", "x", "end"), "eos") == GateDecision(check=False, candidate="x", exit=True)


PIECES = ["<think>", "</think>", "<check>", "</check>", "<update>", "</update>", "<next>", "</next>", "yes", "no",
          "continue", "end", " ", "\n", "a b", "<", ">", "<|im_end|>", ""]  # fmt: skip
SPACE = st.sampled_from(["", " ", "\n", " \t\n"])
FREE = st.one_of(st.text(max_size=8), st.lists(st.sampled_from(PIECES), max_size=3).map("".join))


@st.composite
def nearly_turns(draw):
    """Texts in or close to the format: free text of any characters, then now and then one piece put somewhere."""
    check, go = draw(st.sampled_from(["yes", "no"])), draw(st.sampled_from(["continue", "end"]))
    s = [draw(SPACE) for _ in range(8)]
    think = f"<think>{draw(FREE)}</think>" if draw(st.booleans()) else ""
    text = (
        f"{s[0]}{think}{s[1]}<check>{s[2]}{check}{s[3]}</check>{s[4]}<update>{draw(FREE)}</update>{s[5]}"
        f"<next>{s[6]}{go}</next>{s[7]}"
    )
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.sampled_from(PIECES)) + text[place:]
    return text


@settings(max_examples=300, deadline=None)
@given(nearly_turns())
def test_accepted_text_renders_back_to_an_equal_decision(text):
    decision = parse_turn(text, "eos")
    if decision is None:
        return
    rendered = blocks("yes" if decision.check else "no", decision.candidate, "end" if decision.exit else "continue")
    assert parse_turn(rendered, "eos") == decision
    # The text is the canonical one up to its think block and white space, each gate standing once.
    body = text.split("</think>")[-1]
    assert "".join(body.split()) == "".join(rendered.split())
    assert all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in ("check", "update", "next"))
    assert not decision.check or decision.candidate.strip() == decision.candidate != ""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_jumble_is_refused_or_consistent(text):
    decision = parse_turn(text, "eos")
    assert parse_turn(text, "length") is None
    if decision is not None:
        assert ("yes" in text) >= decision.check and ("end" in text) >= decision.exit


TAGS = [f"<{slash}{name}>" for name in ("think", "check", "update", "next") for slash in ("", "/")]


def reference_turn(text, control_tokens=()):
    """The format as section 2 of the specification words it, block after block, by partition and comparison alone."""
    blocks, rest = {}, text.strip()
    for name in ("think", "check", "update", "next"):
        if name == "think" and not rest.startswith("<think>"):
            continue
        before, opened, rest = rest.partition(f"<{name}>")
        blocks[name], closed, rest = rest.partition(f"</{name}>")
        if before.strip() or not opened or not closed:
            return None
    free = [blocks.get("think", ""), blocks["update"]]
    if rest.strip() or any(mark in part for part in free for mark in [*TAGS, *control_tokens]):
        return None
    if any(holds_control_token(part) for part in free):
        return None
    check, candidate, go = (blocks[name].strip() for name in ("check", "update", "next"))
    if check not in ("yes", "no") or go not in ("continue", "end") or (check, candidate) == ("yes", ""):
        return None
    return GateDecision(check == "yes", candidate, go == "end")


def holds_control_token(text):
    """True for any <|name|> whose name has no white space and none of |, <, >."""
    names = [part.split("|>")[0] for part in text.split("<|")[1:] if "|>" in part]
    return any(not any(letter.isspace() or letter in "|<>" for letter in name) for name in names)


def reference_answer(text, control_tokens=()):
    """The shortest balanced text after the one opening, every pair of backslash and character counting for nothing."""
    parts = text.split("\\boxed{")
    if len(parts) != 2 or holds_control_token(text) or any(token in text for token in control_tokens):
        return None
    inside, left = "", parts[1]
    while left:
        piece, left = (left[:2], left[2:]) if left[0] == "\\" else (left[0], left[1:])
        if piece == "}" and inside.count("{") - inside.count("\\{") == inside.count("}") - inside.count("\\}"):
            return (inside.replace("\0", "\\\\")).strip()
        inside += "\0" if piece == "\\\\" else piece
    return None


ODD = [
    "\x0b",
    "\x1c",
    "\x85",
    "\u2028",
    "\xa0",
    "\ufeff",
    "<|x y|>",
    "<||>",
    "<|a",
    "|>",
    "<|a<|b|>",
    "<think",
    "Yes",
    "é",
]


def mutated(generator, pieces):
    """`pieces` as one text after none to three changes: a piece left out, doubled, exchanged, put in, or a cut."""
    pieces = list(pieces)
    for _ in range(generator.choice([0, 1, 1, 1, 2, 3])):
        at, other = generator.randrange(len(pieces)), generator.randrange(len(pieces))
        change = generator.randrange(5)
        if change == 0:
            pieces[at] = ""
        elif change == 1:
            pieces[at] *= 2
        elif change == 2:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif change == 3:
            pieces.insert(at, generator.choice([*PIECES, *ODD]))
        elif pieces[at]:
            cut = generator.randrange(len(pieces[at]))
            pieces[at] = pieces[at][:cut] + generator.choice(["", *ODD]) + pieces[at][cut + 1 :]
    return "".join(pieces)


def drawn_turn(generator):
    """The pieces of a turn in the format, but for what its free texts hold."""
    free = ["", " ", "a b", "memory\n", *ODD]
    space = ["", "", "\n", " \t", "\x0b", "\u2028"]
    think = ["<think>", generator.choice(free), "</think>"] if generator.random() < 0.5 else []
    pieces = [*think, "<check>", generator.choice(["yes", "no"]), "</check>", "<update>", generator.choice(free)]
    pieces += ["</update>", "<next>", generator.choice(["continue", "end"]), "</next>"]
    return [part for piece in pieces for part in (generator.choice(space), piece)]


def test_turns_are_those_of_an_independent_reader():
    generator, accepted = random.Random(7), 0
    for _ in range(6_000):
        text = mutated(generator, drawn_turn(generator))
        tokens = generator.choice([(), ("a b",), ("[END]", "é")])
        decision = parse_turn(text, "eos", tokens)
        assert decision == reference_turn(text, tokens), text
        accepted += decision is not None
    assert 1_500 < accepted < 4_500  # neither side of the format is rare among the texts


def test_answers_are_those_of_an_independent_reader():
    generator, accepted = random.Random(8), 0
    inner = ["a", "{", "}", "\\{", "\\}", "\\", "\\\\", "\\text{b}", " ", "\n", "<|im_end|>", "\\boxed{", ""]
    for _ in range(6_000):
        middle = [generator.choice(inner) for _ in range(generator.randrange(5))]
        text = mutated(generator, ["so ", "\\boxed{", *middle, "}", " done"])
        answer = parse_answer(text, "eos")
        assert answer == reference_answer(text), text
        accepted += answer is not None
    assert 1_500 < accepted < 4_500


HOSTILE = {
    "blocks that may end anywhere": lambda n: "<think>" + "</think><check>yes</check><update>" * n,
    "updates that may end anywhere": lambda n: "<check>yes</check><update>" + "</update><next>end</next>" * n + "x",
    "all blocks again and again": lambda n: GOOD * n,
    "white space": lambda n: "<check>yes</check>" + " \n" * n + "x",
    "white space in a gate": lambda n: "<check>yes" + " " * n + "x</check>",
    "tags cut off": lambda n: "<think>" + "</thin" * n,
    "control tokens cut off": lambda n: blocks(update="<|a" * n),
    "one long control token": lambda n: blocks(update="<|" + "a" * n),
    "boxes": lambda n: "\\boxed{" * n,
    "braces": lambda n: "\\boxed{" + "{}" * n,
    "backslashes": lambda n: "\\boxed{" + "\\" * n,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_eight_times_the_text_takes_no_more_than_eight_times_the_time(name):
    def seconds(n):
        """The shortest of three readings, at least the millisecond below which a clock says little."""
        text, spent = HOSTILE[name](n), []
        for _ in range(3):
            start = time.process_time()
            parse_turn(text, "eos", ("[END]",)), parse_answer(text, "eos", ("[END]",))
            spent.append(time.process_time() - start)
        return max(min(spent), 1e-3)

    # Linear: 8 times as long. Backtracking over two open ends: 8^2 = 64 times (measured: 0.06 s, then 4.1 s).
    assert seconds(4_000) / seconds(500) < 24


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{Paris}", "Paris"),
        ("So the answer is \\boxed{ Paris }.", "Paris"),
        ("\\boxed{f(x) = {a, b}}", "f(x) = {a, b}"),
        ("\\boxed{\\text{Paris}}", "\\text{Paris}"),
        ("{a} \\boxed{-5} {b}", "-5"),
        ("boxed{no} \\boxed{yes}", "yes"),
        ("\\boxed{two\nlines}", "two\nlines"),
        ("\\boxed{}", ""),
        # Rejected:
        ("Paris", None),
        ("", None),
        ("boxed{Paris}", None),
        ("\\boxed Paris", None),
        ("\\boxed {Paris}", None),
        ("\\Boxed{Paris}", None),
        ("\\boxed{Paris", None),
        ("\\boxed{a{b}", None),
        ("\\boxed{Paris} or \\boxed{Rome}", None),
        ("\\boxed{Paris} \\boxed{Paris}", None),
        ("\\boxed{\\boxed{Paris}}", None),
        ("\\boxed{Paris} \\boxed{", None),
        ("\\boxed{Paris}<|im_end|>", None),
        ("\\boxed{Paris<|unknown_token:7|>}", None),
        ("<|im_start|>\\boxed{Paris}", None),
    ],
)
def test_parse_answer(text, answer):
    assert parse_answer(text, "eos") == answer
    assert parse_answer(text, "length") is None


def test_layouts_share_what_all_members_of_a_group_share():
    first = turn_segments("chunk_first", "I", "Q", "C", "M")
    assert first[-2] == "M" and "".join(first).index("C") < "".join(first).index("M")
    # Everything up to the memory is the same for another memory.
    assert turn_segments("chunk_first", "I", "Q", "C", "other")[:-2] == first[:-2]
    text = "".join(turn_segments("memory_first", "I", "Q", "C", "M"))
    assert text.index("I") < text.index("Q") < text.index("M") < text.index("C")
    answer = "".join(answer_segments("Q", "M"))
    assert answer.index("\\boxed{}") < answer.index("Q") < answer.index("M")
    with pytest.raises(ValueError, match="layout is 'both', expected 'chunk_first' or 'memory_first'"):
        turn_segments("both", "I", "Q", "C", "M")
