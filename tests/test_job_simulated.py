"""A run whose engines are a latency model: it trains on random tokens, as many as the config says, and tells
that they are random.
"""

from __future__ import annotations

from pathlib import Path

import job_runs
import pytest

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.run.specs import engine_spec
from asyncrl_servers.simulated.simulated_state import SimulatedSpec


def test_the_simulated_engine_is_told_its_latency_model_and_draws_from_the_models_vocabulary(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 31}')
    config = load_config(
        job_runs.write_config(
            tmp_path, rollout={"engine": "simulated", "simulated": {"swap_s": 0.5, "mean_tokens": 9}}
        )
    )
    spec = SimulatedSpec.model_validate_json(engine_spec(config, tmp_path, "engine-0"))
    assert (spec.vocab_size, spec.swap_s, spec.mean_tokens, spec.max_length) == (31, 0.5, 9, 40)
    defaults = SimulatedSpec(name="engine-0", slots=1, max_length=2)
    assert (
        config.rollout.simulated.model_copy(update={"swap_s": 0.001, "mean_tokens": 64}).model_dump().items()
        <= defaults.model_dump().items()
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.simulated.sigma=0"],
            "rollout.simulated is the latency model of the simulated engine, and rollout.engine=embedded",
        ),
        (
            ["rollout.engine=simulated", "trainer.logprob_gap_limit=0.1"],
            "trainer.logprob_gap_limit=0.1 compares the logprobs",
        ),
    ],
)
def test_a_latency_model_for_another_engine_and_a_gap_to_no_model_are_refused(
    tmp_path: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(job_runs.write_config(tmp_path), overrides)


@pytest.mark.slow
def test_a_run_on_simulated_engines_goes_to_its_end_and_measures_no_gap(tmp_path: Path) -> None:
    config = job_runs.write_config(
        tmp_path,
        rollout={"engine": "simulated", "simulated": {"mean_tokens": 7, "sigma": 0}},
        trainer={"num_steps": 3},
    )
    done = job_runs.run(config, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "rollout.engine=simulated: tokens are drawn at random" in done.stdout
    assert "WARNING" not in done.stdout
    steps = job_runs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["sample/length_mean"] for step in steps] == [7.0] * 3
    assert not [name for step in steps for name in step if "logprob_gap" in name]
