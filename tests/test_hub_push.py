"""Exports are pushed through the hub's client; its failures become HubError or ConfigError."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest

from asyncrl.base.errors import AsyncrlError, ConfigError, HubError
from asyncrl.job.run_export import open_repo, push_folder

TOKEN = "hf_for_tests"


class RefusedError(OSError):
    response = SimpleNamespace(status_code=403)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for HfApi; me/open is public."""
    hub = create_autospec(huggingface_hub.HfApi, instance=True, endpoint="https://hub")
    hub.create_repo.side_effect = lambda name, **_: SimpleNamespace(
        repo_id=name if "/" in name else f"me/{name}"
    )
    hub.repo_info.side_effect = lambda repo: SimpleNamespace(private=repo != "me/open")
    hub.upload_folder.side_effect = [SimpleNamespace(oid="commit-1"), SimpleNamespace(oid="commit-2")]
    hub.delete_tag.side_effect = [RefusedError("no such tag"), None]
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.mark.parametrize("is_public", [True, False])
def test_export_is_pushed_and_tagged_by_its_step(hub: Any, tmp_path: Path, is_public: bool) -> None:
    repo = open_repo("model", is_public=is_public)
    hub.create_repo.assert_called_once_with("model", private=not is_public, exist_ok=True)
    for _ in range(2):
        assert push_folder(repo, tmp_path, 300) == "https://hub/me/model/tree/step-300"
    uploaded = hub.upload_folder.call_args.kwargs
    assert uploaded["folder_path"] == tmp_path
    assert "*.safetensors" in uploaded["delete_patterns"], "shards of an earlier export"
    hub.delete_tag.assert_called_with("me/model", tag="step-300")
    hub.create_tag.assert_called_with("me/model", tag="step-300", revision="commit-2")


def test_refused_push_names_the_way_out(hub: Any, tmp_path: Path) -> None:
    def refused(kind: type[AsyncrlError], words: str, *, name: str = "me/model") -> str:
        with pytest.raises(kind, match=words) as caught:
            push_folder(open_repo(name, is_public=False), tmp_path, 1)
        assert TOKEN not in str(caught.value)
        return caught.value.way_out

    assert "--public" in refused(ConfigError, "this repository is public", name="me/open")
    hub.upload_folder.assert_not_called()
    hub.upload_folder.side_effect = RefusedError("forbidden")
    assert f"hf upload me/model {tmp_path}" in refused(HubError, r"refused me/model \(status 403\)")
    hub.create_repo.side_effect = RefusedError("forbidden")
    assert "hf auth login" in refused(HubError, r"refused me/new \(status 403\)", name="me/new")
