"""Warm start by supervised fine-tuning: on the gold turns of a corpus, or on prompts with completions.

    python scripts/sft.py --corpus code.jsonl --model_name_or_path Qwen/Qwen2.5-3B-Instruct --use_peft \
        --output_dir outputs/warm_start --max_length 8192 --num_train_epochs 1
    python scripts/sft.py --targets targets.jsonl --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --output_dir outputs/sft --learning_rate 2e-5

Prompts are built by the same workflow as in training, token for token. Only completions are trained, and the loss is
divided by all their tokens in the gradient accumulation. An example longer than --max_length is an error, never cut.
With --use_peft the adapter is saved, else the whole model, each with its tokenizer. On several processes (accelerate
launch) the weights are those of one process with the same batch, and process 0 writes.
"""

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import (
    check_adapter,
    claim_output,
    empty_model,
    load_model,
    load_tokenizer,
    make_output,
    make_workflow,
    parse_options,
    read_corpus,
    run_script,
    setting_up,
)
from datasets import Dataset, load_dataset
from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

from turngrpo.data_prep import gold_turns
from turngrpo.data_prep.gold import relevant_text
from turngrpo.trainer import SingleTurn, Turn
from turngrpo.trainer.checkpoints import ExactCheckpoints
from turngrpo.trainer.gates import GateDecision, parse_answer, parse_turn
from turngrpo.trainer.policy import Policy, evaluating
from turngrpo.trainer.scoring import Scorer


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class SftArguments:
    """What to imitate, and how its prompts are made."""

    corpus: str | None = _option(None, "Corpus file: the gold turns of its training projects are imitated.")
    targets: str | None = _option(None, "JSON Lines file, or dataset name, with columns prompt and completion.")
    validation_fraction: float = _option(0.1, "Share of the projects that are held out.")
    split_seed: int = _option(0, "Seed of the split by project.")
    workflow: str = _option("gated", "Workflow of the corpus's prompts: gated or memagent.")
    layout: str | None = _option(None, "chunk_first or memory_first; the workflow's own when left out.")
    instruction: str | None = _option(None, "Instruction of chunk turns; the workflow's own when left out.")
    gate_noise: float = _option(0.0, "Probability in [0, 1) that a gold gate is flipped, for an imperfect start.")
    read_on: float = _option(0.0, "Probability in [0, 1) that a gold reading goes on after the last evidence.")
    chunk_size: int = _option(5000, "Tokens per chunk where the corpus holds whole documents.")
    max_memory_tokens: int = _option(1024, "A memory longer than this is cut, as in training.")


def gated_reply(decision: GateDecision, think: str = "") -> str:
    """Return the text that the strict parser reads as `decision`."""
    start = f"<think>{think}</think>\n" if think else ""
    check, leave = "yes" if decision.check else "no", "end" if decision.exit else "continue"
    return f"{start}<check>{check}</check>\n<update>{decision.candidate}</update>\n<next>{leave}</next>"


def noisy_gates(
    gold: GateDecision, row: Mapping[str, Any], chunk: Mapping[str, Any], noise: float, generator: random.Random
) -> GateDecision:
    """Flip each gate with probability `noise`; a gate flipped to yes writes the chunk's likeliest line."""
    check = gold.check != (generator.random() < noise)
    leave = gold.exit != (generator.random() < noise)
    if check == gold.check:
        return GateDecision(check, gold.candidate, leave)
    return GateDecision(check, relevant_text(chunk["text"], row["question"], row["answers"]) if check else "", leave)


def row_examples(
    row: Mapping[str, Any],
    workflow: Any,
    gate_noise: float = 0.0,
    generator: random.Random | None = None,
    think: Callable[[Mapping[str, Any], Mapping[str, Any]], str] | None = None,
    read_on: float = 0.0,
) -> list[dict[str, list[int]]]:
    """Return one tokenised example per turn along the gold trajectory of a row, the answer turn included.

    `workflow` is a bound GatedMemory or MemAgent; memory follows the gold gates whatever noise does to the targets.
    Where noise, or chance with probability `read_on`, keeps the reader after the last evidence, the chunks after it
    are read too (gold: write nothing, end).
    `think(row, chunk)` gives the text of the think block. Raises ValueError where a target would not parse.
    """
    generator = generator or random.Random(0)
    gold, gated = gold_turns(row), hasattr(workflow, "exit_gate") and workflow.exit_gate
    state, examples = workflow.start(row), []
    for step, chunk in enumerate(row["chunks"], start=1):
        decision = GateDecision(check=False, candidate="", exit=True)
        if step <= len(gold):
            decision = GateDecision(gold[step - 1]["check"], gold[step - 1]["candidate"], gold[step - 1]["exit"])
        target = noisy_gates(decision, row, chunk, gate_noise, generator)
        staying = GateDecision(decision.check, decision.candidate, exit=False)
        text, followed = gated_reply(target, think(row, chunk) if think else ""), gated_reply(staying)
        if gated and parse_turn(text, "eos") is None:
            raise ValueError(f"row {row['id']!r}, step {step}: the gold turn does not parse: {text!r}")
        if not gated:  # every reply is the whole memory
            text = followed = decision.candidate or state.memory
        examples.append(tokenised(workflow, state, text))
        workflow.advance(state, Turn(step, [], [], [], "eos", followed))
        if gated and step >= len(gold) and target.exit and generator.random() >= read_on:
            break
    state.answering = True
    answer = f"\\boxed{{{row['answers'][0]}}}"
    if parse_answer(answer, "eos") is None:
        raise ValueError(f"row {row['id']!r}: the answer {row['answers'][0]!r} cannot stand in \\boxed{{}}")
    return [*examples, tokenised(workflow, state, answer)]


