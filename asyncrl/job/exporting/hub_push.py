"""Push exports to the Hugging Face hub, with its client's login, HF_TOKEN and HF_ENDPOINT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.base.errors import AsyncrlError, ConfigError, HubError

REPLACED = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]
"""Files of an earlier export to remove if this export lacks them, such as extra shards."""


class HubRepo:
    """Repository to push to. Life: opened() before the long work, then push()."""

    def __init__(self, name: str, api: Any) -> None:
        self.name, self._api = name, api

    @classmethod
    def opened(cls, name: str, *, is_public: bool) -> HubRepo:
        """Create the repository if missing, private unless `is_public`. Raises HubError, and ConfigError
        for an invalid name, a missing token, or a public repository without `is_public`.
        """
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils._validators import validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(f"--push {name}: {error}", way_out="name it like OWNER/NAME.") from error
        api = HfApi()
        with _words(name):
            if get_token() is None:
                what = f"--push {name}: there is no token for the hub on this machine"
                raise ConfigError(what, way_out="log in with `hf auth login`, or set HF_TOKEN.")
            repo_id = api.create_repo(name, private=not is_public, exist_ok=True).repo_id
            if not is_public and not api.repo_info(repo_id).private:
                rule = "what is pushed to it can be read by everyone"
                way_out = "add --public, or name another repository."
                raise ConfigError(f"--push {name}: this repository is public", rule=rule, way_out=way_out)
        return cls(repo_id, api)

    def push(self, folder: Path, version: int) -> str:
        """Upload the folder, tag it step-VERSION and return its address. Raises HubError."""
        with _words(self.name, folder):
            message = f"policy_version {version}, exported by asyncrl"
            commit = self._api.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=message, delete_patterns=REPLACED
            )
            tag = f"step-{version}"
            with contextlib.suppress(OSError):  # a new tag has nothing to delete
                self._api.delete_tag(self.name, tag=tag)
            self._api.create_tag(self.name, tag=tag, revision=commit.oid)
        return f"{self._api.endpoint}/{self.name}/tree/{tag}"


@contextlib.contextmanager
def _words(name: str, folder: Path | None = None) -> Iterator[None]:
    try:
        yield
    except AsyncrlError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        what, way_out = f"the hub refused {name}: {reason}", "see the status of the hub, and try again."
        if status in (401, 403):
            what = f"the hub does not let this token write to {name} ({status}): {reason}"
            way_out = "log in with a token that may write there: `hf auth login`, or HF_TOKEN."
        elif status is None:
            what = f"the hub cannot be reached for {name}: {type(error).__name__}: {reason}"
            way_out = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE."
        if folder is not None:
            way_out += f" The export is whole: `hf upload {name} {folder}` pushes it."
        raise HubError(what, way_out=way_out) from error
