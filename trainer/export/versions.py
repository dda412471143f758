"""Export of a trained adapter: numbered version folders with weights, tokenizer, card and manifest, and `latest`.

    adapters/<name>/v0001/          a version: complete or absent, never written again
    adapters/<name>/v0001-merged/   on request: base and adapter in one, for servers without LoRA
    adapters/<name>/latest          relative symlink to the newest version; replaced by a rename, as the last step

One export at a time holds the lock on `.lock`. The kernel releases it when its process dies, however it dies, so that
whoever holds it may remove the `.partial` folder that a killed export left.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from turngrpo.trainer.export.base_model import public_name
from turngrpo.trainer.export.model_card import model_card
from turngrpo.trainer.files import MANIFEST, RUN_FILE, digests, locked, read_json, sync, sync_below
from turngrpo.trainer.forward.policy import TRAINED
from turngrpo.trainer.writing import writing

FORMAT, MERGED_FORMAT = "turngrpo-adapter/1", "turngrpo-merged/1"
WEIGHTS, CONFIG, TOKENIZER = "adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json"
LONGEST_NAME = 200  # bytes: file systems take 255, and some of them are for what is beside it
NAME = re.compile(r"\w[\w .+-]*")


def export_adapter(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    corpus: Mapping[str, Any] | None = None,
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    update: int | None = None,
) -> Path:
    """Write the trained adapter as the next version `folder`/v0001, v0002, ..., move `latest`, return the version.

    Everything is written beside it and renamed at the end, so that a version is whole or absent, and none is ever
    replaced. `corpus` is data_prep.corpus_facts; `before` and `after` are metrics by name; `config` is kept in the
    manifest; `update` says after how many updates. Raises ValueError for a model without a trained PEFT adapter and
    for a folder whose name cannot be an adapter's.
    """
    if not has_trained_adapter(model):
        raise ValueError(
            f"{type(model).__name__} has no PEFT adapter named {TRAINED!r}: train with --use_peft, or save the whole "
            "model with save_pretrained, which servers take as it is"
        )

    def write(partial: Path) -> None:
        model.save_pretrained(
            str(partial), selected_adapters=[TRAINED], safe_serialization=True, save_embedding_layers=False
        )
        tokenizer.save_pretrained(str(partial))

    facts = run_facts(model, corpus, config, update)
    return _export(Path(folder), write, facts, before, after)


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    corpus: Mapping[str, Any] | None = None,
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
) -> Path:
    """Export the adapter of a checkpoint folder as `export_adapter` does, without loading a model.

    Base model, config and corpus are those that the trainer wrote into the checkpoint; `corpus` replaces the latter.
    Without `after` the metrics are those of the evaluation at this update, if there was one. Raises ValueError for a
    folder without a readable adapter or without its tokenizer.
    """
    checkpoint = find_checkpoint(checkpoint)
    facts = read_json(checkpoint / RUN_FILE) if (checkpoint / RUN_FILE).is_file() else {}
    if corpus is not None:
        facts["corpus"] = corpus
    if (checkpoint / "trainer_state.json").is_file():
        state = read_json(checkpoint / "trainer_state.json")
        facts["update"] = state["global_step"]
        after = after or evaluation_at(state["log_history"], state["global_step"])

    def write(partial: Path) -> None:
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(checkpoint / name, partial / name)
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(partial)

    return _export(Path(folder), write, facts, before, after)


def find_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that holds the adapter: the given one, or its newest checkpoint-N.

    Raises ValueError saying what was found where the adapter, its tokenizer or a readable weight file is missing.
    """
    given = Path(folder)
    if not given.is_dir():
        raise ValueError(f"{given} is no folder: expected a checkpoint-N, or the output_dir of a run")
    found = given if (given / CONFIG).is_file() else Path(get_last_checkpoint(str(given)) or given)
    if not (found / CONFIG).is_file():
        if any(found.glob("*.safetensors")):
            raise ValueError(
                f"{found} holds a whole model, no adapter: servers take it as it is (vllm serve {found}), `hf upload` "
                "pushes it; for an adapter train with --use_peft"
            )
        raise ValueError(f"{found} holds no {CONFIG}: expected a checkpoint-N of a run with --use_peft, or its folder")
    try:
        with safe_open(found / WEIGHTS, framework="pt") as weights:
            weights.keys()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{found / WEIGHTS} cannot be read ({error}): the checkpoint is incomplete") from error
    if not (found / TOKENIZER).is_file():
        raise ValueError(
            f"{found} holds no tokenizer ({TOKENIZER}): save the one it was trained with there, with "
            "AutoTokenizer.from_pretrained(BASE_MODEL).save_pretrained(CHECKPOINT)"
        )
    return found


def has_trained_adapter(model: Any) -> bool:
    """Whether a model has the adapter that an export takes."""
    return is_peft_model(model) and TRAINED in model.peft_config


def run_facts(
    model: Any, corpus: Mapping[str, Any] | None, config: Mapping[str, Any] | None, update: int | None
) -> dict[str, Any]:
    """Return what an export says of a run: the base model (a local one by its full path), corpus, config, update."""
    adapter = model.peft_config[TRAINED]
    base = str(adapter.base_model_name_or_path or "")
    return {
        "base_model": str(Path(base).resolve()) if base and Path(base).is_dir() else base,
        "base_revision": adapter.revision or getattr(model.config, "_commit_hash", None),
        "update": update,
        "corpus": corpus,
        "config": config,
    }


