"""A Ray cluster on hosts of a network, as frugal as Ray can be."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from network_hosts import Host

PORT = 6379
FRUGAL = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parent.parent}",
    "OMP_NUM_THREADS": "1",
}
"""Workers are started when they are asked for; children find modules of the tests."""
START_S = 120.0


@contextlib.contextmanager
def ray_cluster(hosts: Sequence[Host], options: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """The address of the head, on the first host; it is ended with the network. `options`: of `ray start`."""
    head = hosts[0].address
    for number, host in enumerate(hosts):
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if number == 0 else []
        where = where or [f"--address={head}:{PORT}"]
        start_ray(host, *where, *options.get(number, ()))
        if number == 0:
            wait_for(host, ["bash", "-c", f"echo > /dev/tcp/{head}/{PORT}"])
    waits = f"import ray, time\nray.init(log_to_driver=False)\nassert len(ray.nodes()) == {len(hosts)}"
    wait_for(hosts[0], [sys.executable, "-c", waits], RAY_ADDRESS=f"{head}:{PORT}")
    yield f"{head}:{PORT}"


def start_ray(host: Host, *options: str) -> subprocess.Popen[str]:
    """`ray start` there, until the host ends."""
    with (host.folder / "ray.log").open("a") as log:
        return host.start(
            [
                str(Path(sys.executable).with_name("ray")),
                "start",
                "--block",
                f"--node-ip-address={host.address}",
                f"--temp-dir={host.folder / 'tmp'}",
                "--object-store-memory=80000000",
                "--disable-usage-stats",
                "--include-log-monitor=false",
                *options,
            ],
            env=FRUGAL,
            stdout=log,
            stderr=log,
            text=True,
        )


def wait_for(host: Host, command: Sequence[str], **env: str) -> None:
    """Until the command succeeds there."""
    until_s = time.monotonic() + START_S
    while True:
        done = host.run(["env", *(f"{name}={value}" for name, value in env.items()), *command])
        if done.returncode == 0:
            return
        assert time.monotonic() < until_s, done.stdout + done.stderr + (host.folder / "ray.log").read_text()
        time.sleep(0.1)
