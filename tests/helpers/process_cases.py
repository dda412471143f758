"""What test_processes.py runs in one process and in two, by the same functions; a launcher starts the two.

    torchrun --nproc_per_node 2 tests/helpers/process_cases.py FOLDER STAGE [STAGE ...]

A stage is CASE[,CASE ...], or zero2:CASE[,CASE ...] and zero3:... under DeepSpeed.
Every stage but the last runs in forks of the launcher's processes, which have imported everything once: one may be
killed, and the next begins anew.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from openai_server import serving
from peft import LoraConfig, get_peft_model
from tiny import sharpen, tiny_model, word_tokenizer
from torch.distributed.tensor import DTensor
from training import ParityWorkflow, length_turn_reward, make_trainer, token_reward
from transformers import TrainerCallback

from turngrpo.rewards import exit_reward, update_reward
from turngrpo.trainer import GatedMemory
from turngrpo.trainer.reading.gates import GateDecision
from turngrpo.trainer.runs.interruption import Interruption

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "runs"), str(TESTS.parent / "scripts")]

ENGINE = {}  # options of the stage's DeepSpeed engine, if it has one


def zero_config(stage):
    """The field's usual DeepSpeed configuration, with torch's AdamW on the CPU (another would be built first)."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
    } | dict.fromkeys(auto, "auto")


class CountedWorkflow(ParityWorkflow):
    """Reads as many turns as the row says, so that processes hold as many turns as a test wants."""

    def start(self, row):
        return super().start(row) | {"limit": row["turns"]}

    def advance(self, state, turn):
        super().advance(state, turn)
        return state["turns"] < state["limit"]


class TokenGates(GatedMemory):
    """A random model's gates that open and close: by the tokens of its completion."""

    def decide(self, turn):
        first, last = turn.completion_ids[0], turn.completion_ids[-1]
        return None if first % 5 == 0 else GateDecision(first % 2 == 0, "red is 1" if first % 3 else "", last % 4 == 0)


def counted_rows():
    return Dataset.from_list([{"prompt": "code of red is", "turns": 1}, {"prompt": "code of blue", "turns": 3}])


def corpus():
    texts = ["code of red is 1", "blue is yet no", "red is 2"]
    return Dataset.from_list(
        [
            {
                "id": f"row-{i}",
                "question": "code of red",
                "answers": ["1"],
                "chunks": [{"text": texts[(i + k) % 3], "evidence": k == i % 3} for k in range(3)],
            }
            for i in range(5)
        ]
    )


def facts():
    """Return what every test asserts about the launch it got."""
    state = AcceleratorState() if AcceleratorState._shared_state else PartialState()
    return {"num_processes": state.num_processes, "distributed_type": state.distributed_type.value}


class Gradients(TrainerCallback):
    """Keeps the gradient that the first optimizer step takes: after the reduction, before the step."""

    def __init__(self):
        self.kept = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.trainer.is_in_train = True
        engine = getattr(self.trainer, "deepspeed", None)
        if engine is not None:
            from deepspeed.utils import safe_get_full_grad

            step = engine.step

            def keeping_step(*arguments, **options):
                self.keep(safe_get_full_grad)
                return step(*arguments, **options)

            engine.step = keeping_step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.keep(lambda parameter: parameter.grad)

    def keep(self, gradient):
        if self.kept is None:
            named = self.trainer.model.named_parameters()
            kept = {name: gradient(p).detach() for name, p in named if p.requires_grad}
            self.kept = {name: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for name, g in kept.items()}


def gradient(folder, lora=False, split=False, **options):
    """One update of six trajectories in equal parts: 3 turns against 9, or one group over all processes."""
    keeper, processes = Gradients(), PartialState().num_processes
    sizes: Any = {"r": 4, "target_modules": "all-linear"}
    torch.manual_seed(0)  # of a new adapter's matrices
    if lora and "model" in options:
        options["peft_config"] = LoraConfig(**sizes)
    elif lora:  # a warm start, whose every matrix gets a gradient
        warm = LoraConfig(**sizes, init_lora_weights=False)
        options["model"] = get_peft_model(tiny_model(len(word_tokenizer())), warm)
    trainer = make_trainer(
        folder,
        ParityWorkflow() if split else CountedWorkflow(),
        dataset=None if split else counted_rows(),
        per_device_train_batch_size=6 // processes,
        num_generations=6 if split else 3,
        max_tokens_per_microbatch=24,
        max_grad_norm=0.0,
        max_steps=1,
        beta=0.3,
        alpha=1.0 if split else 0.6,
        callbacks=[keeper],
        **(ENGINE | options),
    )
    keeper.trainer = trainer
    torch.manual_seed(0)
    trainer.train()
    rollout = trainer._buffered_inputs[0].rollout
    own = [rollout.turns[i] for i in rollout.own_turns]
    return {
        "gradient": keeper.kept,
        "advantages": rollout.advantages,
        "rewards": rollout.rewards,
        "first_turns": [rollout.trajectory_ids.tolist().index(owner) for owner in range(len(rollout.trajectories))],
        "own_turns": len(own),
        "sharded": any(hasattr(p, "ds_id") or isinstance(p, DTensor) for p in trainer.model.parameters()),
        "tokens": [turn.completion_ids for turn in own],
        "log": trainer.state.log_history,
    }


