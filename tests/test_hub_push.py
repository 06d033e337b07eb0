"""Exports are pushed through the hub's client; its failures get our words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from asyncrl.base.errors import AsyncrlError, ConfigError, HubError
from asyncrl.job.run_export import open_repo, push_folder

TOKEN = "hf_for_tests"


class RefusedError(OSError):
    response = SimpleNamespace(status_code=403)


class Hub:
    """In place of HfApi. `refuses` names a method that fails."""

    endpoint = "https://hub"
    private: dict[str, bool]
    refuses = ""

    def __init__(self) -> None:
        self.private = {}
        self.uploads: list[dict[str, Any]] = []
        self.tags: list[tuple[str, str]] = []

    def _call(self, name: str) -> None:
        if self.refuses == name:
            raise RefusedError(f"{name}: forbidden")

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> Any:
        self._call("create_repo")
        repo = name if "/" in name else f"me/{name}"
        assert exist_ok
        self.private.setdefault(repo, private)
        return SimpleNamespace(repo_id=repo)

    def repo_info(self, repo: str) -> Any:
        return SimpleNamespace(private=self.private[repo])

    def upload_folder(self, **values: Any) -> Any:
        self._call("upload_folder")
        self.uploads.append(values)
        return SimpleNamespace(oid=f"commit-{len(self.uploads)}")

    def delete_tag(self, repo: str, *, tag: str) -> None:
        if tag not in dict(self.tags):
            raise RefusedError("no such tag")
        self.tags = [one for one in self.tags if one[0] != tag]

    def create_tag(self, repo: str, *, tag: str, revision: str) -> None:
        self.tags.append((tag, revision))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.mark.parametrize("is_public", [True, False])
def test_export_is_pushed_and_tagged_by_its_step(hub: Hub, tmp_path: Path, is_public: bool) -> None:
    repo = open_repo("model", is_public=is_public)
    assert hub.private == {"me/model": not is_public}
    for _ in range(2):
        assert push_folder(repo, tmp_path, 300) == "https://hub/me/model/tree/step-300"
    assert [one["folder_path"] for one in hub.uploads] == [tmp_path] * 2
    assert "*.safetensors" in hub.uploads[0]["delete_patterns"], "shards of an earlier export"
    assert hub.tags == [("step-300", "commit-2")]


def test_refused_push_names_the_way_out(hub: Hub, tmp_path: Path) -> None:
    def refused(kind: type[AsyncrlError], words: str, *, name: str = "me/model") -> str:
        with pytest.raises(kind, match=words) as caught:
            push_folder(open_repo(name, is_public=False), tmp_path, 1)
        assert TOKEN not in str(caught.value)
        return caught.value.way_out

    hub.private["me/open"] = False
    assert "--public" in refused(ConfigError, "this repository is public", name="me/open")
    assert hub.uploads == []
    hub.refuses = "upload_folder"
    assert f"hf upload me/model {tmp_path}" in refused(HubError, r"refused me/model \(status 403\)")
    hub.refuses = "create_repo"
    assert "hf auth login" in refused(HubError, r"refused me/new \(status 403\)", name="me/new")
