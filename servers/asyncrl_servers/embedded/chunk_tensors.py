"""The tensors of a chunk, wherever the trainer has put them: in a file, or in memory that both have open. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.sharing import byte_digest, shared_digest
from asyncrl.wire import LoadChunkRequest
from asyncrl_servers.embedded.weight_files import weights_file
from asyncrl_servers.trainer_memory import TrainerMemory, views


@dataclass(frozen=True)
class Chunk:
    """`read` gives the tensor of a name, not copied; `digest` is as the trainer computes it for this kind of place."""

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
