"""The age of trained tokens: how many changes of its weights a model has made since each
token was sampled. Clients name the sampled sequence of each token (provenance spans).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.extensions.tinker.ledger import Ledger, Model, SampleRecord
from asyncrl.extensions.tinker.tinker_requests import UserError

NOT_SAMPLED = -1
UNKNOWN = -2
IntT = npt.NDArray[np.int64]
NO_RECORD = (
    "the server has no record of its sample: it is kept for a day after its last use, and belongs to "
    "the key that sampled it"
)


@dataclass(frozen=True)
class Ages:
    """Of the weighted tokens that were sampled. `masked`: positions of each datum that
    are too old and count as 0.
    """

    masked: dict[int, list[int]] = field(default_factory=dict)
    num_masked: int = 0
    num: int = 0
    total: int = 0
    highest: int = 0
    is_known: bool = False
    """Whether the client named the samples."""

    @property
    def metrics(self) -> dict[str, float]:
        if not self.is_known:
            return {}
        return {
            "staleness:max": float(self.highest),
            "staleness:mean": self.total / max(self.num, 1),
            "masked_tokens:sum": float(self.num_masked),
        }

    def joined(self, other: Ages) -> Ages:
        return Ages(
            {},
            self.num_masked + other.num_masked,
            self.num + other.num,
            self.total + other.total,
            max(self.highest, other.highest),
            self.is_known or other.is_known,
        )


class Bound(NamedTuple):
    """`most`: None: no bound."""

    most: float | None
    on_overdue: str

    @classmethod
    def of(cls, asked: Any, default: Bound) -> Bound:
        """Read the bound of a request. Raises UserError."""
        most, on_overdue = default
        if "max_staleness" in asked.loss_fn_config:
            most = asked.loss_fn_config["max_staleness"]
        for name, value in asked.loss_fn_config_v2.items():
            given = getattr(value, value.WhichOneof("value") or "number")
            if name == "max_staleness":
                most = given
            elif name == "on_overdue":
                on_overdue = given
        if most is not None and not _is_bound(most):
            raise UserError(f"max_staleness={most!r} is not a number from 0")
        if on_overdue not in ("mask", "refuse"):
            raise UserError(f"on_overdue={on_overdue!r} is neither mask nor refuse")
        return cls(most, on_overdue)


def _is_bound(given: Any) -> bool:
    return not isinstance(given, str) and 0 <= given < 2**31


class AgeRule:
    """Finds the ages of a request's tokens, and applies the bound of the request or the
    server's `default`.
    """

    def __init__(self, ledger: Ledger, default: Bound) -> None:
        self._ledger = ledger
        self._default = default

    async def of(self, asked: Any, model: Model) -> Ages:
        """Return the ages of a ForwardBackwardRequest's tokens. Raises UserError for
        tokens above the bound, or without a record that is needed.
        """
        if asked.forward_only:  # trains nothing
            return Ages()
        bound = Bound.of(asked, self._default)
        needs_record = asked.loss_fn == "stable_reinforce"
        if bound.most is None and not needs_record and not _has_spans(asked):
            return Ages()
        known = await self._sequences(asked, model)
        masked = dict[int, list[int]]()
        found = list[IntT]()
        for index, datum in enumerate(asked.data):
            versions = _versions(datum, known, index)
            is_weighted = _is_weighted(datum, len(versions))
            if needs_record or bound.most is not None:
                _check_record(index, versions, is_weighted, asked.loss_fn)
            ages = np.where(versions >= 0, model.version - versions, 0)
            is_old = is_weighted & (
                ages > (np.inf if bound.most is None else bound.most)
            )
            if is_old.any():
                if bound.on_overdue == "refuse":
                    raise UserError(
                        f"datum {index}: {int(is_old.sum())} tokens are up to {int(ages[is_old].max())} "
                        f"steps old, and max_staleness is {bound.most:g}; sample again, or mask them"
                    )
                masked[index] = np.flatnonzero(is_old).tolist()
            found.append(ages[is_weighted & ~is_old & (versions >= 0)])
        trained = np.concatenate(found) if found else np.zeros(0, np.int64)
        return Ages(
            masked,
            sum(map(len, masked.values())),
            len(trained),
            int(trained.sum()),
            int(trained.max(initial=0)),
            is_known=True,
        )

    async def _sequences(self, asked: Any, model: Model) -> Mapping[str, IntT]:
        """Return the version of each token of the sequences that the request names."""
        names = {
            span.sampled_tokens.sequence_id
            for datum in asked.data
            for span in datum.loss_fn_input_spans
            if span.HasField("sampled_tokens")
        }
        known = dict[str, IntT]()
        for name in names:
            found = await self._ledger.first(SampleRecord, id=name)
            if found is None or found.owner != model.owner:
                continue
            # Each use keeps the record for another day.
            self._ledger.put_soon(
                SampleRecord(found.id, found.owner, found.model_id, found.spans)
            )
            if found.model_id in ("", model.id):
                known[name] = _by_token(found.spans)
        return known


def _has_spans(asked: Any) -> bool:
    return any(datum.loss_fn_input_spans for datum in asked.data)


def _by_token(spans: list[list[int]]) -> IntT:
    versions = np.full(spans[-1][1] if spans else 0, UNKNOWN)
    for start, end, version in spans:
        versions[start:end] = version
    return versions


def _versions(datum: Any, known: Mapping[str, IntT], index: int) -> IntT:
    """Return the version of each target token, NOT_SAMPLED for a prompt's, UNKNOWN
    without a record.
    """
    num = len(_values(datum.loss_fn_inputs["target_tokens"]))
    parts = list[IntT]()
    for span in datum.loss_fn_input_spans:
        if span.HasField("prompt_tokens"):
            parts.append(np.full(span.prompt_tokens.length, NOT_SAMPLED))
            continue
        own = span.sampled_tokens
        versions = known.get(own.sequence_id, np.zeros(0, np.int64))
        part = versions[own.offset : own.offset + own.length]
        missing = np.full(own.length - len(part), UNKNOWN)
        parts.append(np.concatenate([part, missing]))
    if not parts:
        return np.full(num, UNKNOWN)
    versions = np.concatenate(parts)
    if len(versions) != num:
        raise UserError(
            f"datum {index}: its provenance spans cover {len(versions)} of {num} target tokens"
        )
    return versions


def _values(tensor: Any) -> npt.NDArray[Any]:
    """Return the values of each row of a dense or sparse tensor. Raises UserError."""
    dtype = "<i8" if tensor.dtype == pb.DTYPE_INT64 else "<f4"
    is_sparse = tensor.HasField("sparse_csr")
    try:
        if not is_sparse:
            values = np.frombuffer(tensor.dense, dtype)
            num_rows = tensor.shape[0] if tensor.shape else len(values)
            return values.reshape(num_rows, -1)
        values = np.frombuffer(tensor.sparse_csr.values, dtype)
        starts = np.frombuffer(tensor.sparse_csr.crow_indices, "<i8")
        is_used = [
            (values[start:end] != 0).any() for start, end in pairwise(starts.tolist())
        ]
        return np.array(is_used)[:, None]
    except ValueError as error:
        raise UserError(f"a tensor cannot be read: {error}") from None


def _is_weighted(datum: Any, num: int) -> npt.NDArray[np.bool_]:
    inputs = datum.loss_fn_inputs
    name = "weights" if "weights" in inputs else "advantages"
    if name not in inputs:
        return np.ones(num, np.bool_)
    is_weighted: npt.NDArray[np.bool_] = (_values(inputs[name]) != 0).any(axis=1)
    return is_weighted


def _check_record(
    index: int, versions: IntT, is_weighted: npt.NDArray[np.bool_], loss: str
) -> None:
    lacking = is_weighted & (versions < 0)
    if not lacking.any():
        return
    place = int(np.argmax(lacking))
    text = f"datum {index}, target token {place}: "
    if versions[place] == NOT_SAMPLED:
        text += "it was not sampled, and has a weight"
    else:
        text += NO_RECORD
    raise UserError(
        f"{text}; {loss} with this bound needs the record of each weighted token"
    )
