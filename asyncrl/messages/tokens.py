"""The token record: ids, the versions that sampled them, and a column for each further
value of a token.

Engines, capture, journal, trainer and resume move tokens with the functions here. A new
value per token needs a Column in COLUMNS, the code that makes it, and the loss that
reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.messages.records import CallSpan, Completion, VersionSpan

NO_EXPERT = 65535
"""Unknown expert (uint16)."""
SIZES = ".sizes"
"""A ragged column is two arrays in a frame: NAME with all values, and NAME.sizes."""


class Ragged(NamedTuple):
    """A list of values per token: `values` [sum(sizes)], `sizes` int32 [T]."""

    values: npt.NDArray[Any]
    sizes: npt.NDArray[np.int32]

    @classmethod
    def of(cls, lists: Sequence[Sequence[Any]], dtype: str) -> Ragged:
        values = [value for one in lists for value in one]
        return cls(
            np.array(values, dtype), np.array([len(one) for one in lists], np.int32)
        )

    def lists(self) -> list[list[Any]]:
        values = self.values.tolist()
        ends = accumulate(self.sizes.tolist(), initial=0)
        return [values[start:end] for start, end in pairwise(ends)]


Values = npt.NDArray[np.generic] | Ragged


@dataclass(frozen=True, slots=True)
class Column:
    """A value per token.

    `dtype`: little-endian. `shape`: one value; several, always the same number E (found
    in the data); or any number (Ragged). `covers`: sampled tokens, or all, so that an
    engine reports the prompt's values too. `fill`: the value of tokens that lack it;
    None: a join drops the column unless all sampled tokens have it.
    """

    name: str
    dtype: str
    shape: Literal["one", "several", "any"] = "one"
    covers: Literal["sampled", "all"] = "sampled"
    fill: float | None = 0
    in_journal: bool = True

    def filled(self, num_tokens: int, width: int = 0) -> Values:
        if self.shape == "any":
            return Ragged(np.zeros(0, self.dtype), np.zeros(num_tokens, np.int32))
        shape = num_tokens if self.shape == "one" else (num_tokens, width)
        if self.fill:
            return np.full(shape, self.fill, self.dtype)
        return np.zeros(shape, self.dtype)


BEHAVIOUR = "behaviour_logprobs"
"""float32 in nats, after temperature (0 is greedy, with the logprobs of temperature 1),
over the support and the tokens that the grammar allows.
"""
SUPPORT = "support"
"""int32, ascending: the ids from which top_p, top_k and min_p let this token be drawn,
itself among them. Empty: the whole vocabulary.
"""
TEACHER = "teacher_logprobs"
"""float32 in nats; the behaviour's where a grammar held or a support was cut."""
DISTILL_IDS, DISTILL_LOGPROBS = "distill_ids", "distill_logprobs"
"""The teacher's likeliest tokens, for a loss over several; logprobs float32 in nats.
Empty where a grammar held or a support was cut.
"""
ROUTING = "routing"
"""uint16 [T, E]: the experts, of each router in order, that read the token before.
NO_EXPERT: unknown, as for the first token. Of several readings, the record has the one
from which the newest token was sampled: its keys and values are the token's context.
"""
TOP_IDS, TOP_LOGPROBS = "top_ids", "top_logprobs"
"""The likeliest tokens in order, for clients that ask for them; logprobs float32 in
nats.
"""

COLUMNS = {
    column.name: column
    for column in (
        Column(BEHAVIOUR, "<f4"),
        # Of the weights that sampled the token: newer weights would cut elsewhere, but
        # the token was drawn from this set.
        Column(SUPPORT, "<i4", shape="any"),
        # A teacher's logprob of 0 would claim certainty, and distillation would pull
        # towards it. So a join of scored and unscored tokens has no such column.
        Column(TEACHER, "<f4", fill=None),
        Column(DISTILL_IDS, "<i4", shape="any"),
        Column(DISTILL_LOGPROBS, "<f4", shape="any"),
        # Context too: with router_replay the trainer reads the whole text with these
        # experts.
        Column(ROUTING, "<u2", shape="several", covers="all", fill=NO_EXPERT),
        # A client that asked for them has read them with its answer. Nothing trains on
        # them, so neither the journal nor a batch pays for them.
        Column(TOP_IDS, "<i4", shape="any", in_journal=False),
        Column(TOP_LOGPROBS, "<f4", shape="any", in_journal=False),
    )
}


