"""A server that somebody else started: stands where a ChildProcess would, and has no process to start, watch or end."""

from __future__ import annotations

import asyncio

from asyncrl.errors import RoomError

KEY_ENV = "ASYNCRL_VLLM_KEY"
"""Environment variable with the key of servers that somebody else started. No child process of ours gets it."""


class ForeignProcess:
    """Nothing but an address. Whether anybody answers there is for its heartbeat to say; an end of it cannot be seen."""

    pid: int | None = None
    returncode: int | None = None
    died: RoomError | None = None
    left = ""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url.rstrip("/")

    def __repr__(self) -> str:
        return f"<ForeignProcess {self.name} {self.url}>"

    @property
    def log_path(self) -> str:
        """Where to read why it does not answer, in words."""
        return f"the log of {self.url}"

    async def start(self) -> None:
        """It is somebody else's to start."""

    def renewed(self) -> ForeignProcess:
        """Whatever answers at the same address later."""
        return self

    async def watch(self) -> None:
        """Sleep for ever."""
        await self.wait()

    async def wait(self) -> None:
        """Sleep for ever."""
        await asyncio.Event().wait()

    def note_death(self) -> None:
        """It has none that we could know of."""

    def death(self) -> RoomError:
        """Never asked for, because wait() does not return."""
        return RoomError(self.name, f"the server at {self.url} ended", way_out=f"read {self.log_path}.")

    def log_tail(self) -> str:
        """Its log is not ours to read."""
        return f"    (in {self.log_path})"

    async def aclose(self) -> None:
        """It goes on, with the weights that it has."""

    def kill_nowait(self) -> None:
        """It is somebody else's to end."""