def evaluation_at(log_history: list[dict[str, Any]], update: int) -> dict[str, float] | None:
    """Return the metrics of the evaluation after `update` updates by their plain names, None without one."""
    found: dict[str, float] = {}
    for log in log_history:
        if log.get("step") == update:
            found |= {name.removeprefix("eval_"): log[name] for name in log if name.startswith("eval_")}
    return found or None


def check_name(name: str) -> None:
    """Raise ValueError for a name of an adapter that is no plain folder name, or too long for one."""
    shown = repr(name if len(name) <= 60 else f"{name[:60]}...")
    if not NAME.fullmatch(name):
        raise ValueError(f"the adapter's name is {shown}: expected letters, digits, '_', '-', '.', '+' and spaces")
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > LONGEST_NAME:
        raise ValueError(f"the adapter's name is {shown} of {size} bytes: expected at most {LONGEST_NAME}")


def read_version(version: str | os.PathLike[str], *formats: str) -> dict[str, Any]:
    """Return the manifest of an exported folder after checking every file against it.

    Raises ValueError for a manifest that is missing, broken or of another format, and for files that are missing,
    changed or not listed.
    """
    version, expected = Path(version), formats or (FORMAT, MERGED_FORMAT)
    if not (version / MANIFEST).is_file():
        raise ValueError(f"{version} holds no {MANIFEST}: expected an exported version as in adapters/<name>/v0001")
    manifest = read_json(version / MANIFEST)
    if manifest.get("format") not in expected or not isinstance(manifest.get("files"), dict):
        raise ValueError(
            f"{version / MANIFEST} has format {manifest.get('format')!r}: expected {' or '.join(expected)}"
        )
    found, listed = digests(version, MANIFEST), manifest["files"]
    if CONFIG in found and found[CONFIG] != listed.get(CONFIG):
        found[CONFIG] = hashlib.sha256(public_config(version, manifest).encode()).hexdigest()
    faults = [f"{name} is missing" for name in listed if name not in found]
    faults += [f"{name} is not in the manifest" for name in found if name not in listed]
    faults += [f"{name} has another SHA-256" for name in found if name in listed and found[name] != listed[name]]
    if faults:
        raise ValueError(f"{version} is not as it was exported: {'; '.join(sorted(faults))}. Export it again")
    return manifest


def public_config(version: Path, manifest: Mapping[str, Any]) -> str:
    """Return the adapter's config as it is pushed: with the base model's public name in the place of its path here.

    The manifest has the digest of this text, so that the path may be corrected where the base model lies elsewhere.
    """
    public = {"base_model_name_or_path": manifest["base_model"], "revision": manifest["base_revision"]}
    return _config_text(read_json(version / CONFIG) | public)


def _config_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def next_version(folder: Path) -> str:
    """Return the version after the highest that is there: v0001 in an empty folder."""
    found = [int(path.name[1:]) for path in folder.glob("v*") if re.fullmatch(r"v\d{4,}", path.name)]
    return f"v{max(found, default=0) + 1:04d}"


def _export(
    folder: Path,
    write: Callable[[Path], None],
    facts: Mapping[str, Any],
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
) -> Path:
    """Let `write` put weights and tokenizer into a new version of `folder`, add card and manifest, move `latest`."""
    check_name(folder.resolve().name)
    with collecting(folder) as partial:
        write(partial)
        (partial / "README.md").unlink(missing_ok=True)  # PEFT's draft of a card
        adapter = read_json(partial / CONFIG)
        base = adapter["base_model_name_or_path"] = facts.get("base_model") or adapter["base_model_name_or_path"]
        name, revision = public_name(base, facts.get("base_revision") or adapter["revision"])
        (partial / CONFIG).write_text(_config_text(adapter), encoding="utf-8")
        version = next_version(folder)
        manifest = {
            "format": FORMAT,
            "name": folder.resolve().name,
            "version": version,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "base_model": name,
            "base_revision": revision,
            "update": facts.get("update"),
            "corpus": facts.get("corpus"),
            "config": facts.get("config"),
            "metrics": {"before": _finite(before), "after": _finite(after)},
        }
        card = model_card(manifest, _finite(before), _finite(after), adapter)
        final = publish(partial, folder / version, manifest, card)
        link = folder / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(version)
        os.replace(link, folder / "latest")
        sync(folder)
        return final


@contextmanager
def collecting(folder: Path) -> Iterator[Path]:
    """Hold the lock of an adapter's folder; yields an empty folder in it, removed at the end if it is still there.

    WriteError where something cannot be written.
    """
    safe = "No version was changed: export the run's newest checkpoint (scripts/export_adapter.py), or merge again"
    partial = folder / ".partial"
    with writing(f"a new version in {folder}", safe):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait=True):
            shutil.rmtree(partial, ignore_errors=True)  # a killed export's: a living one would hold the lock
            partial.mkdir()
            try:
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def publish(partial: Path, final: Path, manifest: Mapping[str, Any], card: str) -> Path:
    """Add card and manifest, put everything on disk, and rename the folder to its final name."""
    (partial / "README.md").write_text(card, encoding="utf-8")
    files = digests(partial)
    if (partial / CONFIG).is_file():
        files[CONFIG] = hashlib.sha256(public_config(partial, manifest).encode()).hexdigest()
    text = json.dumps({**manifest, "files": files}, indent=2, ensure_ascii=False, default=str)
    (partial / MANIFEST).write_text(text + "\n", encoding="utf-8")
    sync_below(partial)
    os.rename(partial, final)
    sync(final.parent)
    return final


def _finite(metrics: Mapping[str, float] | None) -> dict[str, float | None] | None:
    """Return metrics as JSON knows them: None where a number is not finite."""
    return None if metrics is None else {n: v if math.isfinite(v) else None for n, v in metrics.items()}
