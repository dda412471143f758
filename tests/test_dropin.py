"""Without a workflow TurnGRPOTrainer is trl.GRPOTrainer: same losses, metrics and weights, step by step."""

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import tiny_model, word_tokenizer
from trl import GRPOConfig, GRPOTrainer

from turngrpo.trainer import TurnGRPOConfig, TurnGRPOTrainer

PROMPTS = ["code of red", "code of blue is", "red is", "blue is 1", "memory of red", "no code"]


def length_reward(completions, **columns):
    return [float(len(completion)) / 10 for completion in completions]


def run(trainer_class, config_class, folder, peft=False, **options):
    tokenizer = word_tokenizer()
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 5,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    trainer = trainer_class(
        tiny_model(len(tokenizer)),
        length_reward,
        config_class(**(defaults | options)),
        Dataset.from_dict({"prompt": PROMPTS}),
        None,
        tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear") if peft else None,
    )
    trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    times = ("step_time", "runtime", "per_second", "profiling")
    logs = [{k: v for k, v in entry.items() if not any(t in k for t in times)} for entry in trainer.state.log_history]
    return logs, weights


@pytest.mark.parametrize("config_class", [GRPOConfig, TurnGRPOConfig])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "grpo", "beta": 0.1, "peft": True},
    ],
    ids=["defaults", "accumulation, two iterations, beta, LoRA"],
)
def test_same_losses_metrics_and_weights_for_five_steps(config_class, options, tmp_path):
    logs, weights = run(GRPOTrainer, GRPOConfig, tmp_path / "trl", **options)
    our_logs, our_weights = run(TurnGRPOTrainer, config_class, tmp_path / "ours", **options)
    assert len(logs) == 6  # five steps and the summary of the run
    assert our_logs == logs
    assert our_weights.keys() == weights.keys()
    assert all(torch.equal(our_weights[name], weights[name]) for name in weights)
    # The comparison sees a difference where there is one: another seed gives other weights.
    other_logs, other_weights = run(TurnGRPOTrainer, config_class, tmp_path / "other", seed=7, **options)
    assert other_logs != logs
    assert not all(torch.equal(other_weights[name], weights[name]) for name in weights)


def test_args_none_and_every_positional_argument_are_trls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # TRL's own default asks for bf16 on an accelerator; everything else about args=None is left to TRL.
    cpu_config = functools.partial(GRPOConfig, use_cpu=True, bf16=False, report_to=[])
    monkeypatch.setattr("trl.trainer.grpo_trainer.GRPOConfig", cpu_config)
    tokenizer, dataset = word_tokenizer(), Dataset.from_dict({"prompt": PROMPTS})
    model = tiny_model(len(tokenizer))
    model.config._name_or_path = "somewhere/tiny"
    trainer = TurnGRPOTrainer(model, length_reward, None, dataset, dataset, tokenizer)
    assert type(trainer.args) is GRPOConfig
    assert trainer.args.output_dir == GRPOTrainer(model, length_reward, None, dataset, None, tokenizer).args.output_dir
    assert trainer._name == "GRPO" and trainer.eval_dataset is dataset and trainer.workflow is None


def test_signature_shows_trls_arguments_and_then_ours():
    ours, theirs = inspect.signature(TurnGRPOTrainer).parameters, inspect.signature(GRPOTrainer).parameters
    assert list(ours) == [*theirs, "workflow", "turn_reward_funcs"]
    assert all(ours[name] == theirs[name] for name in theirs)
    added = [ours["workflow"], ours["turn_reward_funcs"]]
    assert [(p.kind.name, p.default) for p in added] == [("KEYWORD_ONLY", None)] * 2

    class Narrower(TurnGRPOTrainer):
        def __init__(self, model):
            pass

    assert list(inspect.signature(Narrower).parameters) == ["model"]


def test_an_instance_without_init_has_no_workflow():
    trainer = object.__new__(TurnGRPOTrainer)  # what trl's own tests do to reach one method
    trainer.model, trainer._step, trainer._buffered_inputs = tiny_model(4), 1, ["first", "second"]
    trainer.args, trainer.num_iterations = SimpleNamespace(steps_per_generation=2), 1
    assert trainer._prepare_inputs("a batch") == "second"  # TRL's, at step 1 of 2


def test_our_options_need_a_workflow(tmp_path):
    tokenizer, dataset = word_tokenizer(), Dataset.from_dict({"prompt": PROMPTS})
    arguments = (tiny_model(len(tokenizer)), length_reward)
    with pytest.raises(ValueError, match="turn_reward_funcs reward the turns of a workflow"):
        TurnGRPOTrainer(*arguments, None, dataset, None, tokenizer, turn_reward_funcs=[length_reward])
    config = TurnGRPOConfig(str(tmp_path), loss_type="group", report_to=[], use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="loss_type='group' needs a workflow"):
        TurnGRPOTrainer(*arguments, config, dataset, None, tokenizer)


def test_every_inherited_field_keeps_trls_default():
    ours, theirs = TurnGRPOConfig("a", use_cpu=True, bf16=False), GRPOConfig("a", use_cpu=True, bf16=False)
    skipped = {"logging_dir", "run_name"}
    for name in GRPOConfig.__dataclass_fields__:
        if name not in skipped:
            assert getattr(ours, name) == getattr(theirs, name), name


def test_paper_values_are_those_of_table_3():
    config = TurnGRPOConfig.paper(output_dir="a", use_cpu=True, bf16=False)
    table = {
        "chunk_size": 5000,
        "max_prompt_length": 8192,
        "max_completion_length": 2048,
        "epsilon": 0.2,
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "top_p": 1.0,
        "eval_temperature": 1.0,
        "eval_top_p": 0.7,
        "num_generations": 16,
        "warmup_steps": 20,
        "alpha": 0.9,
        "loss_type": "group",
        "scale_rewards": "none",
        "beta": 0.001,
        "num_iterations": 1,
    }
    assert {name: getattr(config, name) for name in table} == table
    assert config.generation_batch_size == 128 * 16
    assert config.steps_per_generation == config.gradient_accumulation_steps  # one update per rollout batch
    assert TurnGRPOConfig.paper(output_dir="a", alpha=0.5, use_cpu=True, bf16=False).alpha == 0.5
