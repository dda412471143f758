"""The end of a run under a workflow: the adapter as a version on disk, and that version on the Hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants

from .adapters import RUN_FILE, evaluation_at, export_adapter, has_trained_adapter, run_facts
from .hub import hub_errors, push_version


class Exporting:
    """The part of TurnGRPOTrainer that exports and pushes.

    `provenance` is what versions say of the run beside what the trainer knows: "corpus" (data_prep.corpus_facts) and
    "config" (more settings by name). It stands in every checkpoint, so that scripts/export_adapter.py finds it.
    """

    workflow: Any
    args: Any
    state: Any
    model: Any
    processing_class: Any
    accelerator: Any
    callback_handler: Any
    control: Any
    hub_model_id: Any
    is_world_process_zero: Any
    whole_weights: Any
    _place: Any
    provenance: Mapping[str, Any] = {}
    exported: Path | None = None  # the newest version, on process 0
    _is_exported = False  # the weights as they are

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._is_exported = False
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, and beside an adapter what its export will say of the run."""
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if self.workflow is not None and self.args.should_save and has_trained_adapter(self.model):
            path = Path(self._place(output_dir) or self.args.output_dir) / RUN_FILE
            path.write_text(
                json.dumps(run_facts(self.model, **self._facts()), indent=2, default=str) + "\n", encoding="utf-8"
            )

    def export_adapter(
        self,
        name: str | None = None,
        before: Mapping[str, float] | None = None,
        after: Mapping[str, float] | None = None,
    ) -> Path | None:
        """Write the adapter as output_dir/adapters/`name`/v0001, v0002, ... and return that folder (on process 0).

        `name` is by default that of the version before, or the output folder's; `before` and `after` are metrics,
        `after` by default those of the evaluation at this update. Every process must call it. Raises ValueError
        without an adapter.
        """
        output = Path(self.args.output_dir).resolve()
        name = name or (self.exported.parent.name if self.exported else output.name)
        with self.whole_weights():
            if self.is_world_process_zero():
                self.exported = export_adapter(
                    self.model,
                    self.processing_class,
                    output / "adapters" / name,
                    before=before,
                    after=after or evaluation_at(self.state.log_history, self.state.global_step),
                    **self._facts(),
                )
        self._is_exported = True
        return self.exported

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push the exported version, exported now if it was not, and tag the commit with its number.

        Without a workflow it is transformers' method. The repository is args.hub_model_id, private unless `private` or
        args.hub_private_repo say otherwise; the version's card is written at the export, so that options of
        create_model_card raise ValueError. Every process must call it. See push_version for the other errors.
        """
        if self.workflow is None:
            parent: Any = super()
            return parent.push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        if kwargs:
            raise ValueError(f"{', '.join(kwargs)}: under a workflow the model card is written by export_adapter()")
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if not self._is_exported:
            self.export_adapter()
        if not self.is_world_process_zero():
            return None
        assert self.exported is not None
        repo_id = self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).resolve().name
        token, branch = token or self.args.hub_token, revision or self.args.hub_revision
        options = token, self._private(private), branch, commit_message
        if blocking:
            return push_version(self.exported, repo_id, *options)
        return HfApi().run_as_future(push_version, self.exported, repo_id, *options)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository as transformers does, private under a workflow unless told otherwise."""
        parent: Any = super()
        if self.workflow is None:
            return parent.init_hf_repo(token, private)
        with hub_errors(self.args.hub_model_id or Path(self.args.output_dir).name, constants.ENDPOINT):
            parent.init_hf_repo(token, self._private(private))

    def _private(self, private: bool | None) -> bool:
        told = self.args.hub_private_repo if private is None else private
        return told is None or told

    def _facts(self) -> dict[str, Any]:
        config = {"workflow": type(self.workflow).__name__, "trainer": self.args.to_dict()}
        config |= self.provenance.get("config", {})
        return {"corpus": self.provenance.get("corpus"), "config": config, "update": self.state.global_step}
