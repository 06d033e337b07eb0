"""Requests of clients as arrays and micro-batches.

Row i of an input belongs to the prediction after token i of model_input. All rows are
computed and answered; weights and advantages of 0 leave rows without a loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.base.http import Refused
from asyncrl.extensions.tinker.tinker_losses import Loss
from asyncrl.models.devices import to_device
from asyncrl.trainer.attention.tree import IntN, TokenRange, lay_out, places_of
from asyncrl.trainer.loss import packing
from asyncrl.trainer.loss.supports import DistillRows
from asyncrl.trainer.model.policy import Policy

TARGETS = "target_tokens"
Array = npt.NDArray[Any]


class Limits(NamedTuple):
    """Limits of a model. `context`: most tokens of a text."""

    vocab_size: int
    context: float


class Datums(NamedTuple):
    """`texts`: int32 [T] of each datum. `targets`: int64 [T] or [T, K] of each. `inputs`:
    float32 of all target tokens.
    """

    texts: list[Array]
    targets: list[IntN]
    inputs: dict[str, Array]


class PackedDatums(NamedTuple):
    """A micro-batch and its target tokens: token m has entry `entry_M` of Scores.entry_E,
    and `place_M` among all target tokens of the request. `inputs`: float64. `datum_M`: the
    number of its datum in the micro-batch.
    """

    micro: packing.MicroBatch
    entry_M: torch.Tensor
    place_M: IntN
    inputs: dict[str, torch.Tensor]
    datum_M: torch.Tensor


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Raise Refused with the name of a field for a fault in it."""
    try:
        yield
    except (ValueError, IndexError, DecodeError) as error:
        way_out = "send the request with it repaired."
        raise Refused(400, f"{field} {error}", way_out=way_out) from error


def _need(is_met: bool | np.bool_, fault: str) -> None:
    if not is_met:
        raise ValueError(fault)


def read_request(body: bytes) -> Any:
    """Return a ForwardBackwardRequest. Raises Refused."""
    with _naming("forward_backward"):
        request = pb.ForwardBackwardRequest.FromString(body)
        _need(len(request.data) > 0, "has no datum")
    return request


def config_of(request: Any) -> dict[str, float | str]:
    """Return loss_fn_config. Newer clients send loss_fn_config_v2, which goes first."""
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    return {
        key: getattr(value, value.WhichOneof("value") or "number")
        for key, value in request.loss_fn_config_v2.items()
    }


def read_datums(
    request: Any, loss: Loss, masked: Mapping[int, Sequence[int]], limits: Limits
) -> Datums:
    """Return a request's datums, without the loss of `masked` positions. Raises
    Refused.
    """
    texts = list[Array]()
    targets = list[IntN]()
    parts: dict[str, list[Array]] = {name: [] for name in loss.inputs}
    for index, sent in enumerate(request.data):
        where = f"datum {index}"
        with _naming(f"{where}: model_input"):
            text = _read_text(sent.model_input, limits)
        arrays = _read_inputs(where, sent.loss_fn_inputs, loss, limits)
        target = arrays.pop(TARGETS)
        with _naming(f"{where}: {TARGETS}"):
            fault = f"has shape {target.shape}; model_input has {len(text)} tokens"
            _need(len(target) == len(text), fault)
        with _naming(f"{where}: masked positions"):
            for name in loss.masked:
                arrays[name][[*masked.get(index, ())]] = 0
        texts.append(text)
        targets.append(target)
        for name, array in arrays.items():
            parts[name].append(array.reshape(-1))
    inputs = {name: np.concatenate(some) for name, some in parts.items()}
    return Datums(texts, targets, inputs)


def _read_text(chunks: Sequence[Any], limits: Limits) -> Array:
    for chunk in chunks:
        is_text = chunk.WhichOneof("chunk") == "encoded_text"
        _need(is_text, "has images or audio; models read text")
    content = b"".join(chunk.encoded_text.tokens for chunk in chunks)
    text = np.frombuffer(content, np.int32)
    fault = f"has {len(text)} tokens; the model reads 1 to {limits.context}"
    _need(1 <= len(text) <= limits.context, fault)
    _need_ids(text, limits)
    return text


def _read_inputs(
    where: str, sent: Mapping[str, Any], loss: Loss, limits: Limits
) -> dict[str, Array]:
    """Return target_tokens and the other inputs of the loss, of one shape."""
    names = (TARGETS, *loss.inputs)
    for name in sorted({*names} ^ {*sent}):
        with _naming(f"{where}: {name}"):
            _need(name not in names, "is missing")
            _need(name in names, f"is not an input; the loss reads {', '.join(names)}")
    arrays = dict[str, Array]()
    for name in names:
        with _naming(f"{where}: {name}"):
            array = _read_tensor(sent[name], name == TARGETS, limits)
            shape = arrays.setdefault(TARGETS, array).shape
            fault = f"has shape {array.shape}; {TARGETS} has {shape}"
            _need(array.shape == shape, fault)
            _need(array.ndim == 1 or loss.has_columns, f"{fault}; the loss reads [T]")
            _need(np.isfinite(array).all(), "has NaN or infinite numbers")
        arrays[name] = array
    with _naming(f"{where}: {TARGETS}"):
        _need_ids(arrays[TARGETS], limits)
    return arrays


