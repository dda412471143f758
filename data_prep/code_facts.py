"""Facts of Python source found by `ast`: what is asked, the answer, and the characters that state it."""

import ast
import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

MAX_ANSWER_CHARACTERS = 40
UNTELLING = {"", "a", "an", "the", "object", "none", "true", "false"}  # answers that a guess finds

QUESTIONS = {
    "parameter_default": "what is the default value of the parameter `{name}` of the {owner}?",
    "module_constant": "what value is assigned to the module constant `{name}`?",
    "class_attribute": "what value does the {owner} assign to its attribute `{name}`?",
    "base_class": "what is the base class of the {owner}?",
    "return_annotation": "what is the return annotation of the {owner}?",
    "raised_exception": "which exception does the {owner} raise?",
    "import_source": "from which module is the name `{name}` imported?",
}
KINDS = tuple(QUESTIONS)
BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)  # what can hold statements


class Fact(NamedTuple):
    """One statement that could answer a question; `answers` is empty when its answer is not one to ask for.

    `key` is what a reader can look for without knowing file or class: two statements of one document with the same
    key could both answer. `pattern` finds every place in the text that looks like such a statement. `spans` are
    half-open character ranges of the file.
    """

    kind: str
    key: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    pattern: str


class Source:
    """The text of one file (line ends are newlines) with its syntax tree.

    Raises SyntaxError or ValueError for text that Python does not parse.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            self.tree = ast.parse(text)
        self.lines = text.split("\n")
        self.line_starts = [0]
        for line in self.lines:
            self.line_starts.append(self.line_starts[-1] + len(line) + 1)

    def position(self, line: int, byte_column: int) -> int:
        """Character index of a line (from 1) and a column in UTF-8 bytes, as `ast` counts them."""
        column = len(self.lines[line - 1].encode("utf-8")[:byte_column].decode("utf-8"))
        return self.line_starts[line - 1] + column

    def span(self, first: ast.AST, last: ast.AST | None = None) -> tuple[int, int]:
        """Character range from the start of one node to the end of another, or of the same one."""
        begin, end = self._place(first), self._place(last or first)
        return self.position(begin[0], begin[1]), self.position(end[2], end[3])

    def segment(self, node: ast.AST) -> str:
        """The source text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def header(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
        """Character range of a function's head: from `def` or `async` to the colon, or to a comment after it."""
        start, first = self.position(node.lineno, node.col_offset), node.body[0]
        line = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", ()))])
        end = self.position(line, first.col_offset if line == node.lineno else 0)
        return start, start + len(self.text[start:end].rstrip())

    @staticmethod
    def _place(node: ast.AST) -> tuple[int, int, int, int]:
        place = [getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")]
        return place[0], place[1], place[2], place[3]


def find_facts(source: Source) -> list[Fact]:
    """Every fact of a file in the order of the text, also those without an answer worth asking for."""
    facts = [*_constants(source, source.tree.body, None), *_imports(source)]
    scopes: list[tuple[ast.AST, tuple[str, ...], bool]] = [(source.tree, (), False)]
    while scopes:
        scope, names, in_class = scopes.pop()
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.ClassDef):
                facts.extend(_class_facts(source, node, ".".join((*names, node.name))))
                scopes.append((node, (*names, node.name), True))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                owner = f"{'method' if in_class else 'function'} `{'.'.join((*names, node.name))}`"
                facts.extend(_function_facts(source, node, owner))
                scopes.append((node, (*names, node.name), False))
            elif isinstance(node, BLOCKS):
                scopes.append((node, names, in_class))
    return sorted(facts, key=lambda fact: (fact.spans, fact.key))


def _fact(
    source: Source,
    kind: str,
    key: tuple[str, ...],
    answers: tuple[str, ...],
    spans: tuple[tuple[int, int], ...],
    pattern: str,
    owner: str = "",
) -> Fact:
    question = f"In the file {source.path}, " + QUESTIONS[kind].format(name=key[-1], owner=owner)
    return Fact(kind, key, question, _askable(question, answers), spans, pattern)


def _askable(question: str, answers: tuple[str, ...]) -> tuple[str, ...]:
    """The answers, or none when one is too long, says nothing, cannot be boxed, or stands in the question.

    >>> _askable("In the file a.py, what is the default value of the parameter `mode`?", ("strict", "'strict'"))
    ('strict', "'strict'")
    >>> _askable("In the file a.py, what is the default value of the parameter `mode`?", ("mode",))
    ()
    """
    for answer in answers:
        plain = re.sub(r"[^\w\s]", "", answer).strip().lower()
        if plain in UNTELLING or len(answer) > MAX_ANSWER_CHARACTERS or re.search(r"[\\{}\n]", answer):
            return ()
        if not answer.isprintable() or re.search(rf"(?<!\w){re.escape(answer.lower())}(?!\w)", question.lower()):
            return ()
    return answers


def _literal(source: Source, node: ast.AST | None) -> tuple[str, ...]:
    """The accepted spellings of a number or a string, the plain one first; none for any other expression."""
    value = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    if not isinstance(value, ast.Constant) or isinstance(value.value, bool) or node is None:
        return ()
    text = source.segment(node)
    if len(text) > MAX_ANSWER_CHARACTERS:
        return ()
    if isinstance(value.value, int | float):
        computed = repr(-value.value if node is not value else value.value)
        return (text,) if text == computed else (text, computed)
    if isinstance(value.value, str) and node is value and text[1:-1] == value.value and text[0] in "'\"":
        return (value.value, text)
    return ()


def _constants(source: Source, body: list[ast.stmt], class_name: str | None) -> Iterator[Fact]:
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target: ast.expr = node.targets[0]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target = node.target
        else:
            continue
        if isinstance(target, ast.Name) and not target.id.startswith("__"):
            kind, owner = ("class_attribute", f"class `{class_name}`") if class_name else ("module_constant", "")
            pattern = rf"(?m)(?<![\w.]){re.escape(target.id)}[ \t]*(:[^=\n]+)?([-+*/%&|^@]|//|\*\*|<<|>>)?=(?!=)"
            yield _fact(
                source,
                kind,
                ("assignment", target.id),
                _literal(source, node.value),
                (source.span(node),),
                pattern,
                owner,
            )


def _imports(source: Source) -> Iterator[Fact]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            module = node.module if isinstance(node, ast.ImportFrom) and not node.level and not alias.asname else None
            name = alias.asname or alias.name
            pattern = rf"\bimport\b[^\n]*\b{re.escape(name)}\b"
            answers = (module,) if module else ()
            yield _fact(source, "import_source", ("import", name), answers, (source.span(node),), pattern)


def _class_facts(source: Source, node: ast.ClassDef, path: str) -> Iterator[Fact]:
    yield from _constants(source, node.body, path)
    answers: tuple[str, ...] = ()
    end = source.position(node.lineno, node.col_offset) + len("class ") + len(node.name)
    if len(node.bases) == 1 and not node.keywords and re.fullmatch(r"[\w.]+", source.segment(node.bases[0])):
        base = source.segment(node.bases[0])
        answers = (base, base.rsplit(".", 1)[-1]) if "." in base else (base,)
        end = source.span(node.bases[0])[1]
    start = source.position(node.lineno, node.col_offset)
    pattern = rf"\bclass[ \t]+{re.escape(node.name)}\b"
    yield _fact(source, "base_class", ("class", node.name), answers, ((start, end),), pattern, f"class `{path}`")


def _function_facts(source: Source, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> Iterator[Fact]:
    header = source.header(node)
    pattern = rf"\bdef[ \t]+{re.escape(node.name)}\b"
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(node.args.defaults)) + list(node.args.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    for argument, default in pairs:
        key = ("parameter", node.name, argument.arg)
        stated = (header[0], source.span(default)[1]) if default is not None else header
        yield _fact(source, "parameter_default", key, _literal(source, default), (stated,), pattern, owner)
    text = source.segment(node.returns) if node.returns is not None else ""
    returns = (text,) if text.strip("'\"") == text else (text.strip("'\""), text)
    stated = (header[0], source.span(node.returns)[1]) if node.returns is not None else header
    yield _fact(source, "return_annotation", ("returns", node.name), returns, (stated,), pattern, owner)
    raised = list(_raises(node))
    called = [statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc for statement in raised]
    names = {source.segment(name) for name in called if name is not None}
    answers: tuple[str, ...] = ()
    if len(raised) == 1 and len(names) == 1 and re.fullmatch(r"(\w+\.)*[A-Z]\w*", next(iter(names))):
        name = names.pop()
        answers = (name, name.rsplit(".", 1)[-1]) if "." in name else (name,)
    spans = (header, *(source.span(statement) for statement in raised))
    yield _fact(source, "raised_exception", ("raises", node.name), answers, spans, pattern, owner)


def _raises(node: ast.AST) -> Iterator[ast.Raise]:
    """The raise statements of a function itself, not of what is defined inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise):
            yield child
        elif isinstance(child, BLOCKS) and not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            yield from _raises(child)
