"""What cannot be written is one error at every stage: what, why, what is safe, and how to go on."""

import errno
import os
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path

import evaluate
import matplotlib.figure
import pandas
import prepare_corpus
import pyarrow.parquet
import pytest
import run_lab
import sft
import torch
from lib import curves, output, reporting, running
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from test_scripts import LIMITS, PLAIN, READING, tiny  # noqa: F401  a fixture
from tokenizers import Tokenizer, models
from training import make_trainer

from turngrpo.trainer.export import versions
from turngrpo.trainer.warm_start import ExactSFTTrainer
from turngrpo.trainer.writing import UNSAID, WriteError, write_fault, writing

WHY = {
    errno.ENOSPC: "no space is left on the disk: make room",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.ENOENT: "its folder is gone: was it moved or removed",
    errno.EFBIG: "a file would be larger than",
}


def plain(code):
    raise OSError(code, os.strerror(code))


def as_rust_says_it(code):
    raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})")


def as_a_cause(code):
    try:
        plain(code)
    except OSError as error:
        raise RuntimeError("saving failed") from error


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A trainer of a LoRA after its last update, with checkpoint-1 and -2."""
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = make_trainer(
        tmp_path_factory.mktemp("runs") / "run", peft_config=adapter, save_strategy="steps", save_steps=1,
        log_completions=True, num_completions_to_print=0,
    )  # fmt: skip
    trainer.train()
    return trainer


def checkpoint(trainer, folder, patch, fail):
    patch.setattr(torch, "save", fail)
    trainer._save_checkpoint(trainer.model, None)


def ledger(trainer, folder, patch, fail):
    patch.setattr(pyarrow.parquet.ParquetWriter, "write_table", fail)
    trainer._write_down(replace(trainer._buffered_inputs[0].rollout, iteration=2))


def completions(trainer, folder, patch, fail):
    patch.setattr(pandas.DataFrame, "to_parquet", fail)
    trainer.log({})


def metrics(trainer, folder, patch, fail):
    patch.setattr(reporting, "open", fail, raising=False)
    log = reporting.RunLog(Path(trainer.args.output_dir) / "metrics.jsonl", reporting.make_console())
    log.on_log(trainer.args, trainer.state, None, {"kl": 0.1})


def curves_picture(trainer, folder, patch, fail):
    patch.setattr(matplotlib.figure.Figure, "savefig", fail)
    curves.write_curves([{"update": 1, "reward": 1.0}], Path(trainer.args.output_dir) / "curves.png")


def version(trainer, folder, patch, fail):
    patch.setattr(versions, "sync_below", fail)
    trainer.export_adapter("mine")


def version_folder(trainer, folder, patch, fail):
    patch.setattr(versions, "locked", fail)
    trainer.export_adapter("mine")


def corpus(trainer, folder, patch, fail):
    patch.setattr(os, "replace", fail)
    with writing("corpus.jsonl", "A file that was there is as it was; the same command makes it again"):
        prepare_corpus.write_corpus(folder / "corpus.jsonl", *prepare_corpus.build_needle_corpus(projects=2))


def new_folder(trainer, folder, patch, fail):
    patch.setattr(output, "locked", fail)
    with output.held(folder / "new"):
        pass


GOES_ON = "checkpoint-2 is whole: the same command with --resume_from_checkpoint true goes on from it"
STAGES = {
    checkpoint: ("checkpoint-2", GOES_ON),
    ledger: ("the rollout of iteration 2", GOES_ON),
    completions: ("the log of update 2", GOES_ON),
    metrics: ("metrics.jsonl", GOES_ON),
    curves_picture: ("curves.png", GOES_ON),
    version: ("a new version in ", "No version was changed: export the run's newest checkpoint"),
    version_folder: ("a new version in ", "No version was changed: export the run's newest checkpoint"),
    corpus: ("corpus.jsonl", "A file that was there is as it was"),
    new_folder: ("new", "Nothing was started"),
}


def whole_files(trainer):
    """What a resume or a reader could take for a result."""
    paths = Path(trainer.args.output_dir).rglob("*")
    return sorted(
        path for path in paths if path.is_file() and not {"partial", ".lock"} & set(re.split("[/-]", str(path)))
    )


@pytest.mark.parametrize("code", WHY, ids=errno.errorcode.get)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_says_what_was_not_written_why_and_how_to_go_on(stage, code, trainer, tmp_path, monkeypatch):
    what, safe = STAGES[stage]
    kinds = (plain, as_rust_says_it, as_a_cause)
    before = whole_files(trainer)
    for kind in kinds:
        with monkeypatch.context() as patch, pytest.raises(WriteError) as caught:
            stage(trainer, tmp_path, patch, lambda *args, kind=kind, **kwargs: kind(code))
        text = str(caught.value)
        assert what in text and f"was not written: {WHY[code]}" in text and safe in text
    assert whole_files(trainer) == before


def evaluation(tiny, folder, patch, fail):  # noqa: F811
    patch.setattr(output.os, "replace", fail)
    model = ["--model", str(tiny / "model"), "--corpus", str(tiny / "corpus.jsonl"), "--rows", "1"]
    return evaluate.main([*model, "--output", str(folder / "evaluation.json"), *READING, *LIMITS])


def warm_start(tiny, folder, patch, fail):  # noqa: F811
    (folder / "targets.jsonl").write_text('{"prompt": "the code", "completion": "of lamp"}\n' * 4)
    patch.setattr(ExactSFTTrainer, "save_model", fail)
    source = ["--targets", str(folder / "targets.jsonl"), "--model_name_or_path", str(tiny / "model")]
    return sft.main([*source, "--max_steps", "1", "--save_strategy", "no", *PLAIN, "--output_dir", str(folder / "w")])


def laboratory(tiny, folder, patch, fail):  # noqa: F811
    patch.setattr(output.os, "replace", fail)
    return run_lab.main(["--preset", "smoke", "--output", str(folder / "lab")])


def needles(tiny, folder, patch, fail):  # noqa: F811
    patch.setattr(os, "replace", fail)
    status = prepare_corpus.main(["needle", "--projects", "2", "--output", str(folder / "n.jsonl")])
    raise SystemExit(status)


def printing(tiny, folder, patch, fail):  # noqa: F811
    patch.setattr(sys, "stdout", open("/dev/full", "w"))
    print("a trace")
    return 0


SCRIPTS = {
    evaluation: ("evaluation.json was not written", "stands in the tables above"),
    warm_start: ("the result in ", "start it again"),
    laboratory: ("lab was not written", "Finished stages are whole"),
    needles: ("n.jsonl was not written", "A file that was there is as it was"),
    printing: ("something was not written", "What was written before is whole"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_ends_in_one_line(script, tiny, tmp_path, monkeypatch, capsys):  # noqa: F811
    what, safe = SCRIPTS[script]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended, monkeypatch.context() as patch:
        running.run_script(lambda: script(tiny, tmp_path, patch, lambda *args, **kwargs: plain(errno.ENOSPC)))
    assert ended.value.code == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error:", "Traceback"))]
    assert len(errors) == 1 and what in errors[0] and WHY[errno.ENOSPC] in errors[0] and safe in errors[0]


@pytest.fixture
def small_files():
    """Any file that grows beyond 3,000 bytes fails: a real failure of the operating system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


