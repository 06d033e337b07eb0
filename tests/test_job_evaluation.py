"""Real runs with evaluation: what is evaluated, at which weights, and that training does not feel it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from engine_in_process import running_engine
from job_runs import all_gone, children_of, read_lines, run, staging_of, start, wait_for_steps, write_config
from safetensors.numpy import load_file

from asyncrl.config import EvalConfig
from asyncrl.messages.engine_calls import GenerateRequest
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.from_config import read_eval_task

pytestmark = pytest.mark.slow
EVAL: dict[str, Any] = {
    "task": {"python": "asyncrl.tasks.letters:Letters", "size": 50},
    "every": 4,
    "num_prompts": 12,
    "samples": 2,
    "temperature": 1.0,
    "slots": 4,
    "timeout_s": 100,
}
NUM_STEPS = 10


def reward_under(model_dir: Path) -> float:
    """Mean reward of the eval prompts under the weights of a folder: one engine in this process, one
    completion after the other.
    """
    config = EvalConfig.model_validate(EVAL)
    task, prompts = read_eval_task(config)
    tokenizer, rewards = HFChatTokenizer(model_dir), []
    with running_engine(model_dir, max_length=40) as engine:
        for prompt, sample in product(prompts, range(config.samples)):
            ids, seed = (
                list(tokenizer.encode_chat(prompt.messages)),
                derive_seed(config.seed, prompt.prompt_id, sample, 0),
            )
            request = GenerateRequest(
                request_id="r", prompt_ids=ids, max_tokens=24, temperature=config.temperature, seed=seed
            )
            rewards.append(
                float(
                    task.score(prompt, tokenizer.decode(engine.submit(request).result(timeout=60).token_ids))
                )
            )  # type: ignore[arg-type]
    return fmean(rewards)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run at max_staleness 0, so that every version is published."""
    folder = tmp_path_factory.mktemp("evaluated")
    config = write_config(folder, eval=EVAL, trainer={"num_steps": NUM_STEPS}, observe={"tensorboard": True})
    answer = run(config, folder / "run", timeout_s=240)
    assert answer.returncode == 0, answer.stderr
    (folder / "said.txt").write_text(answer.stdout)
    return folder / "run"


def test_the_first_and_last_weights_and_each_multiple_are_evaluated(evaluated: Path) -> None:
    lines = read_lines(evaluated / "eval.jsonl")
    versions = [line["policy_version"] for line in lines]
    assert (versions[0], versions[-1]) == (0, NUM_STEPS)
    assert set(versions) <= {0, 4, 8, NUM_STEPS}
    assert len(versions) + lines[-1]["eval/skipped"] == 4
    assert all(line["eval/failed"] == 0 and line["eval/abandoned"] == 0 for line in lines)
    said = (evaluated.parent / "said.txt").read_text()
    assert said.count("\neval v") == len(lines)
    assert "WARNING" not in said, "a token of another version would have ended the evaluation with a warning"
    on_steps = [
        line["eval/version"] for line in read_lines(evaluated / "metrics.jsonl") if "eval/version" in line
    ]
    assert on_steps == versions[: len(on_steps)]
    assert len(on_steps) >= 1
    assert (evaluated / "reward.png").is_file()


def test_what_is_evaluated_are_the_weights_of_that_version(evaluated: Path) -> None:
    lines = read_lines(evaluated / "eval.jsonl")
    rewards = [line["eval/reward_mean"] for line in lines]
    assert rewards[0] == pytest.approx(reward_under(evaluated / "model"), abs=1e-12)
    assert rewards[-1] == pytest.approx(reward_under(evaluated / "final"), abs=1e-12)
    assert rewards[0] != rewards[-1], "the two could not be told apart"


def test_a_run_at_max_staleness_0_is_the_same_bit_for_bit_without_evaluation(
    evaluated: Path, tmp_path: Path
) -> None:
    answer = run(write_config(tmp_path, trainer={"num_steps": NUM_STEPS}), tmp_path / "run", timeout_s=240)
    assert answer.returncode == 0, answer.stderr
    with_eval, without = (
        read_lines(evaluated / "trained.jsonl"),
        read_lines(tmp_path / "run" / "trained.jsonl"),
    )
    assert len(with_eval) == NUM_STEPS
    assert with_eval == without
    weights, others = (
        load_file(folder / "final" / "model.safetensors") for folder in (evaluated, tmp_path / "run")
    )
    assert all(weights[name].tobytes() == others[name].tobytes() for name in others)


def test_a_killed_eval_engine_ends_evaluation_with_a_warning_and_not_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path, eval=EVAL, buffer={"max_staleness": 2}, trainer={"num_steps": 40})
    process = start(config, tmp_path / "run")
    wait_for_steps(tmp_path / "run", 2, process)
    children = children_of(process)
    (engine,) = children_of(process, "engine-eval")
    engine.kill()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.count("WARNING: the run goes on without evaluation: engine-eval") == 1
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 40
    assert (tmp_path / "run" / "final" / "config.json").is_file()
    assert all_gone(children)
    assert staging_of(process.pid) == []
