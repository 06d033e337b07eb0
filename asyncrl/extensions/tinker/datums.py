"""Requests of clients as arrays, and their datums as micro-batches.

Row i of an input belongs to the prediction after token i of model_input. All rows are
computed and answered; weights and advantages of 0 leave rows without a loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.base.http import Refused
from asyncrl.extensions.tinker.losses import Loss
from asyncrl.models.devices import to_device
from asyncrl.trainer.attention.tree import IntN, TokenRange, lay_out, places_of
from asyncrl.trainer.loss.packing import (
    MOST_TOKENS,
    AdapterStretch,
    MicroBatch,
    assign,
)
from asyncrl.trainer.loss.supports import DistillRows
from asyncrl.trainer.model.policy import Policy

TARGETS = "target_tokens"
DTYPES: Mapping[int, type[np.generic]] = {
    pb.DTYPE_FLOAT32: np.float32,
    pb.DTYPE_INT64: np.int64,
}
Array = npt.NDArray[Any]


class Limits(NamedTuple):
    """Of the model. `context`: most tokens of a text, if its config says so."""

    vocab_size: int
    context: int | None


class Datum(NamedTuple):
    """`target` int64 [T] or [T, K]; `inputs` float32 of that shape."""

    ids_T: npt.NDArray[np.int32]
    target: IntN
    inputs: dict[str, Array]


class PackedDatums(NamedTuple):
    """A micro-batch and its M target tokens: token m has entry `entry_M` of
    Scores.entry_E, and `place_M` among all target tokens of the request. `datum_M`: the
    number of its datum in the micro-batch.
    """

    micro: MicroBatch
    entry_M: torch.Tensor
    place_M: IntN
    datum_M: torch.Tensor


def read_request(body: bytes) -> Any:
    """Return a ForwardBackwardRequest. Raises Refused."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise Refused(
            400, f"the body is not a ForwardBackwardRequest: {error}"
        ) from error


def config_of(request: Any) -> dict[str, float | str]:
    """Return loss_fn_config, of the newer form if the request has it."""
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    return {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in request.loss_fn_config_v2.items()
    }


def read_datums(
    request: Any, loss: Loss, masked: Mapping[int, Sequence[int]], limits: Limits
) -> list[Datum]:
    """Return a request's datums, without the loss of `masked` positions. Raises
    Refused.
    """
    if not request.data:
        raise Refused(400, "data has no datum", way_out="send at least one.")
    datums = list[Datum]()
    for index, sent in enumerate(request.data):
        datum = _read(f"datum {index}", sent, loss, limits)
        places = np.array(masked.get(index, ()), np.int64)
        if ((places < 0) | (places >= len(datum.ids_T))).any():
            raise _wrong(f"datum {index}", f"has {len(datum.ids_T)} rows to mask")
        for name in (loss.inputs[0], *loss.unused):
            datum.inputs[name][places] = 0
        datums.append(datum)
    return datums


