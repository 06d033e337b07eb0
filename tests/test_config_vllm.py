"""Settings of vLLM and of the transports that bring it weights: what cannot work is refused with the reason
and what to write instead.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.run.resume import _is_free

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
VLLM = "rollout.engine=vllm"
LORA = "trainer.lora={rank: 4}"
HERE = "rollout.urls=['http://127.0.0.1:8000/']"
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


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.vllm={max-num-batched-tokens: 4096}", "rollout.tensor_parallel=2"],
        ["weight_sync.rolling=true", "weight_sync.canary_limit=none"],
        ["weight_sync.canary_limit=0.01", "rollout.num_engines=2", "rollout.ports=[8000, 8001]"],
        ["rollout.urls=['http://localhost:1']"],
        ["rollout.urls=['http://[::1]:1']"],
        [THERE, "weight_sync.transport=disk", "weight_sync.disk_dir=/data/weights"],
    ],
)
def test_what_can_work_is_taken(path: Path, overrides: list[str]) -> None:
    load_config(path, [VLLM, *overrides])


@pytest.mark.parametrize("value", ["0", "-1", "never"])
def test_a_canary_limit_is_a_number_above_0_auto_or_none(path: Path, value: str) -> None:
    assert "weight_sync.canary_limit" in refusal(path, VLLM, f"weight_sync.canary_limit={value}")


@pytest.mark.parametrize(
    "override",
    [
        "rollout.vllm={block-size: 32}",
        "rollout.vllm_python=/usr/bin/python3",
        HERE,
        "rollout.tensor_parallel=2",
    ],
)
def test_what_is_for_vllm_is_refused_beside_another_engine(path: Path, override: str) -> None:
    said = f"{override.partition('=')[0]} is for rollout.engine=vllm, and rollout.engine=embedded; set"
    assert said in refusal(path, override)


@pytest.mark.parametrize(
    "url", ["10.0.0.7:8000", "ftp://host:1", "http://host:8000/v1", "http://", "http://h?x=1"]
)
def test_a_url_that_is_no_address_of_a_server_is_refused(path: Path, url: str) -> None:
    said = refusal(path, VLLM, f"rollout.urls=['{url}']")
    assert "write a server like http://10.0.0.7:8000, without a path" in said


@pytest.mark.parametrize(
    ("overrides", "num"),
    [
        (["rollout.urls=['http://h:1', 'http://h:1/']", "rollout.num_engines=2"], 1),
        ([HERE, "rollout.num_engines=2"], 1),
        (["rollout.urls=[]"], 0),
        (["rollout.ports=[8000, 8000]", "rollout.num_engines=2"], 1),
        (["rollout.ports=[8000, 8001]"], 2),
    ],
)
def test_each_engine_has_one_url_or_port_of_its_own(path: Path, overrides: list[str], num: int) -> None:
    said = refusal(path, VLLM, *overrides)
    assert f"engines has one of its own; name each once, or set rollout.num_engines={num}" in said


@pytest.mark.parametrize(
    "override", ["rollout.ports=[8000]", "rollout.vllm={block-size: 32}", "rollout.tensor_parallel=2"]
)
def test_what_is_for_servers_that_the_run_starts_is_refused_beside_urls(path: Path, override: str) -> None:
    said = f"{override.partition('=')[0]} is for servers that the run starts"
    assert said in refusal(path, VLLM, HERE, override)


def test_a_model_that_is_made_at_the_start_is_served_by_no_server_that_was_started_before() -> None:
    assert "model.scratch is made at the start" in refusal(QUICKSTART, VLLM, HERE)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["weight_sync.transport=disk"], "give a folder that trainer and engines share"),
        (
            ["weight_sync.disk_dir=/data"],
            "transport=disk writes each version into disk_dir, and no other does",
        ),
        (["weight_sync.transport=lora"], "set trainer.lora={rank: 16}"),
        ([LORA, "weight_sync.transport=lora", HERE], "needs engines that the run itself starts"),
        ([THERE], "which http://10.0.0.7:8000 cannot read; set weight_sync.transport=disk"),
        (["weight_sync.transport=nccl", HERE], "needs engines that the run itself starts"),
        (["weight_sync.transport=nccl", "weight_sync.rolling=true"], "once, to all engines together"),
        (["weight_sync.transport=ipc", "rollout.engine=embedded"], "rollout.engine=embedded has none"),
        ([HERE, "placement.rollout=trainer", "buffer.max_staleness=0"], "which those of rollout.urls cannot"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_the_reason(
    path: Path, overrides: list[str], says: str
) -> None:
    assert says in refusal(path, VLLM, *overrides)


@pytest.mark.parametrize(
    ("is_free", "keys"),
    [
        (True, "rollout.urls rollout.vllm_python rollout.tensor_parallel weight_sync.disk_dir"),
        (True, "weight_sync.rolling weight_sync.canary_limit weight_sync.retries"),
        (False, "rollout.engine rollout.vllm.enforce_eager rollout.vllm weight_sync.interrupt"),
    ],
)
def test_where_servers_are_and_how_a_push_is_checked_may_change_when_a_run_goes_on(
    path: Path, is_free: bool, keys: str
) -> None:
    config = load_config(path)
    assert {_is_free(key, config, Path("no-run")) for key in keys.split()} == {is_free}
