"""What goes over the link between a controller and an engine server of ours: many requests, segments and
results at once, their tokens and logprobs as arrays.

A frame is one safetensors blob, whose first array has the header as JSON: `kind`, and what is too rare for an
array of its own. Requests have numbers, which the client gives, unique on its link.

    client to server   submit, resume, abort
    server to client   sampled, refused
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from asyncrl.messages.base import ErrorBody
from asyncrl.messages.calls import GenerateRequest, GenerateResponse, Span

Arrays = Mapping[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int32]
_COLUMNS = {
    "max_tokens": np.int64,
    "num_resumed": np.int64,
    "temperature": np.float64,
    "top_p": np.float64,
    "seed": np.uint64,
}
"""Fields of a GenerateRequest that are an array each."""
_DTYPES = _COLUMNS | {
    "numbers": np.int64,
    "prompts": np.int64,
    "prompt_ends": np.int64,
    "prompt": np.int64,
    "is_streamed": np.bool_,
    "ends": np.int64,
    "token_ids": np.int32,
    "logprobs": np.float32,
    "span_ends": np.int64,
    "spans": np.int32,
    "then": np.uint8,
}
SAMPLED = ("more", "stop", "length", "interrupted", "abort")
"""What sampled tokens are followed by: more of them (the answer is streamed), the end, an interruption by a
weight update (the request holds its slot until it is resumed or aborted), or nothing, for it was aborted.
"""


class Asked(NamedTuple):
    """A request by its number on the link; `is_streamed`: tokens come as they are sampled."""

    number: int
    request: GenerateRequest
    is_streamed: bool


class Sampled(NamedTuple):
    """Tokens of one request that were not sent before: ids int32 [N], logprobs float32 [N] in nats, version
    spans (start, end, policy_version) over them; `then` is one of SAMPLED.
    """

    number: int
    token_ids: Ints
    logprobs: npt.NDArray[np.float32]
    spans: Sequence[tuple[int, int, int]]
    then: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that came: its kind, the rest of its header, and its arrays."""

    kind: str
    header: dict[str, Any]
    arrays: Arrays

    @property
    def numbers(self) -> list[int]:
        """The requests it is about, in order."""
        found: list[int] = self.arrays["numbers"].tolist()
        return found


def read_frame(data: bytes) -> Frame:
    """Raises ValueError if it is no frame."""
    try:
        arrays = load_safetensors(data)
        header = json.loads(arrays.pop("header").tobytes())
        for name, array in arrays.items():
            if array.dtype != _DTYPES[name] or array.ndim != 1 + (name == "spans"):
                raise TypeError(f"{name} is {array.dtype} {list(array.shape)}")
        if "numbers" not in arrays or not isinstance(header["kind"], str):
            raise TypeError(f"kind {header['kind']} with {sorted(arrays)}")
        return Frame(header.pop("kind"), header, arrays)
    except Exception as error:
        raise ValueError(f"not a frame of {len(data)} bytes: {type(error).__name__}: {error}") from error


def numbers_frame(kind: str, numbers: Sequence[int]) -> bytes:
    """A frame that says one thing of some requests: resume, abort."""
    return _frame({"kind": kind}, {"numbers": np.array(numbers, np.int64)})


def refused_frame(number: int, status: int, body: ErrorBody) -> bytes:
    """A request that is not served."""
    header = {"kind": "refused", "status": status, "body": body.model_dump()}
    return _frame(header, {"numbers": np.array([number], np.int64)})


def submit_frame(asked: Sequence[Asked]) -> bytes:
    """Requests; those that have their prompt in common, as the same object, carry it once."""
    requests = [one.request for one in asked]
    prompts = {id(one.prompt_ids): np.asarray(one.prompt_ids, np.int64) for one in requests}
    place = {key: index for index, key in enumerate(prompts)}
    header = {
        "kind": "submit",
        "ids": [one.request_id for one in requests],
        "stop": {str(index): one.stop for index, one in enumerate(requests) if one.stop},
    }
    arrays = {
        "numbers": np.array([one.number for one in asked], np.int64),
        "prompts": np.concatenate(list(prompts.values())),
        "prompt_ends": np.cumsum([len(prompt) for prompt in prompts.values()]),
        "prompt": np.array([place[id(one.prompt_ids)] for one in requests], np.int64),
        "is_streamed": np.array([one.is_streamed for one in asked], np.bool_),
    }
    for name, dtype in _COLUMNS.items():
        arrays[name] = np.array([getattr(one, name) for one in requests], dtype)
    return _frame(header, arrays)


