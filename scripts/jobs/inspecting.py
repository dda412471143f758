"""What inspect_group.py does: one group, one update, and tables of both."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from arguments.commands import InspectArguments, UpdateArguments
from lib.adapters import new_adapter_config
from lib.loading import load_model, read_corpus
from lib.lookup import make_workflow
from lib.schedule import adamw
from lib.tokenizing import load_tokenizer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PrinterCallback, TrainerCallback
from trl import ModelConfig

from turngrpo.data_prep import stock_arithmetic
from turngrpo.rewards import answer_reward, exit_reward, format_reward, stock_reward, update_reward
from turngrpo.trainer import TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.forward.policy import evaluating
from turngrpo.trainer.forward.scoring import Reference, Scorer, Scores
from turngrpo.trainer.objective.losses import clipped_surrogate
from turngrpo.trainer.reading.rollout import decode_completion
from turngrpo.trainer.runs.ledger import rollout_rows
from turngrpo.trainer.showing import visible

VALIDATION_FRACTION = 0.1


CONSTANT = "all rewards equal: advantages 0, only KL and weight decay move the policy (KL from the second update on)"


TURN = "member step text finish_reason length reward turn_rewards advantage before after change".split()


TOKEN = "text id behavior before after ratio clip_active exact_kl".split()


class BeforeAndAfter(TrainerCallback):
    """Scores the group with the weights just before and just after the optimizer's step."""

    def __init__(self, score: Callable[[], list[Scores]]):
        self.score = score

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = self.score()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after = self.score()


def pick_row(options: InspectArguments, sizes: UpdateArguments, tokenizer: Any) -> Any:
    """Return a dataset of the one row asked for; ValueError where there is none."""
    seed = sizes.seed if options.data_seed is None else options.data_seed
    if options.corpus is None:
        rows = stock_arithmetic.build(seed)["train"]
        rows = rows.select([number for number, use in enumerate(rows["use"]) if use == "continued"])
    else:
        rows = read_corpus(options.corpus, VALIDATION_FRACTION, seed, tokenizer, sizes.chunk_size)["train"]
    ids, number = list(rows["id"]), options.row
    number = str(ids.index(number)) if number in ids else number
    if not number.isdecimal() or int(number) >= len(ids):
        raise ValueError(f"--row is {options.row!r}: expected 0 to {len(ids) - 1}, or an id as {ids[0]!r}")
    return rows.select([int(number)])