def _read(where: str, sent: Any, loss: Loss, limits: Limits) -> Datum:
    kinds = {chunk.WhichOneof("chunk") for chunk in sent.model_input}
    if kinds - {"encoded_text"}:
        raise _wrong(f"{where}: model_input", "has images or audio; models read text")
    texts = [chunk.encoded_text.tokens for chunk in sent.model_input]
    ids_T = _from_bytes(f"{where}: model_input", b"".join(texts), np.int32)
    if not len(ids_T):
        raise _wrong(f"{where}: model_input", "has no tokens")
    if limits.context is not None and len(ids_T) > limits.context:
        fault = f"has {len(ids_T)} tokens; the model's context has {limits.context}"
        raise _wrong(f"{where}: model_input", fault)
    _check_ids(f"{where}: model_input", ids_T, limits)
    wanted = {TARGETS, *loss.inputs}
    if wrong := sorted(wanted ^ {*sent.loss_fn_inputs}):
        fault = "is missing" if wrong[0] in wanted else "is not an input"
        rule = f"the loss reads {', '.join(sorted(wanted))}"
        raise _wrong(f"{where}: {wrong[0]}", f"{fault}; {rule}")
    arrays = dict[str, Array]()
    for name in (TARGETS, *loss.inputs):
        field = f"{where}: {name}"
        dtype = np.int64 if name == TARGETS else np.float32
        most = (len(ids_T), limits.vocab_size)
        found = _array(field, sent.loss_fn_inputs[name], dtype, most)
        if found.ndim > 1 and loss.inputs != ("weights",):
            raise _wrong(field, f"has shape {found.shape}; the loss reads vectors")
        if found.shape != arrays.setdefault(TARGETS, found).shape:
            shape = arrays[TARGETS].shape
            raise _wrong(field, f"has shape {found.shape}; {TARGETS} has {shape}")
        if not np.isfinite(found).all():
            raise _wrong(field, "has NaN or infinite numbers")
        arrays[name] = found
    target = arrays.pop(TARGETS)
    _check_ids(f"{where}: {TARGETS}", target, limits)
    return Datum(ids_T, target, arrays)


def _array(
    field: str, sent: Any, dtype: type[np.generic], most: tuple[int, int]
) -> Array:
    """Return a tensor [T] or [T, K], dense and writable. `most`: T and the largest K.
    Raises Refused.
    """
    num_rows, most_columns = most
    if DTYPES.get(sent.dtype) is not dtype:
        raise _wrong(field, f"has dtype {sent.dtype}; it is {dtype.__name__}")
    is_sparse = sent.HasField("sparse_csr")
    values = _from_bytes(field, sent.sparse_csr.values or sent.dense, dtype)
    shape = (*sent.shape,) or (len(values),)
    is_wide = len(shape) > 2 or not 1 <= shape[-1] <= max(most)
    if is_wide or shape[0] != num_rows:
        rule = f"each of the {num_rows} tokens of model_input has a row, of at most {most_columns} numbers"
        raise _wrong(field, f"has shape {shape}; {rule}")
    if not is_sparse:
        if len(values) != np.prod(shape):
            raise _wrong(field, f"has {len(values)} numbers; its shape is {shape}")
        return values.reshape(shape).copy()
    start_T = _from_bytes(field, sent.sparse_csr.crow_indices, np.int64)
    column_E = _from_bytes(field, sent.sparse_csr.col_indices, np.int64)
    size_T = np.diff(start_T)
    if (
        len(shape) != 2
        or len(size_T) != num_rows
        or (start_T[0], start_T[-1]) != (0, len(values))
        or len(column_E) != len(values)
        or (size_T < 0).any()
        or ((column_E < 0) | (column_E >= shape[1])).any()
    ):
        raise _wrong(field, f"has CSR indices that do not fit its shape {shape}")
    dense: Array = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(num_rows), size_T), column_E] = values
    return dense


def _from_bytes(field: str, content: bytes, dtype: type[np.generic]) -> Array:
    if len(content) % np.dtype(dtype).itemsize:
        raise _wrong(field, f"has {len(content)} bytes; they are {dtype.__name__}")
    return np.frombuffer(content, dtype)


def _check_ids(field: str, ids: Array, limits: Limits) -> None:
    wrong = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if len(wrong):
        fault = f"has the id {wrong[0]}; ids are 0 to {limits.vocab_size - 1}"
        raise _wrong(field, fault)


def _wrong(field: str, fault: str) -> Refused:
    return Refused(
        400, f"{field} {fault}", way_out="send the request with it repaired."
    )


