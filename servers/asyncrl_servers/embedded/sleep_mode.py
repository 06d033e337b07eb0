"""Sleep and wake of an embedded engine: memory is given back and taken again, and filled. Knows tensors;
knows no request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.base import EnginePart
from asyncrl.messages.engine_calls import CommitRequest, LoadChunkRequest, LoadChunkResponse
from asyncrl.weights.ipc import TrainerMemory
from asyncrl.weights.tensor_files import digest_of_tensor, digest_tensors, read_or_refuse
from asyncrl_servers.checks import not_newer, wrong_digest
from asyncrl_servers.embedded.kv_memory import available_bytes, give_back
from asyncrl_servers.embedded.loaded_weights import Weights, check_parameters
from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.sleeping import PUSH_AGAIN, ChunkedPush, Source, nowhere_whole


class SleepMode:
    """The memory of an engine's KV cache and weights, part by part.

    Life:       awake -> free() -> asleep -> take() -> awake; weights come back without content until they are
                restored, or commit() finds a whole push in them, or staged ones are swapped in.
    Waits:      nobody. load_chunk runs in any thread, all else in the thread that runs the model, while
                nothing runs.
    Invariant:  a part that could not be woken is asleep as it was; and weights never have content that no
                digest vouches for.
    """

    def __init__(self, runner: Runner, weights: Weights) -> None:
        self._runner, self._weights = runner, weights
        self.state = weights.state
        self.push = ChunkedPush()
        self._memory = TrainerMemory(runner.loaded.device)

    def check_may_free(self, parts: Collection[EnginePart]) -> None:
        """Raise Refused (409) if one of them cannot sleep."""
        if "weights" in parts:
            self._weights.check_may_drop()

    @torch.inference_mode(False)
    def free(self, parts: Collection[EnginePart]) -> int:
        """Give the memory of these parts back, which check_may_free has passed; returns its bytes."""
        num_bytes = 0
        with self._weights.lock:
            if "weights" in parts and self.state.is_awake("weights"):
                num_bytes += self._weights.drop()
                self.push.clear()
            if "kv" in parts and self.state.is_awake("kv"):
                num_bytes += self._runner.free_cache()
                self.state.set_asleep("kv")
        give_back(self._runner.loaded.device)
        return num_bytes

    @torch.inference_mode(False)
    def take(self, parts: Collection[EnginePart], *, restore: bool) -> int:
        """Take memory for these parts; returns its bytes. Raises Refused (400, 409; 507: there is not enough
        memory).
        """
        num_bytes = 0
        with self._weights.lock:
            self._check_memory(parts)
            try:
                if "weights" in parts and restore and not self.state.has_content:
                    num_bytes += self._restore()
                elif "weights" in parts and not self.state.is_awake("weights"):
                    num_bytes += self._weights.allocate()
                if "kv" in parts and not self.state.is_awake("kv"):
                    num_bytes += self._runner.take_cache()
                    self.state.set_awake("kv")
            except (RuntimeError, OSError) as error:  # what torch and mmap raise; an answer, not a crash
                raise _no_memory(f"{' and '.join(parts)} cannot wake: {error}") from error
        return num_bytes

    def load_chunk(self, request: LoadChunkRequest) -> LoadChunkResponse:
        """Copy the tensors of a chunk into the weights, and say what is there. Raises Refused (400, 409),
        after which no chunk is.
        """
        weights = self._weights
        with weights.lock:
            self.state.check_may_load(request.version)
            self.push.expect(request, weights.version)
            digests, num_bytes, is_done = {}, 0, False
            try:
                with self._chunk(request) as tensors:
                    check_parameters(tensors, weights.kinds, request.place, is_part=True)
                    for name, tensor in tensors.items():
                        digests[name] = digest_of_tensor(name, weights.fill(name, tensor))
                        num_bytes += tensor.nbytes
                is_done = True
            finally:
                if not is_done:
                    self.push.clear()
            digest = self.push.add(request, digests, num_bytes)
        return LoadChunkResponse(version=request.version, index=request.index, digest=digest)

    def commit(self, request: CommitRequest) -> None:
        """Serve the push that lies in the weights. Raises Refused (409), after which no chunk is there."""
        weights = self._weights
        with weights.lock:
            if request.version == weights.version and request.digest != weights.digest:
                raise not_newer(request.version, weights.version)
            source = self.push.take(request.version, request.digest, weights.kinds)
            weights.settle(request.version, request.digest, source)
        self._runner.prompts.clear()

    @contextmanager
    def _chunk(self, request: LoadChunkRequest) -> Iterator[Mapping[str, Tensor]]:
        """The tensors of a chunk, wherever the trainer has put them. Raises Refused (400)."""
        if request.memory is None:
            yield {name: raw.as_torch() for name, raw in read_or_refuse(request.path).items()}
            return
        with self._memory.tensors(request.memory) as tensors:
            yield tensors

    def _check_memory(self, parts: Collection[EnginePart]) -> None:
        """Raise Refused (507) if there is less than these parts need: asked first, as a CPU's memory is
        promised before it is there.
        """
        sizes = {"kv": self._runner.num_cache_bytes(), "weights": self._weights.num_bytes()}
        needed = {part: sizes[part] for part in parts if not self.state.is_awake(part)}
        device = self._runner.loaded.device
        free = available_bytes(device)
        if sum(needed.values()) > free:
            what = f"{' and '.join(needed)} need {sum(needed.values())} bytes to wake"
            raise _no_memory(f"{what}, {free} are free on {device}")

    def _restore(self) -> int:
        """Load again what served. Memory for it is taken once: what is awake without content is given back
        first.
        """
        weights, source = self._weights, self._weights.source
        if source is None:
            raise nowhere_whole(weights.version)
        was_awake = self.state.is_awake("weights")
        if was_awake:
            weights.drop()
            self.push.clear()
        is_done = False
        try:
            tensors = weights.read(source)
            self._check_digest(tensors, source)
            num_bytes = weights.adopt(tensors, source)
            is_done = True
        finally:
            if was_awake and not is_done:
                weights.allocate()
        return 0 if was_awake else num_bytes

    def _check_digest(self, tensors: dict[str, Tensor], source: Source) -> None:
        found = digest_tensors(tensors)
        if found != source.digest:
            refusal = wrong_digest(
                self._weights.version, source.path or "the model folder", found, source.digest
            )
            raise Refused(
                409,
                f"cannot restore: {refusal}",
                rule=refusal.body.rule,
                way_out=f"wake without restore, and {PUSH_AGAIN}",
            )


def _no_memory(what: str) -> Refused:
    return Refused(
        507,
        what,
        rule="an engine that sleeps has given its memory away, and takes it again once others have freed it",
        way_out="have the trainer offload first, lower rollout.slots, or use a smaller model.",
    )
