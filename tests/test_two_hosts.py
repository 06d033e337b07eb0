"""A run on two hosts of a network, which Ray starts: what comes of it is what one host makes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import network_hosts
import pytest
from crash_fuzz import differences
from job_runs import RUN, run, write_config
from ray_cluster import FRUGAL, ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN_S = 600.0
OVER_BOTH = "placement={trainer: {nodes: 2, gpus: 0}, rollout: {nodes: 2, gpus: 0}}"


def test_ranks_and_engines_of_two_hosts_do_what_those_of_one_do_bit_for_bit(tmp_path: Path) -> None:
    if reason := network_hosts.reason_for_none():
        pytest.skip(reason)
    config = write_config(tmp_path, trainer={"num_steps": 3, "world_size": 2}, rollout={"num_engines": 2})
    here = run(config, tmp_path / "one", timeout_s=RUN_S)
    assert here.returncode == 0, here.stderr
    with network_hosts.network(2) as hosts:
        with ray_cluster(hosts, dict.fromkeys((0, 1), ["--num-cpus=2"])) as address:
            overrides = [f"launcher=ray:{address}", OVER_BOTH, "--run-dir", str(tmp_path / "two")]
            process = hosts[0].start(
                [*RUN, str(config), *overrides],
                env=FRUGAL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output, _ = process.communicate(timeout=RUN_S)
            assert process.returncode == 0, output
            assert [pid for pid in hosts[1].pids() if "asyncrl" in command_of(pid)] == []
            assert hosts[1].sent_bytes() > 0
    assert differences(tmp_path / "one", tmp_path / "two", of_metrics=False) == []
    names = ["engine-0", "engine-1", "relay-0", "relay-1", "trainer-0", "trainer-1"]
    logs = tmp_path / "two" / "logs"
    assert sorted(path.stem for path in logs.glob("*.log")) == ["controller", *names]
    assert all(
        (logs / f"{name}.log").stat().st_size for name in names if name.startswith(("engine", "trainer"))
    )
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["state"] == "done"


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
