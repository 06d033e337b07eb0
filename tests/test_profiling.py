"""trainer.profile_steps: traces of chosen steps, of trainer ranks and engines."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch
from engine_in_process import answered, make_qwen3, publish, running_engine, stage_file
from trainer_cases import MakeStep, make_batch, weights_digest

from asyncrl.base.http import Refused
from asyncrl.config import TrainerConfig
from asyncrl.models.profiling import StepProfiler
from asyncrl.observe.report_page import profiles_of
from asyncrl_servers.embedded.embedded_engine import PROFILED_ITERATIONS

CPU = torch.device("cpu")


def operators(trace: Path) -> list[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event["name"] for event in events]


def test_only_chosen_steps_are_profiled_and_keep_their_bits(
    make_step: MakeStep, tmp_path: Path
) -> None:
    profiled = make_step(trainer={"profile_steps": (2,)})
    plain = make_step()
    for version in range(3):
        batch = make_batch(version=version)
        profiled.train(*batch)
        plain.train(*batch)
    assert weights_digest(profiled) == weights_digest(plain)
    (trace,) = profiles_of(tmp_path)
    assert trace.name == "trainer-0-step-2.trace.json.gz"
    found = operators(trace)
    assert "aten::mm" in found
    assert any("Backward" in name for name in found)
    assert any("AdamW.step" in name for name in found)


def test_step_that_fails_leaves_no_profile_and_the_next_one_gets_its_own(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step(trainer={"profile_steps": (1,), "logprob_gap_limit": 1e-9})
    header, arrays = make_batch(version=0)
    with pytest.raises(Refused, match="engines and trainer disagree"):
        step.train(header, arrays)
    assert not profiles_of(tmp_path)
    step.spec = step.spec.model_copy(update={"trainer": TrainerConfig()})
    step.train(header, arrays)
    assert len(profiles_of(tmp_path)) == 1


def test_engine_profiles_its_first_iterations_with_the_weights_of_a_step(
    tmp_path: Path,
) -> None:
    folder = make_qwen3(tmp_path / "model", num_hidden_layers=1)
    chosen = {"profile_steps": (1, 2), "profile_dir": tmp_path / "profile"}
    with running_engine(folder, **chosen) as engine:
        answered(engine, max_tokens=PROFILED_ITERATIONS + 50)
        (first,) = profiles_of(tmp_path)  # ended by its number of iterations
        publish(engine, stage_file(folder, 1, tmp_path))
        answered(engine, max_tokens=5)
        publish(engine, stage_file(folder, 2, tmp_path))
        answered(engine, max_tokens=5)
        second = profiles_of(tmp_path)[1]  # ended by the next weights
        assert len(profiles_of(tmp_path)) == 2
    num_first, num_second = (
        sum(name == "aten::embedding" for name in operators(trace))
        for trace in (first, second)
    )
    assert (num_first, num_second) == (PROFILED_ITERATIONS, 5)


def test_engine_that_stops_writes_its_open_profile(tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path / "model", num_hidden_layers=1)
    with running_engine(
        folder, profile_steps=(1,), profile_dir=tmp_path / "profile"
    ) as engine:
        answered(engine, max_tokens=5)
        assert not profiles_of(tmp_path)
    assert len(profiles_of(tmp_path)) == 1


def test_profile_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    profiler = StepProfiler(tmp_path / "file" / "profile", "trainer-0", [1], CPU)
    with caplog.at_level(logging.WARNING):
        assert profiler.enter(1)
        profiler.end()
    assert "no profile of step 1: " in caplog.text
    assert not profiler.enter(1), "a step is profiled once"
