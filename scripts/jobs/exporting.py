"""What export_adapter.py does: the adapter of a checkpoint becomes a version, with the metrics that its card shows."""

import json
from pathlib import Path

from arguments.commands import ExportArguments
from lib.reporting import make_console

from turngrpo.data_prep import corpus_facts
from turngrpo.trainer.export.hub import check_push, push_version
from turngrpo.trainer.export.merge import merge_version
from turngrpo.trainer.export.versions import MANIFEST, check_name, export_checkpoint, find_checkpoint
from turngrpo.trainer.runs.proof import prove


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
    """Return the run's summary.json where it is about this checkpoint: the one whose weights the run exported."""
    state, summary = checkpoint / "trainer_state.json", run / "summary.json"
    if not (state.is_file() and summary.is_file()):
        return None
    steps = json.loads(state.read_text(encoding="utf-8"))
    exported = json.loads(summary.read_text(encoding="utf-8")).get("exported", {"update": steps["max_steps"]})
    return summary if steps["global_step"] == exported["update"] else None


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


def deliver(options: ExportArguments) -> None:
    """Export, merge and push as asked; print where each result is."""
    console = make_console()
    if options.push_to_hub:
        check_push(options.push_to_hub)
    version = export(options)
    console.print(f"version: {version}", highlight=False)
    if options.merge:
        console.print(f"merged: {merge_version(version)}", highlight=False)
    if options.push_to_hub:
        commit = push_version(version, options.push_to_hub, private=options.private)
        console.print(f"pushed: {commit.commit_url}, tagged with the version", highlight=False)
