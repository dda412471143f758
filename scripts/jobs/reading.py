"""What read_document.py does: a document as text, its chunks read by a served agent, the trace."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments.commands import ReadArguments
from lib.lookup import make_workflow
from lib.options import (
    OF_A_WORKFLOW,
    evaluation_config,
    reading_config,
    reading_defaults,
    resolve,
    warm_start_of,
)
from lib.running import INTERRUPTED
from lib.served import PATIENCE, Served
from lib.tokenizing import generation_config, load_tokenizer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from turngrpo.data_prep.chunking import chunk_document
from turngrpo.trainer.reading.chat_format import eos_ids
from turngrpo.trainer.reading.gates import INITIAL_MEMORY
from turngrpo.trainer.reading.rollout import Turn, collect
from turngrpo.trainer.sampling.chat_engine import ChatEngine, connect
from turngrpo.trainer.sampling.server import RefusedRequest, Server, ServerError, in_short
from turngrpo.trainer.showing import visible

DEFAULTS = reading_defaults()
CONFIG = [name for name in DEFAULTS if name not in ("workflow", *OF_A_WORKFLOW)]


class Watched:
    """A workflow that tells of every turn when it has ended."""

    def __init__(self, workflow: Any, on_turn: Callable[[Any, Turn], None]):
        self.workflow, self.on_turn = workflow, on_turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.workflow, name)

    def advance(self, state: Any, turn: Turn) -> bool:
        goes_on = self.workflow.advance(state, turn)
        self.on_turn(state, turn)
        return goes_on


def read_text(path: str) -> str:
    """Return the text of a file; ValueError for a file that is empty, binary or in an unknown encoding."""
    data = Path(path).read_bytes()
    if data.startswith(b"%PDF-"):
        text = read_pdf(path)
    else:
        encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        if encoding != "utf-16" and b"\0" in data:
            raise ValueError(f"{path} is a binary file (it has a zero byte): expected text, Markdown, code or PDF")
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is no {error.encoding.upper()} text (byte {error.start} is {data[error.start]:#04x}): "
                "convert it to UTF-8 first"
            ) from error
    if not text.strip():
        raise ValueError(f"{path} has no text in it: expected at least one word")
    return text


def read_pdf(path: str) -> str:
    """Return the text of all pages; ValueError where pypdf is missing or cannot read the file."""
    try:
        import pypdf
    except ImportError as error:
        raise ValueError(
            f"{path} is a PDF, which needs pypdf: `pip install pypdf`, or convert the file to text"
        ) from error
    try:
        return "\n\n".join(page.extract_text() for page in pypdf.PdfReader(path).pages)
    except pypdf.errors.PyPdfError as error:
        raise ValueError(f"{path} is a PDF that pypdf cannot read ({error}): convert it to text") from error


def describe(state: Any, turn: Turn, number: int, gated: bool, seconds: float) -> dict[str, Any]:
    """Return one turn for the trace; chunk is None for the answer turn, and for any of a workflow without gates."""
    decision, chunk = turn.decision, turn.step if gated else None
    return {
        "turn": number,
        "chunk": chunk,
        "parsed": getattr(state, "answer", None) is not None if chunk is None else decision is not None,
        "check": decision and decision.check,
        "exit": decision and decision.exit,
        "candidate": decision and decision.candidate,
        "memory": getattr(state, "memory", None),
        "memory_tokens": getattr(state, "memory_tokens", 0),
        "memory_cut": turn.memory_cut,
        "text": turn.text,
        "finish_reason": turn.finish_reason,
        "prompt_tokens": len(turn.prompt_ids),
        "completion_tokens": len(turn.completion_ids),
        "seconds": round(seconds, 3),
    }


def show(console: Console, entry: dict[str, Any], chunks: int) -> None:
    """Print the gates of one chunk turn, and the memory where it was written; of an unparsed turn its reply.

    A workflow of another kind has no gates (`chunks` is 0): the reply of every turn.
    """
    if not chunks:
        show_reply(console, f"[bold]turn {entry['turn']}[/]", entry)
        return
    if entry["chunk"] is None:
        if not entry["parsed"]:
            show_reply(console, "[bold]answer turn[/]  [red]unparsed[/]", entry)
        return
    if not entry["parsed"]:
        gates = f"[red]unparsed[/] ({entry['finish_reason']}), memory kept"
    else:
        check, leaves = "[green]yes[/]" if entry["check"] else "no", "[yellow]end[/]" if entry["exit"] else "continue"
        gates = f"update {check}  next {leaves}"
    line = f"[bold]chunk {entry['chunk']}/{chunks}[/]  {gates}  memory {entry['memory_tokens']} tokens"
    if not entry["parsed"]:
        show_reply(console, line, entry)
        return
    console.print(line)
    if entry["check"]:
        console.print(f"  {escape(visible(entry['memory']))}", style="cyan", highlight=False)


def show_reply(console: Console, line: str, entry: dict[str, Any]) -> None:
    """Print a line and below it the beginning of the reply, as one line without control characters."""
    console.print(line)
    console.print(f"  {escape(in_short(entry['text']) or '(nothing)')}", style="dim", highlight=False)


@dataclass
class Reading:
    """A document cut into chunks, and who reads it."""

    options: ReadArguments
    config: Any
    tokenizer: Any
    engine: Any
    row: dict[str, Any]
    taken: dict[str, tuple[Any, str]]

    @classmethod
    def prepare(cls, options: ReadArguments) -> "Reading":
        """Check file, model or server, and lengths; ValueError or ServerError says what is wrong."""
        if not Path(options.document).is_file():
            raise ValueError(f"--document is {options.document!r}: no such file")
        text = read_text(options.document)
        config, tokenizer, engine, taken = _served(options) if options.base_url else _loaded(options)
        chunks = [{"text": chunk["text"]} for chunk in chunk_document(text, [], tokenizer, config.chunk_size)]
        row = {"id": options.document, "question": options.question, "answers": [], "chunks": chunks}
        reading = cls(options, config, tokenizer, engine, row, taken)
        reading.check_length()
        return reading

    def check_length(self) -> None:
        """Raise ValueError where a prompt of the document cannot fit; without a bound it is seen turn by turn."""
        bound = getattr(self.workflow(lambda state, turn: None), "max_prompt_tokens", None)
        longest, limit = bound(self.row) if bound else 0, self.config.max_prompt_length
        if longest > limit:
            raise ValueError(
                f"{self.options.document} needs prompts of up to {longest} tokens and cannot fit in {limit} prompt "
                "tokens (--max_prompt_length, and what the model takes beside --max_completion_length): lower "
                "--chunk_size or --max_memory_tokens, or raise the limit"
            )

    def workflow(self, on_turn: Callable[[Any, Turn], None]) -> Watched:
        """Return a bound workflow."""
        options = self.options
        given = {name: getattr(options, name) for name in OF_A_WORKFLOW}
        if options.ignore_exit:
            given["exit_gate"] = False
        workflow = Watched(make_workflow(str(options.workflow), **given), on_turn)
        workflow.bind(self.tokenizer, self.config)
        return workflow

    @property
    def chunks(self) -> int:
        """How many chunks are read turn by turn; 0 for a workflow that decides by no gates."""
        return len(self.row["chunks"]) if hasattr(self.workflow(lambda state, turn: None), "decide") else 0

    @property
    def api(self) -> str | None:
        """How the model is asked, None for one in this process."""
        if self.options.base_url is None:
            return None
        return "chat" if isinstance(self.engine, ChatEngine) else "completions"

    def report(self, trace: list[dict[str, Any]], answer: str | None, seconds: float, **ended: Any) -> dict[str, Any]:
        """Return what --json prints."""
        last = trace[-1] if trace else {"memory": INITIAL_MEMORY if self.chunks else None}
        return {
            "document": self.options.document,
            "question": self.options.question,
            "model": self.options.model,
            "api": self.api,
            "answer": answer,
            "memory": last["memory"],
            "chunks": len(self.row["chunks"]),
            "chunks_read": sum(entry["chunk"] is not None for entry in trace) if self.chunks else None,
            "seconds": round(seconds, 3),
            **ended,
            "turns": trace,
        }


def _served(options: ReadArguments) -> tuple[Any, Any, Any, dict[str, tuple[Any, str]]]:
    """Return config, tokenizer, engine and where the options come from, of a model that a server has loaded."""
    server = Server(str(options.base_url), patience=PATIENCE, answer_timeout=options.answer_timeout)
    served = Served.find(server, options.model)
    taken = resolve(options, DEFAULTS, options.adapter or served.adapter_folder or warm_start_of(served.weights))
    tokenizer = load_tokenizer(options.tokenizer or served.tokenizer)
    config = reading_config(**{name: getattr(options, name) for name in CONFIG})
    ends = eos_ids(tokenizer, generation_config(served.weights))
    engine = connect(server, options.model, tokenizer, config, ends, options.api)
    config.max_prompt_length = engine.prompt_limit
    return config, tokenizer, engine, taken


def _loaded(options: ReadArguments) -> tuple[Any, Any, Any, dict[str, tuple[Any, str]]]:
    """Return the same of a model that is loaded here, which takes torch."""
    from jobs.evaluating import find_adapter, load

    from turngrpo.trainer.evaluation.evaluate import own_engine
    from turngrpo.trainer.forward.policy import Policy

    find_adapter(options)
    taken = resolve(options, DEFAULTS, options.adapter or warm_start_of(options.model))
    tokenizer = load_tokenizer(options.tokenizer or options.model, options.revision)
    config = evaluation_config(**{name: getattr(options, name) for name in CONFIG})
    model = load(options, config)
    model.eval()
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        config.max_prompt_length = min(config.max_prompt_length, positions - (config.max_completion_length or 0))
    engine = own_engine(Policy(model), tokenizer, config)
    engine.refresh()
    return config, tokenizer, engine, taken


def read(reading: Reading, console: Console) -> tuple[dict[str, Any], int]:
    """Read the document; returns report and exit status, also where Ctrl-C or a dying server ended it early."""
    chunks, trace, started = reading.chunks, list[dict[str, Any]](), time.perf_counter()
    answer, error, status = None, None, 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading", total=chunks or None)

        def on_turn(state: Any, turn: Turn) -> None:
            trace.append(describe(state, turn, len(trace) + 1, chunks > 0, time.perf_counter() - started))
            progress.update(task, advance=turn.step is not None)
            show(progress.console, trace[-1], chunks)

        try:
            workflow, seed = reading.workflow(on_turn), reading.config.eval_seed
            answer = collect(workflow, reading.engine, reading.tokenizer, [reading.row], [0], [0], seed, 0)[0].answer
        except KeyboardInterrupt:
            error, status = "interrupted", INTERRUPTED
        except (ServerError, RefusedRequest) as fault:
            error, status = str(fault), 1
    return reading.report(trace, answer, time.perf_counter() - started, error=error), status
