"""Encode frames on the link between a controller and an embedded engine server: many requests, segments and
results at once, their tokens and logprobs as arrays.

A frame is its kind and the number of items of each of its arrays, as uint64, then these arrays, in the order
and with the dtypes of LAYOUTS, little-endian, without gaps: its head gives its length. The client numbers its
requests, uniquely on its link.

    client to server   submit, resume, abort
    server to client   sampled, refused
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat, starmap
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from asyncrl.base.message import ErrorBody
from asyncrl.messages.engine_api import GenerateRequest, GenerateResponse
from asyncrl.messages.records import TopLogprobs, VersionSpan

Arrays = Mapping[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int32]
_NUMBERS, _TEXT = {"numbers": "<i8"}, {"text": "u1"}
_COLUMNS = {"max_tokens": "<i8", "num_resumed": "<i8", "temperature": "<f8", "top_p": "<f8", "seed": "<u8"}
_COLUMNS |= {"top_logprobs": "<i8"}
"""Fields of a GenerateRequest that are an array each."""
_PROMPTS = {"prompts": "<i8", "prompt_sizes": "<u4", "prompt": "<u4", "is_streamed": "u1"}
_TOKENS = {
    "token_ids": "<i4",
    "logprobs": "<f4",
    "spans": "<i4",
    "sizes": "<u4",
    "span_sizes": "<u4",
    "routing_sizes": "<u4",
    "top_ids": "<i4",
    "top_logprobs": "<f4",
    "top_sizes": "u1",
    "has_top": "u1",
    "then": "u1",
    "routing": "u1",
}
LAYOUTS = {
    "submit": _NUMBERS | _COLUMNS | _PROMPTS | _TEXT,
    "resume": _NUMBERS,
    "abort": _NUMBERS,
    "sampled": _NUMBERS | _TOKENS,
    "refused": _NUMBERS | _TEXT,
}
"""Arrays of each kind, the widest first; `text` is JSON of rare fields."""
_DTYPES = {kind: {name: np.dtype(code) for name, code in of.items()} for kind, of in LAYOUTS.items()}
_HEADS = {kind: struct.Struct(f"<{1 + len(of)}Q") for kind, of in LAYOUTS.items()}
_KINDS = list(LAYOUTS)
SAMPLED = ("more", "stop", "length", "interrupted", "abort")
"""Event after sampled tokens: more tokens (a stream), the end, an interruption by a weight update (the
request keeps its slot until resume or abort), or an abort."""


class Asked(NamedTuple):
    """A request by its number on the link; `is_streamed`: send tokens during sampling."""

    number: int
    request: GenerateRequest
    is_streamed: bool


class Sampled(NamedTuple):
    """New tokens of one request.

    ids int32 [N], logprobs float32 [N] in nats, version spans (start, end, policy_version) over them; `then`
    is a word of SAMPLED. `top`: an entry per token if top_logprobs were requested, or empty. `routing`: as in
    GenerateResponse, in the last frame of an engine with router replay.
    """

    number: int
    token_ids: Ints
    logprobs: npt.NDArray[np.float32]
    spans: Sequence[tuple[int, int, int]]
    then: str
    top: Sequence[TopLogprobs] = ()
    routing: bytes = b""


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame: its kind, its arrays of shape [items] over the received bytes, and the JSON part."""

    kind: str
    arrays: Arrays
    text: Any

    @property
    def numbers(self) -> list[int]:
        """The requests it is about, in order."""
        found: list[int] = self.arrays["numbers"].tolist()
        return found


def read_frame(data: bytes) -> Frame:
    """Raises ValueError if it is no frame."""
    try:
        kind = _KINDS[int.from_bytes(data[:8], "little")]
        head, dtypes = _HEADS[kind], _DTYPES[kind]
        counts = head.unpack_from(data)[1:]
        ends = [*accumulate(map(_num_bytes, counts, dtypes.values()), initial=head.size)]
        if ends[-1] != len(data):
            raise TypeError(f"{kind} with arrays of {counts} items, which are {ends[-1]} bytes")
        places = zip(dtypes.items(), counts, ends, strict=False)
        arrays = {name: np.frombuffer(data, dtype, count, at) for (name, dtype), count, at in places}
        text = arrays.pop("text", None)
        return Frame(kind, arrays, None if text is None else json.loads(text.tobytes()))
    except Exception as error:
        raise ValueError(f"not a frame of {len(data)} bytes: {type(error).__name__}: {error}") from error


