"""A run on several hosts of a network, which Ray starts: what comes of it is what one host makes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import network_hosts
import pytest
from crash_fuzz import differences, fuzz_config, promise_of
from job_runs import engine_events, run, wait_for_more_steps, wait_for_steps, wait_until, write_config
from ray_cluster import ray_cluster, start_ray, start_run
from resume_checker import read_evidence, violations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RUN_S = 600.0
UNHURRIED = {"python": "rewards_for_test:Unhurried", "size": 500}
OVER_BOTH = "placement={trainer: {nodes: 2, gpus: 0}, rollout: {nodes: 2, gpus: 0}}"


@pytest.fixture(scope="module", autouse=True)
def needs_hosts() -> None:
    if reason := network_hosts.reason_for_none():
        pytest.skip(reason)


def test_two_hosts_equal_one_bit_for_bit(tmp_path: Path) -> None:
    config = write_config(tmp_path, trainer={"num_steps": 3, "world_size": 2}, rollout={"num_engines": 2})
    here = run(config, tmp_path / "one", timeout_s=RUN_S)
    assert here.returncode == 0, here.stderr
    with network_hosts.network(2) as hosts:
        with ray_cluster(hosts, dict.fromkeys((0, 1), ["--num-cpus=3"])) as address:
            overrides = [f"launcher=ray:{address}", OVER_BOTH, "--run-dir", "two"]
            process = start_run(hosts[0], config, *overrides, cwd=tmp_path)
            output, _ = process.communicate(timeout=RUN_S)
            assert process.returncode == 0, output
            assert [line for host in hosts[1:] for line in host.commands() if "asyncrl" in line] == []
            assert min(host.sent_bytes() for host in hosts[1:]) > 0
    assert differences(tmp_path / "one", tmp_path / "two", of_metrics=False) == []
    logs = [path for path in (tmp_path / "two" / "logs").glob("*.log") if path.stat().st_size]
    assert {path.stem for path in logs} >= {"engine-0", "engine-1", "trainer-0", "trainer-1"}
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["state"] == "done"


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
    with network_hosts.network(2) as hosts, ray_cluster(hosts, dict.fromkeys((0, 1), options)) as address:
        placed = "placement={trainer: cpu, rollout: {nodes: 2, gpus: 0}}"
        process = start_run(hosts[0], config, f"launcher=ray:{address}", placed, "--run-dir", run_dir)
        wait_for_steps(run_dir, 2, process, RUN_S)
        hosts[1].kill()
        wait_until(lambda: engine_events(run_dir)[-1:] == [("engine lost", "engine-1")], process, RUN_S)
        wait_for_more_steps(run_dir, 3, process, RUN_S)
        start_ray(hosts[1], f"--address={address}", *options)
        wait_until(lambda: engine_events(run_dir)[-1] == ("engine up", "engine-1"), process, RUN_S)
        wait_for_more_steps(run_dir, 2, process, RUN_S)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=RUN_S)
        assert process.returncode == 130, output
        assert [*(hosts[1].folder / "shm").glob("asyncrl-*")] == []
    log = (run_dir / "logs" / "controller.log").read_text()
    assert f"the node {hosts[1].address} ({hosts[1].address})" in log
    assert "restarting engine-1, once its node is back; the run continues without it" in log
    assert violations(read_evidence(run_dir), promise_of(config)) == []
