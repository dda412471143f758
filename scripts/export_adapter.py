"""Export the adapter of a checkpoint as a version that servers mount; merge it, push it.

    python scripts/export_adapter.py --checkpoint outputs/run/checkpoint-30 --name contracts
    python scripts/export_adapter.py --checkpoint outputs/run --name contracts --merge --push_to_hub owner/contracts
    python scripts/export_adapter.py --checkpoint outputs/run/adapters/contracts/latest --push_to_hub owner/contracts

--checkpoint is a checkpoint-N, the output_dir of a run (its own adapter, or that of its newest checkpoint), or a
version that was exported before, which is then merged or pushed as it is. A new version is adapters/NAME/v0001, v0002,
... in the run's folder, with adapters/NAME/latest pointing to the newest; --merge writes v0001-merged beside it.
--push_to_hub makes one commit with all files of the version and tags it with its number; needs a token (HF_TOKEN, or
`hf auth login`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.options import option, parse_options
from lib.reporting import make_console
from lib.running import run_script, setting_up

from turngrpo.data_prep import corpus_facts
from turngrpo.trainer.export.hub import check_push, push_version
from turngrpo.trainer.export.merge import merge_version
from turngrpo.trainer.export.versions import MANIFEST, check_name, export_checkpoint, find_checkpoint
from turngrpo.trainer.runs.proof import prove


@dataclass
class ExportArguments:
    """What to export, under which name, and what to do with it."""

    checkpoint: str = option(None, "Folder: a checkpoint-N, a run's output_dir, or an exported version.")
    name: str | None = option(None, "Name of the adapter; the run's folder's when left out.")
    adapters_dir: str | None = option(None, "Folder that gets NAME/v0001; adapters/ of the run when left out.")
    corpus: str | None = option(None, "Corpus file it was trained on; the one that the checkpoint names.")
    metrics: str | None = option(None, "summary.json of train.py or the JSON file of evaluate.py, for the card.")
    merge: bool = option(False, "Also write base and adapter merged, for servers without LoRA.")
    push_to_hub: str | None = option(None, "Repository on the Hub, as in owner/name.")
    private: bool = option(True, "Make the repository private where it is new.")


def read_metrics(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics before and after of a summary.json or an evaluation; ValueError for another file."""
    report = json.loads(path.read_text(encoding="utf-8"))
    policies = report.get("policies", {})
    for names in (("before", "after"), ("base", "adapter")):
        if set(names) <= set(policies):
            before, after = (policies[name]["metrics"] for name in names)
            return before, after
    raise ValueError(f"{path} has the policies {list(policies)}: expected before and after, or base and adapter")


def summary_of(checkpoint: Path, run: Path) -> Path | None:
    """Return the run's summary.json where it is about this checkpoint: the one of the last update."""
    state, summary = checkpoint / "trainer_state.json", run / "summary.json"
    if not (state.is_file() and summary.is_file()):
        return None
    steps = json.loads(state.read_text(encoding="utf-8"))
    return summary if steps["global_step"] == steps["max_steps"] else None


def export(options: ExportArguments) -> Path:
    """Export the checkpoint and return the version; an exported version is returned as it is."""
    given = Path(options.checkpoint)
    if (given / MANIFEST).is_file():
        return given.resolve()
    checkpoint = find_checkpoint(given).resolve()
    prove(checkpoint)
    run = checkpoint.parent if checkpoint.name.startswith("checkpoint-") else checkpoint
    name = options.name or run.name
    check_name(name)
    folder = Path(options.adapters_dir or run / "adapters") / name
    corpus = corpus_facts(options.corpus) if options.corpus else None
    metrics = Path(options.metrics) if options.metrics else summary_of(checkpoint, run)
    before, after = read_metrics(metrics) if metrics else (None, None)
    return export_checkpoint(checkpoint, folder, corpus, before, after)


def main(arguments: Sequence[str] | None = None) -> int:
    """Export, merge, push; print where each result is."""
    console = make_console()
    with setting_up():
        (options,) = parse_options([ExportArguments], arguments)
        if not options.checkpoint:
            raise ValueError("--checkpoint is missing: expected a checkpoint-N, an output_dir or an exported version")
        if options.push_to_hub:
            check_push(options.push_to_hub)
        version = export(options)
        console.print(f"version: {version}", highlight=False)
        if options.merge:
            console.print(f"merged: {merge_version(version)}", highlight=False)
        if options.push_to_hub:
            commit = push_version(version, options.push_to_hub, private=options.private)
            console.print(f"pushed: {commit.commit_url}, tagged with the version", highlight=False)
    return 0


if __name__ == "__main__":
    run_script(main)
