"""A run on several hosts of a network, which Ray starts: what comes of it is what one host makes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import network_hosts
import pytest
from crash_fuzz import differences, fuzz_config, promise_of
from job_runs import (
    RUN,
    engine_events,
    run,
    wait_for_more_steps,
    wait_for_steps,
    wait_until,
    write_config,
)
from ray_cluster import FRUGAL, ray_cluster, start_ray
from resume_checker import read_evidence, violations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN_S = 600.0
OVER_THREE = "placement={trainer: {nodes: 2, gpus: 0}, rollout: {nodes: 3, gpus: 0}}"
OVER_BOTH = "placement={trainer: {nodes: 2, gpus: 0}, rollout: {nodes: 2, gpus: 0}}"


def test_ranks_and_engines_of_three_hosts_do_what_those_of_one_do_bit_for_bit(tmp_path: Path) -> None:
    if reason := network_hosts.reason_for_none():
        pytest.skip(reason)
    config = write_config(tmp_path, trainer={"num_steps": 3, "world_size": 2}, rollout={"num_engines": 3})
    here = run(config, tmp_path / "one", timeout_s=RUN_S)
    assert here.returncode == 0, here.stderr
    with network_hosts.network(3) as hosts:
        with ray_cluster(hosts, dict.fromkeys((0, 1, 2), ["--num-cpus=2"])) as address:
            overrides = [f"launcher=ray:{address}", OVER_THREE, "--run-dir", str(tmp_path / "two")]
            process = hosts[0].start(
                [*RUN, str(config), *overrides],
                env=FRUGAL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output, _ = process.communicate(timeout=RUN_S)
            assert process.returncode == 0, output
            left = [pid for host in hosts[1:] for pid in host.pids() if "asyncrl" in command_of(pid)]
            assert left == []
            assert min(host.sent_bytes() for host in hosts[1:]) > 0
    assert differences(tmp_path / "one", tmp_path / "two", of_metrics=False) == []
    names = [f"{kind}-{number}" for kind in ("engine", "relay") for number in range(3)]
    names += ["trainer-0", "trainer-1"]
    logs = tmp_path / "two" / "logs"
    assert sorted(path.stem for path in logs.glob("*.log")) == ["controller", *names]
    assert all(
        (logs / f"{name}.log").stat().st_size for name in names if name.startswith(("engine", "trainer"))
    )
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["state"] == "done"


@pytest.mark.parametrize(
    ("has_rank", "comes"),
    [(False, 1), (True, 2)],
    ids=[
        "engines alone, it dies and comes back",
        "a rank of the trainer too, cut off for good, another comes",
    ],
)
def test_a_run_goes_on_when_a_host_is_cut_off_for_a_moment_and_when_it_is_lost(
    tmp_path: Path, has_rank: bool, comes: int
) -> None:
    if reason := network_hosts.reason_for_none():
        pytest.skip(reason)
    config = fuzz_config(
        tmp_path,
        task={"size": 500},
        buffer={"max_staleness": 3, "look_ahead": 3},
        rollout={"num_engines": 2, "max_tokens": 100},
        trainer={"num_steps": 100_000, "num_groups": 2, "world_size": 1 + has_rank},
    )
    run_dir, options = tmp_path / "run", ["--num-cpus=3"]
    with (
        network_hosts.network(3) as hosts,
        ray_cluster(hosts[:2], dict.fromkeys((0, 1), options)) as address,
    ):
        placed = OVER_BOTH if has_rank else "placement={trainer: cpu, rollout: {nodes: 2, gpus: 0}}"
        process = hosts[0].start(
            [*RUN, str(config), f"launcher=ray:{address}", placed, "--run-dir", str(run_dir)],
            env=FRUGAL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_for_steps(run_dir, 2, process)
        hosts[1].link("down")
        time.sleep(1.0)  # no wait for anything: it is how long the wire is unplugged
        hosts[1].link("up")
        wait_for_more_steps(run_dir, 2, process)
        assert engine_events(run_dir) == [], "a second without a wire loses no one"
        hosts[1].link("down") if has_rank else hosts[1].kill()
        wait_until(lambda: ("engine lost", "engine-1") in engine_events(run_dir), process)
        if not has_rank:
            wait_for_more_steps(run_dir, 3, process)
        start_ray(hosts[comes], f"--address={address}", *options)
        wait_until(lambda: ("engine up", "engine-1") in engine_events(run_dir), process)
        wait_for_more_steps(run_dir, 2, process)
        assert any("asyncrl" in command_of(pid) for pid in hosts[comes].pids()), "it works there"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=RUN_S)
        assert process.returncode == 130, output
    later = "starting it again, once the node is there; the run goes on meanwhile"
    (told,) = [line for line in output.splitlines() if "engine-1: " in line and later in line]
    if has_rank:
        assert "once the node is there: the run waits for it, supervision.node_wait_s=600 at most" in output
    assert f"the node {hosts[1].address} ({hosts[1].address})" in told
    assert "(raylet)" not in output
    assert violations(read_evidence(run_dir), promise_of(config)) == []
    assert engine_events(run_dir)[-1] == ("engine up", "engine-1")


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
