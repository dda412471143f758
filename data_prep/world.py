"""A small simulated world: who is where and who has what, told in sentences, with the ones that a question needs.

The idea is that of bAbI (arXiv 1502.05698), whose tasks BABILong (arXiv 2406.10149) hides in long text. People walk
from place to place, things go from hand to hand or into a container, and a question about the end needs one, two or
three of the sentences. Every sentence that a question needs names something that the question or an earlier such
sentence named, and nothing overrides it later: a reader who has kept those sees at once that it is one of them.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

PEOPLE = tuple(
    """Ambrose Bertil Brunhild Corisande Cosima Diethelm Dunstan Eudora Fenwick Griselda Hartmut Isolde Jorund Kasimir
    Leocadia Magnild Nikodem Ottoline Peregrin Quirina Rosamund Siegbert Tancred Ulrike Valeska Wendelin Xanthe
    Yolanda Zebulon Thorvald""".split()
)
PLACES = tuple(
    """apiary armoury bakery belfry boathouse brewery cellar chapel cloister crypt dairy foundry gatehouse granary
    greenhouse hayloft jetty lighthouse meadow orchard pantry quarry sawmill smithy stable tannery vineyard windmill
    courtyard almshouse""".split()
)
THINGS = tuple(
    """acorn amulet bobbin brooch bugle candle dagger feather flute goblet horseshoe ladle locket marble mitten monocle
    parasol pebble quill scarf sickle spindle tankard teapot thimble trowel violin walnut whistle snuffbox""".split()
)
CONTAINERS = tuple("barrel basket casket chest crate hamper knapsack satchel trunk urn coffer pannier".split())
VOCABULARY = (PEOPLE, PLACES, THINGS, CONTAINERS)
CAST = (8, 8, 6, 3)  # how many people, places, things and containers one story has

# Sentences that say the same; {one} is who or what changes its place, {other} where, with whom or in what it then is.
SENTENCES = {
    "move": ("{one} went to the {other}.", "{one} walked over to the {other}.", "{one} moved on to the {other}."),
    "take": ("{other} picked up the {one}.", "{other} took the {one}."),
    "send": ("{giver} sent the {one} to {other}.", "{giver} had the {one} brought to {other}."),
    "pack": ("The {one} was packed into the {other}.", "The {one} was put inside the {other}."),
}
QUESTIONS = {
    "where": "Where is {one} at the end?",
    "holder": "Who has {one} at the end?",
    "before": "Where was {one} right before the {other}?",
}
KINDS = {  # number of sentences needed: kinds of questions
    1: ("person_place", "thing_holder"),
    2: ("thing_place", "person_before"),
    3: ("thing_before", "packed_place"),
}
DISTRACTORS = ("move", "move", "move", "take", "send", "pack")  # drawn from with equal weights


class Event(NamedTuple):
    """One change of the world: `one` comes to `other`; `giver` sends it, for kind "send"."""

    kind: str
    one: str
    other: str
    giver: str = ""


class Question(NamedTuple):
    """What is asked about `one`: "where" or "holder" at the end, or where it was right "before" the place `other`."""

    kind: str
    one: str
    other: str = ""

    @property
    def text(self) -> str:
        one = self.one if self.one in PEOPLE else f"the {self.one}"
        return QUESTIONS[self.kind].format(one=one, other=self.other)


class Told(NamedTuple):
    """One sentence of a story, and whether the answer needs it."""

    sentence: str
    evidence: bool


class Story(NamedTuple):
    """A question, its answer, and the sentences of every chunk in the order in which things happen."""

    question: str
    answer: str
    chunks: list[list[Told]]


class World:
    """The state after the events so far, every fact with the numbers of the events that decide it."""

    def __init__(self) -> None:
        self.bearer: dict[str, tuple[str, int]] = {}  # a thing: who or what holds it, since which event
        self.path: dict[str, list[tuple[str, frozenset[int]]]] = {}  # anything: its places in turn, with their events

    def happen(self, number: int, event: Event) -> None:
        """Change the state by one event."""
        if event.kind == "move":
            self.path.setdefault(event.one, []).append((event.other, frozenset([number])))
        else:
            self.bearer[event.one] = event.other, number
        for thing in self.bearer:
            person, links, passed = self._followed(thing)
            if event.one in passed and person in self.path:
                place, events = self.path[person][-1]
                self.path.setdefault(thing, []).append((place, events | links))

    def answer(self, question: Question) -> tuple[str, frozenset[int]] | None:
        """The answer with the numbers of the events that decide it; None when the events do not tell."""
        if question.kind == "holder":
            holder = self.bearer.get(question.one)
            return (holder[0], frozenset([holder[1]])) if holder else None
        path = self.path.get(question.one, [])
        if question.kind == "where":
            return path[-1] if path else None
        for (earlier, why_earlier), (later, why_later) in reversed(list(zip(path, path[1:], strict=False))):
            if later == question.other:
                return earlier, why_earlier | why_later
        return None

    def _followed(self, thing: str) -> tuple[str, frozenset[int], set[str]]:
        """Who holds a thing, through whatever contains it; the events that say so, and all that was passed."""
        links: set[int] = set()
        passed = {thing}
        while thing in self.bearer:
            thing, number = self.bearer[thing]
            links.add(number)
            passed.add(thing)
        return thing, frozenset(links), passed


def tell_story(
    hops: int,
    evidence_chunks: Sequence[int],
    chunks: int,
    facts_per_chunk: int,
    vocabulary: Sequence[Sequence[str]],
    generator: random.Random,
) -> Story:
    """A story of `chunks` x `facts_per_chunk` sentences whose question needs `hops` of them, one in each given chunk.

    `evidence_chunks` are `hops` numbers from 1, in order; `vocabulary` has people, places, things and containers.
    """
    people, places, things, containers = (
        generator.sample(list(words), count) for words, count in zip(vocabulary, CAST, strict=True)
    )
    question, needed = _plot(generator.choice(KINDS[hops]), people, places, things, containers)
    world = World()
    told: list[list[str]] = []
    events: list[Event] = []
    for chunk in range(1, chunks + 1):
        told.append([])
        own = generator.randrange(facts_per_chunk) if chunk in evidence_chunks else -1
        for place in range(facts_per_chunk):
            done = sum(earlier < chunk or (earlier == chunk and place > own) for earlier in evidence_chunks)
            if place == own:
                event = _evidence(needed[done], world, people, generator)
            else:
                event = _distractor(question, needed, done, world, (people, places, things, containers), generator)
            world.happen(len(events), event)
            events.append(event)
            told[-1].append(_sentence(event, generator))
    solved = world.answer(question)
    assert solved is not None and len(solved[1]) == hops, (question, events)
    numbers = iter(range(len(events)))
    marked = [[Told(sentence, next(numbers) in solved[1]) for sentence in chunk] for chunk in told]
    return Story(question.text, solved[0], marked)


@lru_cache(maxsize=8)  # asked for every chunk of a row in turn
def supporting_sentences(question: str, texts: tuple[str, ...]) -> tuple[tuple[str, ...], ...] | None:
    """The sentences of every text of a story, in order, that the answer needs; None where `question` is no story's."""
    match = _QUESTION.fullmatch(question)
    if match is None:
        return None
    kind, one, other = next(
        (kind, match[f"{kind}_one"], match.groupdict().get(f"{kind}_other") or "")
        for kind in QUESTIONS
        if match[f"{kind}_one"]
    )
    found = [(chunk, match[0], event) for chunk, text in enumerate(texts) for match, event in read_events(text)]
    world = World()
    for number, (_, _, event) in enumerate(found):
        world.happen(number, event)
    solved = world.answer(Question(kind, one.removeprefix("the "), other))
    if solved is None:
        return None
    kept = [found[number] for number in sorted(solved[1])]
    return tuple(tuple(sentence for place, sentence, _ in kept if place == chunk) for chunk in range(len(texts)))


