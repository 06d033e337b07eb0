"""`asyncrl watch`, /metrics and /status of a run, and the Grafana dashboard."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from test_observe_page import embedded, make_run

from asyncrl.base.errors import ConfigError
from asyncrl.config import ObserveConfig
from asyncrl.observe.metrics import GAUGES
from asyncrl.observe.run_dir import Recorder
from asyncrl.observe.web import (
    KEY_ENV,
    KEY_FILE,
    LivePage,
    WebServer,
    family_of,
    is_local,
    openmetrics,
    status_server,
)

DASHBOARD = Path(__file__).parents[1] / "examples" / "grafana" / "asyncrl.json"
NAMES = [name.replace("*", "other") for name in GAUGES]
INFO = {"run_dir": 'a "run"\\', "version": "1"}
Story = Callable[[ClientSession, str], Awaitable[None]]


def play(make: Callable[[], WebServer], story: Story) -> None:
    async def played() -> None:
        server = make()
        try:
            await server.start()
            async with ClientSession() as client:
                await story(client, server.url)
        finally:
            await server.aclose()

    asyncio.run(played())


# ---- watch


def watched(run_dir: Path, key: str | None, story: Story) -> None:
    live = LivePage([run_dir])
    routes = {"/": live.show, "/page.json": live.data}
    play(lambda: WebServer("127.0.0.1", 0, routes, key=key, setting="a port"), story)


def test_watch_answers_only_get_requests_to_this_machine(tmp_path: Path) -> None:
    async def story(client: ClientSession, url: str) -> None:
        answer = await client.get(url)
        assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
        assert embedded(await answer.text())["runs"][0]["name"] == "run"
        for host in ("evil.example", "127.0.0.1.evil.example", "[::1", "10.0.0.1"):
            assert (await client.get(url, headers={"Host": host})).status == 403
        assert (await client.post(url)).status == 405
        assert (await client.get(f"{url}/config.yaml")).status == 404

    watched(make_run(tmp_path / "run"), None, story)
    assert all(map(is_local, ("localhost", "[::1]:80", "::1")))


def test_watch_on_a_network_requires_its_key(tmp_path: Path) -> None:
    async def story(client: ClientSession, url: str) -> None:
        statuses = [(await client.get(url + path)).status for path in ("/", "/?key=wrong", "/?key=secret")]
        assert statuses == [401, 401, 200]

    watched(make_run(tmp_path / "run"), "secret", story)


def test_a_live_page_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.observe.web.READ_SHARE", 1e9)
    folder = tmp_path / "run"

    async def story(client: ClientSession, url: str) -> None:
        async def data(since: float = 0.0) -> Any:
            answer = await client.get(f"{url}/page.json?since={since}")
            return await answer.json() if answer.status == 200 else answer.status

        assert (await data())["runs"] == []
        make_run(folder, 2)
        page = await data()
        assert (len(page["runs"][0]["step"]), page["is_live"]) == (2, True)
        assert await data(page["made_s"]) == 204
        recorder = Recorder(folder)
        recorder.record_step({"step": 3, "time_s": 3.0})
        assert (await data(page["made_s"]))["runs"][0]["step"] == [1, 2, 3]
        recorder.keep_steps(1)  # a resume
        recorder.record_step({"step": 2, "time_s": 2.0})
        assert (await data())["runs"][0]["step"] == [1, 2]
        (folder / "config.yaml").write_text("no: [")
        assert len((await data())["runs"]) == 1, "the last page that could be read"
        (folder / "config.yaml").unlink()
        assert (await data())["runs"] == []

    watched(folder, None, story)


def test_ctrl_c_ends_watch(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "asyncrl.cli", "watch", str(tmp_path / "later")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{tmp_path / 'later'} is not a run yet; the page waits for it\n"
        url = re.match(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert url is not None
        with urllib.request.urlopen(f"{url[0]}page.json") as answer:
            assert b'"runs": []' in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


# ---- Prometheus


def parsed(numbers: dict[str, Any], state: str = "running") -> dict[str, Any]:
    """Parse families by name with Prometheus' own client."""
    families = text_string_to_metric_families(openmetrics(numbers, state=state, info=INFO).decode())
    return {family.name: family for family in families}


