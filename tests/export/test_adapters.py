"""Export: only the trained adapter, whole versions or none whatever happens, nothing overwritten."""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, LoraModel, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file
from tiny import adapted_model, save_base, sharpen, tiny_model, word_tokenizer
from training import make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from turngrpo.trainer import GatedMemory, TurnGRPOConfig
from turngrpo.trainer.export.base_model import public_name, weights_digest
from turngrpo.trainer.export.exporter import Exporter
from turngrpo.trainer.export.merge import merge_version
from turngrpo.trainer.export.versions import check_name, export_adapter, export_checkpoint, next_version, read_version

CORPUS = {"name": "tiny corpus", "digest": "ab12", "label_source": "model", "kappa": 0.71}
TOKENS = torch.arange(4, 12)[None]


@pytest.fixture
def trained():
    tokenizer = word_tokenizer()
    return adapted_model(tokenizer), tokenizer


@pytest.fixture
def base_folder(tmp_path):
    return save_base(tmp_path / "base")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def versions(folder):
    """Names of what an export leaves, without the lock."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".lock"))


def test_export_holds_the_trained_adapter_alone(trained, tmp_path):
    path = export_adapter(*trained, tmp_path / "adapters" / "mine", corpus=CORPUS)
    assert path == tmp_path / "adapters" / "mine" / "v0001"
    assert not (path / "ref").exists()
    weights = load_file(path / "adapter_model.safetensors")
    values = {float(tensor.flatten()[0]) for name, tensor in weights.items() if "lora_B" in name}
    assert values == {0.5}  # -7 would be the frozen copy
    assert len(weights) == 2 * 2 * 2  # A and B, of q and v, in two layers
    reloaded = PeftModel.from_pretrained(tiny_model(len(trained[1])), path)
    assert torch.equal(logits(reloaded), logits(trained[0]))


def test_versions_count_up_and_none_is_overwritten(trained, tmp_path):
    first = export_adapter(*trained, tmp_path)
    before = (first / "manifest.json").read_bytes()
    assert export_adapter(*trained, tmp_path).name == "v0002"
    (tmp_path / "v0041").mkdir()
    assert export_adapter(*trained, tmp_path).name == "v0042"
    assert os.readlink(tmp_path / "latest") == "v0042"  # relative: the folder may be moved
    assert (first / "manifest.json").read_bytes() == before


def test_manifest_names_every_file_with_its_digest(trained, tmp_path):
    metrics = {"before": {"reward": 0.5}, "after": {"reward": 1.25, "update_accuracy/evidence": float("nan")}}
    path = export_adapter(*trained, tmp_path, corpus=CORPUS, **metrics)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["version"] == "v0001" and manifest["corpus"] == CORPUS
    assert manifest["metrics"]["after"] == {"reward": 1.25, "update_accuracy/evidence": None}
    assert set(manifest["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest
    assert read_version(path) == manifest


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("manifest.json", b'{"format": ', "not readable JSON"),
        ("manifest.json", b"[]", "holds a list"),
        ("manifest.json", b'{"format": "other/1"}', "format 'other/1': expected turngrpo-adapter/1"),
        ("adapter_model.safetensors", b"", "adapter_model.safetensors has another SHA-256"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("more.txt", b"", "more.txt is not in the manifest"),
    ],
)
def test_a_version_that_was_changed_is_refused(trained, tmp_path, file, content, message):
    path = export_adapter(*trained, tmp_path)
    (path / file).unlink(missing_ok=True)
    if content is not None:
        (path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_version(path)


@pytest.mark.parametrize("name", ["..", "a/b", ".hidden", "two\nlines", "-merge", ""])
def test_a_name_that_is_no_folder_name_is_refused(name):
    with pytest.raises(ValueError, match="the adapter's name is"):
        check_name(name)
    check_name("reader v2.1")


def test_a_folder_whose_name_is_none_is_not_made(trained, tmp_path):
    with pytest.raises(ValueError, match="the adapter's name is '.hidden'"):
        export_adapter(*trained, tmp_path / "adapters" / ".hidden")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_adapter_is_refused(tmp_path):
    tokenizer = word_tokenizer()
    with pytest.raises(ValueError, match="no PEFT adapter"):
        export_adapter(tiny_model(len(tokenizer)), tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- killed, stopped, full disk: in processes of their own ----

WRITING = set("open write fsync rename replace symlink unlink mkdir rmdir flock serialize_file save".split())


def kill_before(count):
    """Kill this process before its `count`-th call of a C function that can change a file."""
    left = count

    def watch(frame, event, function):
        nonlocal left
        if event == "c_call" and function.__name__ in WRITING:
            owner = function.__self__
            module = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__module__
            if module != "builtins" and type(owner).__name__ != "StringIO":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


def child(action):
    """Run `action` in a fork of this process; returns its id. Exit status 0: it came to its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return pid


