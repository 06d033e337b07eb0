"""A run on several hosts of a network, which Ray starts: what comes of it is what one
host makes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launcher_contract
import network_hosts
import pytest
from crash_fuzz import differences, fuzz_config, promise_of
from job_runs import (
    engine_events,
    read_lines,
    run,
    variant,
    wait_for_more_steps,
    wait_for_steps,
    wait_until,
    write_config,
)
from launcher_contract import OTHER, SECRET
from made_runs import write_colocated
from ray_cluster import FRUGAL, ray_cluster, start_ray, start_run
from resume_checker import read_evidence, violations

pytestmark = [
    pytest.mark.extension("ray"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
RUN_S = 600.0
UNHURRIED = {"python": "rewards_for_test:Unhurried", "size": 500}
OVER_BOTH = "placement={trainer: {nodes: 2, gpus: 0}, rollout: {nodes: 2, gpus: 0}}"


@pytest.fixture(scope="module", autouse=True)
def needs_hosts() -> None:
    if reason := network_hosts.reason_for_none():
        pytest.skip(reason)


Cluster = tuple[list[network_hosts.Host], str]


@pytest.fixture(scope="module")
def cluster(needs_hosts: None) -> Iterator[Cluster]:
    """Two hosts with Ray and its address. The last test of this file kills the second
    one's raylet.
    """
    options = {0: ["--num-cpus=4"], 1: ["--num-cpus=3", "--num-gpus=2"]}
    with network_hosts.network(2) as hosts, ray_cluster(hosts, options) as address:
        yield hosts, address


def test_two_hosts_equal_one_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, trainer={"num_steps": 3, "world_size": 2}, rollout={"num_engines": 2}
    )
    here = run(config, tmp_path / "one", timeout_s=RUN_S)
    assert here.returncode == 0, here.stderr
    hosts, address = cluster
    overrides = [f"launcher=ray:{address}", OVER_BOTH, "--run-dir", "two"]
    process = start_run(hosts[0], config, *overrides, cwd=tmp_path)
    output, _ = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, output
    assert [line for line in hosts[1].commands() if "asyncrl" in line] == []
    assert hosts[1].sent_bytes() > 0
    assert differences(tmp_path / "one", tmp_path / "two", of_metrics=False) == []
    logs = [
        path
        for path in (tmp_path / "two" / "logs").glob("*.log")
        if path.stat().st_size
    ]
    assert {path.stem for path in logs} >= {
        "engine-0",
        "engine-1",
        "trainer-0",
        "trainer-1",
    }
    assert (
        json.loads((tmp_path / "two" / "summary.json").read_text())["state"] == "done"
    )


def test_servers_share_by_time_on_ray(cluster: Cluster, tmp_path: Path) -> None:
    """Trainer, engine and two copies of a reward model share the first host's CPU."""
    config = variant(
        write_colocated(tmp_path, "reward"),
        tmp_path,
        trainer={"num_steps": 3},
        placement={"reward": ["cpu", "cpu"]},
    )
    here = run(config, tmp_path / "one", timeout_s=RUN_S)
    assert here.returncode == 0, here.stderr
    hosts, address = cluster
    run_dir = tmp_path / "two"
    process = start_run(
        hosts[0], config, f"launcher=ray:{address}", "--run-dir", run_dir
    )
    output, _ = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, output
    curves = [
        [step["reward/mean"] for step in read_lines(folder / "metrics.jsonl")]
        for folder in (tmp_path / "one", run_dir)
    ]
    # A score depends in its last bits on the texts that are read along.
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
    assert len(curves[1]) == 3
    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    spans = {(event.get("cat"), event["name"]) for event in trace}
    for copy in ("reward-0", "reward-1"):
        assert {(copy, name) for name in ("sleep", "score", "wake")} <= spans


@pytest.mark.long
def test_run_continues_when_a_host_is_killed_and_returns(tmp_path: Path) -> None:
    config = fuzz_config(
        tmp_path,
        task=UNHURRIED,
        buffer={"max_staleness": 3, "look_ahead": 3},
        rollout={"num_engines": 2, "max_tokens": 100},
        trainer={"num_steps": 100_000, "num_groups": 2},
    )
    run_dir, options = tmp_path / "run", ["--num-cpus=5"]
    with (
        network_hosts.network(2) as hosts,
        ray_cluster(hosts, dict.fromkeys((0, 1), options)) as address,
    ):
        placed = "placement={trainer: cpu, rollout: {nodes: 2, gpus: 0}}"
        process = start_run(
            hosts[0], config, f"launcher=ray:{address}", placed, "--run-dir", run_dir
        )
        wait_for_steps(run_dir, 2, process, RUN_S)
        hosts[1].kill()
        wait_until(
            lambda: engine_events(run_dir)[-1:] == [("engine lost", "engine-1")],
            process,
            RUN_S,
        )
        wait_for_more_steps(run_dir, 3, process, RUN_S)
        start_ray(hosts[1], f"--address={address}", *options)
        wait_until(
            lambda: engine_events(run_dir)[-1] == ("engine up", "engine-1"),
            process,
            RUN_S,
        )
        wait_for_more_steps(run_dir, 2, process, RUN_S)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=RUN_S)
        assert process.returncode == 130, output
        assert [*(hosts[1].folder / "shm").glob("asyncrl-*")] == []
    log = (run_dir / "logs" / "controller.log").read_text()
    assert f"the node {hosts[1].address} ({hosts[1].address})" in log
    assert (
        "restarting engine-1, once its node is back; the run continues without it"
        in log
    )
    assert violations(read_evidence(run_dir), promise_of(config)) == []


def test_ray_keeps_the_contract_of_launchers_and_names_what_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    hosts, address = cluster
    command = [
        sys.executable,
        launcher_contract.__file__,
        f"ray:{address}",
        str(tmp_path),
    ]
    controller = hosts[0].start(command, env=FRUGAL, stdout=subprocess.PIPE, text=True)
    told = launcher_contract.killed(controller, tmp_path)
    for host in hosts:
        host.kill()  # it would remove files that are read below
    logs = [
        path
        for host in hosts
        for path in (host.folder / "tmp").rglob("*")
        if path.is_file()
    ]
    texts = [path.read_bytes() for path in logs]
    assert {name: why for name, why in told.items() if why} == {}
    assert texts, "Ray writes logs"
    for secret in (SECRET, OTHER):
        assert not any(secret.encode() in text for text in texts)
