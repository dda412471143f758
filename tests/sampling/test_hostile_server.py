"""Servers that are not trusted: whatever they answer is one short error within the limit, and memory stays bounded."""

import contextlib
import http.server
import json
import threading
import time
import tracemalloc

import pytest
import read_document
from tiny import word_tokenizer

from turngrpo.trainer.reading.rollout import NoiseKey, Request
from turngrpo.trainer.sampling import server as server_module
from turngrpo.trainer.sampling.chat_engine import ChatEngine
from turngrpo.trainer.sampling.server import RefusedRequest, Server, ServerError, served_models
from turngrpo.trainer.sampling.vllm_engine import VllmEngine, base_models

HTML = b"<html><body>Welcome to nginx!</body></html>"
GOOD = {"token_ids": [5, 3], "logprobs": {"token_logprobs": [-0.5, 0]}, "finish_reason": "stop"}


@contextlib.contextmanager
def answering(write, status=200, kind="application/json"):
    """A server that answers every request by `write(send)`, where `send` sends bytes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            with contextlib.suppress(OSError):
                write(self.wfile.write)

        do_GET = do_POST

        def log_message(self, *args):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield Server(f"http://127.0.0.1:{running.server_port}", patience=0.2, answer_timeout=2.0)
    finally:
        running.shutdown()


def engines(server):
    sampling = {"max_new_tokens": 4, "prompt_limit": 100, "model": "m"}
    yield VllmEngine(servers=[server], eos_ids=[3], **sampling)
    yield ChatEngine(server=server, tokenizer=word_tokenizer(), **sampling)


def requests():
    message = [{"role": "user", "content": "hi"}]
    return [Request([[4, 5]], NoiseKey(0, 0, 7, 0, 2), label="row 'c-17'", messages=message)]


def trickle(send):
    while True:
        send(b" ")
        time.sleep(0.3)


def without_end(send):
    while True:
        send(b"[" * 2**16)


BAD = {
    "html": lambda send: send(HTML),
    "broken JSON": lambda send: send(b'{"choices": [{"token_ids": [5'),
    "nothing": lambda send: None,
    "a list": lambda send: send(b"[]"),
    "no choices": lambda send: send(b'{"choices": []}'),
    "choices of text": lambda send: send(b'{"choices": ["a"], "usage": 3}'),
    "deep": lambda send: send(b"[" * 200_000),
    "wrong types": lambda send: send(
        json.dumps({"choices": [{"token_ids": ["5"], "logprobs": [1], "message": {"content": 5}}]}).encode()
    ),
    "booleans": lambda send: send(
        json.dumps({"choices": [GOOD | {"token_ids": [True, 3], "message": {"content": [1]}}]}).encode()
    ),
}


@pytest.mark.parametrize("write", BAD.values(), ids=BAD)
def test_what_is_no_completion_is_one_short_error_with_url_row_and_turn(write):
    with answering(write) as server:
        for engine in engines(server):
            with pytest.raises(ServerError, match=rf"^row 'c-17', turn 2: {server.base_url}") as caught:
                engine.generate(requests())
            assert len(str(caught.value)) < 700


def test_a_good_answer_is_read():
    with answering(lambda send: send(json.dumps({"choices": [GOOD], "usage": None}).encode())) as server:
        (completion,) = next(engines(server)).generate(requests())
    assert (completion.ids, completion.behavior_logprobs, completion.finish_reason) == ([5, 3], [-0.5, 0], "eos")


def test_an_answer_that_trickles_ends_within_the_limit():
    with answering(trickle) as server:
        for engine in engines(server):
            started = time.monotonic()
            with pytest.raises(ServerError, match="row 'c-17', turn 2: .* did not answer within 2 seconds"):
                engine.generate(requests())
            assert time.monotonic() - started < 6  # each blank comes in time: the limit counts the whole answer


def test_an_answer_without_end_stays_bounded(monkeypatch):
    monkeypatch.setattr(server_module, "LARGEST_ANSWER", 2**20)
    with answering(without_end) as server:
        tracemalloc.start()
        with pytest.raises(ServerError, match="answers without end: more than 1 MiB"):
            next(engines(server)).generate(requests())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 * 2**20


def test_five_megabytes_of_error_text_are_shown_in_short():
    text = json.dumps({"error": {"message": "no \x1b[31mroom\x1b[0m\n" * 300_000}}).encode()
    with answering(lambda send: send(text), status=400) as server:
        with pytest.raises(RefusedRequest) as caught:
            next(engines(server)).generate(requests())
    assert len(str(caught.value)) < 700 and "\x1b" not in str(caught.value) and r"no \x1b[31mroom" in str(caught.value)


STEERING = "7\x1b[2J\x9b1m\r\b\u202e\x7f[red]"
SHOWN = r"7\x1b[2J\x9b1m\r\x08\u202e\x7f[red]"


def test_what_a_model_says_is_shown_and_steers_no_terminal(tmp_path, capsys):
    """A served model writes escapes into memory and answer; then the server ends with escapes in its error."""
    reply = f"<check>yes</check><update>{STEERING}</update><next>continue</next>"
    start = ["Hi"] * 3  # to what is asked before the first chunk
    replies = [*start, reply, reply, f"\\boxed{{{STEERING}}}"] * 2

    def write(send):
        if not replies:
            return send(STEERING.encode())
        choice = {"message": {"content": replies.pop(0)}, "finish_reason": "stop"}
        return send(json.dumps({"choices": [choice]}).encode())

    (tmp_path / "document").write_text("red is 7 . " * 8)  # two chunks
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    with answering(write) as server:
        arguments = f"--base_url {server.base_url} --model m --api chat --document {tmp_path}/document --chunk_size 20"
        arguments += f" --question red --tokenizer {tmp_path}/tokenizer --max_memory_tokens 40"
        assert read_document.main(arguments.split()) == 0
        shown = capsys.readouterr().out
        assert read_document.main([*arguments.split(), "--json"]) == 0
        exact = capsys.readouterr().out
        replies = [*start, reply]
        assert read_document.main(arguments.split()) == 1
        broken = capsys.readouterr()
    assert f"\n  {SHOWN}\n" in shown and f"answer: {SHOWN}\n" in shown
    report = json.loads(exact)
    assert (report["memory"], report["answer"], report["turns"][0]["text"]) == (STEERING, STEERING, reply)
    assert "answered " + SHOWN.replace(r"\r", " ") in broken.err and SHOWN in broken.out
    for text in (shown, exact, broken.err, broken.out):
        assert all(character.isprintable() or character == "\n" for character in text)


@pytest.mark.parametrize("text", [HTML, b'{"data": 5}', b'{"data": [1, {"id": 7}]}', b"[]", b""])
def test_a_page_at_v1_models(text):
    with answering(lambda send: send(text), kind="text/html") as server:
        assert served_models(server) == []
        if text.startswith(b'{"data": ['):
            assert base_models(server) == []
        else:
            with pytest.raises(ServerError, match=server.base_url):
                base_models(server)