def read_events(text: str) -> Iterator[tuple[re.Match[str], Event]]:
    """Every sentence of the world that stands in a text, with the event it tells."""
    for match in _SENTENCE.finditer(text):
        kind, _, form = (match.lastgroup or "").partition("_")
        names = {name: match[f"{kind}{form}{name}"] for name in ("one", "other")}
        giver = match[f"{kind}{form}giver"] if kind == "send" else ""
        yield match, Event(kind, names["one"], names["other"], giver)


def _plot(
    kind: str, people: Sequence[str], places: Sequence[str], things: Sequence[str], containers: Sequence[str]
) -> tuple[Question, list[Event]]:
    """The question of a kind and the events that decide it, those of "take" to be told as "send" where need be."""
    person, place, before, thing, container = people[0], places[0], places[1], things[0], containers[0]
    goes, comes_from = Event("move", person, place), Event("move", person, before)
    gets = Event("take", thing, person)
    if kind == "person_place":
        return Question("where", person), [goes]
    if kind == "thing_holder":
        return Question("holder", thing), [gets]
    if kind == "thing_place":
        return Question("where", thing), [gets, goes]
    if kind == "person_before":
        return Question("before", person, place), [comes_from, goes]
    if kind == "thing_before":
        return Question("before", thing, place), [gets, comes_from, goes]
    return Question("where", thing), [Event("pack", thing, container), Event("take", container, person), goes]


