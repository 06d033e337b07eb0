"""Frames on the link between a controller and our engine servers, each with many
requests or segments.

A frame is the length of its head as uint32, the head, and its arrays without gaps,
little-endian. The head is JSON: [kind, [name, dtype, items] of each array, everything
else]. The client numbers its requests.

    client to server   submit, resume, abort
    server to client   sampled, refused
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from asyncrl.base.errors import ErrorBody
from asyncrl.messages.records import VersionSpan
from asyncrl.messages.sampling import SAMPLING_PARAMETERS, SamplingRequest
from asyncrl.messages.tokens import SegmentPart, Tokens, bounds_of

SAMPLED = ("more", "stop", "length", "interrupted", "abort")
"""Event after sampled tokens; its index is sent. interrupted: by a weight update; the
engine keeps the slot until resume or abort follows.
"""


class Asked(NamedTuple):
    """`is_streamed`: send tokens during sampling."""

    number: int
    request: SamplingRequest
    is_streamed: bool


class Sampled(NamedTuple):
    """New tokens of request `number`, as in SegmentPart."""

    number: int
    tokens: Tokens
    then: str

    @property
    def part(self) -> SegmentPart:
        # For the pool both are the early end of a segment. Only the link can resume
        # one.
        finish: Any = {"more": None, "interrupted": "abort"}.get(self.then, self.then)
        return SegmentPart(self.tokens, finish)


@dataclass(frozen=True, slots=True)
class Frame:
    """Arrays of shape [items]."""

    kind: str
    arrays: Mapping[str, npt.NDArray[np.generic]]
    text: Any

    @property
    def numbers(self) -> list[int]:
        numbers: list[int] = self.arrays["numbers"].tolist()
        return numbers


def write_frame(
    kind: str, arrays: Mapping[str, npt.NDArray[np.generic]], text: Any = None
) -> bytes:
    """Encode a frame. `text`: anything that JSON can hold.

    Example: two requests are aborted. The head is 4 bytes of length and 36 of JSON.
        >>> data = write_frame("abort", {"numbers": np.array([3, 5])})
        >>> data[4:40]
        b'["abort",[["numbers","<i8",2]],null]'
        >>> len(data), read_frame(data).numbers
        (56, [3, 5])
    """
    layout = [(name, array.dtype.str, len(array)) for name, array in arrays.items()]
    try:
        # 4 times as fast as json, for the head of every frame. It refuses a lone
        # surrogate, which a user's Python code may put into a text; json escapes it.
        head = to_json((kind, layout, text))
    except ValueError:
        head = json.dumps((kind, layout, text)).encode()
    return b"".join(
        (
            len(head).to_bytes(4, "little"),
            head,
            *(array.tobytes() for array in arrays.values()),
        )
    )


def read_frame(data: bytes) -> Frame:
    """Decode a frame of another process. Raises ValueError if it is damaged."""
    try:
        at = 4 + int.from_bytes(data[:4], "little")
        kind, layout, text = json.loads(data[4:at])
        arrays = {}
        # Views, not copies: a frame of a decode step is read in one pass. They are
        # read-only, and each keeps the bytes of its whole frame alive until Tokens.join
        # copies them.
        # frombuffer refuses a dtype of Python objects, and a count beyond the end. So a
        # hostile or cut frame is a ValueError, and nothing else.
        for name, dtype, count in layout:
            arrays[name] = array = np.frombuffer(data, dtype, count, at)
            at += array.nbytes
        # Bytes too many mean that head and arrays are not of one frame.
        if at != len(data):
            raise TypeError(f"{kind} of {layout} ends at byte {at}")
        return Frame(kind, arrays, text)
    except Exception as error:
        raise ValueError(
            f"not a frame of {len(data)} bytes: {type(error).__name__}: {error}"
        ) from error


def numbers_frame(kind: str, numbers: Sequence[int]) -> bytes:
    return write_frame(kind, {"numbers": np.array(numbers, np.int64)})


def refused_frame(number: int, status: int, body: ErrorBody) -> bytes:
    return write_frame(
        "refused", {"numbers": np.array([number])}, [status, body.model_dump()]
    )


def read_refused(frame: Frame) -> tuple[int, ErrorBody]:
    status, body = frame.text
    return int(status), ErrorBody.model_validate(body)


_OWN = "request_id max_tokens num_resumed seed".split()
_COMMON = [
    *(name for name in SAMPLING_PARAMETERS if name != "logit_bias"),
    *"stop stop_ids ignore_eos thinking top_logprobs grammar adapter role".split(),
]
"""Values that most requests of a frame have in common, and a logit_bias."""
_own, _common = attrgetter(*_OWN), attrgetter(*_COMMON)


def submit_frame(asked: Sequence[Asked]) -> bytes:
    """Encode requests; shared prompt objects and common values once."""
    # By identity: the rollouts of a group share one object, and comparing the ids of
    # long prompts would cost more than it saves. `asked` keeps the objects alive, so no
    # id is used twice.
    prompts = {id(one.request.prompt_ids): one.request.prompt_ids for one in asked}
    place = {key: index for index, key in enumerate(prompts)}
    # A grammar has up to 256 KiB, and all calls of an agent's tool share one.
    kinds = dict[tuple[Any, ...], int]()
    rows = []
    for number, request, is_streamed in asked:
        common = tuple(request.logit_bias.items()), *_common(request)
        kind = kinds.setdefault(common, len(kinds))
        prompt = place[id(request.prompt_ids)]
        rows.append((number, is_streamed, prompt, kind, *_own(request)))
    arrays = {
        "prompts": np.concatenate(
            [np.asarray(prompt, np.int64) for prompt in prompts.values()]
        ),
        "prompt_sizes": np.array([len(prompt) for prompt in prompts.values()]),
    }
    return write_frame("submit", arrays, [rows, [*kinds]])


def read_submit(frame: Frame) -> list[Asked]:
    """Decode requests; equal prompts share one array."""
    rows, kinds = frame.text
    of_kinds = [_read_common(kind) for kind in kinds]
    ids, sizes = frame.arrays["prompts"], frame.arrays["prompt_sizes"].tolist()
    prompts = [ids[start:end] for start, end in bounds_of(sizes, len(ids))]
    asked = []
    for number, is_streamed, prompt, kind, *own in rows:
        values = dict(zip(_OWN, own, strict=True))
        request = SamplingRequest(
            prompt_ids=prompts[prompt], **values, **of_kinds[kind]
        )
        asked.append(Asked(number, request, is_streamed))
    return asked


def _read_common(kind: Sequence[Any]) -> dict[str, Any]:
    bias, *common = kind
    values = dict(zip(_COMMON, common, strict=True))
    # JSON has made lists of them.
    values["stop"] = tuple(values["stop"])
    values["stop_ids"] = tuple(values["stop_ids"])
    values["thinking"] = values["thinking"] and tuple(values["thinking"])
    return {**values, "logit_bias": dict(bias)}


def sampled_frame(rows: Sequence[Sampled]) -> bytes:
    # One record for all rows: a few large arrays, where each token would have several
    # small arrays. The reader splits them by `sizes`.
    tokens = Tokens.join([row.tokens for row in rows])
    arrays = {
        "numbers": np.array([row.number for row in rows]),
        "sizes": np.array([len(row.tokens) for row in rows]),
        "then": np.array([SAMPLED.index(row.then) for row in rows], np.uint8),
    }
    return write_frame("sampled", arrays | tokens.arrays())


def read_sampled(frame: Frame, tokens: Tokens) -> list[Sampled]:
    """Return the rows of the frame's tokens. Raises ValueError or LookupError."""
    arrays = frame.arrays
    parts = tokens.split(arrays["sizes"].tolist())
    thens = [SAMPLED[then] for then in arrays["then"].tolist()]
    return [Sampled(*row) for row in zip(frame.numbers, parts, thens, strict=True)]


