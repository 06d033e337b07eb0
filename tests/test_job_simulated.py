"""rollout.engine=simulated: its engines are told their latency model, and nothing compares their logprobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_runs import write_config

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.run.specs import engine_spec
from asyncrl_servers.simulated.simulated_state import SimulatedSpec


def test_the_simulated_engine_is_told_its_latency_model_and_draws_from_the_models_vocabulary(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 31}')
    config = load_config(
        write_config(
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
        load_config(write_config(tmp_path), overrides)
