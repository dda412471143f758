"""Push of an exported version to the Hub: one commit with all its files, then its number as a git tag."""

import glob
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from huggingface_hub import CommitInfo, HfApi, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from turngrpo.trainer.export.base_model import is_public
from turngrpo.trainer.export.versions import CONFIG, MANIFEST, public_config, read_version


def push_version(
    version: str | os.PathLike[str],
    repo_id: str,
    token: str | None = None,
    private: bool = True,
    branch: str | None = None,
    message: str | None = None,
) -> CommitInfo:
    """Push an exported folder to a model repository, made when it is absent, and tag the commit with its version.

    All files go in one commit, also the removal of those that only the version before had. An interrupted push is
    finished by the next one; one that is complete changes nothing. Raises ValueError for a folder that is not as
    exported, a bad name, no token and a tag with other content, PermissionError where the Hub refuses the token, and
    ConnectionError where it is out of reach.
    """
    version = Path(version)
    manifest, ours = read_version(version), (version / MANIFEST).read_bytes()
    tag = manifest["version"]
    if not is_public(manifest["base_model"]):
        raise ValueError(
            f"{version} says where its base model lies on this machine ({manifest['base_model']!r}), as those of "
            "turngrpo 0.1.0 do: export it again"
        )
    check_push(repo_id, token)
    api = HfApi(token=token, library_name="turngrpo")
    message = message or f"{version.resolve().parent.name} {tag}"
    with hub_errors(repo_id, api.endpoint):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # now with the user's name
        tagged = _manifest_at(api, repo_id, tag)
        if tagged is None:
            with _public(version, manifest) as folder:
                commit = api.upload_folder(
                    repo_id=repo_id,
                    folder_path=folder,
                    commit_message=message,
                    revision=branch,
                    delete_patterns=_left_over(api, repo_id, version, branch),
                )
            api.create_tag(repo_id, tag=tag, revision=commit.oid)
            return commit
        if tagged != ours:
            raise ValueError(
                f"{repo_id} has a tag {tag} with other content: export a new version, or push to another repository"
            )
        oid = str(api.model_info(repo_id, revision=tag).sha)
        return CommitInfo(f"{api.endpoint}/{repo_id}/commit/{oid}", message, "", oid)


@contextmanager
def _public(version: Path, manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a folder that links to all files of a version, but for the adapter's config, which names no path."""
    with TemporaryDirectory() as links:
        shutil.copytree(version.resolve(), links, copy_function=os.symlink, dirs_exist_ok=True)
        if (version / CONFIG).is_file():
            Path(links, CONFIG).unlink()
            Path(links, CONFIG).write_text(public_config(version, manifest), encoding="utf-8")
        yield Path(links)


def check_push(repo_id: str, token: str | None = None) -> None:
    """Raise ValueError, before anything is made, for a name that is no repository's and where no token is at hand."""
    validate_repo_id(repo_id)
    if (token or get_token()) is None:
        raise ValueError("no token for the Hub: expected one from `hf auth login`, or in the variable HF_TOKEN")


@contextmanager
def hub_errors(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turn the client's errors into PermissionError and ConnectionError that say what to do."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ConnectionError("the Hub is switched off by HF_HUB_OFFLINE: unset it to push") from error
    except (HfHubHTTPError, httpx.TransportError, LocalEntryNotFoundError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) else error  # of an upload's thread
        if isinstance(cause, httpx.TransportError | LocalEntryNotFoundError):
            raise ConnectionError(
                f"cannot reach the Hub at {endpoint} ({cause}): push again when it answers"
            ) from error
        if not isinstance(cause, HfHubHTTPError):
            raise
        status = cause.response.status_code
        if status in (401, 403, 404):
            raise PermissionError(
                f"the Hub at {endpoint} refused {repo_id} ({status}): expected a token that may write there; see "
                f"`hf auth whoami`. {cause}"
            ) from error
        if status == 409:
            raise ValueError(f"{repo_id} was changed by somebody else meanwhile (409): push again. {cause}") from error
        raise ConnectionError(f"the Hub at {endpoint} failed ({status}): push again. {cause}") from error


def _manifest_at(api: HfApi, repo_id: str, revision: str) -> bytes | None:
    """Return the bytes of the manifest at a revision: None without the revision, empty without the file."""
    with TemporaryDirectory() as cache:
        try:
            return Path(api.hf_hub_download(repo_id, MANIFEST, revision=revision, cache_dir=cache)).read_bytes()
        except RevisionNotFoundError:
            return None
        except LocalEntryNotFoundError:  # no answer from the Hub
            raise
        except EntryNotFoundError:
            return b""


def _left_over(api: HfApi, repo_id: str, version: Path, branch: str | None) -> list[str]:
    """Return patterns of the files that only the version before had."""
    manifest = _manifest_at(api, repo_id, branch or "main")
    before = json.loads(manifest).get("files", ()) if manifest else ()
    return [glob.escape(name) for name in sorted(before) if not (version / name).is_file()]
