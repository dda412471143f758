"""What a server says of the model that it serves."""

from dataclasses import dataclass
from pathlib import Path

from turngrpo.trainer.sampling.server import Server, served_models

PATIENCE = 5.0  # seconds that a script waits for a server which cannot be reached


@dataclass(frozen=True)
class Served:
    """What a server says of a model: its base where it is an adapter, and where its files are, here or on the Hub."""

    base: str | None
    adapter_folder: str | None
    tokenizer: str
    weights: str | None  # of a listed model or of its base

    @classmethod
    def find(cls, server: Server, model: str) -> "Served":
        """Look a model up in the server's list; the tokenizer is the adapter's, the base model's, or of its name."""
        known = {card["id"]: card for card in served_models(server)}
        card = known.get(model, {})
        base = card.get("parent")
        folders = [known.get(name or "", {}).get("root") or name or "" for name in (model, base)]
        here = [folder for folder in folders if folder and Path(folder, "tokenizer_config.json").is_file()]
        adapter = folders[0] if base and Path(folders[0]).is_dir() else None
        weights = (folders[1] if base else folders[0]) if model in known else None
        return cls(base, adapter, here[0] if here else base or model, weights)