def gated(folder, **options):
    """Two iterations of gated memory, two updates on each, evaluated on five rows along the way."""
    processes = PartialState().num_processes
    trainer = make_trainer(
        folder,
        TokenGates(strict_format=False),
        dataset=corpus(),
        eval_dataset=corpus(),
        allow_overlap=True,
        reward_funcs=[token_reward, exit_reward],
        turn_reward_funcs=[update_reward, length_turn_reward],
        per_device_train_batch_size=8 // processes,
        per_device_eval_batch_size=4 // processes,
        num_generations_eval=2,
        num_iterations=2,
        max_steps=4,
        beta=0.1,
        eval_strategy="steps",
        eval_steps=2,
        log_completions=True,
        num_completions_to_print=0,
        **(ENGINE | options),
    )
    trainer.train()
    return {"log": trainer.state.log_history}


def loaded(folder, **options):
    """The gradient case with a model that trl loads from a folder: ZeRO-3 cuts it into parts at once."""
    path = folder.with_name("model")
    if PartialState().is_main_process:
        tiny_model(len(word_tokenizer())).save_pretrained(path)
    PartialState().wait_for_everyone()
    return gradient(folder, model=str(path), **options)


def lower(folder):
    """LoRA on a bfloat16 model against its reference."""
    options = {
        "dtype": torch.bfloat16,
        "bf16": True,
        "per_device_train_batch_size": 8 // PartialState().num_processes,
        "beta": 0.1,
    }
    trainer = make_trainer(folder, peft_config=LoraConfig(r=4, target_modules="all-linear"), **(ENGINE | options))
    trainer.train()
    return {"log": trainer.state.log_history, "dtypes": {str(p.dtype) for p in trainer.model.parameters()}}


def resumable(folder, resume=None, **options):
    """Four updates with a checkpoint at each."""
    from test_resume import run

    size = 8 // PartialState().num_processes
    options = {"max_steps": 4, "per_device_train_batch_size": size} | ENGINE | options
    return {"log": run(folder, resume=resume, **options).state.log_history}


def killed(folder):
    """The same, but one process is killed in the middle of saving the third checkpoint."""
    save = torch.save

    def killing(value, path, *args, **kwargs):
        save(value, path, *args, **kwargs)
        if "turngrpo_state_1" in str(path) and "checkpoint-3" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = killing
    return resumable(folder)


def interrupted(folder):
    """The same without checkpoints of its own; in its second update a SIGTERM comes to the second process."""
    from test_interruption import SignalAt
    from test_resume import make

    size, interruption = 8 // PartialState().num_processes, Interruption()
    trainer = make(folder, max_steps=4, per_device_train_batch_size=size, save_strategy="no", **ENGINE)
    trainer.add_callback(interruption)
    if PartialState().process_index == 1:
        trainer.add_callback(SignalAt(1))
    with interruption.listening(says=False):
        trainer.train()
    return {"came": interruption.came, "update": trainer.state.global_step}


def resumed(folder, run):
    """Goes on from what another run left."""
    state = PartialState(cpu=True)
    if state.is_main_process:
        shutil.copytree(folder.with_name(run), folder)
    state.wait_for_everyone()
    return resumable(folder, resume=2)


def served(folder):
    """Two updates on rollouts of a server that the first process runs, from the adapter that it alone pushes."""
    state, path = PartialState(cpu=True), folder.with_name("served_model")
    with contextlib.ExitStack() as stack:
        server = None
        if state.is_main_process:
            sharpen(tiny_model(len(word_tokenizer()))).save_pretrained(path)
            word_tokenizer().save_pretrained(path)
            server = stack.enter_context(serving(path))
        (url,) = broadcast_object_list([server.url if server else None])
        trainer = make_trainer(
            folder,
            TokenGates(strict_format=False),
            dataset=corpus(),
            model=sharpen(tiny_model(len(word_tokenizer()))),
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
            per_device_train_batch_size=8 // state.num_processes,
            learning_rate=0.05,
            rollout_engine="vllm",
            vllm_base_url=[url],
            behavior_check="all",
            behavior_tolerance=2e-4,
        )
        trainer.train()
        state.wait_for_everyone()
        asked = [] if server is None else [body["model"] for body in server.asked if body["model"] != str(path)]
    return {"log": trainer.state.log_history, "names": len(set(asked)), "asked": len(asked)}


def failing(folder):
    """One process's reward function raises while the other waits for it."""

    def reward(trajectories, **columns):
        if PartialState().process_index == 1:
            raise ZeroDivisionError("no reward on process 1")
        return [0.0] * len(trajectories)

    make_trainer(folder, reward_funcs=reward, per_device_train_batch_size=4).train()
    return {}


