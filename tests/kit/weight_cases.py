"""Chunks and requests of pushes."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from asyncrl.messages.engine_api import (
    Interrupt,
    PrepareRequest,
)
from asyncrl.messages.trainer_api import (
    ExportChunkResponse,
    ExportResponse,
)
from asyncrl.trainer.ranks.rank import TrainerRank


def chunks_of(step: TrainerRank) -> list[tuple[ExportChunkResponse, dict[str, Tensor]]]:
    """Load each chunk before the next, like an engine."""
    chunks: list[tuple[ExportChunkResponse, dict[str, Tensor]]] = []
    while not chunks or not chunks[-1][0].is_last:
        answer = step.export_chunk(step.policy_version, len(chunks))
        chunks.append(
            (
                answer,
                {
                    name: tensor.clone()
                    for name, tensor in load_file(answer.path).items()
                },
            )
        )
    return chunks


async def publish(
    server: Any, version: int, digest: str = "w0", interrupt: Interrupt = "abort"
) -> None:
    await server.prepare(
        ExportResponse(
            version=version,
            path=f"fake/{digest}",
            digest=digest,
            num_tensors=1,
            num_bytes=1,
        )
    )
    await server.commit(version, digest, interrupt)


def prepare_request(answer: ExportResponse) -> PrepareRequest:
    return PrepareRequest(**answer.model_dump(include=set(PrepareRequest.model_fields)))
