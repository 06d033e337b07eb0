"""`asyncrl watch`, /metrics and /status of a run, and the Grafana dashboard."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from aiohttp import ClientSession
from page_cases import embedded, make_run
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from asyncrl.base.errors import ConfigError
from asyncrl.config.observe_config import ObserveConfig
from asyncrl.observe.metrics import GAUGES
from asyncrl.observe.run_dir import Recorder, cut_steps
from asyncrl.observe.web import (
    KEY_ENV,
    KEY_FILE,
    LivePage,
    WebServer,
    family_of,
    openmetrics,
    status_server,
    watch,
)

ALERTS = Path(__file__).parents[1] / "examples/prometheus"
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


def watched(run_dir: Path, story: Story) -> None:
    live = LivePage([run_dir])
    routes = {"/": live.show, "/page.json": live.data}
    play(
        lambda: WebServer("127.0.0.1", 0, routes, key="secret", setting="a port"), story
    )


def test_watch_answers_only_get_requests_with_its_key(tmp_path: Path) -> None:
    async def story(client: ClientSession, url: str) -> None:
        statuses = [
            (await client.get(url + path)).status
            for path in ("/", "/?key=wrong", "/page.json")
        ]
        assert statuses == [401] * 3
        answer = await client.get(f"{url}/?key=secret")
        assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
        assert embedded(await answer.text())["runs"][0]["name"] == "run"
        bearer = {"Authorization": "Bearer secret"}
        assert (await client.post(url, headers=bearer)).status == 405
        assert (await client.get(f"{url}/config.yaml", headers=bearer)).status == 404

    watched(make_run(tmp_path / "run"), story)


def test_a_live_page_follows_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.observe.web.READ_SHARE", 1e9)
    folder = make_run(tmp_path / "run", 2)

    async def story(client: ClientSession, url: str) -> None:
        async def data(since: float = 0.0) -> Any:
            answer = await client.get(f"{url}/page.json?since={since}&key=secret")
            return await answer.json() if answer.status == 200 else answer.status

        page = await data()
        assert (
            page["runs"][0]["step"],
            page["is_live"],
            await data(page["made_s"]),
        ) == ([1, 2], True, 204)
        recorder = Recorder(folder)
        cut_steps(folder / "metrics.jsonl", 1)  # a resume
        recorder.record_step({"step": 2, "time_s": 2.0})
        recorder.record_step({"step": 3, "time_s": 3.0})
        assert (await data(page["made_s"]))["runs"][0]["step"] == [1, 2, 3]
        (folder / "config.yaml").write_text("no: [")
        recorder.record_step({"step": 4, "time_s": 4.0})
        assert (await data())["runs"][0]["step"] == [1, 2, 3], (
            "the last page that could be read"
        )

    watched(folder, story)


def test_ctrl_c_ends_watch(tmp_path: Path) -> None:
    said = list[str]()

    def say(text: str) -> None:
        said.append(text)
        signal.raise_signal(signal.SIGINT)

    asyncio.run(watch([make_run(tmp_path / "run")], "127.0.0.1", 0, say))
    assert re.match(r"http://127\.0\.0\.1:\d+/\?key=\w{48} ", said[0])


# ---- Prometheus


def parsed(numbers: dict[str, Any], state: str = "running") -> dict[str, Any]:
    """Parse families by name with Prometheus' own client."""
    families = text_string_to_metric_families(
        openmetrics(numbers, state=state, info=INFO).decode()
    )
    return {family.name: family for family in families}