NUMBERS = torch.arange(100_000.0)
LIBRARIES = {
    "python": lambda path: path.write_bytes(bytes(10_000)),
    "torch": lambda path: torch.save(NUMBERS, path),
    "safetensors": lambda path: save_file({"a": NUMBERS}, path),
    "pyarrow": lambda path: pyarrow.parquet.write_table(pyarrow.table({"a": NUMBERS.numpy()}), path),
    "tokenizers": lambda path: Tokenizer(models.WordLevel({str(i): i for i in range(2000)}, "0")).save(str(path)),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_libraries_that_write_for_us_are_understood(library, tmp_path, small_files):
    with pytest.raises(WriteError) as too_large, writing("it", ""):
        LIBRARIES[library](tmp_path / "file")
    assert WHY[errno.EFBIG] in str(too_large.value) or (library == "torch" and UNSAID in str(too_large.value))
    with pytest.raises(WriteError, match=WHY[errno.ENOENT]), writing("it", ""):
        LIBRARIES[library](tmp_path / "gone" / "file")


def test_what_is_no_fault_of_a_disk_stays_what_it_is():
    with pytest.raises(RuntimeError, match="^a bug$"), writing("it", ""):
        raise RuntimeError("a bug")
    with pytest.raises(ValueError, match="^of the user$"), writing("it", ""):
        raise ValueError("of the user") from FileNotFoundError(errno.ENOENT, "no model")

    def missing():
        return as_a_cause(errno.ENOENT)  # outside of what is known to write, this may be anything

    with pytest.raises(RuntimeError, match="saving failed"):
        running.run_script(missing)
    circle = RuntimeError("one")
    circle.__cause__ = RuntimeError("two")
    circle.__cause__.__cause__ = circle
    assert write_fault(circle) is None


def test_a_reader_that_has_enough_of_the_output_is_no_error(monkeypatch, capsys):
    """What `--help | head` does: the page is in the buffer when argparse ends the program, and nobody reads it."""
    read, write = os.pipe()
    os.close(read)

    def page():
        print("a page")
        sys.exit(0)

    with os.fdopen(write, "w") as output, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", output)
        with running.setting_up():
            running.run_script(page)
    assert ended.value.code == 141 and capsys.readouterr().err == ""
