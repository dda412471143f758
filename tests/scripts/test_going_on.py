"""Going on from an adapter on disk: sft.py, train.py, inspect_group.py and evaluate.py on its folder."""

import json
import shutil
from pathlib import Path

import evaluate
import inspect_group
import pytest
import sft
import torch
import train
from arguments.commands import ModelOptions
from jobs import quickstart
from lib import loading, running
from lib.adapters import Adapter
from peft import LoHaConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from turngrpo.data_prep import build_needle_corpus, write_corpus
from turngrpo.trainer.export.base_model import weights_digest
from turngrpo.trainer.export.merge import merge_version
from turngrpo.trainer.export.versions import read_version

READING = ["--instruction", quickstart.INSTRUCTION, "--max_memory_tokens", "16"]
LIMITS = ["--max_prompt_length", "150", "--max_completion_length", "8"]
PLAIN = ["--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false", "--report_to", "none"]
TOKENS = torch.arange(4, 14)[None]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Folder with `model` (random weights), `corpus.jsonl`, `warm` (of sft.py --use_peft), `both` (base, adapter)."""
    folder = tmp_path_factory.mktemp("start")
    manifest, rows = build_needle_corpus("multi_key", 2, 6, 3, 8, shared_keys=True)
    write_corpus(folder / "corpus.jsonl", manifest, rows)
    tokenizer = quickstart.train_tokenizer([f"{row['question']}\n{c['text']}" for row in rows for c in row["chunks"]])
    quickstart.tiny_model(tokenizer, 0, hidden_size=48).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    assert sft.main(sft_arguments(folder, folder / "model", folder / "warm", "--lora_r", "4")) == 0
    assert (folder / "warm" / "checkpoint-4").is_dir() and not (folder / "warm" / "README.md").exists()
    shutil.copytree(folder / "model", folder / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(folder / "warm" / name, folder / "both" / name)
    return folder


def sft_arguments(start, model, output, *more):
    steps = ["--max_steps", "4", "--logging_steps", "4", "--learning_rate", "2e-2", "--save_steps", "4"]
    corpus = ["--corpus", str(start / "corpus.jsonl"), "--model_name_or_path", str(model), "--use_peft"]
    return [*corpus, "--output_dir", str(output), *steps, *READING, *PLAIN, "--disable_tqdm", "true", *more]


def train_arguments(start, model, output, *more):
    model = ["--model_name_or_path", str(model), "--corpus", str(start / "corpus.jsonl"), "--use_peft"]
    group = ["--per_device_train_batch_size", "4", "--num_generations", "4", "--loss_type", "group"]
    steps = ["--max_steps", "1", "--logging_steps", "1", "--save_steps", "1", "--beta", "0.01"]
    return [*model, "--output_dir", str(output), *group, *steps, *READING, *LIMITS, *PLAIN, *more]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def base(start):
    return AutoModelForCausalLM.from_pretrained(start / "model")


def adapted(start, folder):
    return PeftModel.from_pretrained(base(start), folder)


def test_a_warm_started_adapter_is_trained_further_and_evaluated(start, tmp_path):
    """From base to warm start, to training, to its export: every one is the one before, and a little more."""
    run = tmp_path / "run"
    assert (
        train.main(train_arguments(start, start / "warm", run, "--learning_rate", "1e-2", "--weight_decay", "0.5"))
        == 0
    )
    updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [log["kl"] for log in updates if "kl" in log] == [0.0]  # the reference is the warm start
    version = run / "adapters" / "run" / "v0001"
    manifest = read_version(version)
    assert manifest["base_model"] == f"model (local, SHA-256 {weights_digest(start / 'model')})"  # not the adapter's
    warm, trained = logits(adapted(start, start / "warm")), logits(adapted(start, version))
    assert (warm - logits(base(start))).abs().max() > 0.05
    assert 0 < (trained - warm).abs().max() < 0.5 * (trained - logits(base(start))).abs().max()
    config = json.loads((version / "adapter_config.json").read_text())
    assert config["r"] == 4
    reports = []
    for model in ([str(version)], [str(start / "model"), "--adapter", str(version)]):
        output = tmp_path / "evaluation.json"
        arguments = ["--corpus", str(start / "corpus.jsonl"), "--compare_base", "--output", str(output)]
        assert evaluate.main(["--model", *model, *arguments]) == 0
        reports.append(json.loads(output.read_text()))
    assert [list(report["policies"]) for report in reports] == [["base", "adapter"]] * 2
    assert reports[0]["policies"]["adapter"]["metrics"] == reports[1]["policies"]["adapter"]["metrics"]
    assert reports[0]["options"]["model"] == str(start / "model")
    assert (logits(AutoModelForCausalLM.from_pretrained(merge_version(version))) - trained).abs().max() < 1e-4


def test_an_export_and_a_checkpoint_are_gone_on_with(start, tmp_path):
    assert train.main(train_arguments(start, start / "warm", tmp_path / "run")) == 0
    for place in ("adapters/run/v0001", "adapters/run/latest", "checkpoint-1"):
        model = loading.load_model(options(tmp_path / "run" / place))
        assert torch.equal(logits(model), logits(adapted(start, tmp_path / "run" / place)))
        assert any(parameter.requires_grad for parameter in model.parameters())
    again = tmp_path / "again"
    assert train.main(train_arguments(start, tmp_path / "run" / "adapters" / "run" / "latest", again)) == 0
    assert base_of(again / "adapters" / "again" / "v0001") == str(start / "model")
    more = tmp_path / "more"
    assert sft.main(sft_arguments(start, start / "warm" / "checkpoint-4", more)) == 0
    first, second = (json.loads((folder / "sft.json").read_text())[0]["loss"] for folder in (start / "warm", more))
    assert second < first - 0.1  # it starts where the first came to


def base_of(version):
    read_version(version)
    return json.loads((version / "adapter_config.json").read_text())["base_model_name_or_path"]


def options(folder, **more):
    return ModelOptions(model_name_or_path=str(folder), use_peft=True, **more)


def test_base_and_adapter_in_one_folder_are_the_adapter(start, tmp_path):
    """As `transformers serve` takes them; read as a model, the adapter would be gone, or its base the reference."""
    warm = logits(adapted(start, start / "warm"))
    model = loading.load_model(options(start / "both"))
    assert torch.equal(logits(model), warm) and isinstance(model, PeftModel)
    assert not torch.equal(logits(loading.load_weights(options(start / "both"))), warm)
    run = tmp_path / "run"
    assert train.main(train_arguments(start, start / "both", run)) == 0
    updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [log["kl"] for log in updates if "kl" in log] == [0.0]
    assert base_of(run / "adapters" / "run" / "v0001") == str(start / "model")
    output = ["--corpus", str(start / "corpus.jsonl"), "--output", str(tmp_path / "evaluation.json")]
    assert evaluate.main(["--model", str(start / "both"), *output, *READING, *LIMITS]) == 0
    assert list(json.loads((tmp_path / "evaluation.json").read_text())["policies"]) == ["adapter"]


def test_a_dry_run_and_an_inspected_group_start_from_the_adapter(start, tmp_path, capsys):
    assert train.main(train_arguments(start, start / "warm", tmp_path / "out", "--dry_run")) == 0
    # q_proj and v_proj of two layers, r = 4
    shown = capsys.readouterr().out
    model = loading.load_model(options(start / "warm"))
    assert f"trained ({model.get_nb_trainable_parameters()[0]:,})" in shown and "nothing was trained" in shown
    gated = ["--workflow", "gated", "--corpus", str(start / "corpus.jsonl"), "--use_peft", "--rewards", "1", "0"]
    sizes = ["--num_generations", "2", "--max_completion_length", "6", "--max_memory_tokens", "16", "--tokens"]
    report = tmp_path / "group.json"
    more = ["--instruction", quickstart.INSTRUCTION, "--json", str(report), "--beta", "0.02"]
    assert inspect_group.main(["--model_name_or_path", str(start / "warm"), *gated, *sizes, *more]) == 0
    assert json.loads(report.read_text())["update"]["kl"] == 0.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lora_r": 16}, r"--lora_r is 16, the adapter's r is 4"),  # 16 is the default where none is named
        ({"lora_alpha": 7}, "--lora_alpha is 7, the adapter's lora_alpha is 32"),
        (
            {"lora_target_modules": ["k_proj"]},
            r"--lora_target_modules is \['k_proj'\], the adapter's target_modules is \['q",
        ),
        ({"use_dora": True}, "--use_dora is True, the adapter's use_dora is False"),
        (
            {"lora_target_modules": ["all-linear"]},
            r"--lora_target_modules is .*down_proj', .* is \['q_proj', 'v_proj'\]",
        ),
        (
            {"lora_modules_to_save": ["norm"]},
            r"--lora_modules_to_save is \['norm'\], the adapter's modules_to_save is None",
        ),
    ],
)
def test_options_that_contradict_the_adapter_are_named(start, more, message):
    with pytest.raises(ValueError, match=f"warm goes on as it is: leave out what it contradicts: {message}"):
        loading.load_model(options(start / "warm", **more))


def test_options_that_say_what_the_adapter_is_are_heard(start):
    same = {"lora_r": 4, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["v_proj", "q_proj"]}
    model = loading.load_model(options(start / "warm", **same))
    assert torch.equal(logits(model), logits(adapted(start, start / "warm")))


def test_an_adapter_of_another_kind_is_gone_on_with(start, tmp_path):
    get_peft_model(base(start), LoHaConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert loading.load_model(options(tmp_path)).peft_config["default"].peft_type.value == "LOHA"
    with pytest.raises(ValueError, match="--use_dora is True, the adapter's use_dora is None"):
        loading.load_model(options(tmp_path, use_dora=True))


def test_what_is_wrong_with_an_adapters_folder_is_named(start, tmp_path):
    with pytest.raises(
        running.SetupError, match=r"warm holds an adapter of '.*model': add --use_peft to go on with it"
    ):
        train.main([a for a in train_arguments(start, start / "warm", tmp_path / "out") if a != "--use_peft"])
    with pytest.raises(running.SetupError, match="both holds an adapter"):
        sft.main([a for a in sft_arguments(start, start / "both", tmp_path / "out") if a != "--use_peft"])
    with pytest.raises(running.SetupError, match="--lora_r is 8, the adapter's r is 4"):
        train.main(train_arguments(start, start / "warm", tmp_path / "out", "--lora_r", "8"))
    output = ["--corpus", str(start / "corpus.jsonl"), "--output", str(tmp_path / "evaluation.json")]
    with pytest.raises(
        running.SetupError, match="--model .*both is itself an adapter, of '.*model': leave --adapter out"
    ):
        evaluate.main(["--model", str(start / "both"), "--adapter", str(start / "warm"), *output])
    config = json.loads((start / "warm" / "adapter_config.json").read_text())
    pushed = f"model (local, SHA-256 {'0' * 64})"
    bases = {"/no/such/base": "trained on '/no/such/base', found no such folder", None: "names no base model"}
    bases[pushed] = "trained on 'model .local, SHA-256 0*.', found no such folder: .* write where it is into"
    for name, message in bases.items():
        (tmp_path / "lost").mkdir(exist_ok=True)
        (tmp_path / "lost" / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        with pytest.raises(ValueError, match=message):
            Adapter.find(str(tmp_path / "lost"))
    assert not Path(tmp_path, "out").exists()
