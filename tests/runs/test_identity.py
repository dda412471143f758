"""What changes the objective is part of a run's identity: every such change is refused by name, or allowed by name."""

import abc
import copy
import functools
import pickle
import warnings
from dataclasses import dataclass, field
from typing import Protocol

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import tiny_model, word_tokenizer
from training import PROMPTS, length_turn_reward, make_trainer, token_reward
from transformers import Qwen2Config, Qwen2ForSequenceClassification, TrainerCallback
from trl import SFTConfig

from turngrpo.trainer import GatedMemory, MemAgent, TurnGRPOTrainer
from turngrpo.trainer.reading.gates import GateDecision
from turngrpo.trainer.runs.fingerprint import FREE_FIELDS, check_fingerprint
from turngrpo.trainer.runs.identity import code_digest
from turngrpo.trainer.runs.proof import ResumeError
from turngrpo.trainer.warm_start import ExactSFTTrainer

ROWS = Dataset.from_list(
    [
        {"id": f"r{i}", "question": "code of red", "answers": ["1"],
         "chunks": [{"text": "red is 1", "evidence": True}, {"text": "no", "evidence": False}]}
        for i in range(4)
    ]
)  # fmt: skip
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def function_of(text, name="reward"):
    """Return a function made from text, as in a notebook: of one name whatever its body."""
    place = {}
    exec(text, place)
    return place[name]


def first(completion_ids, **columns):
    return [1.0 for _ in completion_ids]


def renamed(function, name="reward"):
    function.__name__ = function.__qualname__ = name
    return function


def closure(scale):
    return renamed(lambda completion_ids, **columns: [scale for _ in completion_ids])


def with_default(scale):
    def reward(completion_ids, scale=scale, **columns):
        return [scale for _ in completion_ids]

    return reward


class Scaled:
    __name__ = "reward"

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, completion_ids, **columns):
        return [self.scale for _ in completion_ids]


def scaled(completion_ids, scale, **columns):
    return [scale for _ in completion_ids]


def bound(scale):
    return renamed(functools.partial(scaled, scale=scale))


TABLE = "WEIGHTS = {weights}\ndef helper(n):\n    return n * {factor}\n"
CALLER = "def reward(completion_ids, **columns):\n    return [helper(WEIGHTS['a']) for _ in completion_ids]\n"


def calling(weights, factor):
    return function_of(TABLE.format(weights=weights, factor=factor) + CALLER)