def test_an_export_killed_at_any_call_leaves_whole_versions_alone(trained, tmp_path):
    folder = tmp_path / "mine"
    first = export_adapter(*trained, folder)

    def killed_export(at):
        kill_before(at)
        export_adapter(*trained, folder)

    count, status, whole, pointed = 0, None, {"v0001"}, set()
    while status != 0:
        count += 1
        assert count < 200
        _, status = os.waitpid(child(partial(killed_export, count)), 0)
        assert status in (0, signal.SIGKILL)
        found = {name for name in versions(folder) if name.startswith("v")}
        for name in found - whole:
            read_version(folder / name)  # complete, or ValueError
        assert whole <= found
        whole = found
        pointed.add(os.readlink(folder / "latest"))
        assert os.readlink(folder / "latest") in whole
    # Killed between the renaming of the version and that of the pointer, an export has made a version all the same.
    assert count > 40 and len(whole) > 2
    assert pointed <= whole and os.readlink(folder / "latest") == max(whole)
    assert versions(folder) == ["latest", *sorted(whole)]  # the last export removed what the killed ones left
    assert read_version(first)["version"] == "v0001"


def test_a_living_export_is_left_alone_and_waited_for(trained, tmp_path):
    folder = tmp_path / "mine"

    class Stopping:
        """A tokenizer whose saving stops the process, in the middle of its export."""

        def save_pretrained(self, partial):
            os.kill(os.getpid(), signal.SIGSTOP)
            trained[1].save_pretrained(partial)

    first = child(lambda: export_adapter(trained[0], Stopping(), folder))
    os.waitpid(first, os.WUNTRACED)
    second = child(lambda: export_adapter(*trained, folder))
    time.sleep(0.5)
    try:
        assert os.waitpid(second, os.WNOHANG) == (0, 0)
        assert (folder / ".partial" / "adapter_model.safetensors").exists() and versions(folder) == [".partial"]
    finally:
        os.kill(first, signal.SIGCONT)
    assert [os.waitpid(pid, 0)[1] for pid in (first, second)] == [0, 0]
    assert versions(folder) == ["latest", "v0001", "v0002"]
    assert os.readlink(folder / "latest") == "v0002"


@pytest.mark.parametrize("source", ["model", "checkpoint"])
def test_a_file_that_cannot_be_written_leaves_nothing(trained, tmp_path, source):
    """The limit on the size of files stops the writing as a full disk does."""
    checkpoint = export_adapter(*trained, tmp_path / "other")

    def export():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            if source == "model":
                export_adapter(*trained, tmp_path / "mine")
            else:
                export_checkpoint(checkpoint, tmp_path / "mine")
        except Exception as error:
            assert "File too large" in str(error)
        else:
            os._exit(3)

    assert os.waitpid(child(export), 0)[1] == 0
    assert versions(tmp_path / "mine") == [] and next_version(tmp_path / "mine") == "v0001"


# ---- from a checkpoint ----


@pytest.fixture
def run(base_folder, tmp_path):
    """The trainer of a run from a warm-started adapter, one update and its checkpoint."""
    warm = adapted_model(word_tokenizer(), load(base_folder))
    warm.delete_adapter("ref")
    trainer = make_trainer(
        tmp_path / "run", model=warm, beta=0.1, max_steps=1, save_strategy="steps", save_steps=1, use_cpu=True
    )
    trainer.provenance = {"corpus": CORPUS, "config": {"script": {"workflow": "gated"}}}
    trainer.train()
    return trainer


