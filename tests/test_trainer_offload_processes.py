"""The real processes of a trainer that takes turns: their memory really goes and comes back, on one rank as
on several.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from offload_ranks import ALL, rank_main
from rank_processes import TIMEOUT_S, Group, running
from safetensors.torch import load_file
from tiny_model import make_tiny_model
from torch import multiprocessing
from trainer_cases import make_batch, make_spec

from asyncrl.errors import TrainerError
from asyncrl.http import CallRefused
from asyncrl.messages.base import Moved, TrainerPart
from asyncrl.messages.trainer_calls import ExportChunkResponse, StateRequest, StateSaved, TrainerHealth
from asyncrl.trainer.trainer_client import TrainerClient
from asyncrl.weights.export import digest_of

pytestmark = pytest.mark.slow

MB = 10**6


def offload(group: Group, *parts: TrainerPart) -> Moved:
    return group.ask(lambda caller: TrainerClient(caller, timeout_s=TIMEOUT_S).offload(parts))


def onload(group: Group, *parts: TrainerPart) -> Moved:
    return group.ask(lambda caller: TrainerClient(caller, timeout_s=TIMEOUT_S).onload(parts))


def chunk(group: Group, version: int, index: int) -> ExportChunkResponse:
    return group.ask(lambda caller: TrainerClient(caller, timeout_s=TIMEOUT_S).export_chunk(version, index))


def save_state(group: Group, path: Path) -> None:
    group.ask(
        lambda caller: caller.post(
            "/begin_save_state", StateRequest(path=str(path)), StateSaved, timeout_s=TIMEOUT_S
        )
    )
    group.ask(lambda caller: caller.post("/wait_save_state", b"", TrainerHealth, timeout_s=TIMEOUT_S))


def status_bytes(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def resident(group: Group) -> list[int]:
    return [status_bytes(process.pid, "VmRSS") for process in group.processes]


def until_resident(group: Group, *, at_most: float) -> list[int]:
    """What is resident as soon as it is no more than that. The test's own limit ends a wait in vain."""
    while sum(now := resident(group)) > at_most:
        time.sleep(0.05)
    return now


