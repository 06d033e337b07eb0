"""/metrics and /status of a run: in form, for bearers of its key, and a dashboard that knows their names."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from asyncrl.base.errors import ConfigError
from asyncrl.config import ObserveConfig
from asyncrl.observe.metrics import GAUGES
from asyncrl.observe.openmetrics import (
    KEY_ENV,
    KEY_FILE,
    StatusServer,
    family_of,
    openmetrics,
)

DASHBOARD = Path(__file__).parents[1] / "examples" / "grafana" / "asyncrl.json"
OPEN = [name.replace("*", "mean" if name == "policy/logprob_gap_*" else "other") for name in GAUGES]
INFO = {"run_dir": 'a "run"\\', "version": "1"}


def parsed(numbers: dict[str, Any], state: str = "running") -> dict[str, Any]:
    """Families by name, as Prometheus' own client reads them."""
    families = text_string_to_metric_families(openmetrics(numbers, state=state, info=INFO).decode())
    return {family.name: family for family in families}


def test_every_declared_number_is_read_by_the_parser_of_prometheus_with_type_unit_and_help() -> None:
    found = parsed({name: index + 0.5 for index, name in enumerate(OPEN)})
    assert len(found) == len(OPEN) + 2, "no two have one name"
    for index, (name, gauge) in enumerate(zip(OPEN, GAUGES.values(), strict=True)):
        family, labels, declared = family_of(name) or pytest.fail(name)
        assert declared is gauge
        (sample,) = found[family].samples
        is_total = gauge.kind == "total"
        assert (sample.name, sample.value) == (family + "_total" * is_total, index + 0.5)
        assert (found[family].type, sample.labels) == ("counter" if is_total else "gauge", labels)
        assert gauge.meaning in found[family].documentation
        assert found[family].unit == {"s": "seconds", "bytes": "bytes", "0..1": "ratio"}.get(gauge.unit, "")
    assert found["asyncrl_run"].samples[0].labels == INFO
    states = {sample.labels["asyncrl_state"]: sample.value for sample in found["asyncrl_state"].samples}
    assert states == {"starting": 0, "running": 1, "done": 0, "failed": 0, "interrupted": 0}


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("perf/step_s", "asyncrl_perf_step_seconds 1.0"),
        ("eval/seconds", "asyncrl_eval_seconds 1.0"),
        ("perf/tokens_per_s", "asyncrl_perf_tokens_per_second 1.0"),
        ("policy/clip_fraction", "asyncrl_policy_clip_ratio 1.0"),
        ("perf/host_memory_bytes", "asyncrl_perf_host_memory_bytes 1.0"),
        ("engine/decode_s", "asyncrl_engine_decode_seconds_total 1.0"),
        ("engine/policy_version/engine-1", 'asyncrl_engine_policy_version{engine="engine-1"} 1.0'),
        ("policy/logprob_gap_max/engine-1", 'asyncrl_policy_logprob_gap_max{engine="engine-1"} 1.0'),
        ("reward/mean/sums", 'asyncrl_reward_mean_by_task{name="sums"} 1.0'),
        ("sample/truncated_fraction/sums", 'asyncrl_sample_truncated_by_task_ratio{name="sums"} 1.0'),
        ("rollout/failed/sums", 'asyncrl_rollout_failed_by_task_total{name="sums"} 1.0'),
        ("eval/held/reward_mean", 'asyncrl_eval_reward_mean{evaluation="held"} 1.0'),
        ('task/a "b"\n\\', r'asyncrl_task{name="a \"b\"\n\\"} 1.0'),
    ],
)
def test_a_name_has_its_unit_at_the_end_and_what_is_named_after_a_slash_as_a_label(
    name: str, sample: str
) -> None:
    assert f"\n{sample}\n" in openmetrics({name: 1}, state="running", info=INFO).decode()
    parsed({name: 1})


def test_what_is_no_number_or_not_declared_is_left_out_and_one_family_stands_together() -> None:
    numbers = {"step": float("nan"), "reward/mean": "high", "engine/decode_s": {"a": 1}, "no/such": 1.0}
    assert set(parsed(numbers, "odd")) == {"asyncrl_run", "asyncrl_state"}
    numbers = {"task/a": True, "step": 2, "task/b": np.float32(0.5)}
    assert [sample.value for sample in parsed(numbers)["asyncrl_task"].samples] == [1, 0.5]


def served(run_dir: Path, story: Callable[[str], Awaitable[None]], **observe: Any) -> None:
    async def play() -> None:
        config = ObserveConfig.model_validate({"status_port": 0} | observe)
        server = StatusServer(run_dir, config, lambda: {"step": 7})
        url = server.bind()
        try:
            await server.start()
            await story(url)
        finally:
            await server.aclose()

    asyncio.run(play())


def test_both_paths_are_for_bearers_of_the_key_and_can_only_be_read(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "running", "step": 7}')

    async def story(url: str) -> None:
        key = (tmp_path / KEY_FILE).read_text()
        async with aiohttp.ClientSession() as session:
            for path in ("/metrics", "/status", "/config.yaml"):
                for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {key}x"}):
                    assert (await session.get(url + path, headers=given)).status == 401
            session.headers["Authorization"] = f"Bearer {key}"
            answer = await session.get(f"{url}/metrics")
            assert (answer.status, answer.headers["Content-Type"]) == (200, CONTENT_TYPE_LATEST)
            assert "\nasyncrl_step 7.0\n" in await answer.text()
            assert await (await session.get(f"{url}/status")).json() == {"state": "running", "step": 7}
            assert (await session.post(f"{url}/metrics")).status == 405
            assert (await session.get(f"{url}/../status.json")).status == 404

    served(tmp_path, story)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    before = (tmp_path / KEY_FILE).read_text()
    served(tmp_path, story)
    assert (tmp_path / KEY_FILE).read_text() == before, "a resumed run has the key that Prometheus knows"


def test_a_key_of_the_users_own_stands_in_no_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status.json").write_text('{"state": "running"}')
    monkeypatch.setenv(KEY_ENV, "ours")

    async def story(url: str) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer ours"}) as session:
            assert (await session.get(f"{url}/metrics")).status == 200

    served(tmp_path, story)
    assert not (tmp_path / KEY_FILE).exists()


def test_a_port_that_is_taken_or_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    async def story(url: str) -> None:
        taken = int(url.rpartition(":")[2])
        for observe in ({"status_port": taken}, {"status_port": 0, "status_host": "203.0.113.1"}):
            config = ObserveConfig.model_validate(observe)
            with pytest.raises(ConfigError, match="cannot be listened on") as refused:
                StatusServer(tmp_path, config, dict).bind()
            assert refused.value.exit_code == 2

    served(tmp_path, story)


def test_the_dashboard_asks_for_metrics_that_there_are_and_its_panels_do_not_overlap() -> None:
    board = json.loads(DASHBOARD.read_text())
    families = {}
    for name in (*OPEN, "policy/logprob_gap_max"):
        family, labels, gauge = family_of(name) or pytest.fail(name)
        families[family + "_total" * (gauge.kind == "total")] = labels
    families |= {"asyncrl_run_info": INFO, "asyncrl_state": {"asyncrl_state": ""}}
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]]
    assert min(map(len, (panel["targets"] for panel in panels))) > 0
    for expr in exprs:
        names = re.findall(r"asyncrl_\w+", re.sub(r"\{[^}]*\}", "", expr))
        assert names, expr
        assert set(names) <= families.keys(), expr
        assert 'instance=~"$instance"' in expr
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "instance"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    covered = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(covered) == len(set(covered))
    assert max(x for x, _ in covered) < 24
