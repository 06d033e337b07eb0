"""A long wire to a host of a network: each frame comes later, and some never, in both directions.

By tc's netem where the kernel has it. Else, as a program, between two TAP devices: the host's wire goes to a
bridge of its own, and each frame from there to the others' bridge, or back, is read and written here.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_hosts import Host, ip

TUN, TUNSETIFF, IFF_TAP, IFF_NO_PI = "/dev/net/tun", 0x400454CA, 0x0002, 0x1000
LARGEST_FRAME_BYTES, READ_AT_ONCE = 1 << 16, 64


@contextlib.contextmanager
def slow_wire(
    host: Host, *, delay_ms: float, jitter_ms: float = 0.0, loss: float = 0.0, seed: int = 0
) -> Iterator[None]:
    """Meanwhile each frame takes delay_ms, give or take jitter_ms (so they may overtake each other), and that
    share of them is lost: each way. `host.link` cuts it as any other wire.
    """
    netem = ["netem", "delay", f"{delay_ms}ms", f"{jitter_ms}ms", "loss", f"{loss:%}"]
    ends = [("-n", host.name, "dev", "eth0"), ("dev", f"{host.name}-w")]
    if all(_tc(end, "replace", *netem) for end in ends):
        yield
        for end in ends:
            _tc(end, "del")
        return
    if not Path(TUN).exists():
        pytest.skip(f"this kernel has neither netem nor {TUN}")
    wire, own, taps = f"{host.name}-w", f"{host.name}-o", [f"{host.name}-{end}" for end in "xy"]
    shared = Path(f"/sys/class/net/{wire}/master").resolve().name
    asked = [*taps, str(delay_ms / 1e3), str(jitter_ms / 1e3), str(loss), str(seed)]
    command = [sys.executable, __file__, *asked]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        ip("link", "add", own, "type", "bridge")
        for device, bridge in zip([wire, *taps], [own, own, shared], strict=True):
            ip("link", "set", device, "master", bridge, "up")
        ip("link", "set", own, "up")
        yield
        assert process.poll() is None, "the wire was there all the time"
        ip("link", "set", wire, "master", shared)
    finally:
        process.kill()
        process.communicate()
        subprocess.run(["ip", "link", "del", own], capture_output=True, check=False)


def _tc(end: tuple[str, ...], what: str, *how: str) -> bool:
    """Whether tc did it; not where this kernel has no netem."""
    *where, dev, device = end
    command = ["tc", *where, "qdisc", what, dev, device, "root", *how]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _tap(name: str) -> int:
    """A TAP device of that name, as long as it is open."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def _carry(one: int, other: int, delay_s: float, jitter_s: float, loss: float, chance: random.Random) -> None:
    """Frames from each to the other, until standard input ends: whoever wanted it is gone."""
    other_end, order = {one: other, other: one}, itertools.count()
    under_way = list[tuple[float, int, int, bytes]]()  # (due, order, to, frame)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready = select.select([one, other, sys.stdin], [], [], wait_s)[0]
        if sys.stdin in ready:
            return
        for end in ready:
            with contextlib.suppress(OSError):  # no more; or it is down
                for _ in range(READ_AT_ONCE):
                    frame = os.read(end, LARGEST_FRAME_BYTES)
                    due_s = time.monotonic() + delay_s + chance.uniform(-jitter_s, jitter_s)
                    if chance.random() >= loss:
                        heapq.heappush(under_way, (due_s, next(order), other_end[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, to, frame = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # it is down, or full: lost, as on any wire
                os.write(to, frame)


if __name__ == "__main__":
    taps = [_tap(name) for name in sys.argv[1:3]]
    print("ready", flush=True)
    _carry(taps[0], taps[1], *map(float, sys.argv[3:6]), random.Random(int(sys.argv[6])))
