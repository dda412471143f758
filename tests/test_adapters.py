"""Adapter export: only the trained adapter, whole versions or none, nothing overwritten."""

import hashlib
import json
import os

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import tiny_model, word_tokenizer

from turngrpo.trainer import adapters
from turngrpo.trainer.adapters import export_adapter, next_version

CORPUS = {"name": "tiny corpus", "digest": "ab12", "label_source": "model", "kappa": 0.71}


def make_model(tokenizer):
    """A LoRA model with TRL's frozen copy "ref" beside the trained adapter."""
    base = tiny_model(len(tokenizer))
    base.name_or_path = base.config._name_or_path = "owner/tiny"
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    model.add_adapter("ref", lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.default" in name:
                parameter.fill_(0.5)
            if "lora_B.ref" in name:
                parameter.fill_(-7.0)
    return model


@pytest.fixture
def trained():
    tokenizer = word_tokenizer()
    return make_model(tokenizer), tokenizer


def test_export_holds_the_trained_adapter_alone(trained, tmp_path):
    path = export_adapter(*trained, tmp_path / "adapters" / "mine", corpus=CORPUS)
    assert path == tmp_path / "adapters" / "mine" / "v0001"
    assert not (path / "ref").exists()
    weights = load_file(path / "adapter_model.safetensors")
    values = {float(tensor.flatten()[0]) for name, tensor in weights.items() if "lora_B" in name}
    assert values == {0.5}  # -7 would be the frozen copy
    assert len(weights) == 2 * 2 * 2  # A and B, of q and v, in two layers
    base = tiny_model(len(trained[1]))
    reloaded = PeftModel.from_pretrained(base, path)
    tokens = torch.arange(4, 12)[None]
    assert torch.equal(reloaded.eval()(tokens).logits, trained[0].eval()(tokens).logits)


def test_versions_count_up_and_none_is_overwritten(trained, tmp_path):
    first = export_adapter(*trained, tmp_path)
    before = (first / "manifest.json").read_bytes()
    assert export_adapter(*trained, tmp_path).name == "v0002"
    (tmp_path / "v0041").mkdir()
    assert export_adapter(*trained, tmp_path).name == "v0042"
    assert (first / "manifest.json").read_bytes() == before


def test_a_version_made_meanwhile_is_left_alone(trained, tmp_path, monkeypatch):
    """Two exports at once: the first free version was taken between looking and renaming."""
    (tmp_path / "v0001").mkdir()
    (tmp_path / "v0001" / "other").write_text("theirs")
    answers = iter(["v0001", "v0002"])
    monkeypatch.setattr(adapters, "next_version", lambda folder: next(answers))
    assert export_adapter(*trained, tmp_path).name == "v0002"
    assert [path.name for path in (tmp_path / "v0001").iterdir()] == ["other"]


@pytest.mark.parametrize("moment", ["tokenizer", "rename"])
def test_a_crash_in_the_middle_leaves_no_version(trained, tmp_path, monkeypatch, moment):
    model, tokenizer = trained

    def crash(*args, **kwargs):
        raise OSError("no space left on device")

    if moment == "tokenizer":
        monkeypatch.setattr(tokenizer, "save_pretrained", crash)
    else:
        monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(OSError, match="no space"):
        export_adapter(model, tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert next_version(tmp_path) == "v0001"


def test_manifest_names_every_file_with_its_digest(trained, tmp_path):
    path = export_adapter(*trained, tmp_path, corpus=CORPUS, before={"reward": 0.5}, after={"reward": 1.25})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["version"] == "v0001" and manifest["corpus"] == CORPUS
    assert manifest["metrics"] == {"before": {"reward": 0.5}, "after": {"reward": 1.25}}
    assert set(manifest["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest


def test_model_card_has_metadata_and_says_where_it_comes_from(trained, tmp_path):
    path = export_adapter(*trained, tmp_path, corpus=CORPUS, before={"reward": 0.5}, after={"reward": 1.25})
    card = (path / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["base_model"] == "owner/tiny" and metadata["library_name"] == "peft"
    for text in ("TurnGRPO / GRU-Mem", "arXiv:2602.10560", "tiny corpus", "ab12", "kappa 0.71"):
        assert text in card
    assert "| reward | 0.5 | 1.25 |" in card


def test_a_local_base_model_is_no_hub_metadata(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    card = (export_adapter(*trained, tmp_path / "out") / "README.md").read_text()
    assert "base_model" not in yaml.safe_load(card.split("---\n")[1])
    assert "owner/tiny" in card


def test_a_model_without_adapter_is_refused(tmp_path):
    tokenizer = word_tokenizer()
    with pytest.raises(ValueError, match="no PEFT adapter"):
        export_adapter(tiny_model(len(tokenizer)), tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