def numbers_frame(kind: str, numbers: Sequence[int]) -> bytes:
    """A frame that says one thing of some requests: resume, abort."""
    return write_frame(kind, {"numbers": numbers})


def refused_frame(number: int, status: int, body: ErrorBody) -> bytes:
    """A request that is not served."""
    return write_frame("refused", {"numbers": [number], "text": _json([status, body.model_dump()])})


def read_refused(frame: Frame) -> tuple[int, ErrorBody]:
    """(status, why) of a refused frame. Raises ValueError."""
    try:
        status, body = frame.text
        return int(status), ErrorBody.model_validate(body)
    except TypeError as error:
        raise ValueError(f"not a refused frame: TypeError: {error}") from error


def submit_frame(asked: Sequence[Asked]) -> bytes:
    """Encode requests. Requests with the same prompt object share its array."""
    requests = [one.request for one in asked]
    prompts = {id(one.prompt_ids): one.prompt_ids for one in requests}
    place = dict(zip(prompts, range(len(prompts)), strict=True))
    stops = {index: one.stop for index, one in enumerate(requests) if one.stop}
    grammars: dict[str, list[int]] = {}
    for index, one in enumerate(requests):
        if one.grammar is not None:
            grammars.setdefault(one.grammar, []).append(index)
    arrays: dict[str, Any] = {
        "numbers": [one.number for one in asked],
        "prompts": np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts.values()]),
        "prompt_sizes": [len(prompt) for prompt in prompts.values()],
        "prompt": [place[id(one.prompt_ids)] for one in requests],
        "is_streamed": [one.is_streamed for one in asked],
        "text": _json([[one.request_id for one in requests], stops, grammars]),
    }
    arrays |= {name: [getattr(one, name) for one in requests] for name in _COLUMNS}
    return write_frame("submit", arrays)


def read_submit(frame: Frame) -> list[Asked]:
    """Decode the requests of a submit frame; equal prompts share one array. Raises ValueError."""
    try:
        arrays, (ids, stops, grammars) = frame.arrays, frame.text
        if not all(isinstance(text, str) for texts in (ids, *stops.values()) for text in texts):
            raise TypeError("an id or a stop string is no text")
        grammar_of = {index: text for text, indices in grammars.items() for index in indices}
        prompts = _parts(arrays["prompts"], arrays["prompt_sizes"].tolist())
        columns = [arrays[name].tolist() for name in ("prompt", "is_streamed", *_COLUMNS)]
        found = []
        for index, row in enumerate(zip(frame.numbers, ids, *columns, strict=True)):
            number, request_id, prompt, is_streamed, max_tokens, num_resumed, temperature, *rest = row
            top_p, seed, num_top = rest
            stop = tuple(stops.get(str(index), ())) if stops else ()
            grammar = grammar_of.get(index) if grammar_of else None
            request = GenerateRequest(
                *(request_id, prompts[prompt], max_tokens, num_resumed, temperature),
                *(top_p, stop, seed, grammar, num_top),
            )
            found.append(Asked(number, request, bool(is_streamed)))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a submit frame: {type(error).__name__}: {error}") from error
    return found


def sampled_frame(rows: Sequence[Sampled]) -> bytes:
    """Tokens of many requests."""
    numbers, token_ids, logprobs, spans, thens, tops, routings = zip(*rows, strict=True)
    top = [one for of_row in tops for one in of_row]
    arrays = {
        "numbers": numbers,
        "token_ids": np.concatenate(token_ids, dtype=np.int32),
        "logprobs": np.concatenate(logprobs, dtype=np.float32),
        "spans": [value for of_row in spans for span in of_row for value in span],
        "sizes": [*map(len, token_ids)],
        "span_sizes": [*map(len, spans)],
        "top_ids": [token for one in top for token, _ in one],
        "top_logprobs": [logprob for one in top for _, logprob in one],
        "top_sizes": [*map(len, top)],
        "has_top": [*map(bool, tops)],
        "then": [*map(SAMPLED.index, thens)],
        "routing": np.frombuffer(b"".join(routings), np.uint8),
        "routing_sizes": [*map(len, routings)],
    }
    return write_frame("sampled", arrays)


