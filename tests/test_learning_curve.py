"""benchmarks/learning_curve.py: its runs are valid, end in time, and a failed one loses
no other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import learning_curve
import pytest
from costly_cases import slow
from shape_task import make_shape

from asyncrl.config import load_config
from asyncrl.launch.machine import described_nodes
from asyncrl.launch.plan import make_plan, resolve_auto
from examples.arithmetic import last_number

ROOT = Path(learning_curve.__file__).parents[1]

RUN = """
import json, pathlib, signal, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
folder.mkdir(parents=True)
steps = [{"time_s": 1.0 + step, "reward/mean": step / 10, "sample/length_mean": 3.0} for step in range(3)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\\n" for step in steps))
signal.pause()
"""
FAILS = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
folder.mkdir(parents=True)
(folder / "metrics.jsonl").touch()
sys.exit("no device")
"""


SHARED = ["placement={trainer: 0, rollout: 0, share: 0.35}", "buffer.max_staleness=2"]


@pytest.mark.parametrize(("ours", "staleness"), [slow(None, 0), (SHARED, 2)])
def test_the_arithmetic_run_fits_one_device(
    ours: list[str] | None,
    staleness: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    arguments = learning_curve.parse([str(ROOT / "examples" / "arithmetic.yaml")])
    arguments.ours = ours
    words = learning_curve.command("asyncrl", arguments)
    settings = words[words.index("run") + 2 :]
    model = make_shape(tmp_path / "model")
    config = load_config(arguments.config, [*settings, f"model.path={model}"])
    nodes = described_nodes("1x80GB", 16, "128GB")
    assert nodes is not None
    plan = make_plan(resolve_auto(config, nodes)[0], nodes)
    assert {
        one.device for one in plan.processes if one.side in ("trainer", "engine")
    } == {"cuda:0"}
    assert config.buffer.max_staleness == staleness


def test_a_run_ends_at_its_limit_and_keeps_its_curve(tmp_path: Path) -> None:
    words = [sys.executable, "-c", RUN]
    curve = learning_curve.measure("run", words, tmp_path, start_s=60.0, limit_s=2.5)
    assert curve is not None
    assert curve.rewards == [0.0, 0.1, 0.2]


def test_a_run_that_fails_prints_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [sys.executable, "-c", FAILS]
    assert (
        learning_curve.measure("run", words, tmp_path, start_s=60.0, limit_s=2.5)
        is None
    )
    assert "run FAILED, exit code 1: no device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("60 - 93 = -33.", 1.0),
        ("-33", 1.0),
        ("33", 0.0),
        ("-33, not 27", 0.0),
        ("", 0.0),
        ("-3,3", 1.0),
    ],
)
def test_the_last_number_is_the_answer(completion: str, reward: float) -> None:
    assert last_number(None, completion, "-33") == reward