def make_trainer(
    options: InspectArguments, sizes: UpdateArguments, model: ModelConfig, folder: str
) -> TurnGRPOTrainer:
    """Return the trainer of one update on one group; what it writes goes to `folder`."""
    gated, numbers, count = options.workflow == "gated", options.rewards, sizes.num_generations
    if options.workflow not in ("single_turn", "gated") or gated != (options.corpus is not None):
        found = f"{options.workflow!r} with{'out' * (options.corpus is None)} --corpus"
        raise ValueError(f"--workflow is {found}: expected gated with --corpus, or single_turn without")
    rewards: Any = [answer_reward, exit_reward, format_reward] if gated else stock_reward
    if numbers is not None:
        if len(numbers) != count or not torch.tensor(numbers).isfinite().all():
            raise ValueError(f"--rewards is {numbers}: expected {count} finite numbers, one for each response")

        def given(**columns: Any) -> list[float]:
            return numbers

        rewards = given
    strict = {"strict_format": numbers is None} if gated else {}  # strict format would overrule given rewards
    tokenizer = load_tokenizer(model.model_name_or_path, model.model_revision)
    if sizes.updates < 1:
        raise ValueError(f"--updates is {sizes.updates}: expected 1 or more")
    numbers_of = {name: value for name, value in asdict(sizes).items() if name != "updates"}
    config = TurnGRPOConfig(
        output_dir=folder,
        **numbers_of,
        per_device_train_batch_size=count,
        max_steps=1,
        lr_scheduler_type="constant",
        alpha=0.9 if gated else 1.0,
        behavior_check="all",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = TurnGRPOTrainer(
        model=load_model(model),
        reward_funcs=rewards,
        args=config,
        train_dataset=pick_row(options, sizes, tokenizer),
        processing_class=tokenizer,
        peft_config=new_adapter_config(model),
        workflow=make_workflow(options.workflow, layout=options.layout, instruction=options.instruction, **strict),
        turn_reward_funcs=update_reward if gated else None,
    )
    made = adamw(trainer.model, sizes.learning_rate, sizes.updates, sizes.weight_decay)
    trainer.optimizer, trainer.lr_scheduler = made
    return trainer


def update(trainer: TurnGRPOTrainer) -> list[dict[str, Any]]:
    """Make the update and return the ledger's row of every turn, with its log-probabilities around the update."""
    tokenizer: Any = trainer.processing_class
    reference = trainer.reference or Reference(trainer.policy)
    scorer = Scorer(trainer.policy, tokenizer.pad_token_id, reference, trainer.temperature)

    def score() -> list[Scores]:
        turns = trainer._buffered_inputs[0].rollout.turns
        with evaluating(trainer.model):
            plans = (scorer.plan(turns, [row]) for row in range(len(turns)))
            return [scores for plan in plans for _, _, scores in scorer.score(turns, plan)]

    scores = BeforeAndAfter(score)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(scores)
    trainer.train()
    (part,) = trainer._buffered_inputs
    rows = rollout_rows(part.rollout, trainer.reward_func_names, trainer.turn_reward_names)
    for row, weight, before, after in zip(rows, part.weights.tolist(), scores.before, scores.after, strict=True):
        tokens = turn_tokens(trainer, row, before, after)
        row |= {"prompt": tokenizer.decode(row["prompt_ids"]), "length": len(tokens), "token_weight": weight}
        row |= {name: sum(token[name] for token in tokens) for name in ("before", "after")}
        row |= {"change": row["after"] - row["before"], "tokens": tokens}
    return rows


def turn_tokens(trainer: TurnGRPOTrainer, row: dict[str, Any], before: Scores, after: Scores) -> list[dict[str, Any]]:
    """Return each token's log-probabilities and KL(after || before), and its ratio and clip after the update."""
    advantage, clip = torch.tensor([row["advantage"]]), (trainer.epsilon_low, trainer.epsilon_high)
    scores = (one[0].tolist() for one in (before.logprobs, after.logprobs, after.kl) if one is not None)  # each (1, T)
    tokens = []
    for token, behavior, old, new, kl in zip(row["completion_ids"], row["behavior_logprobs"], *scores, strict=True):
        current, recorded = torch.tensor([[[new]], [[behavior]]], dtype=torch.float64)
        _, stats = clipped_surrogate(current, recorded, advantage, torch.ones(1, 1), *clip)
        known = {"id": token, "text": decode_completion(trainer.processing_class, [token], "length")}
        known |= {"behavior": behavior, "before": old, "after": new, "exact_kl": kl}
        tokens.append(known | {"ratio": float(stats["ratio/mean"]), "clip_active": bool(stats["clip/active"])})
    return tokens


def table(title: str, records: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    """Return one line per record; text is quoted, so that white space shows."""
    result = Table(title=title)
    for name in names:
        result.add_column(name, justify="left" if name in ("text", "finish_reason") else "right", overflow="fold")
    for record in records:
        result.add_row(*(Text(repr(record[name]) if name == "text" else cell(record[name])) for name in names))
    return result


def cell(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, dict):
        return " ".join(cell(one) for one in value.values())
    if value is None or isinstance(value, bool):
        return "active" if value else ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def show(report: dict[str, Any], console: Console, tokens: bool) -> None:
    """Print the problem, the group, the update, and the tokens if asked for."""
    turns, log, options = report["turns"], report["update"], report["options"]
    console.print(Text(visible(f"{report['row']}: {report['problem']}\nexpected: {report['expected']}")))
    names = [name for name in TURN if options["corpus"] or name not in ("step", "turn_rewards")]
    console.print(table("log-probabilities before and after one update", turns, names))
    if not any(turn["advantage"] for turn in turns):
        console.print(CONSTANT)
    used = ", ".join(f"{name} {options[name]}" for name in ("learning_rate", "beta", "loss_type", "scale_rewards"))
    console.print(f"{used}: loss {log['loss']:.4g}, gradient norm {log['grad_norm']:.4g}", highlight=False)
    for turn in turns if tokens else []:
        title = f"{turn['id']}: advantage {turn['advantage']:.6g}, weight of a token {turn['token_weight']:.6g}"
        console.print(table(visible(title), turn["tokens"], TOKEN))
