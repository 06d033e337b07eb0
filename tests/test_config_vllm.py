"""Settings of vLLM and of the ways that weights take to it: what cannot work is refused with the reason and
what to write instead.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.errors import ConfigError
from asyncrl.run.resume import _is_free

ROOT = Path(__file__).parent.parent
VLLM = "rollout.engine=vllm"
LORA = "trainer.lora={rank: 4}"
HERE = "rollout.urls=['http://127.0.0.1:8000']"
THERE = "rollout.urls=['http://10.0.0.7:8000']"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: some/model}\ntask: {files: [data.jsonl], reward: 'my:reward'}\n")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_vllm_with_its_own_arguments_is_taken_and_written_back(path: Path, tmp_path: Path) -> None:
    config = load_config(
        path,
        [
            VLLM,
            "rollout.vllm={max-num-batched-tokens: 4096, enforce_eager: false}",
            "rollout.tensor_parallel=2",
            "weight_sync.rolling=true",
        ],
    )
    assert config.rollout.vllm == {"max-num-batched-tokens": 4096, "enforce_eager": False}
    again = tmp_path / "again.yaml"
    again.write_text(run_config_yaml(config))
    assert load_config(again) == config


def test_rolling_with_one_engine_is_allowed_and_an_absent_canary_is_the_off_word(path: Path) -> None:
    config = load_config(path, [VLLM, "weight_sync.rolling=true", "weight_sync.canary_limit=none"])
    assert (config.rollout.num_engines, config.weight_sync.canary_limit) == (1, None)
    assert load_config(path, [VLLM, "weight_sync.canary_limit=0.01"]).weight_sync.canary_limit == 0.01


@pytest.mark.parametrize("value", ["0", "-1", "never"])
def test_a_canary_limit_is_a_number_above_0_auto_or_none(path: Path, value: str) -> None:
    assert "weight_sync.canary_limit" in refusal(path, VLLM, f"weight_sync.canary_limit={value}")


@pytest.mark.parametrize("engine", ["embedded", "simulated"])
@pytest.mark.parametrize(
    "override",
    [
        "rollout.vllm={block-size: 32}",
        "rollout.vllm_python=/usr/bin/python3",
        HERE,
        "rollout.tensor_parallel=2",
    ],
)
def test_what_is_for_vllm_is_refused_beside_another_engine(path: Path, engine: str, override: str) -> None:
    said = refusal(path, f"rollout.engine={engine}", override)
    assert (
        f"{override.partition('=')[0]} is for vLLM, and rollout.engine={engine}; set rollout.engine=vllm, or "
        f"remove it" in said
    )


@pytest.mark.parametrize(
    "url", ["10.0.0.7:8000", "ftp://host:1", "http://host:8000/v1", "http://", "http://host:1?x=1"]
)
def test_a_url_that_is_no_address_of_a_server_is_refused(path: Path, url: str) -> None:
    assert "write it like http://10.0.0.7:8000, without a path" in refusal(
        path, VLLM, f"rollout.urls=['{url}']"
    )


def test_a_server_that_is_named_twice_is_refused(path: Path) -> None:
    urls = "rollout.urls=['http://127.0.0.1:8000', 'http://127.0.0.1:8000/']"
    assert "named twice" in refusal(path, VLLM, urls, "rollout.num_engines=2")


def test_servers_of_somebody_else_are_as_many_as_there_are_engines(path: Path) -> None:
    said = refusal(path, VLLM, HERE, "rollout.num_engines=2")
    assert "rollout.urls names 1 servers for rollout.num_engines=2; set rollout.num_engines=1" in said
    assert load_config(path, [VLLM, HERE]).rollout.urls == ["http://127.0.0.1:8000"]
    assert "it names no server" in refusal(path, VLLM, "rollout.urls=[]")


def test_a_port_is_named_once(path: Path) -> None:
    assert "names a port twice" in refusal(path, "rollout.num_engines=2", "rollout.ports=[8000, 8000]")
    assert load_config(path, ["rollout.num_engines=2", "rollout.ports=[8000, 8001]"]).rollout.ports == [
        8000,
        8001,
    ]


@pytest.mark.parametrize(
    "override", ["rollout.ports=[8000]", "rollout.vllm={block-size: 32}", "rollout.tensor_parallel=2"]
)
def test_what_is_for_servers_that_the_run_starts_is_refused_beside_urls(path: Path, override: str) -> None:
    assert f"{override.partition('=')[0]} is for servers that the run starts" in refusal(
        path, VLLM, HERE, override
    )


def test_a_model_that_is_made_at_the_start_cannot_be_served_by_somebody_else() -> None:
    assert "model.scratch is made at the start" in refusal(ROOT / "configs" / "quickstart.yaml", VLLM, HERE)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["weight_sync.transport=disk"], "which is none; give a folder that trainer and engines share"),
        (
            ["weight_sync.disk_dir=/data"],
            "weight_sync.disk_dir is for weight_sync.transport=disk, and the transport is shm; remove it",
        ),
        (["weight_sync.transport=lora"], "set trainer.lora={rank: 16}"),
        (
            [LORA, "weight_sync.transport=lora", HERE],
            "how the servers of rollout.urls were started is not for the run to say",
        ),
        ([THERE], "which http://10.0.0.7:8000 cannot read; set weight_sync.transport=disk"),
        (["weight_sync.transport=nccl", HERE], "where the servers of rollout.urls are is not known"),
        (
            ["weight_sync.transport=ipc", "placement.trainer=cpu"],
            "from CUDA device to CUDA device, and placement.trainer is cpu",
        ),
        (
            ["weight_sync.transport=nccl", "weight_sync.rolling=true"],
            "sends each version once, to all engines together",
        ),
        (
            ["weight_sync.transport=ipc", "placement.rollout=cpu"],
            "from CUDA device to CUDA device, and placement.rollout is cpu",
        ),
        (
            [HERE, "placement.rollout=trainer", "buffer.max_staleness=0"],
            "has the engines sleep while the trainer works",
        ),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_the_reason(
    path: Path, overrides: list[str], says: str
) -> None:
    assert says in refusal(path, VLLM, *overrides)


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_vllms_own_weight_transfer_needs_vllm(path: Path, transport: str) -> None:
    said = refusal(path, f"weight_sync.transport={transport}")
    assert (
        f"weight_sync.transport={transport} is vLLM's own weight transfer, and rollout.engine=embedded has "
        f"none" in said
    )


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1"])
def test_shared_memory_reaches_servers_of_this_machine(path: Path, url: str) -> None:
    load_config(path, [VLLM, f"rollout.urls=['{url}']"])


def test_servers_elsewhere_get_weights_over_a_shared_disk(path: Path) -> None:
    load_config(path, [VLLM, THERE, "weight_sync.transport=disk", "weight_sync.disk_dir=/data/weights"])


def free(config: RunConfig, *keys: str) -> list[bool]:
    return [_is_free(key, config, Path("no-run")) for key in keys]


def test_where_servers_are_and_how_a_push_is_checked_may_change_when_a_run_goes_on(path: Path) -> None:
    config = load_config(path)
    assert all(
        free(
            config,
            "rollout.urls",
            "rollout.vllm_python",
            "rollout.tensor_parallel",
            "weight_sync.disk_dir",
            "weight_sync.rolling",
        )
    )
    assert all(free(config, "weight_sync.canary_limit", "weight_sync.retries"))
    assert not any(
        free(config, "rollout.engine", "rollout.vllm.enforce_eager", "rollout.vllm", "weight_sync.interrupt")
    )