def test_prometheus_reads_every_declared_metric() -> None:
    found = parsed({name: index + 0.5 for index, name in enumerate(NAMES)})
    assert len(found) == len(NAMES) + 2, "no two have one name"
    for index, (name, gauge) in enumerate(zip(NAMES, GAUGES.values(), strict=True)):
        family, label, declared = family_of(name) or pytest.fail(name)
        (sample,) = found[family].samples
        is_total = gauge.kind == "total"
        assert (sample.name, sample.value) == (family + "_total" * is_total, index + 0.5)
        assert found[family].type == ("counter" if is_total else "gauge")
        assert sample.labels == ({"name": label} if label else {})
        assert declared.meaning in found[family].documentation
    assert found["asyncrl_run"].samples[0].labels == INFO
    states = {sample.labels["asyncrl_state"]: sample.value for sample in found["asyncrl_state"].samples}
    assert states == {"starting": 0, "running": 1, "done": 0, "failed": 0, "interrupted": 0}


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("perf/step_s", "asyncrl_perf_step_seconds 1.0"),
        ("perf/tokens_per_s", "asyncrl_perf_tokens_per_s 1.0"),
        ("engine/decode_s", "asyncrl_engine_decode_seconds_total 1.0"),
        ("policy/logprob_gap_max/engine-1", 'asyncrl_policy_logprob_gap_max_by_name{name="engine-1"} 1.0'),
        ("rollout/failed/sums", 'asyncrl_rollout_failed_by_name_total{name="sums"} 1.0'),
        ("eval/held/reward_mean", 'asyncrl_eval_reward_mean{name="held"} 1.0'),
        ('task/a "b"\n\\', r'asyncrl_task{name="a \"b\"\n\\"} 1.0'),
    ],
)
def test_a_metric_has_its_name_and_label(name: str, sample: str) -> None:
    assert f"\n{sample}\n" in openmetrics({name: 1}, state="running", info=INFO).decode()
    parsed({name: 1})


def test_undeclared_and_infinite_numbers_are_left_out() -> None:
    numbers = {"step": float("nan"), "reward/mean": "high", "engine/decode_s": {"a": 1}, "no/such": 1.0}
    assert set(parsed(numbers, "odd")) == {"asyncrl_run", "asyncrl_state"}
    numbers = {"task/a": True, "step": 2, "task/b": np.float32(0.5)}
    assert [sample.value for sample in parsed(numbers)["asyncrl_task"].samples] == [1, 0.5]


def test_the_status_port_serves_only_bearers_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status.json").write_text('{"state": "running", "step": 7}')
    key_file = tmp_path / KEY_FILE

    def make() -> WebServer:
        return status_server(tmp_path, ObserveConfig(status_port=0), lambda: {"step": 7})

    async def story(client: ClientSession, url: str) -> None:
        for path in ("/metrics", "/status", "/config.yaml"):
            for given in ({}, {"Authorization": "Bearer wrong"}):
                assert (await client.get(url + path, headers=given)).status == 401
        bearer = {"Authorization": f"Bearer {key_file.read_text()}"}
        answer = await client.get(f"{url}/metrics", headers=bearer)
        assert (answer.status, answer.headers["Content-Type"]) == (200, CONTENT_TYPE_LATEST)
        assert "\nasyncrl_step 7.0\n" in await answer.text()
        status = await client.get(f"{url}/status", headers=bearer)
        assert await status.json() == {"state": "running", "step": 7}
        taken = int(url.rpartition(":")[2])
        for wrong in ({"status_port": taken}, {"status_port": 0, "status_host": "203.0.113.1"}):
            with pytest.raises(ConfigError, match=r"cannot listen on observe\.status_host"):
                status_server(tmp_path, ObserveConfig.model_validate(wrong), dict)

    play(make, story)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    key = key_file.read_text()
    play(make, story)
    assert key_file.read_text() == key, "a resumed run has the key that Prometheus knows"
    key_file.unlink()
    monkeypatch.setenv(KEY_ENV, "ours")

    async def own_key(client: ClientSession, url: str) -> None:
        assert (await client.get(f"{url}/metrics", headers={"Authorization": "Bearer ours"})).status == 200

    play(make, own_key)
    assert not key_file.exists()


def test_the_dashboard_uses_existing_metrics() -> None:
    board = json.loads(DASHBOARD.read_text())
    families = {"asyncrl_run_info", "asyncrl_state"}
    for name in (*NAMES, "engine/policy_version/engine-0"):
        family, _, gauge = family_of(name) or pytest.fail(name)
        families.add(family + "_total" * (gauge.kind == "total"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    for expr in [target["expr"] for panel in panels for target in panel["targets"]]:
        names = re.findall(r"asyncrl_\w+", re.sub(r"\{[^}]*\}", "", expr))
        assert names, expr
        assert set(names) <= families, expr
        assert 'instance=~"$instance"' in expr
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "instance"}
