"""Which server takes a request. Pure: knows counts and keys, no server and no wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Router:
    """Least loaded server first; but where the request's prefix is cached, as long as that server has a free slot.

    Life:       take(key) charges one server until the block ends. Requests of one key that are in flight stay together; the key is
                forgotten with the last of them, so that nothing grows with the number of groups. Turns of one session follow each
                other: `near` says where the last one was. A server is up, or down and then given nothing.
    Invariant:  a request is given to a server without a free slot only when no server that is up has one; and once one has, a request
                of a server with more than its slots that is interrupted moves there (has_to_move). It moves for nothing less, so
                that no request goes to and fro.
    """

    def __init__(self, num_servers: int, slots: int) -> None:
        self.load = [0] * num_servers
        self.up = set(range(num_servers))
        self.slots = slots
        self._keys: dict[str, tuple[int, int]] = {}  # route key -> (server of its last request, requests in flight)

    def __repr__(self) -> str:
        return f"<Router load {self.load} of {self.slots}, {len(self._keys)} keys>"

    @contextlib.contextmanager
    def take(self, route_key: str, near: int = -1) -> Iterator[int]:
        """Number of the server for one request, charged until the block ends. The key "" is no key; a server must be up."""
        index = self._choose(route_key, near)
        self.load[index] += 1
        if route_key:
            self._keys[route_key] = (index, self._keys.get(route_key, (index, 0))[1] + 1)
        try:
            yield index
        finally:
            self.load[index] -= 1
            if route_key:
                self._release_key(route_key)

    @property
    def num_free(self) -> int:
        """Free slots of all servers that are up."""
        return sum(max(0, self.slots - self.load[index]) for index in self.up)

    def has_to_move(self, index: int) -> bool:
        """Whether a request that is at this server, and has lost its cache there, would be better off if it were taken anew."""
        if index not in self.up:
            return True
        return self.load[index] > self.slots and any(self.load[other] < self.slots for other in self.up)

    def _choose(self, route_key: str, near: int) -> int:
        cached = self._keys[route_key][0] if route_key in self._keys else near
        if cached in self.up and self.load[cached] < self.slots:
            return cached
        return min(sorted(self.up), key=lambda index: self.load[index])

    def _release_key(self, route_key: str) -> None:
        index, count = self._keys[route_key]
        if count > 1:
            self._keys[route_key] = (index, count - 1)
        else:
            del self._keys[route_key]
