"""What a run is, by name: options, corpus, model, rewards, workflow, tokenizer; what a resume refuses or warns of."""

import dataclasses
import hashlib
import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from turngrpo.trainer.runs.proof import ResumeError

# Where a run writes, what it reports and how it is served: none of it reaches a weight, so a resume may change it.
FREE_FIELDS = (
    "output_dir run_name report_to project trackio_space_id trackio_bucket_id trackio_static_space_id "
    "logging_strategy logging_first_step logging_steps log_level log_level_replica log_on_each_node disable_tqdm "
    "save_strategy save_steps save_total_limit save_only_model save_on_each_node eval_strategy eval_steps eval_delay "
    "eval_on_start do_eval do_train do_predict load_best_model_at_end metric_for_best_model greater_is_better "
    "per_device_eval_batch_size num_generations_eval eval_temperature eval_top_p eval_seed push_to_hub hub_model_id "
    "hub_strategy hub_token hub_private_repo hub_always_push hub_revision resume_from_checkpoint allow_changed "
    "allow_overlap max_turns log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo "
    "dataloader_num_workers "
    "dataloader_prefetch_factor dataloader_pin_memory dataloader_persistent_workers ledger "
    "vllm_base_url vllm_server_base_url vllm_server_timeout vllm_adapter_dir vllm_request_timeout "
    "vllm_concurrent_requests reward_timeout local_rank deepspeed_plugin distributed_state _n_gpu"
).split()
LENGTH_FIELDS = ("max_steps", "num_train_epochs")  # a run may be extended; its schedule then changes
# What each entry of a fingerprint beside config, processes and versions is, for messages.
MEANINGS = {
    "corpus": "rows",
    "initial_model": "initial weights",
    "reference": "reference",
    "model_config": "model config",
    "precision": "types or attention",
    "adapter": "adapter config",
    "tokenizer": "tokenizer",
    "optimizer": "optimizer or schedule",
    "trainer": "methods of the trainer's subclass",
    "rewards": "reward functions",
    "turn_rewards": "turn reward functions",
    "workflow": "workflow",
    "generation": "ends of text",
}


def config_values(config: Any) -> dict[str, str]:
    """Return the fields that decide a run's numbers, as text."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in FREE_FIELDS]
    return {name: repr(getattr(config, name)) for name in names}


def rows_digest(rows: Any) -> str:
    """Return the SHA-256 over rows in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
    return digest.hexdigest()


def dataset_digest(dataset: Any) -> str | None:
    """Return the SHA-256 over all rows in order, None for a stream."""
    return rows_digest(dataset) if hasattr(dataset, "__len__") else None


def stream_digest(stream: Any, prompts: int) -> str:
    """Return the SHA-256 over the rows of a stream's first rollout; ValueError where it has fewer than `prompts`."""
    rows = list(itertools.islice(stream, prompts))
    if len(rows) < prompts:
        raise ValueError(
            f"the train stream ends after {len(rows)} rows, but one rollout takes {prompts} prompts "
            "(generation_batch_size / num_generations): nothing would be trained; add rows, or lower "
            "gradient_accumulation_steps, steps_per_generation or per_device_train_batch_size"
        )
    return f"the first {prompts} rows: {rows_digest(rows)}"


def differences(saved: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return a line for every difference by the name that `allow_changed` takes, and what cannot be compared."""
    lines: dict[str, str] = {}
    unknown = [name for name in found["config"] if name not in saved["config"]]
    for name, value in found["config"].items():
        if name not in unknown and saved["config"][name] != value:
            lines[name] = f"{name}: the checkpoint's is {saved['config'][name]}, this run's {value}"
    for name, meaning in MEANINGS.items():
        if name in found and name not in saved:
            unknown.append(name)
        elif name in found and isinstance(found[name], Mapping):
            lines |= _parts_that_differ(name, saved[name], found[name])
        elif name in found and saved[name] != found[name]:
            lines[name] = f"{name}: other {meaning} ({saved[name]} in the checkpoint, {found[name]} here)"
    return lines, unknown


def _parts_that_differ(name: str, saved: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """Return a line for every part of an entry that differs, by `name.part`."""
    return {
        f"{name}.{part}": f"{name}.{part}: the checkpoint's is {saved.get(part, 'absent')}, this run's "
        f"{found.get(part, 'absent')}"
        for part in sorted(saved.keys() | found.keys())
        if saved.get(part) != found.get(part)
    }


def check_fingerprint(
    saved: dict[str, Any], found: dict[str, Any], checkpoint: str, allowed: Sequence[str] = ()
) -> list[str]:
    """Refuse to go on as another run than the checkpoint's; return what differs and is allowed to.

    `allowed` are names of entries, of their parts or of options. Raises ResumeError that names every other difference
    and names in `allowed` that there are none of; other versions, a changed length, and entries that an older
    checkpoint has not are warnings.
    """
    _check_allowed(allowed, found)
    lines, unknown = differences(saved, found)
    passed = [name for name in lines if name in allowed or name.split(".")[0] in allowed]
    longer = [name for name in lines if name in LENGTH_FIELDS and name not in passed]
    faults = [line for name, line in lines.items() if name not in passed and name not in longer]
    if saved["processes"] != found["processes"]:
        faults.append(
            f"processes: the checkpoint's run had {saved['processes']}, this one has {found['processes']}: start as "
            "many"
        )
    if faults:
        raise ResumeError(
            f"{checkpoint} cannot be resumed exactly:\n  "
            + "\n  ".join(faults)
            + "\ngive back what changed, or go on "
            "as another run on purpose with --allow_changed and the names before the colons"
        )
    _warn(checkpoint, "goes on with another schedule: ", [lines[name] for name in longer])
    _warn(checkpoint, "was written by an older version; not compared: ", unknown)
    _warn(checkpoint, "goes on with other versions, so that the last bits may differ: ", _versions(saved, found))
    _warn(checkpoint, "goes on as another run, as allow_changed says: ", [lines[name] for name in passed])
    return [lines[name] for name in passed]


def _check_allowed(allowed: Sequence[str], found: dict[str, Any]) -> None:
    parts = {f"{name}.{part}" for name in MEANINGS if isinstance(found.get(name), Mapping) for part in found[name]}
    heads = {*MEANINGS, *found["config"]}
    wrong = [name for name in allowed if name not in heads | parts and name.split(".")[0] not in MEANINGS]
    if wrong:
        raise ResumeError(
            f"allow_changed names {wrong}, which a resume does not compare: expected {', '.join(MEANINGS)}, a part of "
            "one as in workflow.layout, or the name of an option"
        )


def _versions(saved: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    before, now = saved.get("versions") or {}, found.get("versions") or {}
    return [f"{n} {before[n]} then, {now[n]} now" for n in now if n in before and before[n] != now[n]]


def _warn(checkpoint: str, text: str, lines: Sequence[str]) -> None:
    if lines:
        warnings.warn(f"{checkpoint} {text}{'; '.join(lines)}", stacklevel=4)
