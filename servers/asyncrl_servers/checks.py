"""What all engine servers share: reading the spec, checking requests, version spans, random numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from asyncrl.http import Refused, child_arguments, fail
from asyncrl.messages.calls import GenerateRequest, Span

Spec = TypeVar("Spec", bound=BaseModel)


def read_spec(kind: type[Spec]) -> tuple[Spec, int]:
    """The spec of this server and the number of its socket. Ends the process if the spec is wrong."""
    text, fd = child_arguments()
    try:
        return kind.model_validate_json(text), fd
    except ValidationError as error:
        fail(f"the spec of this server is wrong: {error}", rule=f"its fields are those of {kind.__name__}")


def check_request(request: GenerateRequest, max_length: int, vocab_size: int) -> None:
    """Raise Refused (400) for a request that can never run."""
    name, num_prompt = f"request {request.request_id}", len(request.prompt_ids)
    total = num_prompt + request.max_tokens
    if total > max_length:
        raise Refused(
            400,
            f"{name} wants {num_prompt} prompt tokens + {request.max_tokens} new ones = {total}, a slot "
            f"holds {max_length}",
            rule="prompt and completion must fit into a slot",
            way_out="shorten the prompt, or raise rollout.max_prompt_tokens or rollout.max_tokens.",
        )
    unknown = [token for token in request.prompt_ids if not 0 <= token < vocab_size]
    if unknown:
        rule = f"the model knows ids 0..{vocab_size - 1}"
        way_out = "encode the prompt with the model's own tokenizer."
        raise Refused(400, f"{name} has token id {unknown[0]}", rule=rule, way_out=way_out)
    if request.num_resumed > num_prompt:
        rule = "resumed ids are the last ones of the prompt"
        raise Refused(400, f"{name} has num_resumed={request.num_resumed} of {num_prompt} ids", rule=rule)


def check_queue(request_id: str, *here: Collection[str], max_queued: int) -> None:
    """Raise Refused for an id that is `here` already (409), or one more than may wait (503): `here` ends with
    the queue.
    """
    if any(request_id in ids for ids in here):
        rule = "request ids are unique among running and queued requests"
        raise Refused(409, f"request {request_id} is here already", rule=rule)
    if len(here[-1]) >= max_queued:
        way_out = "keep fewer rollouts in flight, or add engines."
        raise Refused(503, f"{max_queued} requests are queued already", way_out=way_out)


def refusal_of(error: BaseException) -> Refused:
    """The answer for `error`: the error itself if it is a refusal, else a crash (500)."""
    if isinstance(error, Refused):
        return error
    return Refused(500, f"{type(error).__name__}: {error}", way_out="see this server's log.")


def spans_of(marks: Sequence[tuple[int, int]], num_tokens: int) -> list[Span]:
    """Version spans that cover [0, num_tokens) once, in order. A mark is (first token, policy_version); empty
    spans are left out.
    """
    ends = [*(start for start, _ in marks[1:]), num_tokens]
    return [
        Span(start=start, end=end, version=version)
        for (start, version), end in zip(marks, ends, strict=False)  # no mark: aborted before it ran
        if start < end
    ]


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_draws(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, absolute position), float64 with 53 random bits; depends on
    nothing else, so that a resumed request draws what it would have drawn.
    """
    counter = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53