def script_folder(folder):
    """Return a folder with a tiny `model`, `corpus.jsonl` of 12 rows, and what the scripts are told of them."""
    from jobs import quickstart

    from turngrpo.data_prep import build_needle_corpus, write_corpus

    shared = folder.with_name("scripts")
    if PartialState().is_main_process and not shared.exists():
        manifest, rows = build_needle_corpus("multi_key", 2, 6, 3, 8, shared_keys=True)
        texts = [f"{row['question']}\n{chunk['text']}" for row in rows for chunk in row["chunks"]]
        tokenizer = quickstart.train_tokenizer(texts)
        quickstart.tiny_model(tokenizer, 0, hidden_size=48).save_pretrained(shared / "model")
        tokenizer.save_pretrained(shared / "model")
        write_corpus(shared / "corpus.jsonl", manifest, rows)
    PartialState().wait_for_everyone()
    given = ["--corpus", str(shared / "corpus.jsonl"), "--instruction", quickstart.INSTRUCTION]
    return shared / "model", [*given, "--max_memory_tokens", "16"]


def supervised(folder, rows=None):
    """Warm start by scripts/sft.py: twelve epochs in batches of 6, and the whole model in the end."""
    import sft

    model, given = script_folder(folder)
    size = ["--per_device_train_batch_size", str((rows or 6) // PartialState().num_processes)]
    steps = ["--num_train_epochs", "12", "--learning_rate", "1e-2", "--logging_steps", "1", "--save_strategy", "no"]
    plain = ["--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false", "--report_to", "none"]
    drop = [] if rows else ["--dataloader_drop_last", "true"]
    output = ["--model_name_or_path", str(model), "--output_dir", str(folder), "--disable_tqdm", "true"]
    sft.main([*given, *output, *size, *steps, *plain, *drop])
    PartialState().wait_for_everyone()  # process 0 writes
    return {"log": json.loads((folder / "sft.json").read_text())}


def evaluated(folder):
    """scripts/evaluate.py on the model of `supervised`: 6 rows, two readings of each."""
    import evaluate

    _, given = script_folder(folder)
    limits = ["--max_prompt_length", "150", "--max_completion_length", "24", "--members", "2"]
    folder.mkdir(parents=True, exist_ok=True)
    output = ["--model", str(folder.with_name("supervised")), "--output", str(folder / "evaluation.json")]
    evaluate.main([*given, *limits, *output, "--trivial_policies"])
    PartialState().wait_for_everyone()
    return {"report": json.loads((folder / "evaluation.json").read_text())}


CASES = {
    "full": gradient,
    "lora": lambda folder: gradient(folder, lora=True),
    "split": lambda folder: gradient(folder, split=True),
    "gated": gated,
    "straight": resumable,
    "interrupted": interrupted,
    "killed": killed,
    "resumed": lambda folder: resumed(folder, "killed"),
    "stopped": lambda folder: resumable(folder, stop=2),
    "continued": lambda folder: resumed(folder, "stopped"),
    "loaded": loaded,
    "loaded_lora": lambda folder: loaded(folder, lora=True),
    "lower": lower,
    "supervised": supervised,
    "evaluated": evaluated,
    "served": served,
    "failing": failing,
}


def run_case(name, folder):
    """Run a case and return its result, which every process also writes to FOLDER/NAME_RANK.pt."""
    folder = Path(folder)
    result = CASES[name](folder / name) | facts()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(result, folder / f"{name}_{PartialState().process_index}.pt")
    return result


def shard_on_cpus():
    """Let accelerate prepare FSDP2 as accelerate_configs/fsdp2.yaml says, on CPUs: it is told that they are GPUs.

    It would train without FSDP on what it knows to be a CPU; torch itself shards there all the same.
    """
    config = yaml.safe_load((Path(__file__).parents[2] / "accelerate_configs" / "fsdp2.yaml").read_text())
    os.environ |= {name.upper(): str(value).lower() for name, value in config["fsdp_config"].items()}
    for name in ("FSDP_AUTO_WRAP_POLICY", "FSDP_STATE_DICT_TYPE"):
        os.environ[name] = os.environ[name].upper()
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    torch.distributed.init_process_group("gloo")
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def run_stage(stage, folder):
    engine, cases = stage.rpartition(":")[::2]
    if engine == "fsdp2":
        shard_on_cpus()
    elif engine:
        import deepspeed

        deepspeed.init_distributed("gloo")
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        ENGINE["deepspeed"] = zero_config(int(engine.removeprefix("zero")))
    PartialState(cpu=True)  # before anything asks how many processes there are
    for case in cases.split(","):
        run_case(case, Path(folder, engine))


def meet_at(number):
    """Give a stage a port of its own, so that nobody meets a process of the stage before."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1 + number)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def run_fork(number, stage, folder):
    """Run a stage in a fork; write down its exit status and seconds."""
    started, fork = time.perf_counter(), os.fork()
    if not fork:
        meet_at(number)
        status = 1
        try:
            run_stage(stage, folder)
            status = 0
        except Exception:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    ending = {"status": status, "seconds": time.perf_counter() - started}
    Path(folder, f"{stage}_ending_{os.environ['RANK']}.json").write_text(json.dumps(ending))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *stages = sys.argv[1:]
    for number, stage in enumerate(stages[:-1]):
        run_fork(number, stage, folder)
    meet_at(len(stages))
    run_stage(stages[-1], folder)
