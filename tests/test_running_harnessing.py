"""Where the worker key of a run is: of one with workers elsewhere in a file for them, of any other in memory
alone.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import RunConfig
from asyncrl.messages.work import WORKER_KEY_ENV
from asyncrl.run.agents import Harnessing, make_harnessing
from asyncrl.run.supervise import Supervision

TOKENIZER: Any = SimpleNamespace(template="", vocab_size=8, max_token_bytes=4)


def made(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **generator: Any) -> Harnessing:
    """As a start of the run makes it, with nothing started; closed."""
    monkeypatch.setattr(
        "asyncrl.run.agents.call_rules", lambda config, tokenizer: SimpleNamespace(model_name="m")
    )
    monkeypatch.setattr("asyncrl.run.agents.find_tool_format", lambda name, template: None)
    monkeypatch.setattr("asyncrl.run.agents.Gateway", FakeGateway)
    task = {"files": ["x.jsonl"], "reward": "math"}
    config = RunConfig.model_validate({"model": {"path": "x"}, "task": task, "generator": generator})

    async def make() -> Harnessing:
        engines: Any = None
        supervision = Supervision(config.supervision, 1.0, print, print)
        return make_harnessing(config, engines, TOKENIZER, run_dir, on_broken=print, supervision=supervision)

    return asyncio.run(make())


class FakeGateway:
    """Takes no port."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def bind(self) -> str:
        return "http://127.0.0.1:1"


def test_the_worker_key_of_a_local_run_is_drawn_anew_and_stands_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKER_KEY_ENV, "known-to-others")
    keys = [made(tmp_path, monkeypatch, python="my_agent:run").worker_key for _ in range(2)]
    assert len({*keys, "known-to-others"}) == 3
    assert json.loads((tmp_path / "gateway.json").read_text()) == {"url": "http://127.0.0.1:1"}
    assert not any(
        key.encode() in path.read_bytes() for key in keys for path in tmp_path.rglob("*") if path.is_file()
    )


def test_the_worker_key_of_workers_elsewhere_stays_when_the_run_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WORKER_KEY_ENV, raising=False)
    made(tmp_path, monkeypatch, python="my_agent:run")
    first, again = (made(tmp_path, monkeypatch, remote=True).worker_key for _ in range(2))
    assert first == again == json.loads((tmp_path / "gateway.json").read_text())["worker_key"]
    monkeypatch.setenv(WORKER_KEY_ENV, "chosen")
    assert made(tmp_path, monkeypatch, remote=True).worker_key == "chosen"
