"""A run on several hosts of a network, which Ray starts: what comes of it is what one host makes."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from pathlib import Path

import network_hosts
import pytest
from crash_fuzz import differences, fuzz_config, promise_of
from job_runs import (
    CONFIG,
    engine_events,
    events,
    run,
    wait_for_more_steps,
    wait_for_steps,
    wait_until,
    write_config,
)
from ray_cluster import AGENTS, ray_cluster, start_ray, start_run
from resume_checker import read_evidence, violations

from asyncrl.config import ScratchConfig
from asyncrl.trainer.random_init import ScratchSpec, make_scratch_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RUN_S = 600.0
UNHURRIED = {"python": "rewards_for_test:Unhurried", "size": 500}
OVER_THREE = "placement={trainer: {nodes: 2, gpus: 0}, rollout: {nodes: 3, gpus: 0}}"
TAUGHT_ELSEWHERE = """
from asyncrl.launch import placement as placing
placing._extra_device = lambda _, __, placement, **___: placing.NodeDevice(len(placement.nodes) - 1, "cpu")
from asyncrl.cli import main
main()
"""
"""With GPUs a teacher is where one is free; here on the last node."""
TEACHING = [sys.executable, "-c", TAUGHT_ELSEWHERE, "run"]
OVER_BOTH = "placement={trainer: {nodes: 2, gpus: 0}, rollout: {nodes: 2, gpus: 0}}"


@pytest.fixture(scope="module", autouse=True)
def needs_hosts() -> None:
    if reason := network_hosts.reason_for_none():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A config at max_staleness 0, and the directory of its run on this host."""
    folder = tmp_path_factory.mktemp("one_host")
    config = write_config(folder, trainer={"num_steps": 3, "world_size": 2}, rollout={"num_engines": 3})
    here = run(config, folder / "run", timeout_s=RUN_S)
    assert here.returncode == 0, here.stderr
    return config, folder / "run"


def test_three_hosts_equal_one_bit_for_bit(tmp_path: Path, on_one_host: tuple[Path, Path]) -> None:
    config, here = on_one_host
    with network_hosts.network(3) as hosts:
        with ray_cluster(hosts, dict.fromkeys((0, 1, 2), ["--num-cpus=2"])) as address:
            overrides = [f"launcher=ray:{address}", OVER_THREE, "--run-dir", "two"]
            process = start_run(hosts[0], config, *overrides, cwd=tmp_path)
            output, _ = process.communicate(timeout=RUN_S)
            assert process.returncode == 0, output
            assert [line for host in hosts[1:] for line in host.commands() if "asyncrl" in line] == []
            assert min(host.sent_bytes() for host in hosts[1:]) > 0
    assert differences(here, tmp_path / "two", of_metrics=False) == []
    names = [f"engine-{number}" for number in range(3)]
    names += ["trainer-0", "trainer-1"]
    logs = tmp_path / "two" / "logs"
    assert sorted(path.stem for path in logs.glob("*.log")) == ["controller", *names]
    assert all(
        (logs / f"{name}.log").stat().st_size for name in names if name.startswith(("engine", "trainer"))
    )
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["state"] == "done"


