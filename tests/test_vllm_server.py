"""The vLLM server as a process: its arguments, its lock, its seeds, and how it starts
and ends.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_in_process import make_qwen3
from pydantic import ValidationError
from vllm_house import World
from vllm_process import SECRET, VllmProcess, vllm_process

from asyncrl.base.errors import find_fatal
from asyncrl.base.signals import STOPS
from asyncrl.config.rollout_config import RolloutConfig
from asyncrl.extensions.vllm.settings import VLLM_OWN
from asyncrl_servers.vllm import arguments as vllm_arguments
from asyncrl_servers.vllm.arguments import VllmSpec, build_arguments, first_error

SPEC: dict[str, Any] = {"name": "engine-0", "dtype": "float32", "device": "cpu"}
SPEC |= {"max_length": 512, "slots": 16}


def arguments_of(folder: Path, *, is_cpu: bool = True, **fields: Any) -> list[str]:
    return build_arguments(
        VllmSpec(**{**SPEC, "model_path": str(folder), **fields}), is_cpu=is_cpu
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["--max-num-seqs=16", "--max-model-len=512", "--skip-tokenizer-init"]),
        (
            {},
            [
                f"--kv-cache-memory-bytes={max(2**26, (16 * 4 + 1) * 128 * 2 * 4 * 2 * 64 * 4)}"
            ],
        ),
        ({"args": {"kv_cache_memory_bytes": 99}}, ["--kv-cache-memory-bytes=99"]),
        (
            {"args": {"block-size": 32, "prefix_caching": False}},
            ["--block-size=32", "--no-prefix-caching"],
        ),
        (
            {"args": {"compilation-config": {"mode": 3}}},
            ["--compilation-config", '{"mode": 3}'],
        ),
        ({"args": {"sizes": [1, 2], "absent": None}}, ["--sizes", "1", "2"]),
        (
            {"adapters": {"rank": 12, "scale": 1.0}},
            ["--enable-lora", "--max-lora-rank=16"],
        ),
    ],
)
def test_vllm_receives_required_and_user_arguments(
    folder: Path, fields: dict[str, Any], expected: list[str]
) -> None:
    words = arguments_of(folder, **fields)
    assert [word for word in expected if word not in words] == []
    assert "--absent" not in words
    assert not any("kv-cache" in word for word in arguments_of(folder, is_cpu=False))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (
            {"n_layer": 4, "n_head": 8, "n_embd": 512},
            f"--kv-cache-memory-bytes={(16 * 4 + 1) * 128 * 2 * 4 * 512 * 4}",
        ),
        ({"mamba_d_state": 8}, "--no-enable-prefix-caching"),
        (
            {"model_type": "cohere2", "sliding_window": 12},
            '{"sliding_window": 11}',
        ),
        (
            {"model_type": "llama4_text", "attn_temperature_tuning": True},
            '{"attn_temperature_tuning": true}',
        ),
        (
            {
                "rope_parameters": {
                    "original_max_position_embeddings": 32,
                    "llama_4_scaling_beta": 0.1,
                }
            },
            '{"llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.1}}',
        ),
    ],
)
def test_arguments_follow_config_json(
    tmp_path: Path, config: dict[str, Any], word: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert word in arguments_of(tmp_path)


@pytest.mark.extension("vllm")
def test_arguments_of_the_run_are_refused(folder: Path) -> None:
    for name in (*VLLM_OWN, "max-model-len", "no-enable-scale-out", "--middleware+"):
        with pytest.raises(ValidationError, match=rf"vllm\.{re.escape(name)} is set"):
            RolloutConfig(engine="vllm", vllm={name: "x"})
    RolloutConfig(engine="vllm", vllm={"enforce-eager": True})
    defaults = {
        "kv_cache_memory_bytes",
        "enforce_eager",
        "distributed_executor_backend",
    }
    defaults |= {"no_enable_chunked_prefill", "max_num_batched_tokens"}
    options = [
        word
        for word in arguments_of(folder, adapters={"rank": 8, "scale": 1.0})
        if word.startswith("--")
    ]
    ours = {option[2:].partition("=")[0].replace("-", "_") for option in options}
    assert ours - defaults <= VLLM_OWN, "nothing that a user gives is silently replaced"


def test_batch_invariance_is_requested_only_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_arguments.tempfile, "tempdir", None)
    for is_cpu, deterministic in ((False, True), (False, False), (True, True)):
        monkeypatch.setattr(
            vllm_arguments, "is_cpu_build", lambda is_cpu=is_cpu: is_cpu
        )
        monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
        spec = VllmSpec(**SPEC, model_path="/model", deterministic=deterministic)
        vllm_arguments.set_environment(spec, tmp_path)
        assert (os.environ.get("VLLM_BATCH_INVARIANT") == "1") == (
            deterministic and not is_cpu
        )
        assert os.environ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "3600"


def test_first_error_of_the_log_is_named() -> None:
    log = (
        "(MainProcess pid=1) WARNING base.py:380] ValueError: Tokenizer not available\n"
    )
    log += "(Worker pid=8) ERROR worker.py:12] ValueError: Available memory is less than desired\n"
    log += "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    assert first_error(log) == "ValueError: Available memory is less than desired"


slow_vllm = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def server(world: World) -> VllmProcess:
    return world.process


class TestAServer:
    pytestmark = slow_vllm

    def test_every_route_answers_to_the_secret_alone(self, server: VllmProcess) -> None:
        routes = re.findall(r"Route: (\S+), Methods: (\S+)", server.read_log())
        ours = "/health /pause /collective_rpc /inference/v1/generate /update_weights /v1/models"
        assert set(ours.split()) <= {path for path, _ in routes}
        for path, methods in [
            *routes,
            ("/metrics", "GET"),
            ("/nowhere", "GET"),
            ("/docs", "GET"),
        ]:
            for method in methods.replace(",", " ").split():
                for secret in (None, SECRET + "x", SECRET[:-1]):
                    with pytest.raises(httpx.HTTPStatusError) as refused:
                        server.ask(method, path, None, secret, 10)
                    assert refused.value.response.status_code == 401, (
                        method,
                        path,
                        secret,
                    )
        assert server.ask("GET", "/v1/models")["data"][0]["id"] == "policy"

    def test_the_secret_is_in_no_argument_and_no_environment(
        self, server: VllmProcess
    ) -> None:
        pids = server.group()
        assert len(pids) >= 4
        for pid in pids:
            for name in ("cmdline", "environ"):
                assert SECRET.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()

    def test_signals_to_all_processes_end_none(self, server: VllmProcess) -> None:
        pids = server.group()
        for pid, number in itertools.product(pids, STOPS):
            os.kill(pid, number)
        assert len(server.generate([10, 11, 12])[0]) == 16
        assert set(server.group()) == set(pids)

    def test_prefills_of_more_than_a_step_leave_the_engine_alive(
        self, server: VllmProcess
    ) -> None:
        """A split prefill of a seeded request would end it."""

        def ask(index: int) -> list[int]:
            return server.generate(
                [10 + index] * 2500, temperature=1.0, seed=index, max_tokens=5
            )[0]

        with ThreadPoolExecutor(4) as pool:
            assert len({*map(tuple, pool.map(ask, range(4)))}) == 4


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("threads", [1, 2], ids=["forked", "spawned"])
def test_failed_start_names_the_cause_and_a_way_out(
    threads: int, tmp_path: Path
) -> None:
    """The engine fails after its worker has started, and must not wait for it."""
    model = make_qwen3(tmp_path / "model")
    spec = {**SPEC, "model_path": str(model), "threads": threads}
    with vllm_process(
        {**spec, "args": {"kv-cache-memory-bytes": 2**44}}, tmp_path / "server"
    ) as server:
        assert server.process.wait(400) == 1
        fatal = find_fatal(server.read_log())
        assert fatal is not None, server.read_log()[-3000:]
        assert "memory" in fatal.error.lower()
        assert fatal.way_out
        server.wait_group_ended()
