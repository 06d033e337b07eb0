"""Reports of evaluations, and checks of their task."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from job_runs import read_lines, write_config

from asyncrl.config import EvalConfig, load_config
from asyncrl.job.report import Reporter
from asyncrl.observe.show import render_status
from asyncrl.rollouts.evaluation import EvalResult, Sample
from asyncrl.tasks.from_config import build_task, read_eval_task

LETTERS = {"python": "asyncrl.tasks.toy:Letters", "size": 20}


def eval_config(**values: Any) -> EvalConfig:
    return EvalConfig.model_validate({"task": LETTERS, "num_prompts": 5} | values)


def test_an_evaluation_is_written_shown_and_warned_of(tmp_path: Path, capsys: Any) -> None:
    config = write_config(
        tmp_path,
        eval={"task": LETTERS},
        observe={"console": "plain", "trackers": ["tensorboard"]},
    )
    (tmp_path / "config.yaml").write_text(config.read_text())
    reporter = Reporter(load_config(config), tmp_path, "test")
    reporter.start()
    samples = [Sample("0/0", 0.5, 4, False), Sample("0/1", 1.0, 6, True)]
    reporter.evaluated(EvalResult(20, samples, num_failed=1, seconds=3.0, num_skipped=2))
    reporter.evaluated(EvalResult(40, [], num_failed=3, last_failure="KeyError: 'x'"))
    reporter.finish("done")
    asyncio.run(reporter.aclose())
    first, second = read_lines(tmp_path / "eval.jsonl")
    assert (first["policy_version"], first["eval/reward_mean"], first["eval/skipped"]) == (20, 0.75, 2)
    assert (second["last_failure"], "eval/reward_mean" in second) == ("KeyError: 'x'", False)
    said = capsys.readouterr().out
    assert "eval v20 reward 0.750 ± 0.250  5.0 tokens, 50.0% truncated  3.0 s  samples failed: 1" in said
    assert "WARNING: no sample of the evaluation of policy_version 40 has a reward, the last " in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["evaluation"]["policy_version"] == 40
    assert len(summary["warnings"]) == 1
    assert "v40" in render_status(tmp_path)
    assert len(json.loads(render_status(tmp_path, as_json=True))["evaluations"]) == 2
    assert list((tmp_path / "tensorboard").iterdir())


def test_eval_prompts_are_the_first_of_the_task() -> None:
    config = eval_config()
    task, prompts = read_eval_task(config)
    assert [prompt.prompt_id for prompt in prompts] == [f"0/{number}" for number in range(5)]
    assert prompts == read_eval_task(eval_config(num_prompts=20))[1][:5]
    trained_on = build_task(config.task, 0)
    assert any(trained_on.prompt(number) != task.prompt(number) for number in range(20))