def pack(
    datums: Sequence[Datum], adapter: str, policy: Policy, max_tokens: int
) -> Iterator[PackedDatums]:
    """Yield a request's datums in micro-batches of at most `max_tokens` tokens, or of one
    datum. Common prefixes are computed once.
    """
    readings = np.concatenate([one.ids_T for one in datums])
    sequences = list[TokenRange]()
    start = 0
    for index, one in enumerate(datums):
        length = len(one.ids_T)
        sequences.append(
            TokenRange(index, start, length, 0, 0, one.target.size, adapter)
        )
        start += length
    device = policy.model.device
    for side, most in policy.plan.rules(max_tokens).sides(sequences):
        most = min(most, MOST_TOKENS.get(device.type, most))
        for (share,) in assign(side, readings, policy.costs, most, 1):
            yield _assemble(share, datums, readings, most, device)


def _assemble(
    share: Sequence[TokenRange],
    datums: Sequence[Datum],
    readings: npt.NDArray[np.int32],
    max_tokens: int,
    device: torch.device,
) -> PackedDatums:
    share = sorted(share)
    layout, source_N, position_N = lay_out(share, readings, max_tokens)
    first_D = np.cumsum([0, *(one.target.size for one in datums)])
    keys = list[IntN]()
    places = list[IntN]()
    for one, runs in zip(share, layout.rows, strict=True):
        target = datums[one.trajectory].target.reshape(one.length, -1)
        # Packed place above target: equal targets of a place share a logprob.
        keys.append((places_of(runs)[:, None] << 32 | target).reshape(-1))
        places.append(first_D[one.trajectory] + np.arange(target.size))
    key_E, entry_M = np.unique(np.concatenate(keys), return_inverse=True)
    # A row of logits for each place, and from it the logprobs of all its targets. The
    # entries are in the order of their ids, as a slice of the vocabulary needs them.
    order_E = np.argsort(key_E & 0xFFFFFFFF, kind="stable")
    rank_E = np.empty_like(order_E)
    rank_E[order_E] = np.arange(len(order_E))
    place_U, first_U, row_E = np.unique(
        key_E >> 32, return_index=True, return_inverse=True
    )

    def tensor(array: Array) -> torch.Tensor:
        return to_device(array.astype(np.int64), device)

    id_E = key_E & 0xFFFFFFFF
    ids = id_E[order_E].astype(np.int32)
    row = tensor(row_E[order_E])
    micro = MicroBatch(
        token_ids_N=tensor(readings[source_N]),
        position_N=tensor(position_N),
        layout=layout,
        stretches=(AdapterStretch(0, layout.num_tokens, share[0].adapter),),
        predict_U=tensor(place_U),
        target_U=tensor(id_E[first_U]),
        pair_M=tensor(np.arange(len(place_U))),
        source_M=place_U,
        sequence_M=tensor(np.zeros(len(place_U))),
        distilled=DistillRows(row, tensor(ids), ids, row, row.new_zeros(0).float()),
    )
    sizes = [len(own) for own in places]
    return PackedDatums(
        micro,
        tensor(rank_E[entry_M]),
        np.concatenate(places),
        tensor(np.repeat(np.arange(len(share)), sizes)),
    )


def answer_of(
    datums: Sequence[Datum],
    logprobs: npt.NDArray[np.float32],
    metrics: Mapping[str, float],
) -> bytes:
    """Return a serialized ForwardBackwardOutput. `logprobs`: of all target tokens."""
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics.update(metrics)
    start = 0
    # Datums of a record have the same number of targets per row.
    for trailing, some in groupby(datums, key=lambda one: one.target.shape[1:]):
        ends = np.cumsum([0, *(one.target.size for one in some)])
        field = pb.BatchedTensor(
            data=logprobs[start : start + ends[-1]].tobytes(),
            offsets=(4 * ends).astype(np.int64).tobytes(),
            dtype=pb.DTYPE_FLOAT32,
            trailing_shape=trailing,
        )
        output.loss_fn_outputs.add(
            type_tag="ArrayRecord",
            num_datums=len(ends) - 1,
            fields={"logprobs": field},
        )
        start += ends[-1]
    content: bytes = output.SerializeToString()
    return content
