"""What vLLM's CPU engine needs to be mended: seeds that end it, kernels that it compiles for nothing, waits
that starve the machine.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


def mend_cpu() -> None:
    """Everything that is mended in a worker on CPU. A second time does nothing."""
    mend_seeds()
    mend_ranks()
    mend_waits()


def mend_waits() -> None:
    """Sleep 20 us between two looks at the shared memory through which the engine and its workers speak,
    instead of yielding the core.

    vLLM spins there, with sched_yield, for the whole of each step. Engine and worker then hold two cores, and
    on Linux 6.18 with two of them everybody else (vLLM's own front end, the trainer, the run) was not
    scheduled for up to 9 s at a time; with this for 5 ms at most, at the same tokens a second. vLLM's other
    way to wait, for a notice over zmq, loses notices that come in quick succession.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = _nap


def _nap() -> None:
    time.sleep(2e-5)


def mend_ranks() -> None:
    """Count ranks and draw tokens as plain torch does.

    vLLM compiles both with torch.compile, even with --enforce-eager: on CPU the first request with logprobs
    takes some 9 s then, and ends the engine where there is no C++ compiler. The functions are the same, not
    compiled.
    """
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    for module, name in (
        (sampler, "batched_count_greater_than"),
        (topk_topp_sampler, "compiled_random_sample"),
    ):
        compiled = getattr(module, name)
        setattr(module, name, getattr(compiled, "_torchdynamo_orig_callable", compiled))


def mend_seeds() -> None:
    """Undo a draw that vLLM discards by restoring the generator, instead of by winding it back.

    vLLM 0.32: after a partial prefill (a long prompt, many prompts at once, a recompute after a pause) the
    runner throws the sampled token away and calls Generator.set_offset, which a CPU generator has not: "CPU
    Generator does not use offset", and the whole engine ends. Remove with a vLLM whose CPU runner does
    without it.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    if getattr(Runner, "_asyncrl_seeds", False):
        return
    sample, keep_books = Runner._sample, Runner._bookkeeping_sync

    def discarded(runner: Any) -> list[int]:
        batch = runner.input_batch
        found = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
        return [int(index) for index in found if int(index) in batch.generators]

    def sample_and_restore(runner: Any, *args: Any, **named: Any) -> Any:
        generators = runner.input_batch.generators
        states = {index: generators[index].get_state() for index in discarded(runner)}
        try:
            return sample(runner, *args, **named)
        finally:
            for index, state in states.items():
                generators[index].set_state(state)

    def keep_books_without(runner: Any, *args: Any, **named: Any) -> Any:
        generators = runner.input_batch.generators
        held = {index: generators.pop(index) for index in discarded(runner)}
        try:
            return keep_books(runner, *args, **named)
        finally:
            generators.update(held)

    Runner._sample, Runner._bookkeeping_sync, Runner._asyncrl_seeds = (
        sample_and_restore,
        keep_books_without,
        True,
    )


# vLLM's executor of worker processes, for --distributed-executor-backend. Importing it mends the waits of the
# engine's process.


mend_waits()


class CpuExecutor(MultiprocExecutor):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The same, in a process whose waits are mended: nothing else of ours is imported there."""