def spans_between(
    marks: Sequence[tuple[int, int]], start: int, end: int
) -> tuple[VersionSpan, ...]:
    """Return the version spans of tokens [start, end), counted from `start`. A mark is
    (first token, policy_version).

    Example: version 3 sampled tokens 0 to 4, version 4 those after; 4 to 7 are new.
        >>> [tuple(span)[:3] for span in spans_between([(0, 3), (5, 4)], 4, 8)]
        [(0, 1, 3), (1, 4, 4)]
    """
    spans = list[VersionSpan]()
    last = end
    # From the newest mark on: each one holds until the next.
    for first, version in reversed(marks):
        begin = max(first, start)
        if begin < last:
            spans.append(VersionSpan(begin - start, last - start, version))
        last = min(first, last)
        if last <= start:
            break
    return tuple(reversed(spans))


def request_fault(
    request: SamplingRequest, max_length: int, vocab_size: float
) -> ErrorBody | None:
    """Return why a slot of `max_length` tokens cannot serve the request, or None."""
    num_prompt = len(request.prompt_ids)
    # The whole budget must fit at the start: a slot has a fixed length, and a
    # completion may end only by a stop or by max_tokens (SegmentCheck).
    total = num_prompt + request.max_tokens
    if total > max_length:
        return ErrorBody(
            error=f"{num_prompt} prompt tokens + {request.max_tokens} new ones = {total}, a slot holds "
            f"{max_length}",
            rule="prompt and completion must fit into a slot",
            way_out="shorten the prompt, or raise rollout.max_prompt_tokens or rollout.max_tokens.",
        )
    ids = np.asarray(request.prompt_ids, np.int64)
    # As unsigned numbers, negative ids are huge: one comparison finds both kinds. On
    # CUDA an unknown id fails an assertion on the device, which ends the whole process.
    is_unknown = ids.view(np.uint64) >= vocab_size
    if is_unknown.any():
        return ErrorBody(
            error=f"it has token id {ids[is_unknown][0]}",
            rule=f"the model knows ids 0..{vocab_size - 1}",
            way_out="encode the prompt with the model's own tokenizer.",
        )
    return bias_fault(request.logit_bias, vocab_size)


def bias_fault(bias: Mapping[int, float], vocab_size: float) -> ErrorBody | None:
    """Return why a model of this vocabulary has no such bias, or None."""
    unknown = [token_id for token_id in bias if not 0 <= token_id < vocab_size]
    if not unknown:
        return None
    return ErrorBody(
        error=f"logit_bias has token id {unknown[0]}",
        rule=f"the model knows ids 0..{vocab_size - 1}",
        way_out="name ids of the model's own tokenizer in logit_bias.",
    )
