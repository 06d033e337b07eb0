"""Chunks of segments."""

from __future__ import annotations

from typing import Any

from token_cases import sampled_tokens

from asyncrl.messages.records import VersionSpan
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart


def make_request(max_tokens: int) -> SamplingRequest:
    return SamplingRequest("r0", (1, 2), max_tokens, temperature=1.0)


def chunk(*tokens: int, **changes: Any) -> SegmentPart:
    return rest(None, *tokens, **changes)


def rest(reason: Any, *tokens: int, version: int = 2, **changes: Any) -> SegmentPart:
    values: dict[str, Any] = {
        "token_ids": list(tokens),
        "logprobs": [-float(token) for token in tokens],
    }
    values["version_spans"] = spans((0, len(tokens), version)) if tokens else []
    values |= changes
    return SegmentPart(
        sampled_tokens(
            values["token_ids"], values["logprobs"], values["version_spans"]
        ),
        reason,
    )


def spans(*which: tuple[int, int, int]) -> list[VersionSpan]:
    return [VersionSpan(*span) for span in which]