def tokenised(workflow: Any, state: Any, completion: str) -> dict[str, list[int]]:
    """Return input_ids and completion_mask of the current prompt and a completion ended by EOS."""
    prompt = [token for segment in workflow.prompt(state) for token in segment]
    return with_completion(prompt, workflow.chat.tokenizer, completion)


def with_completion(prompt: list[int], tokenizer: Any, completion: str) -> dict[str, list[int]]:
    """Append a completion, tokenised apart as plain text, and EOS to prompt ids."""
    ids = tokenizer(completion, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    ids = [*ids, tokenizer.eos_token_id]
    return {"input_ids": [*prompt, *ids], "completion_mask": [0] * len(prompt) + [1] * len(ids)}


def corpus_examples(
    rows: Iterable[Mapping[str, Any]],
    workflow: Any,
    gate_noise: float = 0.0,
    seed: int = 0,
    think: Callable[[Mapping[str, Any], Mapping[str, Any]], str] | None = None,
    read_on: float = 0.0,
) -> tuple[Dataset, list[str]]:
    """Return the examples of all rows and a name for each, for messages."""
    examples, names, generator = [], [], random.Random(seed)
    for row in tqdm(rows, desc="gold turns", unit="row", leave=False, delay=1):
        turns = row_examples(row, workflow, gate_noise, generator, think, read_on)
        examples += turns
        names += [f"row {row['id']!r}, step {step}" for step in range(1, len(turns))] + [f"row {row['id']!r}, answer"]
    return Dataset.from_list(examples), names


def target_examples(path: str, tokenizer: Any) -> tuple[Dataset, list[str]]:
    """Return the examples of a dataset with columns prompt and completion, each text or messages."""
    local = Path(path).is_file()
    data = load_dataset("json", data_files=path, split="train") if local else load_dataset(path, split="train")
    workflow = SingleTurn()
    workflow.bind(tokenizer, SimpleNamespace(chat_template_kwargs=None))
    examples, names = [], []
    for index, row in enumerate(data):
        if not row.get("prompt") or not row.get("completion"):
            raise ValueError(f"{path}, row {index + 1}: found columns {sorted(row)}, expected prompt and completion")
        completion = row["completion"]
        if not isinstance(completion, str):
            if len(completion) != 1 or completion[0]["role"] != "assistant":
                raise ValueError(f"{path}, row {index + 1}: expected one assistant message as the completion")
            completion = completion[0]["content"]
        prompt = workflow.prompt(workflow.start(row))[0]
        examples.append(with_completion(prompt, tokenizer, completion))
        names.append(f"{path}, row {index + 1}")
    return Dataset.from_list(examples), names


def check_lengths(examples: Dataset, names: Sequence[str], limit: int | None) -> None:
    """Raise ValueError naming up to 20 examples that are longer than `limit` tokens."""
    lengths = [len(ids) for ids in examples["input_ids"]]
    long = [f"  {name}: {n} tokens" for name, n in zip(names, lengths, strict=True) if limit and n > limit]
    if long:
        more = [f"  and {len(long) - 20} more"] if len(long) > 20 else []
        raise ValueError(
            f"{len(long)} examples are longer than {limit} tokens (--max_length, or the model's positions); none is "
            "truncated: raise --max_length or cut chunks smaller\n" + "\n".join(long[:20] + more)
        )


def check_batches(examples: Dataset, config: SFTConfig) -> None:
    """Raise ValueError where several processes would fill up an epoch's last batch with examples of its first."""
    batch = config.per_device_train_batch_size * config.world_size
    if config.world_size > 1 and not config.dataloader_drop_last and len(examples) % batch:
        raise ValueError(
            f"{len(examples)} examples are no multiple of --per_device_train_batch_size x processes = {batch}: the "
            "last batch would be filled up with examples of the first; choose sizes that divide them, or give "
            "--dataloader_drop_last true"
        )


class ExactSFTTrainer(ExactCheckpoints, SFTTrainer):
    """trl's SFTTrainer whose resumed runs end identical to uninterrupted ones, to the last bit.

    `seconds` by purpose (optimisation, validation, saving) are kept outside the checkpoints.
    """

    _total_train_tokens: int
    seconds: dict[str, float]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.seconds = {"optimisation": 0.0, "validation": 0.0, "saving": 0.0}
        with self._timed("optimisation"):
            output = super().train(*args, **kwargs)
        self.seconds["optimisation"] -= self.seconds["validation"] + self.seconds["saving"]
        return output

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def _complete_state(self) -> dict[str, Any]:
        return super()._complete_state() | {"train_tokens": self._total_train_tokens}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._total_train_tokens = state["train_tokens"]


def completion_nll(policy: Policy, examples: Dataset, pad_id: int, max_tokens: int = 16384) -> float:
    """Return the negative log-likelihood in nats per completion token (EOS included), over all examples at once."""
    turns = []
    for ids, mask in zip(examples["input_ids"], examples["completion_mask"], strict=True):
        prompt = mask.index(1)
        turns.append(Turn(None, ids[:prompt], ids[prompt:], [0.0] * (len(ids) - prompt), "eos", ""))
    scorer, total = Scorer(policy, pad_id, max_tokens=max_tokens), 0.0
    with evaluating(policy.model):
        for _, _, scores in scorer.score(turns, scorer.plan(turns)):
            total -= float(scores.logprobs.double().sum())
    return total / sum(len(turn.completion_ids) for turn in turns)


class ValidationNLL(TrainerCallback):
    """Logs `eval_nll` after every epoch; it is never used to choose anything."""

    trainer: Any

    def __init__(self, examples: Dataset):
        self.examples = examples

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.epoch == int(state.epoch):
            trainer = self.trainer
            policy = Policy(trainer.model, trainer.accelerator.autocast)
            with trainer._timed("validation"):
                nll = completion_nll(policy, self.examples, trainer.processing_class.pad_token_id)
            log_loss = control.should_log
            Trainer.log(trainer, {"eval_nll": nll})  # SFTTrainer.log would flush the averages of training
            control.should_log = log_loss  # a log takes the request for one back


def fit(
    model: Any,
    tokenizer: Any,
    examples: Dataset,
    names: Sequence[str],
    config: SFTConfig,
    peft_config: Any = None,
    callbacks: Any = None,
    validation: Dataset | None = None,
    optimizers: tuple[Any, Any] = (None, None),
    log: TrainerCallback | None = None,
) -> ExactSFTTrainer:
    """Train on examples made above through trl's SFTTrainer, nothing cut, loss on completions alone.

    `validation` examples give `eval_nll` after every epoch; `optimizers` is (optimizer, scheduler), as in Trainer;
    `log` replaces transformers' printing.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    check_lengths(examples, names, min(filter(None, (config.max_length, positions)), default=None))
    config.max_length, config.completion_only_loss = None, True
    measure = [ValidationNLL(validation)] if validation is not None else []
    trainer = ExactSFTTrainer(
        model,
        config,
        train_dataset=examples,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[*measure, *(callbacks or [])],
        optimizers=optimizers,
    )
    for callback in measure:
        callback.trainer = trainer
    if log is not None:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(log)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    return trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the examples, train, save; the mean loss of every logging step is printed and written to sft.json."""
    with setting_up():
        options, config, model_options = parse_options([SftArguments, SFTConfig, ModelConfig], arguments)
        output = claim_output(config)
        if (options.corpus is None) == (options.targets is None):
            raise ValueError("expected one of --corpus and --targets")
        if not 0 <= options.gate_noise < 1:
            raise ValueError(f"--gate_noise is {options.gate_noise}: expected a probability in [0, 1)")
        if not 0 <= options.read_on < 1:
            raise ValueError(f"--read_on is {options.read_on}: expected a probability in [0, 1)")
        tokenizer = load_tokenizer(model_options.model_name_or_path, model_options.model_revision)
        if options.targets is not None:
            examples, names = target_examples(options.targets, tokenizer)
        else:
            corpus = read_corpus(
                options.corpus, options.validation_fraction, options.split_seed, tokenizer, options.chunk_size
            )
            workflow = make_workflow(options.workflow, options.layout, options.instruction)
            workflow.bind(
                tokenizer, SimpleNamespace(chat_template_kwargs=None, max_memory_tokens=options.max_memory_tokens)
            )
            examples, names = corpus_examples(
                corpus["train"], workflow, options.gate_noise, config.seed, read_on=options.read_on
            )
        model = load_model(model_options)
        check_lengths(examples, names, config.max_length)
        check_batches(examples, config)
        check_adapter(empty_model(model_options), get_peft_config(model_options))
        make_output(output)
    if config.process_index == 0:
        print(f"{len(examples)} examples, {sum(map(sum, examples['completion_mask']))} completion tokens")
    trainer = fit(model, tokenizer, examples, names, config, get_peft_config(model_options))
    trainer.save_model(config.output_dir)
    if config.process_index == 0:
        losses = [log for log in trainer.state.log_history if "loss" in log]
        (output / "sft.json").write_text(json.dumps(losses, indent=1), encoding="utf-8")
        print(f"saved to {config.output_dir}")
    return 0


if __name__ == "__main__":
    run_script(main)