@contextmanager
def limited(pid: int, what: int, limit: int) -> Iterator[None]:
    """A limit on another process, and no longer than here."""
    soft, hard = resource.prlimit(pid, what, (limit, resource.prlimit(pid, what)[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, (soft, hard))


@contextmanager
def torn_file(pid: int) -> Iterator[None]:
    """What a process has offloaded is cut off, and whole again after this."""
    files = [link for link in Path(f"/proc/{pid}/fd").iterdir() if "/offload/" in str(link.readlink())]
    contents = [file.read_bytes() for file in files]
    assert any(contents)
    for file in files:
        os.truncate(file, 1000)
    yield
    for file, content in zip(files, contents, strict=True):
        with file.open("r+b") as target:
            target.write(content)


@pytest.fixture(scope="module")
def paged_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of several pages, which is what moves."""
    return make_tiny_model(tmp_path_factory.mktemp("paged") / "model", hidden_size=64, intermediate_size=256)


@pytest.fixture(scope="module")
def big_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9.5 M parameters: what moves is far more than what a process's memory varies by."""
    return make_tiny_model(
        tmp_path_factory.mktemp("big") / "model",
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        initializer_range=0.02,
    )


def all_chunks(group: Group, version: int) -> list[ExportChunkResponse]:
    """Each loaded before the next is asked for."""
    answers: list[ExportChunkResponse] = []
    while not answers or not answers[-1].is_last:
        answers.append(chunk(group, version, len(answers)))
        assert answers[-1].digest == digest_of(load_file(answers[-1].path))
    return answers


CHUNK_BYTES = 6 * MB


@pytest.fixture(scope="module")
def big(big_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with running(big_model_dir, tmp_path_factory.mktemp("big") / "w", chunk_bytes=CHUNK_BYTES) as group:
        yield group


def test_two_ranks_gather_chunk_by_chunk_and_take_no_more_memory_than_one(big: Group) -> None:
    assert [big.health(rank).policy_version for rank in range(2)] == [0, 0]
    # the first time with whatever has its first use
    for limit in (1.5 * CHUNK_BYTES + 8 * MB, 1.5 * CHUNK_BYTES):
        for process in big.processes:
            clear_refs = Path(f"/proc/{process.pid}/clear_refs")
            clear_refs.write_text("5", encoding="ascii")  # sets the peak back to what is resident
        before = resident(big)
        answers = all_chunks(big, 0)
        peaks = [status_bytes(process.pid, "VmHWM") for process in big.processes]
        growth = [peak - was for peak, was in zip(peaks, before, strict=True)]
        assert max(growth) <= limit, growth
        assert len(answers) > 5
        assert max(answer.num_bytes for answer in answers) <= CHUNK_BYTES
    whole = big.export()
    num_bytes = sum(answer.num_bytes for answer in answers)
    assert (answers[-1].whole_digest, num_bytes) == (whole.digest, whole.num_bytes)
    with pytest.raises(TrainerError, match="a chunk of version 7"):
        chunk(big, 7, 0)


def test_resident_memory_drops_by_what_was_offloaded_and_is_back_after_onload(
    big: Group, tmp_path: Path
) -> None:
    big.train(*make_batch())
    save_state(big, tmp_path / "first")  # imports, and its copy stays
    before = resident(big)
    moved = offload(big, *ALL)
    away = resident(big)
    assert moved.num_bytes >= 9.4 * MB * 12, "weights and two moments"
    assert sum(before) - sum(away) >= moved.num_bytes, f"{before} resident before, {away} after {moved}"
    assert [big.health(rank).offloaded for rank in range(2)] == [list(ALL)] * 2

    save_state(big, tmp_path / "state")
    # the copy that it was written from is freed again, on the other rank a moment later
    saved = until_resident(big, at_most=sum(away) + moved.num_bytes * 0.7)

    with (
        torn_file(big.processes[-1].pid),
        pytest.raises(TrainerError, match="cannot onload weights, gradients, optimizer") as no,
    ):
        onload(big, *ALL)
    assert "what cannot be moved stays offloaded" in str(no.value)
    assert [big.health(rank).offloaded for rank in range(2)] == [list(ALL)] * 2
    # no rank keeps what another could not take
    until_resident(big, at_most=sum(saved) + moved.num_bytes * 0.7)

    still_away = resident(big)
    assert onload(big, "weights", "optimizer").num_bytes == moved.num_bytes
    back = resident(big)
    assert sum(back) - sum(still_away) >= 0.5 * moved.num_bytes, (
        "the allocator may have let go of other memory meanwhile"
    )
    assert sum(back) <= sum(before) + moved.num_bytes * 0.7
    assert big.train(*make_batch(version=1)).policy_version == 2


def test_two_ranks_that_were_offloaded_give_the_bits_of_two_that_never_were(
    paged_model_dir: Path, tmp_path: Path
) -> None:
    with (
        running(paged_model_dir, tmp_path / "plain") as plain,
        running(paged_model_dir, tmp_path / "moved") as moved,
    ):
        for version in range(4):
            assert (offload(moved, "optimizer").num_bytes > 0) == (version > 0), (
                "there are moments once there was a step"
            )
            offload(moved, *ALL)
            assert offload(moved, *ALL).num_bytes == 0
            if version == 2:
                with pytest.raises(
                    CallRefused, match="cannot train: weights and optimizer are offloaded"
                ) as refused:
                    moved.train(*make_batch(version=version))
                assert refused.value.status == 409
                with pytest.raises(CallRefused, match="cannot export: weights are offloaded"):
                    moved.export()
                with pytest.raises(CallRefused, match="cannot save: weights are offloaded"):
                    moved.save(tmp_path / "saved")
                save_state(moved, tmp_path / "state")
            onload(moved, *ALL)
            expected, actual = (
                group.train(*make_batch(version=version, seed=version)).metrics for group in (plain, moved)
            )
            assert {**actual, "perf/train_s": 0} == {**expected, "perf/train_s": 0}
        assert moved.export().digest == plain.export().digest
        plain.ask(
            lambda caller: caller.post(
                "/load_state", StateRequest(path=str(tmp_path / "state")), TrainerHealth, timeout_s=TIMEOUT_S
            )
        )
        for version in (2, 3):
            plain.train(*make_batch(version=version, seed=version))
        assert moved.export().digest == plain.export().digest, "the state was saved while it was away"


def test_shards_whose_storages_are_set_to_size_0_as_on_a_device_come_back_to_the_bit_too(
    paged_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "staging").mkdir()
    specs = [
        make_spec(paged_model_dir, tmp_path, trainer={"world_size": 2}, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]
    multiprocessing.spawn(rank_main, ([spec.model_dump_json() for spec in specs], tmp_path), nprocs=2)


def test_a_part_that_one_rank_cannot_offload_stays_on_all_and_a_chunk_that_cannot_be_written_costs_nothing(
    paged_model_dir: Path, tmp_path: Path
) -> None:
    with running(paged_model_dir, tmp_path / "w", chunk_bytes=30_000) as group:
        group.train(*make_batch())
        with limited(group.processes[1].pid, resource.RLIMIT_FSIZE, 20_000):
            with pytest.raises(
                TrainerError, match=r"cannot offload weights, gradients, optimizer to .* on rank 1: OSError"
            ) as refused:
                offload(group, *ALL)
        assert refused.value.rule == "what cannot be moved stays where it was"
        assert [group.health(rank).offloaded for rank in range(2)] == [[], []]
        group.train(*make_batch(version=1))
        offload(group, *ALL)
        onload(group, *ALL)
        group.train(*make_batch(version=2))
        file = tmp_path / "w" / "staging" / "chunk.safetensors"
        file.symlink_to("/dev/full")
        with pytest.raises(
            TrainerError, match=r"was refused \(507\): cannot write chunk 0 into .*No space left"
        ) as refused:
            chunk(group, 3, 0)
        assert "lower publisher.chunk_bytes" in refused.value.way_out
        file.unlink()
        assert chunk(group, 3, 0).num_tensors > 0
        group.train(*make_batch(version=3))
