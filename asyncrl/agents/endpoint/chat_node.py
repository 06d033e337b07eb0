"""A recorded completion in the tree of a session's chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from asyncrl.messages.records import PolicyCall
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.worker_api import new_hash

Deviation = Literal["thought", "opening", "end_token", "form"]
"""Part of a realigned prompt that the template's own render of the chat lacks or writes
differently.

thought: of an earlier answer. opening: text of a generation prompt, such as an empty
thought. end_token: sampled instead of the template's. form: white space or calls of an
answer.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Length and running hash of a text or of ids, int32 [T]."""

    length: int = 0
    state: blake2b = field(default_factory=new_hash)

    @property
    def place(self) -> tuple[int, bytes]:
        return self.length, self.state.digest()

    def then(self, more: str | npt.NDArray[np.int32]) -> Prefix:
        state = self.state.copy()
        state.update(
            more.encode()
            if isinstance(more, str)
            else np.ascontiguousarray(more, dtype="<i4").data
        )
        return Prefix(self.length + len(more), state)


@dataclass(frozen=True, slots=True, eq=False)
class ChatNode:
    """A recorded completion. `tokens` follow the parent's: `num_added` prompt tokens,
    then sampled ones.

    `order`: number of the call. `whole`: of all_ids(). Not `is_trained`: context. Of a
    chat: `num_messages` with the answer, `key` in a Chain, and `text`, the text of all
    ids or None. `call`: its tokens counted from the first of `tokens`.
    """

    name: str
    order: int
    parent: ChatNode | None
    tokens: Tokens
    num_added: int
    is_truncated: bool
    num_interruptions: int
    whole: Prefix
    call: PolicyCall
    is_trained: bool = True
    role: str = ""
    num_messages: int = 0
    key: bytes = b""
    text: Prefix | None = None
    deviations: Sequence[Deviation] = ()
    shown: Prefix | None = None
    """PromptMatch.shown"""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self.tokens.ids

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_added

    @property
    def sampled_ids(self) -> npt.NDArray[np.int32]:
        return self.ids[self.num_added :]

    @property
    def has_loss(self) -> bool:
        return self.is_trained and self.num_sampled > 0

    @property
    def content(
        self,
    ) -> tuple[bytes, int, bytes, tuple[tuple[int, int, int], ...], bool, int]:
        """Return a sort key independent of arrival and engine."""
        spans = tuple(
            (span.start, span.end, span.version) for span in self.tokens.spans
        )
        # big-endian, so that bytes sort like ids
        ids = self.ids.astype(">i4").tobytes()
        logprobs = self.tokens.behaviour_logprobs.tobytes()
        return (
            ids,
            self.num_added,
            logprobs,
            spans,
            self.is_truncated,
            self.num_interruptions,
        )

    def path(self) -> list[ChatNode]:
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        nodes.reverse()
        return nodes

    def all_ids(self) -> npt.NDArray[np.int32]:
        return np.concatenate([node.ids for node in self.path()])

    def last_ids(self, number: int) -> list[int]:
        node: ChatNode | None = self
        ids: list[int] = []
        while node is not None and len(ids) < number:
            ids = [*node.ids[len(ids) - number :].tolist(), *ids]
            node = node.parent
        return ids
