"""The vLLM server as a process: its arguments, its lock, its seeds, and how it starts and ends."""

from __future__ import annotations

import json
import random
import re
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_in_process import make_qwen3
from vllm_house import MAX_LENGTH, House
from vllm_process import SECRET, VllmProcess, vllm_process

from asyncrl.http import Refused
from asyncrl.messages.base import find_fatal
from asyncrl_servers.vllm.arguments import (
    ELSEWHERE,
    KV_CACHE,
    MIN_BYTES,
    VllmSpec,
    build_arguments,
    kv_cache_bytes,
)
from asyncrl_servers.vllm.environment import last_error

SPEC: dict[str, Any] = {
    "name": "engine-0",
    "dtype": "float32",
    "device": "cpu",
    "max_length": 512,
    "slots": 16,
}
OTHERS = (
    "block_size max_num_batched_tokens enable_prefix_caching no_enable_prefix_caching kv_cache_memory_bytes "
    "gpu_memory_utilization "
    "enforce_eager no_enforce_eager compilation_config cudagraph_capture_sizes disable_uvicorn_access_log "
    "disable_fastapi_docs max_loras"
)
KNOWN = {name: [f"--{name.replace('_', '-')}"] for name in (*ELSEWHERE, *OTHERS.split())}


def arguments_of(folder: Path, *, is_cpu: bool = True, **fields: Any) -> list[str]:
    return build_arguments(VllmSpec(**{**SPEC, "model_path": str(folder), **fields}), KNOWN, is_cpu=is_cpu)


def test_what_the_run_depends_on_is_always_given_to_vllm(tmp_path: Path) -> None:
    given = arguments_of(tmp_path)
    for option in (
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--enforce-eager",
        "--logprobs-mode=processed_logprobs",
        "--served-model-name=policy",
        "--max-num-seqs=16",
        "--max-model-len=512",
        "--generation-config=vllm",
        "--worker-extension-cls=asyncrl_servers.vllm.worker_extension.WeightLoader",
        "--distributed-executor-backend=asyncrl_servers.vllm.monkeypatches.CpuExecutor",
    ):
        assert option in given
    assert not any("secret" in option or "api-key" in option for option in given)


def test_users_arguments_are_switches_lists_json_and_values(tmp_path: Path) -> None:
    args = {
        "block-size": 32,
        "enable_prefix_caching": False,
        "enforce-eager": False,
        "cudagraph_capture_sizes": [1, 2],
        "compilation-config": {"mode": 3},
        "compilation_config.backend": "eager",
        "max_num_batched_tokens": None,
    }
    given = arguments_of(tmp_path, args=args)
    assert "--block-size=32" in given
    assert "--no-enable-prefix-caching" in given
    assert "--no-enforce-eager" in given
    assert "--enforce-eager" not in given
    assert given[given.index("--cudagraph-capture-sizes") :][:3] == ["--cudagraph-capture-sizes", "1", "2"]
    assert given[given.index("--compilation-config") + 1] == '{"mode": 3}'
    assert "--compilation-config.backend=eager" in given
    assert not any("batched" in option for option in given)


