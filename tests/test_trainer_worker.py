"""The real worker process over HTTP: it steps, exports, saves, refuses, survives, and ends with its
parent.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import rank_processes
from rank_processes import TIMEOUT_S, Group, save_state
from safetensors.torch import load_file
from trainer_cases import changed, learned, make_batch, make_spec
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.checkpoints.folder import Checkpoints
from asyncrl.config import CheckpointConfig
from asyncrl.http import Caller, CallRefused
from asyncrl.messages.calls import (
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


@pytest.fixture(scope="module")
def worker(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with running(tiny_model_dir, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


def test_a_run_of_the_worker_is_bit_for_bit_that_of_a_step_in_process_before_and_after_a_saved_state(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
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
            lines = (worker.folder / "trained.jsonl").read_text().splitlines()
            assert len(lines) == version + 1, "written before the answer"
            if version == 1:
                assert worker.post("/begin_save_state", state, TrainerHealth).policy_version == 2
        worker.post("/wait_save_state", b"", TrainerHealth)
        assert sorted(path.name for path in staging.iterdir()) == ["v3.safetensors", "v4.safetensors"]
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


def test_a_trainer_that_is_killed_between_the_copy_and_the_manifest_goes_on_from_the_checkpoint_before(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    with running(tiny_model_dir, tmp_path / "w") as worker:
        worker.train(*make_batch(version=0))
        pending = checkpoints.begin()
        save_state(worker, pending.trainer_dir)
        checkpoints.finish(pending, 1, {})
        worker.train(*make_batch(version=1, seed=1))
        second = worker.export().digest
        path = str(checkpoints.begin().trainer_dir)
        assert worker.post("/begin_save_state", StateRequest(path=path), TrainerHealth).policy_version == 2
        worker.processes[0].kill()  # the copy is in its memory, and some of it may be on disk
        worker.processes[0].wait(TIMEOUT_S)
    newest, damaged = checkpoints.newest_whole()
    assert newest is not None
    assert (newest.version, damaged, checkpoints.versions()) == (1, [], [1])
    with running(tiny_model_dir, tmp_path / "again") as again:
        again.post("/load_state", StateRequest(path=str(newest.trainer_dir)), TrainerHealth)
        again.train(*make_batch(version=1, seed=1))
        assert again.export().digest == second


def test_a_body_that_is_no_batch_is_refused_and_the_worker_lives_on(worker: Group) -> None:
    with pytest.raises(CallRefused) as caught:
        worker.train_body(b"nonsense")
    assert caught.value.status == 422
    version = worker.train(*make_batch(version=worker.health().policy_version)).policy_version
    header, arrays = make_batch(version=version)
    with pytest.raises(CallRefused, match=f"sampled at version {version - 1}"):
        worker.train(header, changed(arrays, versions=arrays.versions - 1))
    assert worker.train(header, arrays).policy_version == version + 1


def test_save_writes_a_folder_that_opens_and_replaces_one_that_exists(worker: Group, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "old").touch()
    worker.save(tmp_path / "hf")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == 52
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    assert digest_of({name: weight.detach() for name, weight in saved.items()}) == worker.export().digest
    assert not (tmp_path / "hf" / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_export_waits_for_the_step_before_it_while_health_is_answered_beside_both(worker: Group) -> None:
    first = worker.health().policy_version
    body = pack_batch(*make_batch(version=first, num_groups=64, group_size=8))

    async def story(caller: Caller) -> ExportResponse:
        step = asyncio.ensure_future(caller.post("/train", body, TrainResponse, timeout_s=TIMEOUT_S))
        while not (await caller.get("/health", TrainerHealth, timeout_s=TIMEOUT_S)).is_busy:
            assert not step.done(), "health was not answered once during a step of 512 sequences"
        export = await caller.post("/export", b"", ExportResponse, timeout_s=TIMEOUT_S)
        assert (await step).policy_version == first + 1
        return export

    assert worker.ask(story).version == first + 1


def test_an_export_that_was_begun_holds_what_the_weights_were_then_whatever_was_trained_since(
    worker: Group,
) -> None:
    version = worker.health().policy_version
    before = worker.export().digest
    assert worker.begin_export() == version
    worker.train(*make_batch(version=version))
    begun, newest = worker.export(), worker.export()
    assert (begun.version, begun.digest) == (version, before)
    assert digest_of(load_file(begun.path)) == before
    assert newest.version == version + 1
    assert newest.digest != before


def test_an_exception_in_a_step_is_answered_with_500_and_sigterm_leaves_the_staging_to_the_next_worker(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
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
