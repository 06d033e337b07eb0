"""Checks of engine answers, and the experts of tokens."""

from __future__ import annotations

import math

from asyncrl.base.errors import EngineError
from asyncrl.messages.engine_api import NO_EXPERT, GenerateRequest, GenerateResponse

_UNKNOWN = NO_EXPERT.to_bytes(2, "little")
LOGPROB_SLACK = 1e-3
"""In nats."""


def is_sampled(token_id: int, logprob: float) -> bool:
    return token_id >= 0 and math.isfinite(logprob) and logprob <= LOGPROB_SLACK


class SegmentCheck:
    """Raises EngineError for invalid answers of server `name` to `request`.

    Invariant: versions never decrease from `oldest` (confirmed at sending) to `newest` (offered last). A
        completion's last token comes with its finish_reason, so a request can continue after a lost
        server.
    """

    def __init__(self, name: str, request: GenerateRequest, *, oldest: int) -> None:
        self._name = name
        self._request = request
        self._num_accepted = 0
        self._version = oldest

    def accept(self, part: GenerateResponse, *, newest: int) -> None:
        request = self._request
        token_ids = part.token_ids
        logprobs = part.logprobs
        self._num_accepted += len(token_ids)
        if self._num_accepted > request.max_tokens:
            raise self._wrong(f"{self._num_accepted} tokens", "max_tokens is a limit")
        if len(logprobs) != len(token_ids):
            wrong = f"{len(logprobs)} logprobs for {len(token_ids)} tokens"
            raise self._wrong(wrong, "each token has one logprob")
        # The first test is 5 times faster than the loop, which finds the token to report.
        if token_ids and not (
            min(token_ids) >= 0 and all(map(math.isfinite, logprobs)) and max(logprobs) <= LOGPROB_SLACK
        ):
            for token_id, logprob in zip(token_ids, logprobs, strict=True):
                if not is_sampled(token_id, logprob):
                    wrong = f"token id {token_id} with logprob {logprob}"
                    raise self._wrong(wrong, "ids are 0 or more, a sampled logprob is finite and at most 0")
        self._check_top(part)
        self._check_spans(part, newest)
        is_full = self._num_accepted == request.max_tokens
        if part.finish_reason is None and is_full:
            raise self._wrong(f"chunks of {self._num_accepted} tokens and no end", "max_tokens is a limit")
        if (part.finish_reason == "length" and not is_full) or (
            part.finish_reason == "stop" and not token_ids
        ):
            wrong = f"finish_reason {part.finish_reason} after {self._num_accepted} tokens"
            raise self._wrong(wrong, "length means that max_tokens are used up, stop comes with its token")

    def _check_spans(self, part: GenerateResponse, newest: int) -> None:
        oldest = self._version
        end = 0
        for span in part.version_spans:
            if span.start != end or span.end <= end or not self._version <= span.version <= newest:
                break
            end = span.end
            self._version = span.version
        if end != len(part.token_ids):
            shown = ", ".join(
                f"[{span.start}, {span.end}) v{span.version}" for span in part.version_spans[:6]
            )
            raise self._wrong(
                f"version spans {shown or 'none'} over {len(part.token_ids)} tokens",
                "spans cover every token once, under versions that never go back, from "
                f"{oldest} (confirmed before) to {newest} (offered last)",
            )

    def _check_top(self, part: GenerateResponse) -> None:
        most = self._request.top_logprobs
        top = part.top_logprobs
        if len(top) != (len(part.token_ids) if most else 0) or any(len(pairs) > most for pairs in top):
            wrong = f"top_logprobs of sizes {list(map(len, top[:6]))} for {len(part.token_ids)} tokens"
            raise self._wrong(wrong, f"the request asked for at most {most} per token")
        if not all(is_sampled(*pair) for pairs in top for pair in pairs):
            wrong = "top_logprobs with an id below 0, or a logprob that is not finite or above 0"
            raise self._wrong(wrong, "ids are 0 or more, logprobs finite and at most 0")

    def _wrong(self, answered: str, rule: str) -> EngineError:
        request = self._request
        what = f"answered request {request.request_id} of {request.max_tokens} tokens with {answered}"
        return EngineError(self._name, what, rule=rule, way_out=f"read {self._name}'s log.")


class RoutedTokens:
    """Experts of a request's tokens: `known`, uint16 (little endian), for each token but the last. Pure.

    An answer's part covers the tokens read since the previous part; the first part the whole prompt.
    Known experts stay when tokens are read again; unknown ones are NO_EXPERT.
    """

    def __init__(self, num_prompt: int) -> None:
        self.known = b""
        self._num_prompt = num_prompt
        self._width = 0

    def add(self, routing: bytes, num_before: int, num_after: int) -> None:
        if not routing:
            return
        end = self._num_prompt + num_after - 1
        self._width = width = self._width or len(routing) // end
        first = len(self.known) // width
        assert len(routing) >= (end - first) * width, f"{len(routing)} bytes for tokens {first} to {end}"
        new = bytearray(routing[len(routing) - (end - first) * width :])
        lost_from = max(first, self._num_prompt - 1)
        num_lost = self._num_prompt + num_before - 1 - lost_from
        if num_lost > 0:
            start = (lost_from - first) * width
            new[start : start + num_lost * width] = _UNKNOWN * (num_lost * width // len(_UNKNOWN))
        self.known += bytes(new)