def _read_tensor(sent: Any, is_integer: bool, limits: Limits) -> Array:
    """Return a tensor [T] or [T, K], dense and writable. Raises ValueError."""
    dtype = np.dtype(np.int64 if is_integer else np.float32)
    known = pb.DTYPE_INT64 if is_integer else pb.DTYPE_FLOAT32
    _need(sent.dtype == known, f"has another dtype than {dtype}")
    csr = sent.sparse_csr
    values = np.frombuffer(csr.values or sent.dense, dtype)
    shape = (*sent.shape,) or (len(values),)
    # Before memory is made for it.
    fault = f"has shape {shape}; it has one or two axes, the second of 1 to {limits.vocab_size}"
    _need(len(shape) in (1, 2), fault)
    _need(1 <= (*shape, 1)[1] <= limits.vocab_size, fault)
    if not sent.HasField("sparse_csr"):
        return values.reshape(shape).copy()
    dense: Array = np.zeros(shape, dtype)
    starts: IntN = np.frombuffer(csr.crow_indices, np.int64)
    rows = np.repeat(np.arange(len(dense)), np.diff(starts))
    columns = np.frombuffer(csr.col_indices, np.int64)
    _need(len(rows) == len(columns) == len(values), "has CSR indices of other sizes")
    dense.reshape(-1)[np.ravel_multi_index((rows, columns), shape)] = values
    return dense


def _need_ids(ids: Array, limits: Limits) -> None:
    for wrong in ids[(ids < 0) | (ids >= limits.vocab_size)][:1]:
        raise ValueError(f"has the id {wrong}; ids are 0 to {limits.vocab_size - 1}")


def pack(
    datums: Datums, adapter: str, policy: Policy, max_tokens: int
) -> Iterator[PackedDatums]:
    """Yield a request's datums in micro-batches of at most `max_tokens` tokens, or of one
    datum. Common prefixes are computed once.
    """
    readings = np.concatenate(datums.texts)
    sequences = list[TokenRange]()
    start = 0
    for index, text in enumerate(datums.texts):
        num_loss = datums.targets[index].size
        sequences.append(TokenRange(index, start, len(text), 0, 0, num_loss, adapter))
        start += len(text)
    device = policy.model.device
    for side, most in policy.plan.rules(max_tokens).sides(sequences):
        most = min(most, packing.MOST_TOKENS.get(device.type, most))
        for (share,) in packing.assign(side, readings, policy.costs, most, 1):
            yield _assemble(share, datums, readings, most, device)


def _assemble(
    share: Sequence[TokenRange],
    datums: Datums,
    readings: Array,
    max_tokens: int,
    device: torch.device,
) -> PackedDatums:
    layout, source_N, position_N = lay_out(share, readings, max_tokens)
    first_D = np.cumsum([0, *(target.size for target in datums.targets)])
    keys = list[IntN]()
    places = list[IntN]()
    for one, runs in zip(share, layout.rows, strict=True):
        target = datums.targets[one.trajectory].reshape(one.length, -1)
        # The target above its packed place, so that entries are sorted by their ids.
        # Equal targets of a place share an entry.
        keys.append((target << 32 | places_of(runs)[:, None]).reshape(-1))
        places.append(first_D[one.trajectory] + np.arange(target.size))
    key_E, entry_M = np.unique(np.concatenate(keys), return_inverse=True)
    id_E = key_E >> 32
    # One row of logits for each place; all of its targets are entries of this row.
    place_U, first_U, row_E = np.unique(
        key_E & 0xFFFFFFFF, return_index=True, return_inverse=True
    )

    def tensor(array: Array) -> torch.Tensor:
        return to_device(array.astype(np.int64), device)

    rows = tensor(row_E)
    micro = packing.MicroBatch(
        token_ids_N=tensor(readings[source_N]),
        position_N=tensor(position_N),
        layout=layout,
        stretches=(packing.AdapterStretch(0, layout.num_tokens, share[0].adapter),),
        predict_U=tensor(place_U),
        target_U=tensor(id_E[first_U]),
        pair_M=tensor(np.arange(len(place_U))),
        source_M=place_U,
        sequence_M=tensor(np.zeros(len(place_U))),
        distilled=DistillRows(
            rows, tensor(id_E), id_E.astype(np.int32), rows, rows.new_zeros(0).float()
        ),
    )
    datum_M = np.repeat(np.arange(len(share)), [len(own) for own in places])
    place_M = np.concatenate(places)
    inputs = {
        name: to_device(array[place_M].astype(np.float64), device)
        for name, array in datums.inputs.items()
    }
    return PackedDatums(micro, tensor(entry_M), place_M, inputs, tensor(datum_M))


def answer_of(
    targets: Sequence[IntN], logprobs: Array, metrics: Mapping[str, float]
) -> bytes:
    """Return a serialized ForwardBackwardOutput. `logprobs`: float32 of all target
    tokens.
    """
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics.update(metrics)
    start = 0
    # Datums of a record have the same number of targets in a row.
    for trailing, some in groupby(targets, key=lambda one: one.shape[1:]):
        ends = np.cumsum([0, *(4 * one.size for one in some)])
        field = pb.BatchedTensor(
            data=logprobs.tobytes()[start : start + ends[-1]],
            offsets=ends.astype(np.int64).tobytes(),
            dtype=pb.DTYPE_FLOAT32,
            trailing_shape=trailing,
        )
        fields = {"logprobs": field}
        output.loss_fn_outputs.add(num_datums=len(ends) - 1, fields=fields)
        start += ends[-1]
    content: bytes = output.SerializeToString()
    return content
