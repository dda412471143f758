"""A warm start by supervised fine-tuning: examples from the gold turns of a corpus, or from prompts with completions.

Prompts are built by the same workflow as in training, token for token. Only completions are trained, the loss is
divided by all their tokens in the gradient accumulation, and an example that is too long is an error, never cut.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from turngrpo.data_prep import gold_turns
from turngrpo.data_prep.gold import BLANK, relevant_text
from turngrpo.trainer.forward.policy import Policy, evaluating
from turngrpo.trainer.forward.scoring import Scorer
from turngrpo.trainer.reading.chat_format import CLOSE_THINK, ChatFormat
from turngrpo.trainer.reading.gates import GateDecision, for_memory, parse_answer, parse_turn, write_turn
from turngrpo.trainer.reading.rollout import Turn
from turngrpo.trainer.reading.workflows import SingleTurn, WorkflowOptions
from turngrpo.trainer.runs.checkpoints import ExactCheckpoints


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
    `think(row, chunk)` gives the text of the think block. Raises ValueError where a target would not parse, and for a
    workflow that carries no memory from chunk to chunk.
    """
    generator, chat = generator or random.Random(0), workflow.chat
    gold, gated = gold_turns(row), hasattr(workflow, "exit_gate") and workflow.exit_gate
    state, examples = workflow.start(row), []
    if not hasattr(state, "memory"):
        raise ValueError(
            f"{type(workflow).__name__} carries no memory: its state has no such attribute, so that there are no gold "
            "turns to imitate; expected a workflow that reads as GatedMemory does, or give prompts with completions "
            "(sft.py --targets)"
        )
    for step, chunk in enumerate(row["chunks"], start=1):
        decision = GateDecision(check=False, candidate="", exit=True)
        if step <= len(gold):
            decision = GateDecision(gold[step - 1]["check"], gold[step - 1]["candidate"], gold[step - 1]["exit"])
        target = allowed(noisy_gates(decision, row, chunk, gate_noise, generator), chat)
        staying = replace(allowed(decision, chat), exit=False)
        thought = for_memory(think(row, chunk), chat.control_tokens) if think else ""
        text = write_turn(target, thought, chat.opens_think)
        followed = write_turn(staying, opens_think=chat.opens_think)
        if gated and parse_turn(text, "eos", chat.control_tokens, chat.opens_think) is None:
            raise ValueError(f"row {row['id']!r}, step {step}: the gold turn does not parse: {text!r}")
        if not gated:  # every reply is the whole memory
            text = followed = CLOSE_THINK * chat.opens_think + (staying.candidate or state.memory)
        examples.append(tokenised(workflow, state, text))
        workflow.advance(state, Turn(step, [], [], [], "eos", followed))
        if gated and step >= len(gold) and target.exit and generator.random() >= read_on:
            break
    state.answering = True
    answer = f"{CLOSE_THINK * chat.opens_think}\\boxed{{{row['answers'][0]}}}"
    if parse_answer(answer, "eos", chat.control_tokens) is None:
        raise ValueError(f"row {row['id']!r}: the answer {row['answers'][0]!r} cannot stand in \\boxed{{}}")
    return [*examples, tokenised(workflow, state, answer)]


def allowed(decision: GateDecision, chat: ChatFormat) -> GateDecision:
    """Return a gold decision whose candidate holds nothing that the parser of a turn allows in no memory."""
    candidate = for_memory(decision.candidate, chat.control_tokens)
    return replace(decision, candidate=candidate or (BLANK if decision.candidate else ""))


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


def target_examples(
    path: str, tokenizer: Any, chat_template_kwargs: dict[str, Any] | None = None
) -> tuple[Dataset, list[str]]:
    """Return the examples of a dataset with columns prompt and completion, each text or messages."""
    local = Path(path).is_file()
    data = load_dataset("json", data_files=path, split="train") if local else load_dataset(path, split="train")
    workflow = SingleTurn()
    workflow.bind(tokenizer, WorkflowOptions(chat_template_kwargs=chat_template_kwargs))
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


class ExactSFTTrainer(SFTTrainer):
    """trl's SFTTrainer whose resumed runs end identical to uninterrupted ones, to the last bit.

    `allow_changed` names what a resume may go on with although it differs from the checkpoint's, on purpose.
    `seconds` by purpose (optimisation, validation, saving) are kept outside the checkpoints. `updates` says of every
    update which examples of this process it was made of, by place in the dataset, and over how many tokens.
    """

    _total_train_tokens: int

    def __init__(self, *args: Any, allow_changed: Sequence[str] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.checkpoints = ExactCheckpoints(self, self._run_state, self._restore_run, allow_changed=allow_changed)
        self.seconds = {"optimisation": 0.0, "validation": 0.0, "saving": 0.0}
        self.updates: list[dict[str, Any]] = []
        data: Any = self.train_dataset
        known = isinstance(data, Dataset) and "input_ids" in data.column_names
        examples = enumerate(data["input_ids"] if known else ())
        self._places = {tuple(ids): place for place, ids in reversed(list(examples))}  # the first of equal ones

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of what runs inside to those of `name`."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    # ---- replaces train, _run_epoch, get_batch_samples, _save_checkpoint, _load_rng_state, _finalize_training of
    # transformers' Trainer (5.24) ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        checkpoint, _ = self.checkpoints.begin(resume_from_checkpoint)
        with self.timed("optimisation"):
            output = super().train(checkpoint, *args, **kwargs)
        self.seconds["optimisation"] -= self.seconds["validation"] + self.seconds["saving"]
        return output

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.checkpoints.is_finished():
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, tokens = super().get_batch_samples(*args, **kwargs)
        places = [self._places.get(ids) for batch in batches for ids in whole_rows(batch)]
        update = {"update": self.state.global_step + 1, "examples": places}
        self.updates.append(update | {"tokens": None if tokens is None else int(tokens)})
        return batches, tokens

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing: trl's card names a local base "None"; an exported version has one of its own."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.timed("saving"), self.checkpoints.saving(trial):
            super()._save_checkpoint(model, trial)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.checkpoints.load(checkpoint)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoints.finish(partial(super()._finalize_training, *args, **kwargs))

    def _run_state(self) -> dict[str, Any]:
        return {"train_tokens": self._total_train_tokens, "updates": self.updates}

    def _restore_run(self, state: dict[str, Any]) -> None:
        self._total_train_tokens, made = state["train_tokens"], list(state.get("updates", ()))
        self.updates = made + [one for one in self.updates if one["update"] > len(made)]  # its batch is drawn by now


def whole_rows(batch: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of every row of a batch without its padding; none of one that is not padded."""
    if "input_ids" in batch and "attention_mask" in batch:
        for ids, kept in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            yield tuple(ids[kept.bool()].tolist())


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
            with trainer.timed("validation"):
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
    allow_changed: Sequence[str] | None = None,
) -> ExactSFTTrainer:
    """Train on examples made above through trl's SFTTrainer, nothing cut, loss on completions alone.

    `validation` examples give `eval_nll` after every epoch; `optimizers` is (optimizer, scheduler), as in Trainer;
    `log` replaces transformers' printing; `allow_changed` is ExactSFTTrainer's.
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
        allow_changed=allow_changed,
    )
    for callback in measure:
        callback.trainer = trainer
    if log is not None:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(log)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    return trainer