def test_a_checkpoint_exports_as_its_trainer_does(run, base_folder, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert not (checkpoint / "ref").exists()  # the reference is no adapter
    ours = export_checkpoint(checkpoint, tmp_path / "adapters" / "mine", before={"reward": 0.5})
    theirs = run.export_adapter("mine", before={"reward": 0.5})
    assert theirs == tmp_path / "run" / "adapters" / "mine" / "v0001"
    first, second = read_version(ours), read_version(theirs)
    loaded = "tokenizer_config.json"  # says also that the tokenizer was loaded from a folder
    assert first["files"].keys() == second["files"].keys()
    assert {n for n, digest in first["files"].items() if digest != second["files"][n]} <= {
        loaded
    }  # card, weights, ...
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} <= {"created", "files"}
    assert (
        AutoTokenizer.from_pretrained(ours)("code of red")["input_ids"] == word_tokenizer()("code of red")["input_ids"]
    )
    assert first["base_model"] == f"base (local, SHA-256 {weights_digest(base_folder)})" and first["update"] == 1
    assert first["corpus"] == CORPUS
    config = json.loads((ours / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base_folder)  # here PEFT finds it by this
    assert first["config"]["trainer"]["beta"] == 0.1 and first["config"]["script"] == {"workflow": "gated"}
    reloaded = AutoPeftModelForCausalLM.from_pretrained(ours)
    assert torch.equal(logits(reloaded), logits(run.model))
    with run.reference._context():
        assert not torch.equal(logits(reloaded), logits(run.model))


def test_an_output_folder_exports_its_newest_checkpoint(run, tmp_path):
    shutil.copytree(tmp_path / "run" / "checkpoint-1", tmp_path / "run" / "checkpoint-12")
    shutil.copytree(tmp_path / "run" / "checkpoint-1", tmp_path / "run" / "checkpoint-9")
    state = tmp_path / "run" / "checkpoint-12" / "trainer_state.json"
    logs = [{"eval_reward": 1.0, "step": 9}, {"eval_reward": 1.5, "epoch": 2.0, "step": 12}, {"loss": 1.0, "step": 12}]
    state.write_text(json.dumps({"global_step": 12, "max_steps": 20, "log_history": logs}))
    manifest = read_version(export_checkpoint(tmp_path / "run", tmp_path / "mine"))
    assert manifest["update"] == 12  # 9 comes last in the order of names
    assert manifest["metrics"] == {"before": None, "after": {"reward": 1.5}}


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("adapter_config.json", "holds a whole model, no adapter: servers take it as it is"),
        ("adapter_model.safetensors", "adapter_model.safetensors cannot be read"),
        ("tokenizer_config.json", "holds no tokenizer"),
        ("", "expected a checkpoint-N"),
    ],
)
def test_an_incomplete_checkpoint_is_refused(trained, tmp_path, missing, message):
    checkpoint = export_adapter(*trained, tmp_path / "other")
    (checkpoint / missing).unlink() if missing else shutil.rmtree(checkpoint)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(checkpoint, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_broken_weights_are_refused(trained, tmp_path):
    checkpoint = export_adapter(*trained, tmp_path / "other")
    weights = checkpoint / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match="cannot be read"):
        export_checkpoint(checkpoint, tmp_path / "mine")


# ---- merged ----