def test_an_unknown_argument_is_refused_with_the_nearest_known_ones(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        arguments_of(tmp_path, args={"max-num-batch-tokens": 1})
    assert "rollout.vllm has max_num_batch_tokens" in refused.value.body.error
    assert "did you mean max_num_batched_tokens" in refused.value.body.way_out


@pytest.mark.parametrize("name", [*ELSEWHERE, "max-model-len", "no-enable-scale-out", "middleware+"])
def test_an_argument_that_is_set_elsewhere_is_refused_with_the_place(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused) as refused:
        arguments_of(tmp_path, args={name: "x"})
    assert "by itself" in refused.value.body.error
    assert "remove it; use " in refused.value.body.way_out


@pytest.mark.parametrize("transport", ["shm", "lora", "nccl"])
def test_nothing_that_a_user_gives_is_silently_replaced(tmp_path: Path, transport: str) -> None:
    ours = {
        option[2:].partition("=")[0].replace("-", "_")
        for option in arguments_of(tmp_path, transport=transport)
        if option[:2] == "--"
    }
    assert (
        ours - KV_CACHE - {"enforce_eager", "distributed_executor_backend"} <= ELSEWHERE.keys()
    )  # those give way to what is given
    with pytest.raises(Refused) as refused:
        arguments_of(tmp_path, args={"max-num-batched-tokens": 64, "max_num_batched_tokens": 128})
    assert "twice" in refused.value.body.error


def test_the_kv_cache_holds_all_slots_on_cpu_and_is_vllms_business_on_cuda_or_where_the_user_says_so(
    tmp_path: Path,
) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    token_bytes = 2 * 4 * 2 * 64 * 4
    assert kv_cache_bytes(tmp_path, "float32", 64, 1000) == (64 * 8 + 1) * 128 * token_bytes
    assert kv_cache_bytes(tmp_path, "bfloat16", 1, 128) == MIN_BYTES
    assert kv_cache_bytes(tmp_path / "elsewhere", "float32", 64, 1000) == MIN_BYTES
    kv = "kv-cache-memory-bytes"
    assert any(kv in option for option in arguments_of(tmp_path))
    assert not any(kv in option for option in arguments_of(tmp_path, is_cpu=False))
    assert f"--{kv}=12345" in arguments_of(tmp_path, is_cpu=False, kv_cache_bytes=12345)
    assert f"--{kv}=99" in arguments_of(tmp_path, args={"kv_cache_memory_bytes": 99})
    assert not any(kv in option for option in arguments_of(tmp_path, args={"gpu_memory_utilization": 0.3}))


@pytest.mark.parametrize(
    ("transport", "backend"),
    [("shm", None), ("disk", None), ("nccl", "broadcast"), ("ipc", None), ("lora", None)],
)
def test_the_transport_chooses_vllms_backend_and_adapters(
    tmp_path: Path, transport: str, backend: str | None
) -> None:
    given = arguments_of(tmp_path, transport=transport, lora_rank=12)
    assert (backend is None) == ("--weight-transfer-config" not in given)
    if backend is not None:
        assert given[given.index("--weight-transfer-config") + 1] == json.dumps({"backend": backend})
    assert ("--enable-lora" in given) == (transport == "lora")
    assert ("--max-lora-rank=16" in given) == (transport == "lora")


def test_a_model_without_a_tokenizer_is_served_without_one(tmp_path: Path) -> None:
    assert "--skip-tokenizer-init" in arguments_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in arguments_of(tmp_path)


def test_the_last_words_are_the_cause_and_not_what_points_to_it() -> None:
    log = (
        "(EngineCore pid=7) ERROR core.py:99] Traceback (most recent call last):\n"
        "(Worker pid=8) ERROR worker.py:12] ValueError: Available memory on node 0 (1/2 GiB) on startup is "
        "less than desired\n"
        "(EngineCore pid=7) ERROR core.py:99] RuntimeError: WorkerProc initialization failed due to an "
        "exception\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    assert last_error(log).startswith("ValueError: Available memory on node 0")
    ended = (
        "(EngineCore pid=7) ERROR multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly "
        "(exit code: 0).\n"
    )
    assert last_error(log + ended) == last_error(log), "a worker that was ended after the error is no cause"
    killed = (
        "(MainProcess pid=1) WARNING base.py:380] ValueError: Tokenizer not available\n"
        "(EngineCore pid=7) ERROR multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly "
        "(exit code: -9), shutting down.\n"
        "(EngineCore pid=7) ERROR core.py:1512] RuntimeError: Executor failed.\n"
        "(EngineCore pid=7) ERROR core.py:1512] RuntimeError: cancelled\n"
    )
    assert last_error(killed).startswith("Worker proc VllmWorker-0 died unexpectedly (exit code: -9)")
    assert last_error("all is well\n") == ""


slow_vllm = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("model") / "A")


@pytest.fixture
def server(house: House) -> VllmProcess:
    return house.process


class TestAServer:
    pytestmark = slow_vllm

    def test_every_route_answers_to_the_secret_alone(self, server: VllmProcess) -> None:
        routes = re.findall(r"Route: (\S+), Methods: (\S+)", server.read_log())
        assert {
            "/health",
            "/pause",
            "/collective_rpc",
            "/inference/v1/generate",
            "/update_weights",
            "/v1/models",
        } <= {path for path, _ in routes}
        for path, methods in [*routes, ("/metrics", "GET"), ("/nowhere", "GET"), ("/docs", "GET")]:
            for method in methods.replace(",", " ").split():
                for secret in (None, "", SECRET + "x", SECRET[:-1]):
                    with pytest.raises(urllib.error.HTTPError) as refused:
                        server._ask(method, path, b"{}" if method == "POST" else None, secret, 10)
                    assert refused.value.code == 401, (method, path, secret)
        assert server.get("/v1/models")["data"][0]["id"] == "policy"

    def test_the_secret_is_in_no_argument_and_no_environment(self, server: VllmProcess) -> None:
        pids = server.group()
        assert len(pids) >= 4
        for pid in pids:
            for name in ("cmdline", "environ"):
                assert SECRET.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()

    def test_vllm_was_started_as_the_spec_says(self, server: VllmProcess) -> None:
        config = json.dumps(server.get("/server_info?config_format=json"))
        for expected in (
            '"logprobs_mode": "processed_logprobs"',
            '"max_num_seqs": 16',
            f'"max_model_len": {MAX_LENGTH}',
            '"max_num_batched_tokens": 256',
        ):
            assert expected in config

    def test_seeded_requests_with_split_prefills_live_and_answer_bit_for_bit_as_alone(
        self, server: VllmProcess
    ) -> None:
        """Sixteen prompts of 300 tokens in steps of 256: each prefill is split. Without the mended seeds this
        ends the engine.
        """
        drawn = random.Random(3)
        prompts = [[drawn.randrange(40) for _ in range(300)] for _ in range(16)]

        def ask(case: tuple[str, int]) -> tuple[list[int], list[float]]:
            salt, index = case
            return server.generate(
                prompts[index], salt=f"{salt}{index}", temperature=1.0, seed=index, max_tokens=40
            )

        alone = [ask(("alone", index)) for index in range(16)]
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(ask, [("together", index) for index in range(16)]))
        assert together == alone
        assert len({tuple(tokens) for tokens, _ in alone}) == 16
        assert ask(("another seed", 0)) == alone[0]
        assert server.generate(prompts[0], temperature=1.0, seed=99, max_tokens=40)[0] != alone[0][0]

    def test_requests_with_and_without_a_seed_run_side_by_side(self, server: VllmProcess) -> None:
        with ThreadPoolExecutor(16) as pool:
            answers = list(
                pool.map(
                    lambda seed: server.generate([1, 2, 3] * 60, temperature=1.0, **seed),
                    [{}, {"seed": 4}] * 8,
                )
            )
        assert all(len(tokens) == len(logprobs) == 16 for tokens, logprobs in answers)
        assert len({tuple(tokens) for tokens, _ in answers[1::2]}) == 1