def in_journal(column: Column) -> bool:
    return column.in_journal


# Never changed, so versions and the like may be cached. Frozen, it would take 3 times
# as long to make, twice per streamed token; and slots leave no place for a
# cached_property. Without eq: == on arrays has no truth value.
@dataclass(eq=False)
class Tokens:
    """T tokens of one text, or of several texts one after the other.

    `ids` int32 [T]. `spans`: the sampled tokens, in order; the others are context.
    `calls`: sampled tokens under a grammar or
    with adjusted logits. A column has one entry per token; an
    absent one has only fills.

    Example: the prompt 5 6, the answer 7 8 under version 3, and only its first token.
        >>> prompt = Tokens(np.array([5, 6], np.int32))
        >>> logprobs = np.array([-0.5, -1.0], np.float32)
        >>> answer = Tokens(np.array([7, 8], np.int32), (VersionSpan(0, 2, 3),), {BEHAVIOUR: logprobs})
        >>> whole = Tokens.join([prompt, answer])
        >>> whole.ids.tolist(), whole.versions.tolist()
        ([5, 6, 7, 8], [-1, -1, 3, 3])
        >>> whole.behaviour_logprobs.tolist()
        [0.0, 0.0, -0.5, -1.0]
        >>> whole.slice(2, 3).spans
        (VersionSpan(start=0, end=1, version=3, engine=-1),)
    """

    ids: npt.NDArray[np.int32]
    spans: tuple[VersionSpan, ...] = ()
    columns: Mapping[str, Values] = field(default_factory=dict)
    calls: tuple[CallSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_context(self) -> int:
        """Tokens before the first sampled one."""
        return self.spans[0].start if self.spans else len(self.ids)

    @property
    def num_sampled(self) -> int:
        return sum(span.end - span.start for span in self.spans)

    @cached_property
    def versions(self) -> npt.NDArray[np.int32]:
        """int32 [T]; -1: context."""
        versions = np.full(len(self.ids), -1, np.int32)
        for span in self.spans:
            versions[span.start : span.end] = span.version
        return versions

    @cached_property
    def engines(self) -> npt.NDArray[np.int16]:
        """int16 [T]; -1: context or unknown."""
        # Wide enough: a run has at most 10,000 engines (rollout.num_engines).
        engines = np.full(len(self.ids), -1, np.int16)
        for span in self.spans:
            engines[span.start : span.end] = span.engine
        return engines

    @cached_property
    def is_sampled(self) -> npt.NDArray[np.bool_]:
        """Bool [T]"""
        return self.versions >= 0

    @cached_property
    def readings(self) -> npt.NDArray[np.int32]:
        """int32 [T]: equal for tokens with equal ids that were read by the same experts.

        Two texts share the states of a common prefix only if its readings are equal:
        weights of two versions may read one prompt by other experts.
        """
        if ROUTING not in self.columns or not len(self):
            return self.ids
        # The entry of the next token has the experts that read this one. The last
        # token has none.
        experts = self.column(ROUTING)
        following = np.vstack([experts[1:], np.full_like(experts[:1], NO_EXPERT)])
        ids = self.ids.view(np.uint16).reshape(-1, 2)
        entries = np.ascontiguousarray(np.hstack([ids, following]))
        as_bytes = entries.view(np.dtype((np.void, entries.strides[0])))
        _, readings = np.unique(as_bytes[:, 0], return_inverse=True)
        return readings.astype(np.int32)

    @property
    def behaviour_logprobs(self) -> npt.NDArray[np.float32]:
        """float32 [T] in nats; 0 for context."""
        logprobs: npt.NDArray[np.float32] = self.column(BEHAVIOUR)
        return logprobs

    def column(self, name: str) -> Any:
        """Return the values, or fills if the column is absent."""
        values = self.columns.get(name)
        return COLUMNS[name].filled(len(self.ids)) if values is None else values

    def with_columns(self, columns: Mapping[str, Values]) -> Tokens:
        """Add columns, in place of present ones of the same names."""
        return replace(self, columns={**self.columns, **columns}) if columns else self

    def read_again(self, context: Tokens) -> Tokens:
        """Return the tokens, the first of them with the values that a later reading gave
        them as `context`.

        Example: an engine reads 5 6 again under other weights.
            >>> def routed(*experts):
            ...     columns = {ROUTING: np.array(experts, np.uint16)[:, None]}
            ...     return Tokens(np.array([5, 6, 7][: len(experts)], np.int32), (), columns)
            >>> routed(1, 1, 1).read_again(routed(3, 3)).columns[ROUTING].tolist()
            [[3], [3], [1]]
        """
        if not context.columns:
            return self
        columns = context.as_context().columns
        read, rest = self.split([len(context), len(self) - len(context)])
        return Tokens.join([read.with_columns(columns), rest])

    def kept(self, is_kept: Callable[[Column], bool]) -> Tokens:
        """Return the tokens with only these columns, such as those of the journal."""
        columns = {
            name: values
            for name, values in self.columns.items()
            if is_kept(COLUMNS[name])
        }
        if len(columns) == len(self.columns):
            return self
        # Not replace(), which reads the fields of the class for each answer.
        return Tokens(self.ids, self.spans, columns, self.calls)

    def as_context(self) -> Tokens:
        """Return the same tokens as if they had been read only."""
        columns = {
            name: values
            for name, values in self.columns.items()
            if COLUMNS[name].covers == "all"
        }
        return Tokens(self.ids, columns=columns)

    def sampled_by(self, engine: int) -> Tokens:
        spans = [span._replace(engine=engine) for span in self.spans]
        return Tokens(self.ids, tuple(spans), self.columns, self.calls)

    def slice(self, start: int, end: int | None = None) -> Tokens:
        length = len(self.ids)
        start = min(start, length)
        end = length if end is None else max(start, min(end, length))
        if (start, end) == (0, length):
            return self
        return self.split([start, end - start, length - end])[1]

    def split(self, sizes: Sequence[int]) -> list[Tokens]:
        """Return parts of these sizes. Raises ValueError if they are not all tokens."""
        bounds = bounds_of(sizes, len(self.ids))
        spans = split_spans(self.spans, bounds)
        calls = split_spans(self.calls, bounds)
        columns = {
            name: _split(values, bounds) for name, values in self.columns.items()
        }
        return [
            Tokens(
                self.ids[start:end],
                tuple(spans[part]),
                {name: values[part] for name, values in columns.items()},
                tuple(calls[part]),
            )
            for part, (start, end) in enumerate(bounds)
        ]

    def copy(self) -> Tokens:
        """Return the tokens with arrays of their own. A slice holds those of the whole."""
        columns = deepcopy(self.columns)
        return Tokens(self.ids.copy(), self.spans, columns, self.calls)

    @staticmethod
    def join(parts: Sequence[Tokens]) -> Tokens:
        """Return all tokens, in order. Adjacent spans of one version and engine become
        one. The only part with tokens is returned unchanged.
        """
        # A part without tokens has no values, and after a frame it has lost the width of
        # its columns.
        if len(parts) > 1:
            parts = [part for part in parts if len(part.ids)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        # Adjacent spans become one, also across rows of a frame: a step of 256
        # sequences under one version needs one span. split() cuts it again at the rows'
        # bounds.
        spans, calls = list[VersionSpan](), list[CallSpan]()
        start = 0
        for part in parts:
            for span in part.spans:
                last = spans[-1] if spans else None
                first = start + span.start
                # By engine as well: the next turn asks the engine of the last span,
                # whose cache has the conversation.
                if last is not None and last.end == first and last[2:] == span[2:]:
                    spans.pop()
                    first = last.start
                spans.append(
                    VersionSpan(first, start + span.end, span.version, span.engine)
                )
            for call in part.calls:
                calls.append(_moved(call, start + call.start, start + call.end))
            start += len(part.ids)
        columns = {}
        for name in {name: None for part in parts for name in part.columns}:
            values = _joined(COLUMNS[name], parts)
            if values is not None:
                columns[name] = values
        ids = (
            np.concatenate([part.ids for part in parts])
            if parts
            else np.zeros(0, np.int32)
        )
        return Tokens(ids, tuple(spans), columns, tuple(calls))

    # ---- frames

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return flat arrays for a frame, without calls: ids, spans int32 [4 S],
        columns.
        """
        # A span is a tuple of four numbers, so a frame, the journal and a batch hold
        # them flat. A fifth field would change all three formats.
        spans = np.fromiter(
            chain.from_iterable(self.spans), np.int32, 4 * len(self.spans)
        )
        arrays: dict[str, npt.NDArray[np.generic]] = {"ids": self.ids, "spans": spans}
        for name, values in self.columns.items():
            if isinstance(values, Ragged):
                arrays[name + SIZES] = values.sizes
                values = values.values
            arrays[name] = values.reshape(-1)
        return arrays

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, npt.NDArray[Any]],
        calls: Iterable[CallSpan] = (),
    ) -> Tokens:
        """Return the tokens of arrays(), with their `calls`.

        Raises ValueError or LookupError if the arrays do not belong together.
        """
        ids = arrays["ids"]
        columns = dict[str, Values]()
        # Other arrays of the frame are its owner's (numbers, sizes, ...), so unknown
        # names are not an error.
        for name, column in COLUMNS.items():
            if name in arrays:
                columns[name] = _read_column(column, arrays, len(ids))
        spans = tuple(
            [VersionSpan(*span) for span in arrays["spans"].reshape(-1, 4).tolist()]
        )
        # The arrays come from another process. Wrong dtypes would pass as wrong
        # numbers: the same bytes are other ids.
        if ids.dtype != np.int32 or arrays["spans"].dtype != np.int32:
            raise ValueError(f"ids of {ids.dtype}, spans of {arrays['spans'].dtype}")
        return cls(ids, spans, columns, tuple(calls))


EMPTY = Tokens(np.zeros(0, np.int32))


NO_COMPLETION = Completion(EMPTY)


class SegmentPart(NamedTuple):
    """Newly sampled tokens of a request: a streamed chunk, or with `finish_reason` the
    end of a segment.

    abort: a push, sleep or abort ended the segment early. The tokens are new, or the
    whole text so far if a column covers the prompt as well: their first tokens are then
    context that the request already has.
    """

    tokens: Tokens
    finish_reason: Literal["stop", "length", "abort"] | None = None

    @property
    def sampled(self) -> Tokens:
        return self.tokens.slice(self.tokens.num_context)

    @property
    def token_ids(self) -> list[int]:
        """The new ids."""
        ids: list[int] = self.tokens.ids[self.tokens.num_context :].tolist()
        return ids

    @property
    def logprobs(self) -> list[float]:
        """Behaviour logprobs of the new ids, float32 in nats."""
        logprobs: list[float] = self.sampled.behaviour_logprobs.tolist()
        return logprobs


def bounds_of(sizes: Sequence[int], num_items: int) -> list[tuple[int, int]]:
    """Return the bounds of parts of these sizes. Raises ValueError if they are not all
    items.
    """
    bounds = [*pairwise(accumulate(sizes, initial=0))]
    if sum(sizes) != num_items:
        raise ValueError(f"parts of {sizes[:6]}... are {sum(sizes)} of {num_items}")
    return bounds


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of an array in Tokens.arrays()."""
    return np.dtype(COLUMNS[name].dtype if name in COLUMNS else "<i4")


def spans_of(versions: npt.NDArray[np.integer[Any]]) -> tuple[VersionSpan, ...]:
    """Return the spans of tokens of equal version; -1 is context."""
    bounds = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    spans = list[VersionSpan]()
    for start, end in pairwise(bounds):
        if start < end and versions[start] >= 0:
            spans.append(VersionSpan(start, end, int(versions[start])))
    return tuple(spans)


def split_spans(
    spans: Sequence[Any], bounds: Sequence[tuple[int, int]]
) -> list[list[Any]]:
    """Cut spans at the bounds, which cover everything in order.

    Example: one span over two rows of a frame becomes one in each.
        >>> split_spans([VersionSpan(0, 5, 3)], [(0, 2), (2, 2), (2, 5)])[2]
        [VersionSpan(start=0, end=3, version=3, engine=-1)]
    """
    parts: list[list[Any]] = [[] for _ in bounds]
    # Spans and bounds both ascend, so one pass is enough: spans + parts steps. A span
    # may cover several parts, and a part may be empty.
    part = 0
    for span in spans:
        start = span.start
        while bounds[part][1] <= start:
            part += 1
        first, end = bounds[part]
        while start < span.end:
            while end <= start:
                part += 1
                first, end = bounds[part]
            stop = min(span.end, end)
            parts[part].append(_moved(span, start - first, stop - first))
            start = stop
    return parts


def _moved(span: Any, start: int, end: int) -> Any:
    # replace() is for dataclasses only.
    if isinstance(span, VersionSpan):
        return VersionSpan(start, end, span.version, span.engine)
    return replace(span, start=start, end=end)


def _split(values: Values, bounds: Sequence[tuple[int, int]]) -> list[Values]:
    if not isinstance(values, Ragged):
        return [values[start:end] for start, end in bounds]
    places = np.concatenate([[0], np.cumsum(values.sizes)]).tolist()
    return [
        Ragged(values.values[places[start] : places[end]], values.sizes[start:end])
        for start, end in bounds
    ]


def _joined(column: Column, parts: Sequence[Tokens]) -> Values | None:
    """Return the column over all parts, with fills where a part lacks it, or None if it
    must be dropped. At least one part has it.
    """
    links: list[Any] = [part.columns.get(column.name) for part in parts]
    # E is not declared: it is the model's layers with routers times the experts of a
    # token.
    width = 0
    if column.shape == "several":
        width = next(values.shape[1] for values in links if values is not None)
    for place, part in enumerate(parts):
        if links[place] is None:
            # A part of context only needs no value: the column stays if all sampled
            # tokens have one.
            if column.fill is None and part.spans:
                return None
            links[place] = column.filled(len(part.ids), width)
    if column.shape == "any":
        return Ragged(*(np.concatenate(arrays) for arrays in zip(*links, strict=True)))
    joined: npt.NDArray[np.generic] = np.concatenate(links)
    return joined


def _read_column(
    column: Column, arrays: Mapping[str, npt.NDArray[Any]], num_tokens: int
) -> Values:
    values = arrays[column.name]
    if values.dtype != np.dtype(column.dtype):
        raise ValueError(f"{column.name} of {values.dtype}")
    if column.shape == "any":
        sizes = arrays[column.name + SIZES]
        if sizes.dtype != np.int32 or (sizes < 0).any():
            raise ValueError(f"sizes of {column.name} are {sizes[:6]}...")
        if len(sizes) != num_tokens or int(sizes.sum()) != len(values):
            raise ValueError(
                f"{len(sizes)} sizes and {len(values)} values of {column.name} for {num_tokens} tokens"
            )
        return Ragged(values, sizes)
    # If E does not divide evenly, values were lost, and the check below fails.
    width = len(values) // num_tokens if column.shape == "several" and num_tokens else 1
    if len(values) != num_tokens * width:
        raise ValueError(f"{len(values)} {column.name} for {num_tokens} tokens")
    return values.reshape(num_tokens, width) if column.shape == "several" else values