@pytest.mark.long
@pytest.mark.parametrize(
    ("has_rank", "losses", "head_dies"),
    [
        pytest.param(False, ["all"], False, id="engines alone, all of it is killed"),
        pytest.param(True, ["wire", "raylet"], True, id="a rank too: its wire, its raylet, then the head"),
    ],
)
def test_run_continues_when_a_host_is_lost_and_returns(
    tmp_path: Path, has_rank: bool, losses: list[str], head_dies: bool
) -> None:
    """`losses`: how the second host is lost. In the end the controller is interrupted, or its host, Ray's
    head, is killed: then none of its processes remains on another host, and the run resumes there.
    """
    config = fuzz_config(
        tmp_path,
        task=UNHURRIED,
        buffer={"max_staleness": 3, "look_ahead": 3},
        rollout={"num_engines": 2, "max_tokens": 100},
        trainer={"num_steps": 100_000, "num_groups": 2, "world_size": 1 + has_rank},
        **(with_teacher(tmp_path) if has_rank else {}),
    )
    run_dir, options = tmp_path / "run", ["--num-cpus=5"]
    with network_hosts.network(3) as hosts, ray_cluster(hosts[:2], dict.fromkeys((0, 1), options)) as address:
        placed = OVER_BOTH if has_rank else "placement={trainer: cpu, rollout: {nodes: 2, gpus: 0}}"
        overrides = [f"launcher=ray:{address}", placed, "--run-dir", run_dir]
        process = start_run(hosts[0], config, *overrides, command=TEACHING)
        wait_for_steps(run_dir, 2, process, RUN_S)
        hosts[1].unplug(1.0)
        wait_for_more_steps(run_dir, 2, process, RUN_S)
        assert engine_events(run_dir) == [], "a second without a wire loses no one"
        for how in losses:
            lose(hosts[1], how)
            wait_until(lambda: engine_events(run_dir)[-1:] == [("engine lost", "engine-1")], process, RUN_S)
            if not has_rank:
                wait_for_more_steps(run_dir, 3, process, RUN_S)
            if how == "wire":
                hosts[1].kill()
                hosts[1].link("up")
            start_ray(hosts[1], f"--address={address}", *options)
            wait_until(lambda: engine_events(run_dir)[-1] == ("engine up", "engine-1"), process, RUN_S)
            wait_for_more_steps(run_dir, 2, process, RUN_S)
            working = ["engine-1", *(["teacher", "trainer"] if has_rank else [])]
            assert {name for name in working if works_on(hosts[1], name)} == {*working}
        if head_dies:
            hosts[0].kill()
            output, _ = process.communicate(timeout=RUN_S)
            assert [weights_left_on(host) for host in hosts[1:]] == [[], []]
            with ray_cluster(hosts[2:], {0: ["--num-cpus=8"]}) as address:
                overrides = [f"launcher=ray:{address}", "placement={trainer: cpu, rollout: cpu}"]
                process = start_run(hosts[2], config, *overrides, "--run-dir", run_dir, command=TEACHING)
                wait_for_more_steps(run_dir, 2, process, RUN_S)
                process.send_signal(signal.SIGINT)
                again, _ = process.communicate(timeout=RUN_S)
                assert process.returncode == 130, again
        else:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=RUN_S)
            assert process.returncode == 130, output
        assert [*(hosts[1].folder / "shm").glob("asyncrl-*")] == []
    log = (run_dir / "logs" / "controller.log").read_text().splitlines()
    later = "restarting engine-1, once its node is back; the run continues without it"
    told = [line for line in log if "engine-1: " in line and later in line]
    assert len(told) == len(losses)
    if has_rank:
        waits = "once its node is back; the run waits 600 s at most"
        assert any("teacher: " in line and waits in line for line in log)
        assert any("restarting trainer" in line and waits in line for line in log)
        teacher = itertools.groupby(what for what, _ in events(run_dir) if what.startswith("teacher"))
        assert [what for what, _ in teacher] == ["teacher lost", "teacher up"] * len(losses)
    assert f"the node {hosts[1].address} ({hosts[1].address})" in told[0]
    assert "(raylet)" not in output
    assert violations(read_evidence(run_dir), promise_of(config)) == []


def lose(host: network_hosts.Host, how: str) -> None:
    """By its wire, by all of its processes, or by its raylet alone, after which no other is left."""
    if how == "wire":
        host.link("down")
    elif how == "all":
        host.kill()
    else:
        host.kill_only("raylet")
        host.wait_empty()


def with_teacher(folder: Path) -> dict[str, dict[str, object]]:
    """The sections of a run with a teacher, whose model lies there."""
    scratch = ScratchConfig.model_validate(CONFIG["model"]["scratch"])
    make_scratch_model(ScratchSpec(out=folder / "teacher", seed=11, scratch=scratch))
    return {"teacher": {"path": str(folder / "teacher")}, "algorithm": {"distill_weight": 1.0}}


def weights_left_on(host: network_hosts.Host) -> list[Path]:
    """In its shared memory, once all of its processes but Ray's agents have ended by themselves."""
    host.wait_empty(but=AGENTS)
    return [*(host.folder / "shm").glob("asyncrl-*")]


def works_on(host: network_hosts.Host, name: str) -> bool:
    """Whether a process of the run with this name is there."""
    return any(f"specs/{name}" in line for line in host.commands())