def started(model: Path, folder: Path, **fields: Any) -> Any:
    return vllm_process({**SPEC, "model_path": str(model), **fields}, folder)


class TestItsEnd:
    """The servers of other tests end in the other ways: the shared one by SIGTERM (conftest.py), that with
    adapters by the loss of its worker, those of a broadcast by the loss of the API process and of the parent.
    """

    pytestmark = slow_vllm

    def test_a_server_whose_parent_is_gone_while_it_starts_ends_too(
        self, model: Path, tmp_path: Path
    ) -> None:
        with started(model, tmp_path) as server:
            server.wait_group_of(4)  # server, warden, resource tracker, engine
            assert server.process.stdin is not None
            server.process.stdin.close()
            assert server.process.wait(60) == 3
            server.wait_group_ended()


class TestAStartThatFails:
    """The run shows what stands in the fatal line, so it must name the cause."""

    pytestmark = slow_vllm

    @pytest.mark.parametrize(
        ("fields", "cause"),
        [
            ({"args": {"max-num-batch-tokens": 1}}, "max_num_batch_tokens, and vLLM has no argument"),
            ({"kv_cache_bytes": 2**44}, "memory"),
        ],
    )
    def test_a_start_that_fails_names_the_cause_and_a_way_out(
        self, model: Path, tmp_path: Path, fields: dict[str, Any], cause: str
    ) -> None:
        with started(model, tmp_path, **fields) as server:
            assert server.process.wait(400) == 1
            fatal = find_fatal(server.read_log())
            assert fatal is not None, server.read_log()[-3000:]
            assert cause in fatal.error
            assert fatal.way_out
            server.wait_group_ended()

    def test_a_model_whose_weights_are_torn_is_named(self, model: Path, tmp_path: Path) -> None:
        torn = tmp_path / "torn"
        torn.mkdir()
        (torn / "config.json").write_bytes((model / "config.json").read_bytes())
        (torn / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:5000])
        with started(torn, tmp_path) as server:
            assert server.process.wait(400) == 1
            fatal = find_fatal(server.read_log())
            assert fatal is not None
            assert "safetensor" in fatal.error.lower() or "header" in fatal.error.lower(), fatal
            assert str(torn) in fatal.error
