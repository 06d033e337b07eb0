"""The real processes of a trainer that takes turns: their memory really goes and comes back, on one rank as
on several.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rank_processes import TIMEOUT_S, Group, running
from tiny_model import make_tiny_model
from trainer_cases import make_batch

from asyncrl.errors import TrainerError
from asyncrl.http import CallRefused
from asyncrl.messages.base import Moved, TrainerPart
from asyncrl.messages.trainer_calls import StateRequest, StateSaved, TrainerHealth
from asyncrl.trainer.trainer_client import TrainerClient

pytestmark = pytest.mark.slow

ALL: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")

MB = 10**6


def offload(group: Group, *parts: TrainerPart) -> Moved:
    return group.ask(lambda caller: TrainerClient(caller, timeout_s=TIMEOUT_S).offload(parts))


def onload(group: Group, *parts: TrainerPart) -> Moved:
    return group.ask(lambda caller: TrainerClient(caller, timeout_s=TIMEOUT_S).onload(parts))


def save_state(group: Group, path: Path) -> None:
    group.ask(
        lambda caller: caller.post(
            "/begin_save_state", StateRequest(path=str(path)), StateSaved, timeout_s=TIMEOUT_S
        )
    )
    group.ask(lambda caller: caller.post("/wait_save_state", b"", TrainerHealth, timeout_s=TIMEOUT_S))


@contextmanager
def limited(pid: int, what: int, limit: int) -> Iterator[None]:
    """A limit on another process, and no longer than here."""
    soft, hard = resource.prlimit(pid, what, (limit, resource.prlimit(pid, what)[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, (soft, hard))


@pytest.fixture(scope="module")
def paged_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of several pages, which is what moves."""
    return make_tiny_model(tmp_path_factory.mktemp("paged") / "model", hidden_size=64, intermediate_size=256)


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


def test_a_part_that_one_rank_cannot_offload_stays_on_all_of_them(
    paged_model_dir: Path, tmp_path: Path
) -> None:
    with running(paged_model_dir, tmp_path / "w") as group:
        group.train(*make_batch())
        with limited(group.processes[1].pid, resource.RLIMIT_FSIZE, 20_000):
            with pytest.raises(
                TrainerError, match=r"cannot offload weights, gradients, optimizer to .* on rank 1: OSError"
            ) as refused:
                offload(group, *ALL)
        assert refused.value.rule.startswith("what cannot be moved")
        assert [group.health(rank).offloaded for rank in range(2)] == [[], []]
        group.train(*make_batch(version=1))
        offload(group, *ALL)
        onload(group, *ALL)
        group.train(*make_batch(version=2))
