"""Relays on the hosts of a network (network_hosts.py), and the controller's end on the first of them.

As a program, on a host: one push to some nodes, told as JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from network_hosts import Host, network

from asyncrl.errors import RoomError
from asyncrl.http import Caller
from asyncrl.messages.base import SECRET_ENV, RelayHealth
from asyncrl.messages.calls import ExportResponse
from asyncrl.sync.spread import NodeRelay, Spread
from asyncrl.weights.relay import RelaySpec

SECRET = "a secret of relays"
TRAINER = Path("/dev/shm/trainer")
"""Where the trainer writes, on the first host."""
BOUND = """
import os, socket, sys
listener = socket.create_server((sys.argv[1], 7000), backlog=2048)
os.set_inheritable(listener.fileno(), True)
print("bound", flush=True)
arguments = ["-m", "asyncrl.weights.relay", "--spec", sys.argv[2], "--fd", str(listener.fileno())]
os.execv(sys.executable, [sys.executable, *arguments])
"""


@dataclass(frozen=True)
class RelayNetwork:
    """Hosts with a relay each, the trainer's first. Digests are names here: no engine computes them."""

    hosts: list[Host]

    def write(self, name: str, data: bytes) -> str:
        """What the trainer has written; the path on its host."""
        there = self.hosts[0].folder / "shm" / "trainer"
        there.mkdir(exist_ok=True)
        (there / name).write_bytes(data)
        return str(TRAINER / name)

    def read(self, number: int, path: str) -> bytes:
        """A file in the shared memory of a host."""
        return (self.hosts[number].folder / "shm" / Path(path).relative_to("/dev/shm")).read_bytes()

    def begin_push(self, path: str, digest: str, nodes: Sequence[int], *, is_chain: bool = True) -> Any:
        """Its process; told() has what came of it. Not a chain: each node pulls from the trainer's."""
        urls = [f"http://{host.address}:7000" for host in self.hosts]
        asked = {"urls": urls, "path": path, "digest": digest, "nodes": list(nodes), "is_chain": is_chain}
        command = [sys.executable, __file__, json.dumps(asked)]
        return self.hosts[0].start(command, stdout=subprocess.PIPE)

    def push(self, *args: Any, **how: Any) -> dict[str, Any]:
        """begin_push, and what came of it: `seconds`, and of each node its `paths` or `errors`."""
        return told(self.begin_push(*args, **how))


def told(pushing: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a push came to, once it has ended."""
    output, _ = pushing.communicate(timeout=240)
    answer: dict[str, Any] = json.loads(output)
    return answer


@contextmanager
def relay_network(num: int) -> Iterator[RelayNetwork]:
    """So many hosts, and a relay on each."""
    with network(num) as hosts, ExitStack() as stack:
        for number, host in enumerate(hosts):
            spec = host.folder / "relay.json"
            roots = [] if number else [str(TRAINER)]
            spec.write_text(RelaySpec(node=f"node-{number}", roots=roots).model_dump_json())
            command = [sys.executable, "-c", BOUND, host.address, str(spec)]
            log = stack.enter_context((host.folder / "relay.log").open("wb"))
            pipe = subprocess.PIPE
            process = host.start(command, env={SECRET_ENV: SECRET}, stdin=pipe, stdout=pipe, stderr=log)
            for end in (process.stdin, process.stdout):
                assert end is not None
                stack.callback(end.close)
            assert process.stdout is not None
            assert process.stdout.readline() == b"bound\n"
        yield RelayNetwork(hosts)
        for host in hosts:
            host.kill()


async def _push(
    urls: Sequence[str], path: str, digest: str, nodes: Sequence[int], is_chain: bool
) -> dict[str, Any]:
    callers = [Caller(f"relay-{number}", url, SECRET) for number, url in enumerate(urls)]
    relays = [NodeRelay(f"node-{number}", caller) for number, caller in enumerate(callers)]
    engines = {f"engine-{number}": number for number in nodes}
    spread = Spread(relays, engines, trainer=0, timeout_s=600)
    sent = ExportResponse(version=1, path=path, digest=digest, num_tensors=1, num_bytes=1)
    await asyncio.gather(
        *(callers[number].get("/health", RelayHealth, timeout_s=60) for number in (0, *nodes))
    )
    start = time.perf_counter()
    asked = [spread.locate(name, sent, engines if is_chain else [name]) for name in engines]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    seconds = time.perf_counter() - start
    for caller in callers:
        await caller.aclose()
    found: dict[str, Any] = {"seconds": seconds, "paths": {}, "errors": {}}
    for number, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, ExportResponse):
            found["paths"][str(number)] = answer.path
        elif isinstance(answer, RoomError):
            found["errors"][str(number)] = f"{type(answer).__name__}: {answer}"
        else:
            raise answer
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_push(**json.loads(sys.argv[1])))), flush=True)
