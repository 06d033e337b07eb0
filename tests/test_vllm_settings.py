"""What a vLLM server must be, and the environment that it gets, without a vLLM: pure functions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.vllm.facts import VllmFacts, check_settings
from asyncrl.engines.vllm.vllm_routes import ServerInfo
from asyncrl.errors import ConfigError
from asyncrl_servers.vllm import environment
from asyncrl_servers.vllm.arguments import VllmSpec

FACTS = VllmFacts("/model", "float32", 4, 64, (), False, "cpu")
MODEL = {
    "model": "/model",
    "dtype": "torch.float32",
    "max_model_len": 64,
    "logprobs_mode": "processed_logprobs",
}


def info(env: dict[str, Any], **model: Any) -> ServerInfo:
    return ServerInfo(
        vllm_config={"model_config": MODEL | model, "scheduler_config": {"max_num_seqs": 4}}, vllm_env=env
    )


@pytest.mark.parametrize(
    "env", [{}, {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": None}, {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": 60}]
)
def test_a_server_that_keeps_connections_longer_than_we_do_is_taken(env: dict[str, Any]) -> None:
    check_settings("engine-0", info(env), FACTS)


def test_a_server_that_closes_resting_connections_first_is_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings("engine-0", info({"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": 5}), FACTS)
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5" in str(caught.value)
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=60 or more" in str(caught.value)


def test_a_server_that_gives_the_logprobs_of_another_distribution_is_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        check_settings("engine-0", info({}, logprobs_mode="raw_logprobs"), FACTS)


@pytest.mark.parametrize(
    ("is_cpu", "deterministic", "is_set"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_kernels_that_do_not_depend_on_the_batch_are_asked_for_on_cuda_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cpu: bool, deterministic: bool, is_set: bool
) -> None:
    monkeypatch.setattr(environment, "is_cpu_build", lambda: is_cpu)
    monkeypatch.setattr(environment.tempfile, "tempdir", None)
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    environment.set_environment(
        VllmSpec(name="engine-0", model_path="/model", max_length=64, slots=4, deterministic=deterministic),
        tmp_path,
    )
    assert (os.environ.get("VLLM_BATCH_INVARIANT") == "1") == is_set
    assert os.environ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "3600"
