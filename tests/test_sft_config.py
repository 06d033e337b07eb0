"""Settings of `asyncrl sft`, and refusals before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from followed_ways import split
from job_runs import CONFIG
from sft_cases import CHATML, GIVEN, GOOD, base_model
from typer.testing import CliRunner

from asyncrl.cli import app

pytestmark = pytest.mark.extension("sft")
ROOT = Path(__file__).parents[1]


@pytest.mark.extension("ray")
def test_check_counts_rows_and_plans_no_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    where = "placement.trainer={nodes: 2, gpus: 1} launcher=ray trainer.world_size=2"
    nodes = "--devices 2x1xH100-80GB --cores 16 --memory 256GB"
    words = [*split(where), *nodes.split()]
    shown = CliRunner().invoke(app, ["check", "configs/sft.yaml", *words])
    assert shown.exit_code == 0, shown.output
    assert "data.files: 85 rows" in shown.output
    assert "data.eval_files: 23 rows" in shown.output
    assert "trainer-1" in shown.output
    assert "engine-0" not in shown.output
    assert "/dev/shm: not used" in shown.output


def test_check_plans_memory_for_the_longest_row(tmp_path: Path) -> None:
    """A row above trainer.micro_batch_tokens is a pass of its own."""
    architecture = GIVEN["model"]["scratch"]["architecture"]
    longer = {**architecture, "max_position_embeddings": 8192}
    scratch = {**GIVEN["model"]["scratch"], "architecture": longer}
    planned = []
    for length in (10, 6000):
        rows = tmp_path / f"{length}.jsonl"
        rows.write_text(json.dumps({"prompt": "a", "completion": "b" * length}) + "\n")
        path = tmp_path / f"{length}.yaml"
        given = {
            **GIVEN,
            "model": {**GIVEN["model"], "scratch": scratch},
            "data": {"files": [str(rows)], "max_tokens": 8192},
            "placement": {"trainer": "cpu"},
        }
        path.write_text(yaml.safe_dump(given))
        shown = CliRunner().invoke(app, ["check", str(path)])
        assert shown.exit_code == 0, shown.output
        (line,) = [
            line for line in shown.output.splitlines() if line.startswith("trainer-0")
        ]
        planned.append(float(line.split()[-2]))
    assert planned[1] > 1.5 * planned[0], planned


@pytest.mark.parametrize("command", ["sft", "run"])
def test_check_prints_what_a_run_would_warn_of(
    command: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Of rows, and of a template: its end token stops nothing, and it omits a role."""
    model = base_model(tiny_model_dir, tmp_path / "model")
    template = tmp_path / "template.jinja"
    omitting = "in messages if message.role != 'system' %}"
    template.write_text(CHATML.replace("in messages %}", omitting))
    rows = tmp_path / "rows.jsonl"
    long = {"prompt": "a", "completion": "b" * 40}
    rows.write_text(f"{json.dumps(GOOD)}\n{json.dumps(long)}\n")
    data = {"files": [str(rows)], "max_tokens": 30, "overlong": "skip"}
    config = GIVEN | {"data": data, "placement": {"trainer": "cpu"}}
    said = ["warning: the last answers of 1 rows end with no", "warning: 1 rows are"]
    if command == "run":
        task = CONFIG["task"] | {"system_prompt": "be short"}
        rollout = CONFIG["rollout"] | {"max_prompt_tokens": 64}
        config = CONFIG | {"task": task, "rollout": rollout}
        said = ["note: the chat template ends answers with no token at which"]
        said.append("leaves out the system message of prompts of the task")
    config["model"] = {"path": str(model), "chat_template": str(template)}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    shown = CliRunner().invoke(app, ["check", str(path)])
    assert [text for text in said if text not in shown.output] == []
    (model / "generation_config.json").write_text("{")
    refused = CliRunner().invoke(app, ["check", str(path)]).exception
    assert "generation_config.json is not a JSON object: Expecting" in str(refused)
