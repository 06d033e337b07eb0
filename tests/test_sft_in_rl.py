"""Demonstrations in the batches of a run (algorithm.sft_weight)."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crash_fuzz import differences
from job_runs import (
    children_of,
    read_lines,
    run,
    start,
    wait_for_steps,
    write_config,
)
from rank_processes import running
from test_sft_job import write_rows
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trainer_cases import (
    MakeStep,
    Rows,
    batch_of,
    make_batch,
    make_spec,
    naive,
)
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from asyncrl.base.errors import ConfigError
from asyncrl.cli import app
from asyncrl.config import AlgorithmConfig, load_config
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import (
    BatchHeader,
    TrainResponse,
    pack_batch,
    unpack_batch,
    unpack_demonstrations,
)
from asyncrl.observe.console import plain_line
from asyncrl.observe.run_numbers import Steps
from asyncrl.trainer.rank import TrainerRank

PLAIN = {
    "loss": "reinforce",
    "advantage": "asyncrl.algorithms.advantages:unchanged",
}
"""-reward * logprob, averaged over tokens."""


def rows_of_answers(num: int) -> Rows:
    """Rows of 4 tokens of context and an answer, each its own group."""
    draw = np.random.default_rng(3)
    groups: Rows = []
    for _ in range(num):
        length = int(draw.integers(1, 9))
        ids = draw.integers(6, 52, 4 + length).tolist()
        groups.append([(ids, [False] * 4 + [True] * length)])
    return groups


def demonstrations(num: int = 5) -> tuple[BatchHeader, Tokens]:
    return batch_of(rows_of_answers(num))


def gradients_of(step: TrainerRank, *arguments: Any) -> list[dict[str, torch.Tensor]]:
    """Train, and return the gradient of each optimizer step."""
    found = list[dict[str, torch.Tensor]]()

    def keep(*_: Any) -> None:
        named = step.masters.named.items()
        found.append(
            {name: one.grad.clone() for name, one in named if one.grad is not None}
        )

    with register_optimizer_step_pre_hook(keep):
        step.train(*arguments)
    return found


@pytest.mark.parametrize("micro_batch_tokens", [1, 16384])
def test_gradient_is_that_of_the_plain_sum(
    make_step: MakeStep, tiny_model_dir: Path, micro_batch_tokens: int
) -> None:
    weight, temperature = 0.3, 0.7
    step = make_step(
        dtype="float32",
        temperature=temperature,
        trainer={"micro_batch_tokens": micro_batch_tokens, "max_grad_norm": 1e9},
        algorithm={**PLAIN, "sft_weight": weight},
        measures_gap=False,
    )
    (header, arrays), shown = make_batch(), demonstrations()
    (found,) = gradients_of(step, header, arrays, shown)

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    reward_N = np.zeros(len(arrays), np.float32)
    for entry in header.trajectories:
        reward_N[entry.start : entry.end] = entry.reward
    reward_M = torch.from_numpy(reward_N[arrays.is_sampled])
    logprob_M = naive(plain, header, arrays, temperature)
    nll = -naive(plain, *shown, 1.0).mean()
    (-(reward_M * logprob_M).mean() + weight * nll).backward()
    expected = {
        name: one.grad for name, one in plain.named_parameters() if one.grad is not None
    }
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        limit = 1e-6 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=limit)


def test_metrics_of_rollouts_do_not_see_demonstrations(make_step: MakeStep) -> None:
    batch, shown = make_batch(), demonstrations()
    algorithm = {"sft_weight": 0.5}
    mixed, alone = make_step(algorithm=algorithm), make_step()
    found, expected = mixed.train(*batch, shown), alone.train(*batch)
    of_demonstrations = {
        name: found.pop(name) for name in [*found] if name.startswith("sft/")
    }
    for name, value in expected.items():
        if not name.startswith(("perf/", "policy/grad_norm")):
            assert found[name] == value, name
    assert found.keys() == expected.keys()
    assert found["policy/grad_norm"] != expected["policy/grad_norm"]
    assert of_demonstrations["sft/rows"] == 5
    assert of_demonstrations["sft/tokens"] == shown[1].is_sampled.sum()
    assert mixed.rollout_gaps == alone.rollout_gaps
    assert mixed.rollout_advantages == alone.rollout_advantages


def test_each_mini_batch_has_its_part_of_the_rows(
    make_step: MakeStep, tiny_model_dir: Path
) -> None:
    # So small a rate that both steps begin with the same weights.
    trainer = {"mini_batches": 2, "learning_rate": 1e-20, "max_grad_norm": 1e9}
    mixed = {**PLAIN, "sft_weight": 1.0}
    found, expected = (
        gradients_of(
            make_step(
                dtype="float32",
                trainer=trainer,
                algorithm=algorithm,
                measures_gap=False,
            ),
            *make_batch(num_groups=2),
            *shown,
        )
        for algorithm, shown in ((mixed, [demonstrations(num=4)]), (PLAIN, []))
    )
    groups = rows_of_answers(num=4)
    for number in range(2):
        part = batch_of(groups[2 * number : 2 * number + 2])
        plain = AutoModelForCausalLM.from_pretrained(
            tiny_model_dir, dtype=torch.float32
        )
        (-naive(plain, *part).mean()).backward()
        for name, weight in plain.named_parameters():
            if weight.grad is not None:
                total = expected[number][name] + weight.grad
                torch.testing.assert_close(
                    found[number][name], total, rtol=1e-5, atol=1e-5
                )


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 5])
def test_two_ranks_learn_like_one(
    num_rows: int, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """With one row, the second rank has none."""
    values: dict[str, Any] = {"algorithm": {"sft_weight": 0.5}, "dtype": "float32"}
    alone = TrainerRank(make_spec(tiny_model_dir, tmp_path, **values))
    with running(tiny_model_dir, tmp_path / "ranks", 2, **values) as group:
        for version in range(2):
            batch, shown = make_batch(version=version), demonstrations(num_rows)
            shown = (shown[0].model_copy(update={"version": version}), shown[1])
            expected = alone.train(*batch, shown)
            body = pack_batch(*batch, pack_batch(*shown))
            found = group.post("/train", body, TrainResponse).metrics
            for name in ("sft/loss", "sft/rows", "sft/tokens", "policy/grad_norm"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4), name


def test_weight_falls_to_zero() -> None:
    falling = AlgorithmConfig(sft_weight=0.2, sft_steps=4)
    found = [falling.sft_weight_at(version) for version in range(6)]
    assert found == pytest.approx([0.2, 0.15, 0.1, 0.05, 0, 0])
    assert AlgorithmConfig(sft_weight=0.2).sft_weight_at(999) == 0.2


def test_demonstrations_travel_with_the_batch() -> None:
    batch, shown = make_batch(), demonstrations()
    body = pack_batch(*batch, pack_batch(*shown))
    assert unpack_demonstrations(pack_batch(*batch)) is None
    found = unpack_demonstrations(body)
    assert found is not None
    for (header, tokens), (sent, sent_tokens) in (
        (found, shown),
        (unpack_batch(body), batch),
    ):
        assert header == sent
        assert tokens.spans == sent_tokens.spans
        assert (tokens.ids == sent_tokens.ids).all()


def test_infinite_loss_of_demonstrations_skips_the_step(make_step: MakeStep) -> None:
    step = make_step(algorithm={"sft_weight": 1e300})
    before = step.weights_digest()
    metrics = step.train(*make_batch(), demonstrations())
    assert metrics["trainer/skipped_steps"] == 1
    assert step.weights_digest() == before


# ---- settings, and what is shown


def mixed_config(folder: Path, **sections: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = write_rows(folder / "rows.jsonl", 22, 0)
    given = {
        "algorithm": {"sft_weight": 0.5},
        "demonstrations": {"files": [str(rows)], "num_rows": 4},
    }
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}
    return write_config(folder, **given)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"sft_weight": 1.0}}, "sft_weight=1.0 needs `demonstrations`"),
        ({"algorithm": {"sft_weight": -1}}, "algorithm.sft_weight=-1"),
        ({"algorithm": {"sft_steps": 5}}, "sft_steps has no effect"),
        ({"demonstrations": {"num_rows": 2}}, "give either demonstrations.files or"),
    ],
)
def test_settings_that_disagree_are_refused(
    sections: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(write_config(tmp_path, **sections))


def test_check_reads_the_rows(tmp_path: Path) -> None:
    config = mixed_config(tmp_path)
    checked = CliRunner().invoke(app, ["check", str(config)])
    assert checked.exit_code == 0, checked.output
    assert re.search(r"demonstrations: 22 rows, \d+ tokens", checked.output)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() + '{"prompt": "a 1"}\n')
    refused = CliRunner().invoke(app, ["check", str(config)])
    assert re.search(r"rows\.jsonl line 23", str(refused.exception))


def test_console_shows_their_loss() -> None:
    line = {"step": 1, "reward/mean": 0.5, "sft/loss": 1.25, "sft/rows": 8.0}
    shown = plain_line(Steps([line]), 1, 9, 0)
    assert "demonstrations loss 1.250, 8 rows a step" in shown


# ---- real runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    return mixed_config(
        folder,
        algorithm={"sft_steps": 10},
        trainer={"num_steps": 14},
        checkpoint={"every": 5},
        supervision={"backoff_s": 0.01},
    )


@pytest.fixture(scope="module")
def whole(config: Path, folder: Path) -> Path:
    done = run(config, folder / "whole")
    assert done.returncode == 0, done.stderr
    return folder / "whole"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_learns_them_while_their_weight_lasts(whole: Path) -> None:
    lines = read_lines(whole / "metrics.jsonl")
    rows = [line.get("sft/rows") for line in lines]
    # 22 rows, 4 a step: the last batch of an epoch has 2.
    assert rows == [4, 4, 4, 4, 4, 2, 4, 4, 4, 4, None, None, None, None]
    assert lines[9]["sft/loss"] < 0.9 * lines[0]["sft/loss"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["run", "trainer"])
def test_killed_run_has_the_same_bits(
    config: Path, whole: Path, tmp_path: Path, victim: str
) -> None:
    process = start(config, tmp_path / "run")
    wait_for_steps(tmp_path / "run", 7, process)
    if victim == "trainer":
        children_of(process, "asyncrl.trainer.rank_process")[0].kill()
        process.communicate(timeout=240)
    else:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        done = run(config, tmp_path / "run")
        assert done.returncode == 0, done.stderr
    assert differences(tmp_path / "run", whole) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weight_zero_has_the_bits_of_a_run_without_them(tmp_path: Path) -> None:
    trainer = {"num_steps": 4}
    off = mixed_config(tmp_path / "a", algorithm={"sft_weight": 0}, trainer=trainer)
    without = write_config(tmp_path / "b", trainer=trainer)
    for name, config in (("off", off), ("without", without)):
        done = run(config, tmp_path / name)
        assert done.returncode == 0, done.stderr
    assert differences(tmp_path / "off", tmp_path / "without") == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resume_with_other_rows_is_refused(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    pins = json.loads((whole / "data.json").read_text())
    assert [*pins] == ["demonstrations/rows"]
    other = write_rows(tmp_path / "rows.jsonl", 22, 1)
    overrides = [f"demonstrations.files=[{other}]", "trainer.num_steps=16"]
    done = run(config, whole, *overrides)
    assert done.returncode == 2
    assert "demonstrations/rows have changed" in done.stderr
    assert "--allow-change task.digest" in done.stderr
