"""The real worker process over HTTP steps, exports, refuses, and ends with its parent."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import rank_processes
from rank_processes import TIMEOUT_S, Group
from safetensors.torch import load_file
from trainer_cases import learned, make_batch, make_spec

from asyncrl.base.http import Caller, CallRefused
from asyncrl.messages.trainer_api import (
    ExportResponse,
    StateRequest,
    TrainerHealth,
    TrainResponse,
    pack_batch,
)
from asyncrl.trainer.step import TrainStep
from asyncrl.weights.export import digest_of

pytestmark = pytest.mark.slow

BREAKS = "def loss(*tensors):\n    raise ArithmeticError('planted')\n"


def running(model_dir: Path, folder: Path, **values: Any) -> AbstractContextManager[Group]:
    return rank_processes.running(model_dir, folder, 1, **values)


def test_worker_is_bit_for_bit_a_step_in_process(tiny_model_dir: Path, tmp_path: Path) -> None:
    here, state = TrainStep(make_spec(tiny_model_dir, tmp_path)), StateRequest(path=str(tmp_path / "state"))
    expected = []
    with running(tiny_model_dir, tmp_path / "w") as worker:
        staging = worker.folder / "staging"
        assert worker.health() == TrainerHealth(policy_version=0, device="cpu", is_busy=False)
        for version in range(4):
            header, arrays = make_batch(version=version, seed=version)
            there, metrics = worker.train(header, arrays), here.train(header, arrays)
            assert there.policy_version == version + 1
            assert learned(there.metrics) == learned(metrics)
            export = worker.export()
            assert export.digest == here.weights_digest() == digest_of(load_file(export.path))
            expected.append(export.digest)
            if version == 1:
                assert worker.post("/begin_save_state", state, TrainerHealth).policy_version == 2
        worker.post("/wait_save_state", b"", TrainerHealth)
        assert stat.S_IMODE(staging.stat().st_mode) == 0o700
        assert worker.processes[0].stdin is not None
        worker.processes[0].stdin.close()
        assert worker.processes[0].wait(TIMEOUT_S) == 3
        assert not staging.exists()
    shutil.copytree(tmp_path / "w", tmp_path / "second")
    with running(tiny_model_dir, tmp_path / "second") as second:
        with pytest.raises(CallRefused, match="/no/such/state"):
            second.post("/load_state", StateRequest(path="/no/such/state"), TrainerHealth)
        assert second.post("/load_state", state, TrainerHealth).policy_version == 2
        second.train(*make_batch(version=2, seed=2))
        assert second.export().digest == expected[2]
        lines = [json.loads(line) for line in (second.folder / "trained.jsonl").read_text().splitlines()]
        assert [line.get("restored", line.get("version")) for line in lines] == [0, 1, 2, 3, 2, 2]


def test_export_waits_for_the_step_before_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    body = pack_batch(*make_batch(version=0, num_groups=64, group_size=8))

    async def story(caller: Caller) -> ExportResponse:
        step = asyncio.ensure_future(caller.post("/train", body, TrainResponse, timeout_s=TIMEOUT_S))
        while not (await caller.get("/health", TrainerHealth, timeout_s=TIMEOUT_S)).is_busy:
            assert not step.done(), "health was not answered once during a step of 512 sequences"
        export = await caller.post("/export", b"", ExportResponse, timeout_s=TIMEOUT_S)
        assert (await step).policy_version == 1
        return export

    with running(tiny_model_dir, tmp_path / "w") as worker:
        assert worker.ask(story).version == 1


def test_error_in_a_step_is_answered_with_500(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "planted_loss.py").write_text(BREAKS)
    with running(tiny_model_dir, tmp_path, algorithm={"loss": "planted_loss:loss"}) as worker:
        for _ in range(2):
            with pytest.raises(CallRefused) as caught:
                worker.train(*make_batch())
            assert caught.value.status == 500
            assert caught.value.body.error == "ArithmeticError: planted"
        assert worker.health().policy_version == 0
        assert "Traceback" in worker.log()
        worker.processes[0].send_signal(signal.SIGTERM)
        assert worker.processes[0].wait(TIMEOUT_S) == 0
        assert (worker.folder / "staging").exists()
