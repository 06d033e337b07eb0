"""Shapes of every HTTP message, and the digest both ends compute. All that servers/ may import; imports no asyncrl.

Every server listens on 127.0.0.1 and answers only to `Authorization: Bearer <the run's secret>`; the secret
reaches a child process as SECRET_ENV in the first line of its standard input. Errors are `ErrorBody` with a 4xx or 5xx status.
Tensors travel as safetensors bytes, or lie in memory whose handle is told; nothing is pickled.

Engine servers (embedded, simulated, vllm):   GET /health, POST /generate /abort /prepare /commit
                                              /sleep /wake /load_chunk
Trainer worker (rank 0):                      GET /health, POST /train /export /save
                                              /begin_save_state /wait_save_state /load_state
                                              /offload /onload /export_chunk /broadcast
"""

from asyncrl.wire.base import (
    FATAL_PREFIX,
    SECRET_ENV,
    EnginePart,
    ErrorBody,
    Interrupt,
    Message,
    Moved,
    TrainerPart,
    WeightKind,
    fatal_line,
    find_fatal,
)
from asyncrl.wire.batch import BatchArrays, BatchHeader, CreditHeader, TrajectoryHeader, pack_batch, unpack_batch
from asyncrl.wire.broadcast import BroadcastRequest, BroadcastResponse, GroupSeat, SentChunk, SentWeights
from asyncrl.wire.chunks import ChunkMemory, MemoryHandle, PlacedTensor
from asyncrl.wire.digests import joint_digest, tensor_digest, weights_digest
from asyncrl.wire.engine import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    LoadChunkRequest,
    LoadChunkResponse,
    PrepareRequest,
    PrepareResponse,
    SleepRequest,
    Span,
    WakeRequest,
)
from asyncrl.wire.trainer import (
    Canary,
    ExportChunkRequest,
    ExportChunkResponse,
    ExportResponse,
    OffloadRequest,
    SaveRequest,
    StateRequest,
    StateSaved,
    TrainerHealth,
    TrainResponse,
)

__all__ = [
    "FATAL_PREFIX",
    "SECRET_ENV",
    "AbortRequest",
    "AbortResponse",
    "BatchArrays",
    "BatchHeader",
    "BroadcastRequest",
    "BroadcastResponse",
    "Canary",
    "ChunkMemory",
    "CommitRequest",
    "CommitResponse",
    "CreditHeader",
    "EngineHealth",
    "EnginePart",
    "ErrorBody",
    "ExportChunkRequest",
    "ExportChunkResponse",
    "ExportResponse",
    "GenerateChunk",
    "GenerateRequest",
    "GenerateResponse",
    "GroupSeat",
    "Interrupt",
    "LoadChunkRequest",
    "LoadChunkResponse",
    "MemoryHandle",
    "Message",
    "Moved",
    "OffloadRequest",
    "PlacedTensor",
    "PrepareRequest",
    "PrepareResponse",
    "SaveRequest",
    "SentChunk",
    "SentWeights",
    "SleepRequest",
    "Span",
    "StateRequest",
    "StateSaved",
    "TrainResponse",
    "TrainerHealth",
    "TrainerPart",
    "TrajectoryHeader",
    "WakeRequest",
    "WeightKind",
    "fatal_line",
    "find_fatal",
    "joint_digest",
    "pack_batch",
    "tensor_digest",
    "unpack_batch",
    "weights_digest",
]
