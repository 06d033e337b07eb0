"""Messages about weights that the trainer sends to all workers of all engines at once (publisher.transport=nccl)."""

from __future__ import annotations

from pydantic import Field

from asyncrl.wire.base import Message
from asyncrl.wire.chunks import PlacedTensor


class GroupSeat(Message):
    """The place of one participant in the group that weights are sent through: the trainer has rank 0, an engine's workers the ranks
    from `rank` on.

    `path` is the file in which they find each other, one a group; `is_new`: the group is to be formed first. `timeout_s` bounds
    forming it, and each buffer that is sent.
    """

    path: str
    size: int = Field(ge=2)
    rank: int = Field(ge=0)
    is_new: bool
    timeout_s: float = Field(gt=0)


class BroadcastRequest(Message):
    """Send the weights of `version` to everybody in the group."""

    version: int = Field(ge=0)
    seat: GroupSeat


class BroadcastResponse(Message):
    """They were sent. Whether they arrived whole, each receiver says: `digest` is of what was held."""

    version: int
    digest: str
    num_bytes: int


class SentChunk(Message):
    """One buffer, and the tensors that lie in it."""

    num_bytes: int = Field(ge=1)
    tensors: list[PlacedTensor]


class SentWeights(Message):
    """What comes through the group, told in it before the first buffer."""

    version: int
    chunks: list[SentChunk]
