"""The vLLM server as a process: its arguments, its lock, its seeds, and how it starts and ends."""

from __future__ import annotations

import json
import os
import random
import re
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_in_process import make_qwen3
from vllm_house import House
from vllm_process import SECRET, VllmProcess, vllm_process

from asyncrl.base.http import Refused
from asyncrl.base.message import find_fatal
from asyncrl_servers.vllm import arguments as vllm_arguments
from asyncrl_servers.vllm.arguments import ELSEWHERE, KV_CACHE, VllmSpec, build_arguments, kv_cache_bytes

SPEC: dict[str, Any] = {"name": "engine-0", "dtype": "float32", "device": "cpu"}
SPEC |= {"max_length": 512, "slots": 16}
GIVEN: dict[str, Any] = {"block-size": 32, "enable_prefix_caching": False, "max_num_batched_tokens": None}
GIVEN |= {"compilation-config": {"mode": 3}, "compilation_config.backend": "eager"}
GIVEN |= {"cudagraph_capture_sizes": [1, 2]}
WORDS = """--enable-scale-out
--logprobs-mode=processed_logprobs
--max-num-seqs=16
--max-model-len=512
--worker-extension-cls=asyncrl_servers.vllm.worker_extension.WeightLoader
--distributed-executor-backend=asyncrl_servers.vllm.monkeypatches.CpuExecutor
--block-size=32
--no-enable-prefix-caching
--cudagraph-capture-sizes 1 2 --
--compilation-config {"mode": 3}
--compilation-config.backend=eager"""


def arguments_of(folder: Path, *, is_cpu: bool = True, **fields: Any) -> list[str]:
    return build_arguments(VllmSpec(**{**SPEC, "model_path": str(folder), **fields}), is_cpu=is_cpu)


def test_vllm_receives_required_and_user_arguments(tmp_path: Path) -> None:
    words = " ".join(arguments_of(tmp_path, args=GIVEN))
    assert [expected for expected in WORDS.splitlines() if expected not in words] == []
    assert [absent for absent in ("batched", "secret", "api-key") if absent in words] == []


def test_arguments_of_the_run_are_refused_with_the_key_to_use(tmp_path: Path) -> None:
    for name in (*ELSEWHERE, "max-model-len", "no-enable-scale-out", "middleware+"):
        with pytest.raises(Refused, match="by itself") as refused:
            arguments_of(tmp_path, args={name: "x"})
        assert "remove it; use " in refused.value.body.way_out
    gives_way = KV_CACHE | {"enforce_eager", "distributed_executor_backend"}
    for has_adapters in (False, True):
        options = [
            word for word in arguments_of(tmp_path, has_adapters=has_adapters) if word.startswith("--")
        ]
        ours = {option[2:].partition("=")[0].replace("-", "_") for option in options}
        assert ours - gives_way <= ELSEWHERE.keys(), "nothing that a user gives is silently replaced"


def test_kv_cache_holds_all_slots_on_cpu_by_default(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    token_bytes = 2 * 4 * 2 * 64 * 4
    assert kv_cache_bytes(tmp_path, "float32", 64, 1000) == (64 * 8 + 1) * 128 * token_bytes
    least = kv_cache_bytes(tmp_path, "bfloat16", 1, 128)
    assert kv_cache_bytes(tmp_path / "elsewhere", "float32", 64, 1000) == least > 128 * token_bytes
    kv = "kv-cache-memory-bytes"
    assert any(kv in option for option in arguments_of(tmp_path))
    assert not any(kv in option for option in arguments_of(tmp_path, is_cpu=False))
    assert f"--{kv}=99" in arguments_of(tmp_path, args={"kv_cache_memory_bytes": 99})
    assert not any(kv in option for option in arguments_of(tmp_path, args={"gpu_memory_utilization": 0.3}))


def test_adapters_and_tokenizer_choose_arguments(tmp_path: Path) -> None:
    assert "--skip-tokenizer-init" in arguments_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    for has_adapters in (False, True):
        given = arguments_of(tmp_path, has_adapters=has_adapters, lora_rank=12)
        assert ("--enable-lora" in given) == ("--max-lora-rank=16" in given) == has_adapters
        assert "--skip-tokenizer-init" not in given


def test_batch_invariance_is_asked_for_on_cuda_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments.tempfile, "tempdir", None)
    for is_cpu, deterministic in ((False, True), (False, False), (True, True)):
        monkeypatch.setattr(vllm_arguments, "is_cpu_build", lambda is_cpu=is_cpu: is_cpu)
        monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
        spec = VllmSpec(**SPEC, model_path="/model", deterministic=deterministic)
        vllm_arguments.set_environment(spec, tmp_path)
        assert (os.environ.get("VLLM_BATCH_INVARIANT") == "1") == (deterministic and not is_cpu)
        assert os.environ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "3600"


POINTS = (
    "(EngineCore pid=7) ERROR core.py:99] RuntimeError: WorkerProc initialization failed\n"
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    "(EngineCore pid=7) ERROR core.py:1512] RuntimeError: cancelled\n"
    "(MainProcess pid=1) WARNING base.py:380] ValueError: Tokenizer not available\n"
)
DIED = "Worker proc VllmWorker-0 died unexpectedly (exit code: {})"


@pytest.mark.parametrize("cause", ["ValueError: Available memory is less than desired", DIED.format(-9), ""])
def test_last_words_name_the_cause(cause: str) -> None:
    log = f"(Worker pid=8) ERROR worker.py:12] {cause}\n{POINTS}(EngineCore pid=7) ERROR {DIED.format(0)}.\n"
    assert vllm_arguments.last_error(log) == cause


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
        ours = "/health /pause /collective_rpc /inference/v1/generate /update_weights /v1/models"
        assert set(ours.split()) <= {path for path, _ in routes}
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

    def test_seeded_requests_with_split_prefills_are_bit_identical(self, server: VllmProcess) -> None:
        """Prompts of 300 tokens in steps of 256: without the patched seeds this ends the engine."""
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


def started(model: Path, folder: Path, **fields: Any) -> Any:
    return vllm_process({**SPEC, "model_path": str(model), **fields}, folder)


class TestItsEnd:
    """The servers of other tests end otherwise: the shared one by SIGTERM (conftest.py), that with adapters
    by the loss of its worker, those of a broadcast by the loss of the API process and of the parent.
    """

    pytestmark = slow_vllm

    def test_server_ends_if_its_parent_dies_during_the_start(self, model: Path, tmp_path: Path) -> None:
        with started(model, tmp_path) as server:
            server.wait_group(lambda num: num >= 4)  # server, reaper, resource tracker, engine
            assert server.process.stdin is not None
            server.process.stdin.close()
            assert server.process.wait(60) == 3
            server.wait_group_ended()

    def test_failed_start_names_the_cause_and_a_way_out(self, model: Path, tmp_path: Path) -> None:
        with started(model, tmp_path, args={"kv-cache-memory-bytes": 2**44}) as server:
            assert server.process.wait(400) == 1
            fatal = find_fatal(server.read_log())
            assert fatal is not None, server.read_log()[-3000:]
            assert "memory" in fatal.error.lower()
            assert fatal.way_out
            server.wait_group_ended()