def read_submit(frame: Frame) -> list[Asked]:
    """The requests of a submit frame; those with one prompt share its array. Raises ValueError."""
    try:
        arrays, stops = frame.arrays, frame.header["stop"]
        if not all(
            isinstance(text, str) for texts in (frame.header["ids"], *stops.values()) for text in texts
        ):
            raise TypeError("an id or a stop string is no text")
        _check_ends(arrays["prompt_ends"], len(arrays["prompts"]))
        prompts = np.split(arrays["prompts"], arrays["prompt_ends"][:-1])
        columns = [arrays[name].tolist() for name in ("prompt", "is_streamed", *_COLUMNS)]
        found = []
        for index, row in enumerate(zip(frame.numbers, frame.header["ids"], *columns, strict=True)):
            number, request_id, prompt, is_streamed, *values = row
            stop = tuple(stops.get(str(index), ()))
            fields = dict(zip(_COLUMNS, values, strict=True))
            request = GenerateRequest(request_id, prompts[prompt], stop=stop, **fields)
            found.append(Asked(number, request, is_streamed))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a submit frame: {type(error).__name__}: {error}") from error
    return found


def sampled_frame(rows: Sequence[Sampled]) -> bytes:
    """Tokens of many requests."""
    spans = [span for row in rows for span in row.spans]
    arrays = {
        "numbers": np.array([row.number for row in rows], np.int64),
        "ends": np.cumsum([len(row.token_ids) for row in rows]),
        "token_ids": np.concatenate([row.token_ids for row in rows], dtype=np.int32),
        "logprobs": np.concatenate([row.logprobs for row in rows], dtype=np.float32),
        "span_ends": np.cumsum([len(row.spans) for row in rows]),
        "spans": np.array(spans, np.int32).reshape(len(spans), 3),
        "then": np.array([SAMPLED.index(row.then) for row in rows], np.uint8),
    }
    return _frame({"kind": "sampled"}, arrays)


def read_sampled(frame: Frame) -> Iterable[Sampled]:
    """The rows of a sampled frame. Raises ValueError or LookupError."""
    arrays, first, first_span = frame.arrays, 0, 0
    _check_ends(arrays["ends"], len(arrays["token_ids"]))
    _check_ends(arrays["ends"], len(arrays["logprobs"]))
    _check_ends(arrays["span_ends"], len(arrays["spans"]))
    columns = [frame.numbers, *(arrays[name].tolist() for name in ("ends", "span_ends", "then"))]
    for number, end, span_end, then in zip(*columns, strict=True):
        ids, logprobs = arrays["token_ids"][first:end], arrays["logprobs"][first:end]
        spans = arrays["spans"][first_span:span_end].tolist()
        yield Sampled(number, ids, logprobs, spans, SAMPLED[then])
        first, first_span = end, span_end


def joined(request_id: str, rows: Sequence[Sampled]) -> GenerateResponse:
    """The whole answer of a request from its rows; neighbouring spans of one version are one."""
    ids, logprobs, spans = list[int](), list[float](), list[tuple[int, int, int]]()
    for row in rows:
        for start, end, version in row.spans:
            joint = spans.pop() if spans and spans[-1][2] == version else (start + len(ids), 0, version)
            spans.append((joint[0], end + len(ids), version))
        ids += row.token_ids.tolist()
        logprobs += row.logprobs.tolist()
    return GenerateResponse(
        request_id=request_id,
        token_ids=ids,
        logprobs=logprobs,
        version_spans=spans_from(spans),
        finish_reason=cast(Any, rows[-1].then),
    )


def spans_of(marks: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int, int]]:
    """Version spans over the tokens [start, end) of a request, counted from `start`. A mark is (first token,
    policy_version), in order; spans that are empty are left out.
    """
    ends = [*(first for first, _ in marks[1:]), end]
    found = [
        (max(first, start) - start, min(last, end) - start, version)
        for (first, version), last in zip(marks, ends, strict=False)
    ]
    return [span for span in found if span[0] < span[1]]


def spans_from(rows: Iterable[tuple[int, int, int]]) -> list[Span]:
    """As messages have them."""
    return [Span(start=start, end=end, version=version) for start, end, version in rows]


def _check_ends(ends: npt.NDArray[Any], total: int) -> None:
    if (np.diff(ends, prepend=0, append=total) < 0).any() or ends[-1:].sum() != total:
        raise ValueError(f"parts end at {ends[:6].tolist()}... of {total}")


def _frame(header: dict[str, Any], arrays: Arrays) -> bytes:
    blob = np.frombuffer(json.dumps(header).encode(), np.uint8)
    frame: bytes = save_safetensors({"header": blob, **arrays})
    return frame