@pytest.mark.parametrize("lora", [{}, {"use_dora": True, "modules_to_save": ["lm_head"]}], ids=["lora", "dora"])
def test_merged_weights_are_base_and_adapter(base_folder, tmp_path, lora):
    model = adapted_model(word_tokenizer(), load(base_folder), **lora)
    if lora:
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(0.5)
    version = export_adapter(model, word_tokenizer(), tmp_path / "mine")
    weights = load_file(version / "adapter_model.safetensors")
    assert any("magnitude" in name for name in weights) == any("lm_head" in name for name in weights) == bool(lora)
    assert torch.equal(logits(PeftModel.from_pretrained(load(base_folder), version)), logits(model))
    merged = merge_version(version)
    assert merged == tmp_path / "mine" / "v0001-merged"
    assert not (merged / "adapter_config.json").exists()
    gap = (logits(load(merged)) - logits(model)).abs().max()
    assert gap < 1e-4 < 0.1 < (logits(load(base_folder)) - logits(model)).abs().max()
    assert (merged / "tokenizer.json").read_bytes() == (version / "tokenizer.json").read_bytes()
    manifest = read_version(merged)
    assert manifest["format"] == "turngrpo-merged/1" and "model.safetensors" in manifest["files"]
    assert os.readlink(tmp_path / "mine" / "latest") == "v0001"
    with pytest.raises(ValueError, match="there already"):
        merge_version(version)
    assert next_version(tmp_path / "mine") == "v0002"


ENDS = {  # of a base whose head is its embedding
    "embedding": LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
    "head": LoraConfig(r=2, target_modules=["q_proj", "lm_head"]),
    "both": LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"]),
    "both, as one": LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
    "head of DoRA": LoraConfig(r=2, target_modules=["lm_head"], use_dora=True),
    "tokens of the head": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"lm_head": [4, 5]}),
    "tokens of both": TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[4, 5]),
    "embedding saved": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "both saved, as one": LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_adapter_on_the_ends_of_a_tied_model_merges_into_each_its_own(name, tmp_path):
    """Merged into the one weight that both ends share, LoRA on the head alone moves logits by 4 and more."""
    tokenizer, folder = word_tokenizer(), tmp_path / "base"
    sharpen(tiny_model(len(tokenizer))).save_pretrained(folder)
    model = get_peft_model(load(folder), ENDS[name])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    merged = load(merge_version(export_adapter(model, tokenizer, tmp_path / "mine")))
    assert (logits(merged) - logits(model)).abs().max() < 1e-4 * logits(model).abs().max()
    assert 0.5 < (logits(load(folder)) - logits(model)).abs().max()
    assert merged.config.tie_word_embeddings == (name == "both saved, as one")


def test_merged_weights_that_are_another_model_are_refused(base_folder, tmp_path, monkeypatch):
    version = export_adapter(adapted_model(word_tokenizer(), load(base_folder)), word_tokenizer(), tmp_path / "mine")
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self, **_: self.unload())  # as if nothing were merged
    with pytest.raises(ValueError, match="merged weights give other logits than base and adapter do .by up to"):
        merge_version(version)
    assert versions(tmp_path / "mine") == ["latest", "v0001"]


def test_merging_takes_the_weights_of_a_folder_that_holds_an_adapter_too(base_folder, tmp_path):
    model = adapted_model(word_tokenizer(), load(base_folder))
    version = export_adapter(model, word_tokenizer(), tmp_path / "mine")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(version / name, base_folder / name)
    merged = merge_version(version)
    assert (logits(load(merged)) - logits(model)).abs().max() < 1e-4


