"""The page of --help: the options that a run is made of, by topic; --help_all shows every one with all of its text."""

import argparse
import inspect
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any

WIDTH, COLUMN = 100, 32

# Where an option stands on the page of every command that has it, in this order.
TOPICS = {
    "what to read": (
        "run corpus targets dataset_name checkpoint document question row "
        "split validation_fraction split_seed rows data_seed chunk_size sft_rows"
    ),
    "how it is read": (
        "workflow layout instruction strict_format exit_gate ignore_exit max_prompt_length max_completion_length "
        "max_memory_tokens max_turns chat_template_kwargs template_kwargs gate_noise read_on think eval_temperature "
        "eval_top_p eval_seed"
    ),
    "rewards": (
        "reward_funcs turn_reward_funcs reward_weights turn_reward_weights rewards alpha turn_baseline scale_rewards "
        "advantage_epsilon reward_timeout"
    ),
    "model": (
        "model model_name_or_path model_revision revision adapter tokenizer dtype use_peft lora_r lora_alpha "
        "lora_dropout lora_target_modules base_url api concurrency answer_timeout"
    ),
    "training": (
        "learning_rate grpo_learning_rate sft_learning_rate lr_scheduler_type warmup_steps warmup final weight_decay "
        "max_grad_norm max_steps num_train_epochs warm_start_epochs sft_epochs grpo_iterations grpo_interrupt updates "
        "updates_per_rollout exercise_generations exercise_iterations exercise_interrupt max_length "
        "per_device_train_batch_size gradient_accumulation_steps batch_size micro_batch_size prompts generations "
        "num_generations loss_type epsilon beta kl seed threads bf16 gradient_checkpointing "
        "max_tokens_per_microbatch rollout_batch_tokens share_prefix behavior_check behavior_tolerance rollout_engine "
        "vllm_base_url vllm_adapter_dir vllm_request_timeout vllm_concurrent_requests resume_from_checkpoint "
        "allow_changed"
    ),
    "evaluation": (
        "eval_strategy eval_steps per_device_eval_batch_size num_generations_eval load_best_model_at_end "
        "metric_for_best_model early_stopping_patience early_stopping_threshold validation_rows validation_members "
        "members cluster baselines compare_base compare_ungated compare_document trivial_policies allow_overlap draws "
        "test_rows probe_rows"
    ),
    "output": (
        "output_dir output trajectories megabytes adapter_name ledger json tokens name adapters_dir metrics merge "
        "logging_steps save_steps save_every report_to push_to_hub private preset quickstart dry_run probe"
    ),
}

# Options of TRL and transformers that stand on the page too: what everybody sets.
INHERITED = (
    "dataset_name max_completion_length chat_template_kwargs reward_weights scale_rewards model_name_or_path "
    "model_revision dtype use_peft lora_target_modules learning_rate lr_scheduler_type warmup_steps max_steps "
    "num_train_epochs max_length per_device_train_batch_size gradient_accumulation_steps num_generations loss_type "
    "epsilon beta seed bf16 gradient_checkpointing resume_from_checkpoint eval_strategy eval_steps "
    "num_generations_eval load_best_model_at_end metric_for_best_model output_dir logging_steps save_steps "
    "report_to push_to_hub"
).split()


def own_options(kinds: Iterable[type]) -> set[str]:
    """Return the options that classes of ours declare; those of TRL and transformers are inherited."""
    ours = [
        base
        for kind in kinds
        for base in kind.__mro__
        if is_dataclass(base) and base.__module__.split(".")[0] not in ("trl", "transformers")
    ]
    return {name for base in ours for name in inspect.get_annotations(base)}


def help_page(
    usage: str,
    actions: Sequence[argparse.Action],
    doc: str,
    own: Collection[str],
    required: Collection[str],
    hidden: Collection[str],
    in_full: bool = False,
) -> str:
    """Return the page of a command; `doc` is its module's docstring, `hidden` are options that it refuses.

    `in_full` it has the whole text of every option, the inherited ones at the end.
    """
    shown = _options(actions, hidden)
    line = _in_full if in_full else _in_short
    lines = [*_head(usage, doc, required), *_topics(shown, own, required, line), ""]
    inherited = "inherited from TRL and transformers"
    rest = [action for name, action in shown.items() if name not in _listed(shown, own)]
    if rest and in_full:
        lines += [f"{inherited}:", *(text for action in rest for text in line(action, required)), ""]
    elif rest:
        lines += [f"{len(rest)} options {inherited}: --help_all"]
    return "\n".join([*lines, *_foot()])