def read_sampled(frame: Frame) -> Iterable[Sampled]:
    """The rows of a sampled frame. Raises ValueError or LookupError."""
    arrays = frame.arrays
    sizes, span_sizes, thens = (arrays[name].tolist() for name in ("sizes", "span_sizes", "then"))
    columns = (
        frame.numbers,
        _parts(arrays["token_ids"], sizes),
        _parts(arrays["logprobs"], sizes),
        _parts(arrays["spans"].reshape(-1, 3).tolist(), span_sizes),
        [SAMPLED[then] for then in thens],
    )
    tops = _tops(arrays, sizes) if arrays["has_top"].any() else repeat((), len(sizes))
    routings: Iterable[bytes] = repeat(b"", len(sizes))
    if len(arrays["routing"]):
        parts = _parts(arrays["routing"], arrays["routing_sizes"].tolist())
        routings = [part.tobytes() for part in parts]
    return starmap(Sampled, zip(*columns, tops, routings, strict=True))


def _tops(arrays: Arrays, sizes: Sequence[int]) -> list[Sequence[TopLogprobs]]:
    """Split an array by row. Raises ValueError."""
    pairs = [*zip(arrays["top_ids"].tolist(), arrays["top_logprobs"].tolist(), strict=True)]
    counts = [size * has for size, has in zip(sizes, arrays["has_top"].tolist(), strict=True)]
    return _parts(_parts(pairs, arrays["top_sizes"].tolist()), counts)


def response(request_id: str, *rows: Sampled) -> GenerateResponse:
    """Return a request's rows as one answer; adjacent spans of one version are joined."""
    token_ids = list[int]()
    logprobs = list[float]()
    spans = list[VersionSpan]()
    for row in rows:
        for start, end, version in row.spans:
            start += len(token_ids)
            if spans and spans[-1].version == version:
                start = spans.pop().start
            spans.append(VersionSpan(start, end + len(token_ids), version))
        token_ids += row.token_ids.tolist()
        logprobs += row.logprobs.tolist()
    then = rows[-1].then
    return GenerateResponse(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=spans,
        finish_reason=cast(Any, {"more": None, "interrupted": "abort"}.get(then, then)),
        top_logprobs=[top for row in rows for top in row.top],
        routing=b"".join(row.routing for row in rows),
    )


def spans_of(marks: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int, int]]:
    """Return the version spans of a request's tokens [start, end), counted from `start`. A mark is (first
    token, policy_version), in order; empty spans are dropped.
    """
    ends = [*(first for first, _ in marks[1:]), end]
    spans = [
        (max(first, start) - start, min(last, end) - start, version)
        for (first, version), last in zip(marks, ends, strict=False)
    ]
    return [span for span in spans if span[0] < span[1]]


def write_frame(kind: str, arrays: Mapping[str, Any]) -> bytes:
    """Encode arrays, or sequences that become arrays, each [items]."""
    parts = [np.asarray(arrays[name], dtype) for name, dtype in _DTYPES[kind].items()]
    head = _HEADS[kind].pack(_KINDS.index(kind), *map(len, parts))
    return b"".join((head, *(part.tobytes() for part in parts)))


def _num_bytes(count: int, dtype: np.dtype[Any]) -> int:
    return count * dtype.itemsize


def _parts(items: Any, sizes: Sequence[int]) -> list[Any]:
    """`items`, cut into parts of these sizes. Raises ValueError."""
    ends = [*accumulate(sizes, initial=0)]
    if ends[-1] != len(items):
        raise ValueError(f"parts of {sizes[:6]}... are {ends[-1]} of {len(items)}")
    return [items[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def _json(content: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(content).encode(), np.uint8)
