"""Segments of one logical request, joined into one completion. Pure: knows no server and no wait."""

from __future__ import annotations

from asyncrl.types import Completion, SamplingRequest, VersionSpan
from asyncrl.wire import GenerateRequest, GenerateResponse


class SegmentJoin:
    """What has been sampled of one request so far, and what to ask for next.

    Life:       empty -> one add() a segment, with next_request() between them -> is_finished, completion().
    Invariant:  the lengths of all segments add up to at most request.max_tokens, and the spans cover every
                token once: add() shifts each segment's spans to where its tokens lie.
    """

    def __init__(self, request: SamplingRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.num_interruptions = 0
        self._finish_reason: str | None = None

    def __repr__(self) -> str:
        state = self._finish_reason or "unfinished"
        return f"<SegmentJoin {self.request.request_id} {len(self.token_ids)}/{self.request.max_tokens} tokens, {state}>"

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.max_tokens - len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """No further segment is needed."""
        return self._finish_reason is not None

    def next_request(self) -> GenerateRequest:
        """The message that goes on where the last segment ended.

        The seed stays: the server draws each token from (seed, absolute position), so that the resumed request
        draws what the uninterrupted one would have drawn.
        """
        request = self.request
        return GenerateRequest(
            request_id=request.request_id,
            prompt_ids=[*request.prompt_ids, *self.token_ids],
            num_resumed=len(self.token_ids),
            max_tokens=self.num_left,
            temperature=request.temperature,
            top_p=request.top_p,
            stop=list(request.stop),
            seed=request.seed,
        )

    def add(self, segment: GenerateResponse) -> None:
        """Append a segment that check_segment has passed."""
        shift = len(self.token_ids)
        self.token_ids += segment.token_ids
        self.logprobs += segment.logprobs
        for span in segment.version_spans:
            self._add_span(VersionSpan(span.start + shift, span.end + shift, span.version))
        if segment.finish_reason != "abort":
            self._finish_reason = segment.finish_reason
            return
        self.num_interruptions += 1
        if not self.num_left:
            self._finish_reason = "length"

    def completion(self) -> Completion:
        """All segments as one. Only when is_finished."""
        assert self._finish_reason is not None, f"{self!r} is not finished"
        return Completion(
            token_ids=tuple(self.token_ids),
            behaviour_logprobs=tuple(self.logprobs),
            version_spans=tuple(self.spans),
            finish_reason="stop" if self._finish_reason == "stop" else "length",
            num_interruptions=self.num_interruptions,
        )

    def _add_span(self, span: VersionSpan) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and last.version == span.version:
            self.spans[-1] = VersionSpan(last.start, span.end, span.version)
        else:
            self.spans.append(span)