def _evidence(event: Event, world: World, people: Sequence[str], generator: random.Random) -> Event:
    """The event as it can happen: a thing that somebody holds is sent by that person."""
    if event.kind != "take":
        return event
    holder = world.bearer.get(event.one, ("", 0))[0]
    if not holder and generator.random() < 0.5:
        return event
    return event._replace(kind="send", giver=holder or generator.choice(people[1:]))


def _distractor(
    question: Question,
    needed: Sequence[Event],
    done: int,
    world: World,
    cast: tuple[Sequence[str], ...],
    generator: random.Random,
) -> Event:
    """An event about nobody and nothing that the question and the needed events so far name.

    Who comes into the chain later may walk about and get things before that, but never to where the chain leads them.
    """
    known = {question.one} | {name for event in needed[:done] for name in (event.one, event.other)}
    forbidden = {(event.one, event.other) for event in needed}
    people, places, things, containers = cast
    free = [person for person in people if person not in known]
    loose = [thing for thing in (*things, *containers) if thing not in known]
    while True:
        kind = generator.choice(DISTRACTORS)
        giver = ""
        if kind == "move":
            one, other = generator.choice(free), generator.choice(places)
            now = world.path.get(one, [("", frozenset())])[-1][0]
            sound = other != now
        elif kind == "pack":
            one, other = generator.choice(things), generator.choice(containers)
            sound = one in loose and one not in world.bearer and other not in known
        else:
            one, other = generator.choice(loose), generator.choice(free)
            holder = world.bearer.get(one, ("", 0))[0]
            giver = holder or generator.choice(free)
            sound = giver in free and giver != other and (kind == "send" or not holder)
        if sound and (one, other) not in forbidden:
            return Event(kind, one, other, giver if kind == "send" else "")


def _sentence(event: Event, generator: random.Random) -> str:
    return generator.choice(SENTENCES[event.kind]).format(**event._asdict())


def _pattern(template: str, prefix: str, names: dict[str, str]) -> str:
    """A template as a regular expression whose fields are groups named prefix + field."""
    escaped = re.escape(template)
    return re.sub(r"\\\{(\w+)\\\}", lambda field: f"(?P<{prefix}{field[1]}>{names[field[1]]})", escaped)


def _any(*words: Sequence[str]) -> str:
    return "|".join(word for group in words for word in group)


_FIELDS = {
    "move": {"one": _any(PEOPLE), "other": _any(PLACES)},
    "take": {"one": _any(THINGS, CONTAINERS), "other": _any(PEOPLE)},
    "send": {"one": _any(THINGS, CONTAINERS), "other": _any(PEOPLE), "giver": _any(PEOPLE)},
    "pack": {"one": _any(THINGS), "other": _any(CONTAINERS)},
}
_SENTENCE = re.compile(
    "|".join(
        rf"(?P<{kind}_{form}>(?<!\w){_pattern(template, f'{kind}{form}', _FIELDS[kind])})"
        for kind, templates in SENTENCES.items()
        for form, template in enumerate(templates)
    )
)
_ASKED = {"one": rf"{_any(PEOPLE)}|the (?:{_any(THINGS)})", "other": _any(PLACES)}
_QUESTION = re.compile("|".join(_pattern(template, f"{kind}_", _ASKED) for kind, template in QUESTIONS.items()))
