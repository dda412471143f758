"""Text on a terminal: what would steer it is shown."""

import json
import unicodedata

import pytest
from training import make_trainer

from turngrpo.trainer.showing import visible, visible_json


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),  # one character that does what ESC [ does
        ("50\r99", r"50\r99"),
        ("50\b\b99", r"50\x08\x0899"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),  # letters in another order than they stand in
        ("a\u2028b", r"a\u2028b"),
        ("\ud800", r"\ud800"),  # which no terminal could be sent
        ("two\nlines\tand \\x1b", "two\nlines\tand \\x1b"),
        ("中\u3000文 \u05d0\u05d1 é 👩\u200d🚀", "中\u3000文 \u05d0\u05d1 é 👩\u200d🚀"),
    ],
)
def test_what_steers_is_shown_and_text_is_left_alone(text, shown):
    assert visible(text) == shown
    assert json.loads(visible_json({"text": text})) == {"text": text}


def test_nothing_that_steers_is_left_over():
    everything = "".join(map(chr, range(0x3000))) + "\U000e0001\ufeff\ufff9"
    for text in (visible(everything), visible_json(everything)):
        left = {one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp", "Cs")}
        assert left <= {"\n", "\t", "\u200c", "\u200d"}


def test_the_table_of_completions_shows_what_steers_and_keeps_it_in_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    trainer = make_trainer(tmp_path, log_completions=True, num_completions_to_print=1, max_steps=1)
    columns = {"prompt": ["read"], "completion": ["7\x1b[2J\u202e"], "advantages": [0.5]}
    trainer.completion_log.restore(columns | {"rewards": {"r": [1.0]}, "extra": {"note": ["a\x9b1m"]}})
    trainer.log({})
    shown = capsys.readouterr().out
    assert r"7\x1b[2J\u202e" in shown and r"a\x9b1m" in shown and "\u202e" not in shown and "update 0" in shown
    assert shown.count("update 0") == 1 and trainer.num_completions_to_print == 1
    (table,) = (tmp_path / "completions").iterdir()
    assert b"7\x1b[2J\xe2\x80\xae" in table.read_bytes()
