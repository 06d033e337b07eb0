"""The ranks of a trainer on several hosts: the same bits as on one, and an end to every wait."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from network_hosts import network, reason_for_none
from rank_processes import TIMEOUT_S, Group, running, save_state
from safetensors.torch import load_file
from trainer_cases import assert_all_close, learned, make_batch, make_spec

from asyncrl.http import CallRefused
from asyncrl.messages.base import Moved, TrainerPart, find_fatal
from asyncrl.messages.calls import OffloadRequest, StateRequest, TrainerHealth
from asyncrl.trainer.step import TrainStep

CUT_S = 20.0
HELD = """
import os
from pathlib import Path
import torch
from asyncrl.algorithms.losses import ppo_clip

HERE = Path(__file__).parent

def loss(*given):
    if (HERE / "reached").exists() and torch.distributed.get_rank() == 1:
        (HERE / "reached").write_bytes(b"x")
        os.read(os.open(HERE / "go_on", os.O_RDONLY), 1)
    return ppo_clip(*given)
"""
PARTS: list[TrainerPart] = ["weights", "optimizer"]


def make(version: int):  # type: ignore[no-untyped-def]
    return make_batch(version=version, seed=version, num_groups=4, group_size=3)


def held_step(group: Group, version: int, meanwhile: Callable[[], None]) -> str:
    """What rank 0 answers to a step in whose loss rank 1 waits until `meanwhile` is done."""
    pipes = [group.folder / "reached", group.folder / "go_on"]
    for pipe in pipes:
        os.mkfifo(pipe)
    reached, go_on = (os.open(pipe, os.O_RDWR) for pipe in pipes)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(group.train, *make(version))
        assert select.select([reached], [], [], TIMEOUT_S)[0], "rank 1 is in the step"
        meanwhile()
        os.write(go_on, b"x")
        error = answer.exception(TIMEOUT_S)
    assert isinstance(error, CallRefused)
    assert error.status == 503
    return str(error)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none())
def test_two_hosts_learn_what_one_does_go_on_in_other_places_and_end_when_the_wire_is_cut(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("near", "far", "swapped")]
    for folder in folders:
        folder.mkdir()
        (folder / "held_loss.py").write_text(HELD)
    monkeypatch.syspath_prepend(str(folders[0]))
    values = {"algorithm": {"loss": "held_loss:loss"}}
    cut = {"trainer": {"timeout_s": CUT_S}}
    alone = TrainStep(make_spec(tiny_model_dir, tmp_path / "alone", **values))
    own = tmp_path / "own"
    own.mkdir()
    with (
        network(2) as hosts,
        running(tiny_model_dir, folders[1], hosts=hosts, hide=[own], **values, **cut) as far,
    ):
        with running(tiny_model_dir, folders[0], **values) as near:
            for version in range(2):
                wanted, found = learned(near.train(*make(version)).metrics), far.train(*make(version))
                assert learned(found.metrics) == wanted, "the same bits"
                assert wanted == pytest.approx(learned(alone.train(*make(version))), rel=1e-4, abs=1e-4)
            assert far.export().digest == near.export().digest
        weights = [load_file(path) for path in (far.export().path, alone.export(tmp_path / "alone.st").path)]
        assert_all_close(*(found.values() for found in weights), 1e-5)
        save_state(far, tmp_path / "state")
        with pytest.raises(CallRefused, match=r"lacks __1_0.distcp, which other ranks have written"):
            save_state(far, own / "state")
        with pytest.raises(CallRefused, match=r"state.json cannot be read by rank 0"):
            far.post("/load_state", StateRequest(path=str(own / "state")), TrainerHealth)
        for path in ("/offload", "/onload"):  # all hosts beside one run directory
            assert far.post(path, OffloadRequest(parts=PARTS), Moved).num_bytes > 0
        wanted, digest = learned(far.train(*make(2)).metrics), far.export().digest
        assert not (folders[1] / "staging-1").exists(), "rank 0 alone writes exports"
        with running(tiny_model_dir, folders[2], hosts=hosts[::-1], **values, **cut) as swapped:
            swapped.post("/load_state", StateRequest(path=str(tmp_path / "state")), TrainerHealth)
            assert learned(swapped.train(*make(2)).metrics) == wanted
            assert swapped.export().digest == digest
            said = held_step(swapped, 3, lambda: hosts[1].link("down"))
            assert f"rank 0 ({hosts[1].address}) has lost the other ranks of the trainer" in said
            for group in (swapped, far):  # in the middle of a step, and waiting for one
                assert group.processes[1].wait(TIMEOUT_S) == 1
                fatal = find_fatal(group.log(1))
                assert fatal is not None
                assert f"rank 1 ({group.hosts[1].address}) has lost the other ranks" in fatal.error
                assert f"trainer.timeout_s={CUT_S:g}" in fatal.rule
                with pytest.raises(CallRefused, match="has lost the other ranks"):
                    group.health(0)