def decorated(scale):
    def times(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return [scale * value for value in function(*args, **kwargs)]

        return inner

    return renamed(times(first), "reward")


BODIES = {
    "source": (lambda: token_reward, lambda: renamed(first, "token_reward")),
    "exec": (
        lambda: function_of("def reward(completion_ids, **c):\n    return [1.0 for _ in completion_ids]"),
        lambda: function_of("def reward(completion_ids, **c):\n    return [2.0 for _ in completion_ids]"),
    ),
    "lambda": (lambda: renamed(lambda ids, **c: [1.0]), lambda: renamed(lambda ids, **c: [2.0])),
    "closure": (lambda: closure(1.0), lambda: closure(2.0)),
    "default": (lambda: with_default(1.0), lambda: with_default(2.0)),
    "object": (lambda: Scaled(1.0), lambda: Scaled(2.0)),
    "method": (lambda: Scaled(1.0).__call__, lambda: Scaled(2.0).__call__),
    "partial": (lambda: bound(1.0), lambda: bound(2.0)),
    "helper": (lambda: calling({"a": 1}, 1.0), lambda: calling({"a": 1}, 2.0)),
    "table": (lambda: calling({"a": 1}, 1.0), lambda: calling({"a": 2}, 1.0)),
    "decorator": (lambda: decorated(1.0), lambda: decorated(2.0)),
}


@pytest.mark.parametrize("kind", BODIES)
def test_another_body_of_the_same_name_is_another_reward(kind):
    one, other = BODIES[kind]
    if kind != "lambda":  # two of one line have one source
        assert code_digest(one()) == code_digest(one())
    assert code_digest(one()) != code_digest(other())


def test_equal_values_read_the_same_whether_they_are_shared_or_not():
    shared = [1, 2]
    assert code_digest([shared, shared]) == code_digest([[1, 2], [1, 2]]) != code_digest([[1, 2], [2, 1]])
    assert code_digest({"a": 1, "b": {2, 3}}) == code_digest({"b": {3, 2}, "a": 1})


class Judge(Protocol):
    def __call__(self, text: str) -> float: ...


@dataclass
class Verdict:
    score: float = 0.0
    notes: list = field(default_factory=list)


class Strict(Judge, abc.ABC):
    def __call__(self, text):
        return Verdict(len(text)).score


@pytest.mark.parametrize("kind", [GatedMemory, MemAgent, Strict, GateDecision])
def test_what_is_made_copied_shown_or_sent_on_reads_as_before(kind):
    """Python keeps notes in a class when one of its objects is pickled, as two processes do with parsed turns."""
    before = code_digest(kind)
    own = kind(True, "x", False) if kind is GateDecision else kind()
    for one in (own, Verdict(), GateDecision(True, "", True)):
        copy.deepcopy(one), pickle.loads(pickle.dumps(one)), repr(one), isinstance(one, Verdict)
    assert "__slotnames__" in vars(kind) and code_digest(kind) == before


def test_a_reward_model_is_its_config_and_its_weights():
    def model(seed, **shape):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        heads = {"num_key_value_heads": 2, "vocab_size": 12, "num_labels": 1}
        return Qwen2ForSequenceClassification(Qwen2Config(**sizes, **heads, **shape))

    assert code_digest(model(0)) == code_digest(model(0))
    assert code_digest(model(0)) != code_digest(model(1))
    assert code_digest(model(0)) != code_digest(model(0, rms_norm_eps=1e-3))


# ---- the trainer: a checkpoint of one run, and runs that differ from it in one thing ----


def gated(**changes):
    """Return the arguments of a run with GatedMemory and LoRA, some changed."""
    tokenizer, lora = word_tokenizer(), LoraConfig(**(LORA | changes.pop("lora", {})))
    if "template" in changes:
        tokenizer.chat_template = changes.pop("template")
    defaults = {"workflow": GatedMemory(strict_format=False), "dataset": ROWS, "tokenizer": tokenizer, "max_steps": 1}
    return defaults | {"save_strategy": "steps", "save_steps": 1, "peft_config": lora} | changes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run's folder and checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    make_trainer(folder, **gated()).train()
    return folder, str(folder / "checkpoint-1")


class Shouting(TurnGRPOTrainer):
    def _get_train_sampler(self, dataset=None):
        return super()._get_train_sampler(dataset)


TEMPLATE = word_tokenizer().chat_template.replace("assistant", "user")
CHANGES = {
    "another reward": (lambda: {"reward_funcs": length_reward}, "rewards.order: the checkpoint's is token_reward"),
    "another body": (lambda: {"reward_funcs": renamed(first, "token_reward")}, "rewards.token_reward: "),
    "no turn rewards": (lambda: {"turn_reward_funcs": None}, "turn_rewards.order: .* this run's none"),
    "another workflow": (lambda: {"workflow": MemAgent()}, "workflow.class: .* GatedMemory, this run's MemAgent"),
    "strict": (lambda: {"workflow": GatedMemory()}, "workflow.strict_format: .* False, this run's True"),
    "exit gate": (
        lambda: {"workflow": GatedMemory(strict_format=False, exit_gate=False)},
        "workflow.exit_gate: the checkpoint's is True, this run's False",
    ),
    "instruction": (
        lambda: {"workflow": GatedMemory(strict_format=False, instruction="memory")},
        "workflow.instruction: the checkpoint's is SHA-256 .* this run's 'memory'",
    ),
    "layout": (
        lambda: {"workflow": GatedMemory("memory_first", strict_format=False)},
        "workflow.layout: the checkpoint's is 'chunk_first', this run's 'memory_first'",
    ),
    "chat template": (lambda: {"template": TEMPLATE}, "tokenizer.chat_template: "),
    "alpha": (
        lambda: {"lora": {"lora_alpha": 64}},
        "adapter.default.lora_alpha: the checkpoint's is 8, this run's 64",
    ),
    "rslora": (
        lambda: {"lora": {"use_rslora": True}},
        "adapter.default.use_rslora: the checkpoint's is False, this run's True",
    ),
    "dtype": (lambda: {"dtype": torch.float64}, "precision: .*float32.*float64"),
    "model config": (lambda: {"model": tiny_model(len(word_tokenizer()), rms_norm_eps=1e-3)}, "model_config: "),
    "ends of text": (lambda: {"model": more_ends()}, r"generation.eos_token_ids: .* \[3\], this run's \[2, 3\]"),
    "optimizer": (
        lambda: {"rollout_batch_tokens": 7},
        "rollout_batch_tokens: the checkpoint's is 262144, this run's 7",
    ),
}


def length_reward(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def more_ends():
    model = tiny_model(len(word_tokenizer()))
    model.generation_config.eos_token_id = [2, 3]
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_objective_is_refused_by_name(change, saved):
    changed, named = CHANGES[change]
    folder, checkpoint = saved
    with pytest.raises(ResumeError, match=named):
        make_trainer(folder, **gated(**changed())).check_resume(checkpoint)


def test_the_same_run_goes_on_without_a_word(saved):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(saved[0], **gated())
        trainer.check_resume(saved[1])
    assert [str(one.message) for one in caught if "goes on" in str(one.message)] == []


def test_a_change_is_allowed_by_name_and_written_down(tmp_path):
    make_trainer(tmp_path, **gated()).train()
    changed = {"reward_funcs": length_reward, "max_steps": 2, "allow_changed": ["rewards"]}
    trainer = make_trainer(tmp_path, **gated(**changed))
    with pytest.warns(UserWarning, match="goes on as another run, as allow_changed says: rewards.length_reward"):
        trainer.train(str(tmp_path / "checkpoint-1"))
    said = [log["allowed_changes"] for log in trainer.state.log_history if "allowed_changes" in log]
    assert len(said) == 1 and "rewards.order: the checkpoint's is token_reward, this run's length_reward" in said[0]
    state = torch.load(tmp_path / "checkpoint-2" / "turngrpo_state_0.pt", weights_only=True)
    assert [one["update"] for one in state["changes"]] == [1]
    assert [line.split(":")[0] for line in state["changes"][0]["changed"]] == [
        "rewards.length_reward",
        "rewards.order",
        "rewards.token_reward",
    ]
    with pytest.raises(ResumeError, match="turn_rewards.order"):  # what was allowed is all that may differ
        make_trainer(tmp_path, **gated(**changed, turn_reward_funcs=None)).check_resume(str(tmp_path / "checkpoint-1"))


def test_allowing_what_is_not_compared_is_an_error(saved):
    with pytest.raises(ResumeError, match=r"allow_changed names \['reward'\].* expected corpus, .*rewards"):
        make_trainer(saved[0], **gated(allow_changed=["reward"])).check_resume(saved[1])


FINGERPRINT = {"config": {"beta": "0.1"}, "processes": 1, "rewards": {"order": "a"}, "versions": {"torch": "2.13"}}


def test_other_versions_are_a_warning_and_so_is_what_an_older_checkpoint_lacks():
    old = FINGERPRINT | {"versions": {"torch": "2.12"}}
    with pytest.warns(UserWarning, match="other versions, .*: torch 2.12 then, 2.13 now"):
        assert check_fingerprint(old, FINGERPRINT, "checkpoint-1") == []
    old = {"config": {}, "processes": 1}
    with pytest.warns(UserWarning, match="older version; not compared: beta; rewards"):
        assert check_fingerprint(old, FINGERPRINT, "checkpoint-1") == []


def test_a_subclass_that_changes_a_method_is_another_run(saved):
    trainer = make_trainer(saved[0], **gated())
    trainer.__class__ = Shouting
    with pytest.raises(ResumeError, match="trainer: other methods of the trainer's subclass"):
        trainer.check_resume(saved[1])


# ---- the supervised trainer ----


def sft(folder, lora_alpha=8, ids=(4, 5, 3), template=None, optimizer=None):
    rows = [{"input_ids": list(ids), "completion_mask": [0, 1, 1]}] * 4
    options = {"max_steps": 1, "save_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False}
    options |= {"max_length": None, "gradient_checkpointing": False}
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    model = tiny_model(len(tokenizer))
    if optimizer is not None:
        adamw = torch.optim.AdamW(model.parameters(), lr=optimizer)
        optimizer = adamw, torch.optim.lr_scheduler.LambdaLR(adamw, lambda update: 1.0)
    return ExactSFTTrainer(
        model,
        SFTConfig(output_dir=str(folder), disable_tqdm=True, completion_only_loss=True, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(**(LORA | {"lora_alpha": lora_alpha}), task_type="CAUSAL_LM"),
        optimizers=optimizer or (None, None),
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lora_alpha": 64}, "adapter.default.lora_alpha: the checkpoint's is 8, this run's 64"),
        ({"ids": (4, 6, 3)}, "corpus: other rows"),
        ({"template": TEMPLATE}, "tokenizer.chat_template"),
        ({"optimizer": 0.5}, "optimizer.class: the checkpoint's is absent, this run's AdamW"),
    ],
)
def test_a_supervised_run_has_an_identity_too(change, named, tmp_path):
    sft(tmp_path).train()
    with pytest.raises(ResumeError, match=named):
        sft(tmp_path, **change).train(str(tmp_path / "checkpoint-1"))


# ---- free fields: two values of each, one run ----


class Weights(TrainerCallback):
    """Keeps a sum and the bytes of every parameter after each update."""

    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append([parameter.detach().clone() for parameter in model.parameters()])


EVALUATION = {
    "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "save_strategy": "steps",
    "save_steps": 1,
}  # fmt: skip
OTHER = {  # another value of every free field, and what it needs beside it
    "output_dir": {},  # other in every run
    "run_name": {"run_name": "another"},
    "report_to": {"report_to": "none"},
    "project": {"project": "another"},
    "trackio_space_id": {"trackio_space_id": "another"},
    "logging_strategy": {"logging_strategy": "no"},
    "logging_first_step": {"logging_first_step": True},
    "logging_steps": {"logging_steps": 2},
    "log_level": {"log_level": "error"},
    "log_level_replica": {"log_level_replica": "error"},
    "log_on_each_node": {"log_on_each_node": False},
    "disable_tqdm": {"disable_tqdm": False},
    "save_strategy": {"save_strategy": "steps"},
    "save_steps": {"save_strategy": "steps", "save_steps": 2},
    "save_total_limit": {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1},
    "save_only_model": {"save_strategy": "steps", "save_steps": 1, "save_only_model": True},
    "save_on_each_node": {"save_strategy": "steps", "save_steps": 1, "save_on_each_node": True},
    "eval_strategy": EVALUATION,
    "eval_steps": EVALUATION | {"eval_steps": 2, "save_steps": 2},
    "eval_delay": EVALUATION | {"eval_delay": 1},
    "eval_on_start": EVALUATION | {"eval_on_start": True},
    "do_eval": EVALUATION | {"do_eval": False},
    "do_train": {"do_train": True},
    "do_predict": {"do_predict": True},
    "load_best_model_at_end": EVALUATION | {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"},
    "metric_for_best_model": EVALUATION | {"metric_for_best_model": "eval_reward"},
    "greater_is_better": EVALUATION | {"metric_for_best_model": "eval_reward", "greater_is_better": False},
    "per_device_eval_batch_size": EVALUATION | {"per_device_eval_batch_size": 4},
    "num_generations_eval": EVALUATION | {"num_generations_eval": 2},
    "eval_temperature": EVALUATION | {"eval_temperature": 0.5},
    "eval_top_p": EVALUATION | {"eval_top_p": 1.0},
    "eval_seed": EVALUATION | {"eval_seed": 5},
    "hub_model_id": {"hub_model_id": "owner/another"},
    "hub_strategy": {"hub_strategy": "end"},
    "hub_token": {"hub_token": "none"},
    "hub_private_repo": {"hub_private_repo": True},
    "hub_always_push": {"hub_always_push": True},
    "hub_revision": {"hub_revision": "another"},
    "resume_from_checkpoint": {"resume_from_checkpoint": "unused by the trainer"},
    "allow_changed": {"allow_changed": ["rewards"]},
    "allow_overlap": {"allow_overlap": True},
    "max_turns": {"max_turns": 9},
    "log_completions": {"log_completions": True},
    "num_completions_to_print": {"log_completions": True, "num_completions_to_print": 0},
    "log_unique_prompts": {"log_completions": True, "log_unique_prompts": True},
    "dataloader_num_workers": {"dataloader_num_workers": 1},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3},
    "dataloader_pin_memory": {"dataloader_pin_memory": False},
    "dataloader_persistent_workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "ledger": {"ledger": False},
    "vllm_adapter_dir": {"vllm_adapter_dir": "another"},
    "vllm_base_url": {"vllm_base_url": ["http://localhost:1"]},
    "vllm_request_timeout": {"vllm_request_timeout": 1.0},
    "vllm_concurrent_requests": {"vllm_concurrent_requests": 1},
    "reward_timeout": {"reward_timeout": 60.0},
}
NEEDS_A_HUB = ("push_to_hub", "log_completions_hub_repo", "trackio_bucket_id", "trackio_static_space_id")
REFUSED_WITHOUT_A_SERVER = ("vllm_server_base_url", "vllm_server_timeout")
NO_OPTION = ("local_rank", "deepspeed_plugin", "distributed_state", "_n_gpu")  # of the machine


def drawing(completion_ids, trajectories, **columns):
    """A reward that draws, so that a run that moves the global generators shows."""
    return [base + float(torch.rand(())) for base in token_reward(completion_ids, trajectories)]


def weights_after(folder, **options):
    kept = Weights()
    evaluation = Dataset.from_dict({"prompt": PROMPTS[:2]}) if "eval_strategy" in options else None
    make_trainer(
        folder, eval_dataset=evaluation, callbacks=[kept], reward_funcs=drawing, turn_reward_funcs=length_turn_reward,
        **options,
    ).train()  # fmt: skip
    return kept.after


@pytest.fixture(scope="module")
def plain_weights(tmp_path_factory):
    return weights_after(tmp_path_factory.mktemp("plain"))


def test_every_free_field_is_tried():
    assert set(FREE_FIELDS) == {*OTHER, *NEEDS_A_HUB, *REFUSED_WITHOUT_A_SERVER, *NO_OPTION}


@pytest.mark.parametrize("field", OTHER)
def test_a_free_field_moves_no_weight(field, plain_weights, tmp_path):
    found = weights_after(tmp_path, **OTHER[field])
    assert len(found) == len(plain_weights) == 2
    for ours, theirs in zip(found, plain_weights, strict=True):
        assert all(map(torch.equal, ours, theirs))
