"""The end of a run under a workflow: the adapter as a version on disk, and that version on the Hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from turngrpo.trainer.export.hub import push_version
from turngrpo.trainer.export.versions import (
    RUN_FILE,
    check_name,
    evaluation_at,
    export_adapter,
    has_trained_adapter,
    run_facts,
)

SHORT_NAMES = {"GatedMemory": "gated", "MemAgent": "memagent", "SingleTurn": "single_turn"}
WORKFLOW_OPTIONS = ("layout", "instruction", "strict_format", "exit_gate")
READING_LIMITS = (
    "chunk_size max_prompt_length max_completion_length max_memory_tokens max_turns chat_template_kwargs "
    "reward_weights turn_reward_weights"
).split()


# All that a version says of a config: no token, no password, no path of the machine it was trained on.
PUBLIC = {
    "trainer": (
        "alpha turn_baseline turn_reward_weights advantage_epsilon kl behavior_check behavior_tolerance chunk_size "
        "max_prompt_length max_memory_tokens max_tokens_per_microbatch rollout_batch_tokens share_prefix "
        "rollout_engine "
        "eval_temperature eval_top_p eval_seed beta epsilon epsilon_high loss_type scale_rewards reward_weights "
        "use_bias_correction_kl num_generations num_generations_eval num_iterations steps_per_generation "
        "generation_batch_size temperature max_completion_length chat_template_kwargs seed data_seed learning_rate "
        "lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim max_steps "
        "num_train_epochs per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing bf16 fp16"
    ).split(),
    "script": (
        "workflow layout instruction strict_format exit_gate validation_fraction split_seed reward_funcs "
        "turn_reward_funcs validation_rows validation_members train_projects quickstart"
    ).split(),
    "model": (
        "dtype attn_implementation use_peft lora_r lora_alpha lora_dropout lora_target_modules use_rslora use_dora"
    ).split(),
}


def is_private(args: Any, private: bool | None) -> bool:
    """Whether a repository is made private: as told by `private`, else by args.hub_private_repo, else yes."""
    told = args.hub_private_repo if private is None else private
    return told is None or told


class Exporter:
    """Versions of one run's adapter under `output_dir`/adapters, and what they say of the run.

    `provenance` is what the trainer does not know: "corpus" (data_prep.corpus_facts), "reading" (what of it the config
    does not say) and "config" (more settings by
    name). It stands in every checkpoint, so that scripts/export_adapter.py finds it.
    """

    def __init__(self, args: Any, model: Any, tokenizer: Any, workflow: Any):
        self.args, self.model, self.tokenizer, self.workflow = args, model, tokenizer, workflow
        self.provenance: Mapping[str, Any] = {}
        self.exported: Path | None = None  # the newest version
        self.is_current = False  # whether it holds the weights as they are; the trainer says so, on every process

    def facts(self, update: int) -> dict[str, Any]:
        """Return what a version says of the run after `update` updates."""
        given = {"trainer": self.args.to_dict(), **self.provenance.get("config", {})}
        config: dict[str, Any] = {"workflow": type(self.workflow).__name__}
        for part, names in PUBLIC.items():
            config[part] = {name: given[part][name] for name in names if name in given.get(part, {})}
        config["reading"] = self._reading()
        return {"corpus": self.provenance.get("corpus"), "config": config, "update": update}

    def _reading(self) -> dict[str, Any]:
        """Return how the workflow reads, in resolved values by the names of the scripts' options."""
        workflow = SHORT_NAMES.get(type(self.workflow).__name__, type(self.workflow).__name__)
        names = [name for name in WORKFLOW_OPTIONS if hasattr(self.workflow, name)]
        values = {name: getattr(self.workflow, name) for name in names}
        limits = {name: getattr(self.args, name) for name in READING_LIMITS if hasattr(self.args, name)}
        return {"workflow": workflow} | values | limits | self.provenance.get("reading", {})

    def save_facts(self, folder: str | Path, update: int) -> None:
        """Write beside a saved adapter what its export will say of the run; nothing without an adapter."""
        if has_trained_adapter(self.model):
            text = json.dumps(run_facts(self.model, **self.facts(update)), indent=2, default=str)
            (Path(folder) / RUN_FILE).write_text(text + "\n", encoding="utf-8")

    def export(
        self,
        name: str | None,
        before: Mapping[str, float] | None,
        after: Mapping[str, float] | None,
        update: int,
        log_history: list[dict[str, Any]],
    ) -> Path:
        """Write the next version, of the weights after `update` updates; see TurnGRPOTrainer.export_adapter."""
        output = Path(self.args.output_dir).resolve()
        check_name(name or output.name)  # before it is a part of a path
        name = name or (self.exported.parent.name if self.exported else output.name)
        self.exported = export_adapter(
            self.model,
            self.tokenizer,
            output / "adapters" / name,
            before=before,
            after=after or evaluation_at(log_history, update),
            **self.facts(update),
        )
        return self.exported

    def push(
        self, repo_id: str | None, token: str | None, private: bool | None, blocking: bool, **options: Any
    ) -> Any:
        """Push the newest version, private unless told otherwise; a future where `blocking` is False."""
        assert self.exported is not None
        repo_id = repo_id or self.args.hub_model_id or Path(self.args.output_dir).resolve().name
        options |= {"token": token or self.args.hub_token, "private": is_private(self.args, private)}
        if blocking:
            return push_version(self.exported, repo_id, **options)
        return HfApi().run_as_future(push_version, self.exported, repo_id, **options)
