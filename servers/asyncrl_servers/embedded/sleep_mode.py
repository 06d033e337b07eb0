"""Sleep and wake of an embedded engine: memory is given back and taken again, and filled. Knows tensors;
knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.base import EnginePart
from asyncrl.messages.engine_calls import CommitRequest, LoadChunkRequest, LoadChunkResponse
from asyncrl.weights.shared_memory import byte_digest, shared_digest
from asyncrl_servers.checks import not_newer, wrong_digest
from asyncrl_servers.embedded.kv_memory import available_bytes, give_back
from asyncrl_servers.embedded.loaded_weights import (
    Weights,
    check_names,
    digest_tensors,
    fitting,
    weights_file,
)
from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.sleeping import PUSH_AGAIN, ChunkedPush, nowhere_whole
from asyncrl_servers.trainer_memory import TrainerMemory, views

# The tensors of a chunk, wherever the trainer has put them: in a file, or in memory that both have open.
# Knows no model.


@dataclass(frozen=True)
class Chunk:
    """`read` gives the tensor of a name, not copied; `digest` is as the trainer computes it for this kind of
    place.
    """

    names: frozenset[str]
    read: Callable[[str], Tensor]
    digest: Callable[[str, Tensor], bytes]


class ChunkReader:
    """Reads chunks for one server."""

    def __init__(self, device: torch.device) -> None:
        self._memory = TrainerMemory(device)

    def __repr__(self) -> str:
        return f"<ChunkReader, {self._memory!r}>"

    @contextmanager
    def read(self, request: LoadChunkRequest) -> Iterator[Chunk]:
        """While it may be read; what was begun with its tensors is done afterwards. Raises Refused (400)."""
        if request.memory is None:
            with weights_file(request.path) as file:
                yield Chunk(frozenset(file.keys()), file.get_tensor, byte_digest)
            return
        memory = self._memory.opened(request.memory.handle)
        tensors = views(request.memory, memory.data)
        try:
            yield Chunk(frozenset(tensors), tensors.__getitem__, shared_digest)
        finally:
            memory.settle()  # the trainer writes the next chunk over it


class Resting:
    """The memory of an engine's KV cache and weights, part by part.

    Life:       awake -> free() -> asleep -> take() -> awake; weights come back without content until they are
    restored, or
                commit() finds a whole push in them, or staged ones are swapped in.
    Waits:      nobody. load_chunk runs in any thread, all else in the thread that runs the model, while
    nothing runs. Invariant:  a part that could not be woken is asleep as it was; and weights never have
    content that no digest vouches for.
    """

    def __init__(self, runner: Runner, weights: Weights, spare_path: str | None = None) -> None:
        """`spare_path`: a file for weights that lie nowhere as a whole, while they are asleep; None: those
        cannot be restored.
        """
        self._runner, self._weights, self._spare_path = runner, weights, spare_path
        self.state = weights.state
        self.push = ChunkedPush()
        self._chunks = ChunkReader(runner.loaded.device)

    def check_may_free(self, parts: Collection[EnginePart]) -> None:
        """Raise Refused (409) if one of them cannot sleep."""
        if "weights" in parts:
            self._weights.check_may_drop()

    @torch.inference_mode(False)
    def free(self, parts: Collection[EnginePart]) -> int:
        """Give the memory of these parts back, which check_may_free has passed; returns its bytes. Raises
        Refused (507).
        """
        num_bytes = 0
        with self._weights.lock:
            if "weights" in parts and self.state.is_awake("weights"):
                if self._spare_path is not None:
                    self._weights.keep_at(self._spare_path)
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
            except (
                RuntimeError,
                OSError,
            ) as error:  # what torch and mmap raise; an answer, not the end of the loop
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
                with self._chunks.read(request) as chunk:
                    check_names(set(chunk.names), weights.kinds, request.place, is_part=True)
                    for name in sorted(chunk.names):
                        tensor = fitting(name, chunk.read(name), weights.kinds[name], request.place)
                        digests[name] = chunk.digest(name, weights.fill(name, tensor))
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
            if request.version == weights.version and not weights.is_digest(request.digest):
                raise not_newer(request.version, weights.version)
            source = self.push.take(request.version, request.digest, weights.kinds)
            weights.settle(request.version, request.digest, source)
        self._runner.prompts.clear()

    def _check_memory(self, parts: Collection[EnginePart]) -> None:
        """Raise Refused (507) if there is less than these parts need: asked first, as a CPU's memory is
        promised before it is there.
        """
        sizes = {"kv": self._runner.num_cache_bytes(), "weights": self._weights.num_bytes()}
        needed = {part: sizes[part] for part in parts if not self.state.is_awake(part)}
        free = available_bytes(self._runner.loaded.device)
        if sum(needed.values()) > free:
            device = self._runner.loaded.device
            raise _no_memory(
                f"{' and '.join(needed)} need {sum(needed.values())} bytes to wake, {free} are free on "
                f"{device}"
            )

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
            self._check_digest(tensors, source.path or "the model folder", source.digest)
            num_bytes = weights.adopt(tensors, source)
            is_done = True
        finally:
            if was_awake and not is_done:
                weights.allocate()
        return 0 if was_awake else num_bytes

    def _check_digest(self, tensors: dict[str, Tensor], path: str, expected: str) -> None:
        found = digest_tensors(tensors)
        if found != expected:
            refusal = wrong_digest(self._weights.version, path, found, expected)
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
        rule="what sleeps was given away, and comes back only where somebody else has freed it",
        way_out="have the trainer offload first, lower rollout.slots, or use a smaller model.",
    )