def test_prometheus_reads_every_declared_metric() -> None:
    found = parsed({name: index + 0.5 for index, name in enumerate(NAMES)})
    assert len(found) == len(NAMES) + 2, "no two have one name"
    for index, (name, gauge) in enumerate(zip(NAMES, GAUGES.values(), strict=True)):
        family, label, declared = family_of(name) or pytest.fail(name)
        (sample,) = found[family].samples
        assert (sample.name, sample.value) == (
            family + "_total" * (gauge.kind == "total"),
            index + 0.5,
        )
        assert sample.labels == ({"name": label} if label else {})
        assert declared.meaning in found[family].documentation
    assert found["asyncrl_run"].samples[0].labels == INFO
    odd = {
        "step": float("nan"),
        "reward/mean": "high",
        "engine/decode_s": {"a": 1},
        "no/such": 1.0,
    }
    assert set(parsed(odd, "odd")) == {"asyncrl_run", "asyncrl_state"}
    numbers = {"task/a": True, "step": 2, "task/b": np.float32(0.5)}
    assert [sample.value for sample in parsed(numbers)["asyncrl_task"].samples] == [
        1,
        0.5,
    ]


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("perf/step_s", "asyncrl_perf_step_seconds 1.0"),
        ("perf/tokens_per_s", "asyncrl_perf_tokens_per_s 1.0"),
        (
            "rollout/failed/sums",
            'asyncrl_rollout_failed_by_name_total{name="sums"} 1.0',
        ),
        ("eval/held/reward_mean", 'asyncrl_eval_reward_mean{name="held"} 1.0'),
        ("eval/held/task/turns", 'asyncrl_eval_task_by_name{name="held/turns"} 1.0'),
        (
            "eval/held/failure/limit",
            'asyncrl_eval_failure_by_name{name="held/limit"} 1.0',
        ),
        ("eval/failure/limit", 'asyncrl_eval_failure_by_name{name="limit"} 1.0'),
        ('task/a "b"\n\\', r'asyncrl_task{name="a \"b\"\n\\"} 1.0'),
    ],
)
def test_a_metric_has_its_name_and_label(name: str, sample: str) -> None:
    assert (
        f"\n{sample}\n" in openmetrics({name: 1}, state="running", info=INFO).decode()
    )


def test_the_status_port_serves_only_bearers_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status.json").write_text('{"state": "running", "step": 7}')
    key_file = tmp_path / KEY_FILE

    def make() -> WebServer:
        return status_server(
            tmp_path, ObserveConfig(status_port=0), lambda: {"step": 7}
        )

    async def story(client: ClientSession, url: str) -> None:
        assert (await client.get(f"{url}/metrics")).status == 401
        bearer = {
            "Authorization": f"Bearer {os.environ.get(KEY_ENV) or key_file.read_text()}"
        }
        answer = await client.get(f"{url}/metrics", headers=bearer)
        assert (answer.status, answer.headers["Content-Type"]) == (
            200,
            CONTENT_TYPE_LATEST,
        )
        assert "\nasyncrl_step 7.0\n" in await answer.text()
        status = await client.get(f"{url}/status", headers=bearer)
        assert await status.json() == {"state": "running", "step": 7}
        with pytest.raises(ConfigError, match=r"cannot listen on observe\.status_host"):
            status_server(
                tmp_path, ObserveConfig(status_port=int(url.rpartition(":")[2])), dict
            )

    play(make, story)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    play(make, story)  # a resumed run has the key that Prometheus knows
    key_file.write_text("\n")
    play(make, story)  # an empty key would let in everybody
    assert key_file.read_text().strip()
    key_file.unlink()
    monkeypatch.setenv(KEY_ENV, "ours")
    play(make, story)
    assert not key_file.exists()


def test_dashboard_and_alerts_use_existing_metrics() -> None:
    board = json.loads(DASHBOARD.read_text())
    families = {"asyncrl_run_info", "asyncrl_state"}
    for name in (*NAMES, "engine/policy_version/engine-0"):
        family, _, gauge = family_of(name) or pytest.fail(name)
        families.add(family + "_total" * (gauge.kind == "total"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    assert all('instance=~"$instance"' in expr for expr in shown)
    (group,) = yaml.safe_load((ALERTS / "asyncrl.rules.yml").read_text())["groups"]
    alerts = [rule["expr"].replace("up{", "asyncrl_state{") for rule in group["rules"]]
    for expr in shown + alerts:
        names = re.findall(r"asyncrl_\w+", re.sub(r"\{[^}]*\}", "", expr))
        assert names, expr
        assert set(names) <= families, expr


def test_alerts_fire_as_their_tests_say() -> None:
    promtool = shutil.which("promtool") or pytest.skip("apt-get install prometheus")
    for command in (["check", "rules", "asyncrl.rules.yml"], ["test", "rules"]):
        files = ["asyncrl.test.yml"] if command[0] == "test" else []
        subprocess.run([promtool, *command, *files], cwd=ALERTS, check=True)
