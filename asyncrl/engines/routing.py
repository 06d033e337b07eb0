"""Which server takes a request. Pure: knows counts and keys, no server and no wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Router:
    """Least loaded server first; requests of one route key together, as long as their server has a free slot.

    Life:       take(key) charges one server until the block ends; a key is forgotten with its last request, so
                that nothing grows with the number of groups. A server is up, or down and then given nothing.
    Invariant:  a request queues at a server only when no server that is up has a free slot.
    """

    def __init__(self, num_servers: int, slots: int) -> None:
        self.load = [0] * num_servers
        self.up = set(range(num_servers))
        self.slots = slots
        self._keys: dict[str, tuple[int, int]] = {}  # route key -> (server of its last request, requests in flight)

    def __repr__(self) -> str:
        return f"<Router load {self.load} of {self.slots}, {len(self._keys)} keys>"

    @contextlib.contextmanager
    def take(self, route_key: str) -> Iterator[int]:
        """Number of the server for one request, charged until the block ends. The key "" is no key; a server must be up."""
        index = self._choose(route_key)
        self.load[index] += 1
        if route_key:
            self._keys[route_key] = (index, self._keys.get(route_key, (index, 0))[1] + 1)
        try:
            yield index
        finally:
            self.load[index] -= 1
            if route_key:
                self._release_key(route_key)

    def _choose(self, route_key: str) -> int:
        if route_key in self._keys:
            known, _ = self._keys[route_key]
            if known in self.up and self.load[known] < self.slots:
                return known
        return min(sorted(self.up), key=lambda index: self.load[index])

    def _release_key(self, route_key: str) -> None:
        index, count = self._keys[route_key]
        if count > 1:
            self._keys[route_key] = (index, count - 1)
        else:
            del self._keys[route_key]
