"""The trained adapter on running vLLM servers: saved, loaded and unloaded as the policy changes."""

import contextlib
import hashlib
import os
import shutil
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from turngrpo.trainer.forward.policy import TRAINED, tensors_digest
from turngrpo.trainer.sampling.server import RefusedRequest, Server, ServerError, served_models
from turngrpo.trainer.writing import writing

CLEAN_UP_TIMEOUT = 5.0


def run_digest(run: str) -> str:
    """Return 12 hexadecimal digits that name a run."""
    return hashlib.sha256(run.encode()).hexdigest()[:12]


class ServedAdapter:
    """The trained adapter of a PEFT model, as it is now, on every server.

    Each state is saved whole into a folder of its own under `folder`, which the servers must be able to read, and
    loaded under a name of its own: a server that is given a used name or path may go on with the old weights. `run`
    names the run through all its lives: what an earlier one that was killed left is removed before the first push.
    """

    def __init__(self, model: Any, servers: Sequence[Server], folder: str | os.PathLike[str], run: str | None = None):
        self.model, self.servers, self.folder = model, servers, Path(folder).resolve()
        self.owner = f"turngrpo-{run_digest(run or str(self.folder))}-"
        self.run, self.count = f"{self.owner}{uuid.uuid4().hex[:8]}", 0
        self.name: str | None = None  # what is served now, and the digest of its weights
        self._digest = ""
        self._loaded: list[tuple[str, Path]] = []  # on the servers and on disk, process 0
        weakref.finalize(self, _clean_up, self.servers, self._loaded)

    def push(self) -> str:
        """Serve the adapter as it is now and return its name; all processes call it, process 0 saves and loads."""
        outcome: list[Any] = [None, None]
        if PartialState().is_main_process:
            try:
                outcome = [self._push(), None]
            except (ValueError, OSError) as error:
                broadcast_object_list([None, str(error)])
                raise
        name, fault = broadcast_object_list(outcome)
        if fault is not None:
            raise ServerError(f"process 0 could not push the adapter: {fault}")
        self.name = name
        return name

    def _push(self) -> str:
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        digest = tensors_digest(trained)
        if self.name is not None and digest == self._digest:
            return self.name
        if self.count == 0:
            self._remove_left_over()
        self.count += 1
        name = f"{self.run}-{self.count:05d}"
        path, partial = self.folder / name, self.folder / f".partial-{name}"
        with writing(str(path), "The servers keep the adapter before it: resume the run from its newest checkpoint"):
            partial.mkdir(parents=True)
            self.model.save_pretrained(
                str(partial), selected_adapters=[TRAINED], safe_serialization=True, save_embedding_layers=False
            )
            os.rename(partial, path)
        self._loaded.append((name, path))
        for server in self.servers:
            self.load(server, name)
        for old in self._loaded[:-1]:
            for server in self.servers:
                with contextlib.suppress(RefusedRequest):  # a server that started again has lost it
                    server.ask("/v1/unload_lora_adapter", {"lora_name": old[0]}, retry=False, expected=None)
            shutil.rmtree(old[1])
            self._loaded.remove(old)
        self._digest = digest
        return name

    def _remove_left_over(self) -> None:
        """Unload and delete the adapters of this run's earlier lives."""
        for server in self.servers:
            for card in served_models(server):
                if card["id"].startswith(self.owner):
                    with contextlib.suppress(RefusedRequest):
                        server.ask("/v1/unload_lora_adapter", {"lora_name": card["id"]}, retry=False, expected=None)
        for path in (*self.folder.glob(f"{self.owner}*"), *self.folder.glob(f".partial-{self.owner}*")):
            shutil.rmtree(path, ignore_errors=True)

    def load(self, server: Server, name: str) -> None:
        """Load an adapter under its name into one server, where it may be already; ValueError where that refuses."""
        body = {"lora_name": name, "lora_path": str(self.folder / name)}
        try:
            server.ask("/v1/load_lora_adapter", body, retry=False, expected=None)
        except RefusedRequest as error:
            if name in [card["id"] for card in served_models(server)]:
                return
            rank = self.model.peft_config[TRAINED].r
            raise ValueError(
                f"{server.base_url} does not load the adapter: {error}; expected a server that was started with "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora --max-lora-rank {rank} or more, and that "
                f"reads {self.folder} (vllm_adapter_dir)"
            ) from error


def _clean_up(servers: Sequence[Server], loaded: list[tuple[str, Path]]) -> None:
    """Unload and remove what a run left at its end; a server that is gone is left alone."""
    for name, path in loaded:
        for server in servers:
            headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
            with contextlib.suppress(httpx.HTTPError):
                url = f"{server.base_url}/v1/unload_lora_adapter"
                httpx.post(url, json={"lora_name": name}, headers=headers, timeout=CLEAN_UP_TIMEOUT)
        shutil.rmtree(path, ignore_errors=True)
