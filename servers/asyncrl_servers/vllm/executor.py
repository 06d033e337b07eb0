"""vLLM's executor of worker processes, for --distributed-executor-backend. Importing it mends the waits of the engine's process."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from asyncrl_servers.vllm.mending import mend_waits

mend_waits()


class CpuExecutor(MultiprocExecutor):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The same, in a process whose waits are mended: nothing else of ours is imported there."""