def examples(doc: str, count: int = 2) -> list[str]:
    """Return the first commands of a docstring, which Python has joined where a line ends with a backslash."""
    found = [" ".join(line.split()) for line in doc.splitlines() if line.startswith("    ")][:count]
    folded = [
        textwrap.wrap(
            line,
            WIDTH - 2,
            initial_indent="    ",
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for line in found
    ]
    return [line for lines in folded for line in " \\\n".join(lines).split("\n")]


def _options(actions: Sequence[argparse.Action], hidden: Collection[str]) -> dict[str, argparse.Action]:
    """Return the options by name; the complement --no_NAME of one stands for it."""
    found: dict[str, argparse.Action] = {}
    for action in actions:
        if action.dest not in (*hidden, argparse.SUPPRESS, "help"):
            found.setdefault(action.dest, action)
    return found


def _listed(shown: Collection[str], own: Collection[str]) -> list[str]:
    """Return the options on the page: ours, and what everybody sets."""
    return [name for name in shown if name in own or name in INHERITED]


def _head(usage: str, doc: str, required: Collection[str]) -> list[str]:
    """Return what stands above the options: usage, what the command does, two examples."""
    first = textwrap.wrap(doc.split("\n\n")[0], WIDTH)
    marks = ["", "* is required"] if required else []
    return [usage.strip(), "", *first, "", *examples(doc), *marks]


def _foot() -> list[str]:
    return ["--help is this page, --help_all all of every option; --config FILE reads options from YAML"]


def _topics(
    shown: dict[str, argparse.Action], own: Collection[str], required: Collection[str], line: Any
) -> list[str]:
    """Return the options by topic, ours that stand in none at the end."""
    topics = {topic: names.split() for topic, names in TOPICS.items()}
    known = {name for names in topics.values() for name in names}
    listed = _listed(shown, own)
    topics["more"] = [name for name in listed if name not in known]
    lines: list[str] = []
    for topic, names in topics.items():
        here = [text for name in names if name in listed for text in line(shown[name], required)]
        lines += ["", f"{topic}:", *here] if here else []
    return lines


def _in_short(action: argparse.Action, required: Collection[str]) -> list[str]:
    """Return an option with its default and the first sentence of its text, one that is inherited in a line."""
    text, default = _text(action).split(". ")[0].rstrip("."), _default(action)
    room = WIDTH - COLUMN - len(default)
    if action.dest in INHERITED and len(text) > room:
        text = f"{textwrap.shorten(text, room - 4, placeholder='')} ..."
    return _lines(action, required, text)


def _in_full(action: argparse.Action, required: Collection[str]) -> list[str]:
    """Return an option with its default and all of its text."""
    return _lines(action, required, _text(action))


def _lines(action: argparse.Action, required: Collection[str], text: str) -> list[str]:
    texts: Sequence[str] = textwrap.wrap(f"{text}{_default(action)}", WIDTH - COLUMN) or [""]
    first = f"{_name(action, required):<{COLUMN - 1}} {texts[0]}"
    return [first, *(" " * COLUMN + text for text in texts[1:])]


def _text(action: argparse.Action) -> str:
    return " ".join((action.help or "").split())


def _name(action: argparse.Action, required: Collection[str]) -> str:
    return f"{'*' if action.dest in required else ' '} {action.option_strings[0]}"


def _default(action: argparse.Action) -> str:
    """Return a default as it is shown; none for a switch that is off and for what is nothing."""
    if action.default is None or action.default is False or action.default in ("", []):
        return ""
    value = getattr(action.default, "value", action.default)
    text = " ".join(map(str, value)) if isinstance(value, list) else f"{value}"
    return f" [{text}]"