def test_merging_an_adapted_embedding_leaves_the_head_that_was_tied_to_it(tmp_path):
    tokenizer, folder = word_tokenizer(), tmp_path / "base"
    sharpen(tiny_model(len(tokenizer))).save_pretrained(folder)
    model = get_peft_model(load(folder), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    merged = load(merge_version(export_adapter(model, tokenizer, tmp_path / "mine")))
    assert not merged.config.tie_word_embeddings
    assert torch.equal(merged.lm_head.weight, load(folder).lm_head.weight)
    # With the merged embedding in the head's place logits would differ by more than 1.
    wrong = merged.model(TOKENS).last_hidden_state @ merged.model.embed_tokens.weight.T
    assert (logits(merged) - logits(model)).abs().max() < 1e-4 < 1 < (wrong - logits(model)).abs().max()


@pytest.mark.parametrize("name", ["../../x", "..", "a/b", "", "a" * 201, "\u00e9" * 101, "\n"])
def test_names_that_are_no_folders_write_nothing(name, tmp_path):
    exporter = Exporter(SimpleNamespace(output_dir=str(tmp_path / "run")), None, None, None)
    if name:
        with pytest.raises(ValueError, match="the adapter's name is "):
            exporter.export(name, None, None, 0, [])
    with pytest.raises(ValueError, match="the adapter's name is ") as caught:
        check_name(name)
    assert len(str(caught.value)) < 250 and not list(tmp_path.iterdir())
    check_name("a" * 200)
    check_name("\u00e9" * 100)  # 200 bytes


def test_nothing_secret_and_no_path_stands_in_a_version(tmp_path):
    secret = {"model_init_kwargs": {"token": "hf_secret"}, "hub_token": "hf_secret"}
    config = TurnGRPOConfig(
        str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", run_name="hf_secret", seed=7,
        vllm_base_url=["http://user:hf_secret@host:8000"], **secret,
    )  # fmt: skip
    exporter = Exporter(config, None, None, GatedMemory())
    script = {"corpus": str(tmp_path / "corpus.jsonl"), "split_seed": 3, "train_projects": ["0123456789abcdef"]}
    model = {"model_name_or_path": str(tmp_path / "base"), "lora_r": 16, "lora_model_path": str(tmp_path)}
    exporter.provenance = {"config": {"script": script, "model": model, "other": {"password": "hf_secret"}}}
    facts = exporter.facts(3)
    text = json.dumps(facts, default=str)
    assert "hf_secret" not in text and str(tmp_path) not in text
    assert facts["config"]["trainer"]["seed"] == 7 and facts["config"]["model"] == {"lora_r": 16}
    assert facts["config"]["script"] == {"split_seed": 3, "train_projects": ["0123456789abcdef"]}
    assert facts["config"]["reading"]["workflow"] == "gated"


# ---- the base model's name ----


def test_a_base_model_is_named_without_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--owner--tiny" / "snapshots" / commit
    for folder in (cached, tmp_path / "warm", tmp_path / "bare", tmp_path / "gpt2"):
        folder.mkdir(parents=True)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "adapter_model.safetensors"):
        (tmp_path / "warm" / name).write_bytes(name.encode())
    done = subprocess.run(
        "sha256sum model*.safetensors | sha256sum", shell=True, cwd="warm", capture_output=True, text=True
    )
    digest = done.stdout.split()[0]  # as the card says that it can be checked
    assert public_name("owner/tiny", "0a1b") == ("owner/tiny", "0a1b")
    assert public_name(str(cached), None) == ("owner/tiny", commit)
    assert public_name("warm", None) == (f"warm (local, SHA-256 {digest})", None)
    assert public_name(str(tmp_path / "warm"), "main") == (f"warm (local, SHA-256 {digest})", None)
    assert public_name("bare", None) == ("bare (local)", None)
    assert public_name("gpt2", None) == ("gpt2 (local)", None)  # not the Hub's gpt2
    assert public_name(str(tmp_path / "gone"), None) == ("gone (local)", None)
    assert public_name(None, None) == ("unnamed (local)", None)
    for name in (f"warm (local, SHA-256 {digest})", "bare (local)"):
        assert public_name(name, None) == (name, None)


def test_a_base_model_that_was_moved_is_said_where_it_is(base_folder, tmp_path):
    """The path in the config may change, since the manifest has the digest of what is pushed; nothing else may."""
    model = adapted_model(word_tokenizer(), load(base_folder))
    version = export_adapter(model, word_tokenizer(), tmp_path / "mine")
    expected = logits(AutoPeftModelForCausalLM.from_pretrained(version))
    shutil.move(base_folder, tmp_path / "moved")
    with pytest.raises(ValueError, match="base', found no such folder: write where it is into .*adapter_config.json"):
        merge_version(version)
    config = json.loads((version / "adapter_config.json").read_text())
    here = {"base_model_name_or_path": str(tmp_path / "moved")}
    (version / "adapter_config.json").write_text(json.dumps(config | here))
    assert (logits(load(merge_version(version))) - expected).abs().max() < 1e-4
    (version / "adapter_config.json").write_text(json.dumps(config | here | {"lora_alpha": 9}))
    with pytest.raises(ValueError, match="adapter_config.json has another SHA-256"):
        read_version(version)
