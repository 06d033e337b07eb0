"""Segments of one logical request, joined into one completion. Pure: knows no server and no wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asyncrl.types import Completion, PartialCompletion, SamplingRequest, VersionSpan
from asyncrl.wire import GenerateChunk, GenerateRequest, GenerateResponse


class SegmentJoin:
    """What has been sampled of one request so far, and what to ask for next.

    Life:       empty -> segments, with next_request() before each -> is_finished, completion(). A segment is any number of
                add_chunk(), and add() for the rest of it, or cut() if the rest never came.
    Invariant:  the lengths of all segments add up to at most request.max_tokens, if `partial` is not longer, and the spans cover every
                token once: each segment's spans are shifted to where its tokens lie.
    """

    def __init__(
        self,
        request: SamplingRequest,
        partial: PartialCompletion | None = None,
        on_segment: Callable[[PartialCompletion], None] | None = None,
    ) -> None:
        """`partial`: what an earlier process had sampled of it; `on_segment` is told all there is after each interruption."""
        self.request, self._on_segment = request, on_segment
        before = partial or PartialCompletion()
        self.token_ids = list(before.token_ids)
        self.logprobs = list(before.behaviour_logprobs)
        self.spans = list(before.version_spans)
        self.num_interruptions = before.num_interruptions + (partial is not None)
        self._num_told = len(self.token_ids)
        """Tokens that on_segment knows of."""
        self._finish_reason: str | None = None if self.num_left > 0 else "length"

    def __repr__(self) -> str:
        state = self._finish_reason or "unfinished"
        return f"<SegmentJoin {self.request.request_id} {len(self.token_ids)}/{self.request.max_tokens} tokens, {state}>"

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled; below 0 if a killed run, whose partial this is, had a larger limit."""
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

    def add_chunk(self, chunk: GenerateChunk, engine: int = -1) -> None:
        """Append a part of a segment by engine server number `engine`, which SegmentCheck has passed."""
        start = len(self.token_ids)
        self._add_span(VersionSpan(start, start + len(chunk.token_ids), chunk.version, engine))
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs

    def add(self, segment: GenerateResponse, engine: int = -1) -> None:
        """Append a segment by engine server number `engine`, or what is left of it after its chunks, which SegmentCheck has passed."""
        shift = len(self.token_ids)
        self.token_ids += segment.token_ids
        self.logprobs += segment.logprobs
        for span in segment.version_spans:
            self._add_span(VersionSpan(span.start + shift, span.end + shift, span.version, engine))
        if segment.finish_reason != "abort":
            self._finish_reason = segment.finish_reason
            return
        self._interrupted()

    def cut(self) -> None:
        """The rest of the segment is lost; its chunks, if there were any, stay."""
        if len(self.token_ids) > self._num_told:
            self._interrupted()

    def _interrupted(self) -> None:
        self.num_interruptions += 1
        if self.num_left <= 0:
            self._finish_reason = "length"
        elif self._on_segment is not None and len(self.token_ids) > self._num_told:
            self._on_segment(self.partial())
        self._num_told = len(self.token_ids)

    def partial(self) -> PartialCompletion:
        """All segments so far."""
        return PartialCompletion(tuple(self.token_ids), tuple(self.logprobs), tuple(self.spans), self.num_interruptions)

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
        if last is not None and (last.version, last.engine) == (span.version, span.engine):
            self.spans[-1] = replace(last, end=span.end)
        else:
            self.spans.append(span)
