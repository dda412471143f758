"""Push: huggingface_hub's own client against a hub on this machine; one commit with everything, then the tag."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import export_adapter as export_adapter_script
import pytest
from datasets import Dataset
from hub_server import hub_for_client, running_hub
from huggingface_hub import ModelCard, constants, snapshot_download
from lib import running
from tiny import adapted_model, save_base, tiny_model, word_tokenizer
from training import PROMPTS, make_trainer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from turngrpo.data_prep import build_needle_corpus, write_corpus
from turngrpo.trainer import TurnGRPOTrainer
from turngrpo.trainer.export.base_model import weights_digest
from turngrpo.trainer.export.hub import push_version
from turngrpo.trainer.export.merge import merge_version
from turngrpo.trainer.export.versions import export_adapter, read_version

SCRIPT = Path(__file__).parents[2] / "scripts" / "export_adapter.py"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_for_client(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def version(tmp_path):
    tokenizer = word_tokenizer()
    return export_adapter(adapted_model(tokenizer), tokenizer, tmp_path / "mine")


def digests(folder):
    paths = [path for path in Path(folder).iterdir() if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def requests(hub, kind):
    return [path for method, path in hub.log if method in ("POST", "PUT") and f"/{kind}" in path]


def test_a_pushed_version_comes_back_by_its_tag(hub, version, tmp_path):
    commit = push_version(version, "owner/mine")
    assert hub.private == {"owner/mine": True}
    assert hub.refs["owner/mine"]["v0001"] == commit.oid == hub.refs["owner/mine"]["main"]
    assert len(requests(hub, "commit/")) == 1  # all files in one
    assert len(requests(hub, "large/")) == 1  # the weights, by LFS
    folder = snapshot_download("owner/mine", revision="v0001", cache_dir=tmp_path / "cache")
    back = digests(folder)
    assert back.pop(".gitattributes")
    assert back == digests(version)
    assert {name: back[name] for name in back if name != "manifest.json"} == read_version(version)["files"]


def test_pushing_again_changes_nothing(hub, version):
    first = push_version(version, "owner/mine")
    sent = len(requests(hub, "commit/") + requests(hub, "tag/"))
    assert push_version(version, "owner/mine").oid == first.oid
    assert len(requests(hub, "commit/") + requests(hub, "tag/")) == sent == 2


def test_the_next_version_replaces_files_and_leaves_the_tag_before(hub, version, tmp_path):
    first = push_version(version, "owner/mine")
    hub.commit("owner/mine", "main", {"figure.png": b"somebody's own"})
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None  # one file fewer
    second = export_adapter(adapted_model(tokenizer), tokenizer, tmp_path / "mine")
    push_version(second, "owner/mine", private=False)
    _, now = hub.files("owner/mine", "v0002")
    _, before = hub.files("owner/mine", "v0001")
    assert set(before) - set(now) == {"chat_template.jinja"} and set(now) - set(before) == {"figure.png"}
    assert hub.refs["owner/mine"]["v0001"] == first.oid and hub.private["owner/mine"]


def test_a_public_repository_on_request(hub, version):
    push_version(version, "named", private=False)
    assert hub.private == {"owner/named": False}  # of the token's user


@pytest.mark.parametrize("step", ["large/", "commit/"])
def test_an_upload_that_fails_leaves_the_repository_as_it_was(hub, version, step):
    hub.broken[step] = 400
    with pytest.raises(ConnectionError, match="push again"):
        push_version(version, "owner/mine")
    assert set(hub.files("owner/mine", "main")[1]) == {".gitattributes"} and "v0001" not in hub.refs["owner/mine"]
    hub.broken.clear()
    push_version(version, "owner/mine")
    assert "adapter_model.safetensors" in hub.files("owner/mine", "v0001")[1]


def test_a_push_that_ended_before_its_tag_is_finished_by_the_next(hub, version):
    hub.broken["tag/"] = 500
    with pytest.raises(ConnectionError, match="failed .500.: push again"):
        push_version(version, "owner/mine")
    committed = hub.refs["owner/mine"]["main"]
    hub.broken.clear()
    assert push_version(version, "owner/mine").oid == hub.refs["owner/mine"]["v0001"] == committed
    assert len(requests(hub, "commit/")) == 1


def test_a_tag_with_other_content_is_refused(hub, version, tmp_path):
    push_version(version, "owner/mine")
    tokenizer = word_tokenizer("other words")
    other = export_adapter(adapted_model(tokenizer), tokenizer, tmp_path / "elsewhere" / "mine")
    before = dict(hub.refs["owner/mine"])
    with pytest.raises(ValueError, match="owner/mine has a tag v0001 with other content: export a new version"):
        push_version(other, "owner/mine")
    assert hub.refs["owner/mine"] == before


@pytest.mark.parametrize(
    ("token", "repo", "error", "message"),
    [
        (None, "owner/mine", ValueError, "no token for the Hub: expected one from `hf auth login`"),
        ("hf_unknown", "owner/mine", PermissionError, "refused owner/mine .401.: expected a token that may write"),
        ("hf_other", "owner/mine", PermissionError, "refused owner/mine .403."),
        ("hf_owner", "owner/mine/v2", ValueError, "Repo id must be"),
        ("hf_owner", "owner/two words", ValueError, "Repo id must"),
    ],
)
def test_what_is_refused_is_said(hub, version, monkeypatch, token, repo, error, message):
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(error, match=message):
        push_version(version, repo)
    assert hub.commits == {}


def test_no_network_is_said(version, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, but nobody listens
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(ConnectionError, match=f"cannot reach the Hub at {address}"):
            push_version(version, "owner/mine", token="hf_owner")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE"):
        push_version(version, "owner/mine", token="hf_owner")


def test_a_changed_version_is_not_pushed(hub, version):
    (version / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json has another SHA-256"):
        push_version(version, "owner/mine")
    assert hub.log == []


# ---- from the trainer ----


def len_reward(completions, **columns):
    return [float(len(completion)) for completion in completions]


def test_the_trainer_pushes_the_version_it_exported(hub, tmp_path):
    model = adapted_model(word_tokenizer())
    model.delete_adapter("ref")
    trainer = make_trainer(
        tmp_path / "run", model=model, max_steps=1, push_to_hub=True, hub_strategy="end", hub_model_id="owner/run"
    )
    assert hub.private == {"owner/run": True}  # made when training was set up: no token, no training
    trainer.train()
    version = trainer.export_adapter("mine", after={"reward": 1.25})
    commit = trainer.push_to_hub("Trained")
    assert hub.refs["owner/run"]["v0001"] == commit.oid and commit.commit_message == "Trained"
    files = hub.files("owner/run", "v0001")[1]
    assert files["manifest.json"] == (version / "manifest.json").read_bytes()
    assert not any("rollouts" in path or path.endswith(".parquet") for path in files)
    trainer.train()
    assert trainer.push_to_hub(blocking=False).result().oid == hub.refs["owner/run"]["v0002"]  # exported anew
    assert trainer.exported == tmp_path / "run" / "adapters" / "mine" / "v0002"
    with pytest.raises(ValueError, match="dataset_name: under a workflow the model card is written by export_adapter"):
        trainer.push_to_hub(dataset_name="some/data")


def test_without_a_workflow_transformers_pushes_the_output_folder(hub, tmp_path):
    options = {"max_completion_length": 6, "per_device_train_batch_size": 8, "use_cpu": True, "bf16": False}
    trainer = TurnGRPOTrainer(
        tiny_model(len(word_tokenizer())),
        len_reward,
        GRPOConfig(str(tmp_path / "plain"), hub_model_id="owner/plain", **options, report_to=[]),
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=word_tokenizer(),
    )
    commit = trainer.push_to_hub("By TRL", True, None, None, True, dataset_name="some/data")
    _, files = hub.files("owner/plain", commit.oid)
    assert hub.private == {"owner/plain": True} and hub.refs["owner/plain"] == {"main": commit.oid}
    assert "model.safetensors" in files and "manifest.json" not in files
    assert ModelCard(files["README.md"].decode()).data.datasets == "some/data"


def test_pushing_at_every_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="push_to_hub: under a workflow .* hub_strategy='end'"):
        make_trainer(tmp_path, push_to_hub=True)


# ---- the script, in a process of its own ----


def test_the_script_exports_merges_and_pushes(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(save_base(tmp_path / "base"))
    model = adapted_model(word_tokenizer(), base)
    model.delete_adapter("ref")
    make_trainer(tmp_path / "run", model=model, max_steps=1, save_strategy="steps", save_steps=1).train()
    policies = {"before": {"metrics": {"reward": 0.5}}, "after": {"metrics": {"reward": 1.25}}}
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"policies": policies}))
    manifest, rows = build_needle_corpus("multi_key", 2, 6, 3, 8, shared_keys=True)
    write_corpus(tmp_path / "corpus.jsonl", manifest, rows)
    arguments = ["--checkpoint", tmp_path / "run", "--name", "mine", "--corpus", tmp_path / "corpus.jsonl", "--merge"]
    with running_hub() as (hub, address):
        environment = os.environ | {"HF_ENDPOINT": address, "HF_TOKEN": "hf_owner", "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, SCRIPT, *arguments, "--push_to_hub", "owner/mine", "--no_private"],
            capture_output=True,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0"},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        _, files = hub.files("owner/mine", "v0001")
        assert hub.private == {"owner/mine": False}
    folder = tmp_path / "run" / "adapters" / "mine"
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "latest", "v0001", "v0001-merged"]
    manifest = read_version(folder / "latest")
    assert json.loads(files["manifest.json"]) == manifest
    assert manifest["metrics"] == {"before": {"reward": 0.5}, "after": {"reward": 1.25}}
    assert (manifest["corpus"]["rows"], manifest["corpus"]["projects"]) == (12, 2)
    assert f"version: {folder / 'v0001'}" in done.stdout.replace("\n", "")


def test_no_path_of_this_machine_is_pushed(hub, tmp_path):
    """Not where the base model lies, in no file; here it is found, and what is pushed is a whole version too."""
    base = save_base(tmp_path / "my base")
    model = adapted_model(word_tokenizer(), AutoModelForCausalLM.from_pretrained(base))
    version = export_adapter(model, word_tokenizer(), tmp_path / "mine")
    config = json.loads((version / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    push_version(version, "owner/mine")
    _, files = hub.files("owner/mine", "v0001")
    assert set(files) >= {path.name for path in version.iterdir()}
    for name, content in files.items():
        assert str(tmp_path).encode() not in content, name
    (tmp_path / "pulled").mkdir()
    for name in files.keys() - {".gitattributes"}:
        (tmp_path / "pulled" / name).write_bytes(files[name])
    public = f"my base (local, SHA-256 {weights_digest(base)})"
    assert read_version(tmp_path / "pulled")["base_model"] == public
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == public
    push_version(merge_version(version), "owner/merged")
    for name, content in hub.files("owner/merged", "v0001")[1].items():
        assert str(tmp_path).encode() not in content, name


def test_a_version_that_names_a_path_is_not_pushed(hub, version):
    manifest = json.loads((version / "manifest.json").read_text())
    manifest["files"]["adapter_config.json"] = digests(version)["adapter_config.json"]
    (version / "manifest.json").write_text(json.dumps(manifest | {"base_model": "/home/me/base"}))
    assert read_version(version)  # as it was exported once
    with pytest.raises(ValueError, match="says where its base model lies on this machine .*: export it again"):
        push_version(version, "owner/mine")
    assert hub.log == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--checkpoint is missing"),
        (["--checkpoint", "absent"], "absent is no folder"),
        (["--checkpoint", "mine/v0001", "--push_to_hub", "owner/a/b"], "Repo id must be"),
        (["--checkpoint", "plain", "--name", "../up"], "the adapter's name is '../up'"),
        (["--checkpoint", "plain", "--metrics", "metrics.json"], "expected before and after, or base and adapter"),
        (["--checkpoint", "mine/v0001", "--merge"], "owner/tiny"),
    ],
)
def test_the_script_says_what_is_wrong(version, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    shutil.copytree(version, "plain")
    Path("plain", "manifest.json").unlink()
    Path("metrics.json").write_text('{"policies": {"model": {}}}')
    with pytest.raises(running.SetupError, match=message):
        export_adapter_script.main(arguments)
    assert not Path("plain", "adapters").exists() and not Path("mine", "v0001-merged").exists()
