"""The trainer of Tinker clients, compared with plain forwards in float64."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_cases import iterate_until, segments_of
from engine_in_process import make_request
from engine_in_process import make_spec as engine_spec
from forked_processes import popen
from model_zoo import make_config, random_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trainer_cases import make_spec
from transformers import AutoModelForCausalLM

from asyncrl.base.http import SECRET_ENV, Caller, CallRefused, Refused

pytest.importorskip("tinker")

from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from asyncrl.extensions.tinker import trainer_calls as api
from asyncrl.extensions.tinker.trainer_process import TinkerRank
from asyncrl.messages.engine_api import (
    CommitRequest,
    OpenAdapterRequest,
    PrepareRequest,
)
from asyncrl.weights.tensor_files import digest_tensors
from asyncrl_servers.embedded.embedded_engine import build_engine

pytestmark = [pytest.mark.extras, pytest.mark.extension("tinker")]

ALL: list[api.Part] = ["attn", "mlp", "unembed"]
VOCAB = 50
PARAMS = api.AdamParams(
    learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1
)
RATIO_LOSSES = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "stable_reinforce": {},
}


# ---- requests, as the client sends them


def datum(ids: Sequence[int], **inputs: np.ndarray) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([*ids]),
        loss_fn_inputs={
            name: types.TensorData.from_numpy(one) for name, one in inputs.items()
        },
    )


def body_of(
    data: Sequence[types.Datum],
    loss: str,
    config: Mapping[str, float | str] | None = None,
    *,
    forward_only: bool = False,
) -> bytes:
    sent = types.ForwardBackwardInput(
        data=[*data], loss_fn=loss, loss_fn_config=dict(config) if config else None
    )
    request = types.ForwardBackwardRequest(
        forward_backward_input=sent, model_id="s:train:0", seq_id=1
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    content: bytes = message.SerializeToString()
    return content


def ratio_data(loss: str, seed: int = 0) -> list[types.Datum]:
    """Return five datums. Three begin with the same 20 tokens, as answers to a prompt,
    whose rows have target 0, q = 0 and A = 0.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, 20)
    data = list[types.Datum]()
    for index in range(5):
        num_prompt = 20 if index < 3 else 3
        ids = rng.integers(0, VOCAB, num_prompt + int(rng.integers(2, 9)))
        ids[:num_prompt] = prompt[:num_prompt]
        target = rng.integers(0, VOCAB, len(ids))
        target[: num_prompt - 1] = 0
        is_sampled = target > 0
        inputs = {
            "target_tokens": target,
            "logprobs": np.where(is_sampled, rng.normal(-4, 0.5, len(ids)), 0.0),
            "advantages": np.where(is_sampled, rng.normal(0, 1, len(ids)), 0.0),
        }
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = is_sampled * 1.0
        floats = {
            name: one.astype(np.float32) if one.dtype == np.float64 else one
            for name, one in inputs.items()
        }
        data.append(datum(ids.tolist(), **floats))
    return data


def weighted_data(*widths: int, seed: int = 0) -> list[types.Datum]:
    """Return a datum per width: 0 for targets [T], K for targets [T, K]."""
    rng = np.random.default_rng(seed)
    data = list[types.Datum]()
    for index, width in enumerate(widths):
        shape = (6 + index, width) if width else (6 + index,)
        weights = rng.normal(0, 1, shape).astype(np.float32)
        weights[rng.random(shape) < 0.3] = 0
        ids = rng.integers(0, VOCAB, shape[0])
        target = rng.integers(0, VOCAB, shape)
        data.append(datum(ids.tolist(), target_tokens=target, weights=weights))
    return data


def arrays_of(one: types.Datum) -> dict[str, Tensor]:
    return {
        name: torch.tensor(np.array(sent.to_numpy())).reshape(sent.shape)
        for name, sent in one.loss_fn_inputs.items()
    }


# ---- the oracle


class Oracle:
    """A plain model in float64, with explicit A and B."""

    def __init__(self, folder: Path, saved: Mapping[str, Tensor], scale: float) -> None:
        # The grouped products of experts know no float64.
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        self.model.requires_grad_(False)
        self.weights = {
            name.removeprefix("weights."): nn.Parameter(one.double())
            for name, one in saved.items()
        }
        for name in {name.rpartition(".lora_")[0] for name in self.weights}:
            self._add(name, scale)

    def _add(self, name: str, scale: float) -> None:
        lora_A, lora_B = (self.weights[f"{name}.lora_{end}.weight"] for end in "AB")

        def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            return output + scale * (inputs[0] @ lora_A.T @ lora_B.T)

        self.model.get_submodule(name).register_forward_hook(hook)

    def logprobs(self, one: types.Datum) -> Tensor:
        ids = torch.tensor(one.model_input.to_ints())
        logprob_TV = self.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        target = arrays_of(one)["target_tokens"]
        columns = target.reshape(len(ids), -1)
        return logprob_TV.gather(1, columns).reshape(target.shape)

    def loss(
        self, data: Sequence[types.Datum], loss: str, config: Mapping[str, float]
    ) -> Tensor:
        values = [
            plain_loss(loss, self.logprobs(one), arrays_of(one), config) for one in data
        ]
        return torch.stack(values).sum()


def plain_loss(
    loss: str, lp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> Tensor:
    inputs = {name: one.double() for name, one in inputs.items()}
    if loss == "cross_entropy":
        return -(inputs["weights"] * lp).sum()
    A, q = inputs["advantages"], inputs["logprobs"]
    r = torch.exp(lp - q)
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    match loss:
        case "importance_sampling":
            return -(r * A).sum()
        case "ppo":
            return -torch.min(r * A, r.clamp(low, high) * A).sum()
        case "cispo":
            return -(r.clamp(low, high).detach() * lp * A).sum()
        case "dro":
            used = ((A != 0) | (q != 0)).double()
            return -(lp * A - 0.5 * config["beta"] * used * (lp - q) ** 2).sum()
        case "gspo":
            mask = inputs["sequence_ratio_mask"] == 1
            r = torch.exp((lp - q)[mask].mean().detach() + lp - lp.detach())
            return -torch.min(r * A, r.clamp(low, high) * A).sum()
        case _:
            return -(r.detach().clamp(max=1) * lp * A).sum()


# ---- the trainer


@pytest.fixture
def make_rank(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., TinkerRank]:
    def make(**trainer: Any) -> TinkerRank:
        lora = {"rank": 1, "targets": "all"}
        spec = make_spec(tiny_model_dir, tmp_path, trainer={"lora": lora, **trainer})
        return TinkerRank(spec)

    return make


@pytest.fixture
def rank(make_rank: Callable[..., TinkerRank]) -> TinkerRank:
    return make_rank()


def open_random(rank: TinkerRank, folder: Path, name: str = "a", seed: int = 1) -> Path:
    """Open an adapter whose B is not zero, and return its saved file."""
    rank.open(api.OpenCall(adapter=name, rank=4, seed=seed, parts=ALL))
    path = folder / f"{name}{seed}.safetensors"
    rank.save(api.FileCall(adapter=name, path=path))
    generator = torch.Generator().manual_seed(seed)
    saved = {
        key: torch.randn(one.shape, generator=generator) * 0.1
        for key, one in load_file(path).items()
    }
    save_file(saved, path)
    rank.load(api.FileCall(adapter=name, path=path))
    return path


class Answer(NamedTuple):
    """`logprobs`: of each datum, in the shape of its targets."""

    metrics: dict[str, float]
    logprobs: list[Any]


def read_answer(content: bytes) -> Answer:
    answer = deserialize_forward_backward_output(content)
    logprobs = [one["logprobs"] for one in answer.loss_fn_outputs]
    return Answer(
        answer.metrics,
        [one.to_numpy().reshape(one.shape).tolist() for one in logprobs],
    )


def train(
    rank: TinkerRank,
    body: bytes,
    name: str = "a",
    masked: Mapping[int, Sequence[int]] = {},
) -> Answer:
    call = api.GradientCall(
        adapter=name, masked={index: [*own] for index, own in masked.items()}
    )
    return read_answer(rank.forward_backward(call, body))


def step(rank: TinkerRank, name: str = "a", **params: float) -> dict[str, float]:
    changed = PARAMS.model_copy(update=params)
    return rank.optim_step(api.StepCall(adapter=name, params=changed)).metrics


def gradient_of(rank: TinkerRank, name: str = "a") -> dict[str, Tensor]:
    named = rank._table.trained(name).masters.named
    return {key: one.grad.clone() for key, one in named.items() if one.grad is not None}


def weights_of(rank: TinkerRank, folder: Path, name: str = "a") -> dict[str, Tensor]:
    path = folder / "weights_of.safetensors"
    rank.save(api.FileCall(adapter=name, path=path, with_optimizer=True))
    return load_file(path)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, one in found.items():
        assert torch.equal(one, expected[key]), key


def assert_gradient(found: Mapping[str, Tensor], oracle: Oracle) -> None:
    assert found.keys() == oracle.weights.keys()
    for key, one in found.items():
        expected = oracle.weights[key].grad
        assert expected is not None
        assert expected.abs().max() > 0, f"{key} has no gradient"
        error = (one - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, (key, float(error))


@pytest.mark.parametrize("max_tokens", [16384, 48])
@pytest.mark.parametrize(
    ("loss", "config", "data"),
    [
        *((name, config, ratio_data(name)) for name, config in RATIO_LOSSES.items()),
        ("cross_entropy", {}, weighted_data(0, 0, 0)),
        ("cross_entropy", {}, weighted_data(0, 3, 3, 40)),
    ],
)
def test_loss_logprobs_gradient_and_step_match_plain_forward(
    make_rank: Callable[..., TinkerRank],
    tiny_model_dir: Path,
    tmp_path: Path,
    loss: str,
    config: dict[str, float],
    data: list[types.Datum],
    max_tokens: int,
) -> None:
    rank = make_rank(micro_batch_tokens=max_tokens)
    saved = open_random(rank, tmp_path)
    oracle = Oracle(tiny_model_dir, load_file(saved), 32 / 4)
    expected = oracle.loss(data, loss, config)
    answer = train(rank, body_of(data, loss, config, forward_only=True))
    assert gradient_of(rank) == {}
    assert answer == train(rank, body_of(data, loss, config))
    assert answer.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-5)
    assert all(name.count(":") == 1 for name in answer.metrics)
    for own, sent in zip(answer.logprobs, data, strict=True):
        plain = oracle.logprobs(sent).detach().numpy()
        np.testing.assert_allclose(own, plain, rtol=0, atol=2e-5)
    expected.backward()
    assert_gradient(gradient_of(rank), oracle)
    assert_stepped(rank, oracle, tmp_path, grad_clip_norm=0.5)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "qwen3_5_text"])
def test_other_families_match_plain_forward(family: str, tmp_path: Path) -> None:
    """A head with a softcap, experts, and recurrences."""
    folder = tmp_path / "model"
    random_model(make_config(family), 0).save_pretrained(folder)
    lora = {"rank": 1, "targets": "all"}
    spec = make_spec(folder, tmp_path, trainer={"lora": lora}, dtype="float32")
    rank = TinkerRank(spec)
    saved = open_random(rank, tmp_path)
    oracle = Oracle(folder, load_file(saved), 32 / 4)
    data = weighted_data(0, 3)
    expected = oracle.loss(data, "cross_entropy", {})
    answer = train(rank, body_of(data, "cross_entropy"))
    assert answer.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)
    expected.backward()
    for key, one in gradient_of(rank).items():
        plain = oracle.weights[key].grad
        assert plain is not None
        error = (one - plain).abs().max() / plain.abs().max()
        assert error < 1e-3, (key, float(error))


def assert_stepped(
    rank: TinkerRank, oracle: Oracle, folder: Path, grad_clip_norm: float = 0.0
) -> None:
    """Take a step in both, and compare weights and norm."""
    weights = [*oracle.weights.values()]
    norm = torch.nn.utils.clip_grad_norm_(weights, grad_clip_norm or torch.inf)
    torch.optim.AdamW(
        weights, PARAMS.learning_rate, (0.8, 0.9), PARAMS.eps, PARAMS.weight_decay
    ).step()
    metrics = step(rank, grad_clip_norm=grad_clip_norm)
    assert metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-5)
    found = weights_of(rank, folder)
    for key, one in oracle.weights.items():
        torch.testing.assert_close(
            found[f"weights.{key}"].double(), one.detach(), atol=2e-5, rtol=0
        )


def test_sparse_tensors_mean_the_dense_ones(rank: TinkerRank, tmp_path: Path) -> None:
    open_random(rank, tmp_path)
    data = weighted_data(0, 5, 20)
    dense = pb.ForwardBackwardRequest.FromString(body_of(data, "cross_entropy"))
    sparse = pb.ForwardBackwardRequest()
    sparse.CopyFrom(dense)
    for one in [*sparse.data][1:]:
        for sent in one.loss_fn_inputs.values():
            dtype = np.int64 if sent.dtype == pb.DTYPE_INT64 else np.float32
            rows = np.frombuffer(sent.dense, dtype).reshape(*sent.shape)
            sizes = (rows != 0).sum(axis=1)
            sent.sparse_csr.values = rows[rows != 0].tobytes()
            sent.sparse_csr.crow_indices = np.cumsum([0, *sizes]).tobytes()
            sent.sparse_csr.col_indices = np.nonzero(rows)[1].tobytes()
    assert len(sparse.SerializeToString()) > 0
    expected = train(rank, dense.SerializeToString())
    first = gradient_of(rank)
    assert train(rank, sparse.SerializeToString()) == expected
    for key, one in gradient_of(rank).items():
        assert torch.equal(one, 2 * first[key])


def test_gradients_of_calls_add_up_in_their_order(
    rank: TinkerRank, tiny_model_dir: Path, tmp_path: Path
) -> None:
    saved = open_random(rank, tmp_path)
    oracle = Oracle(tiny_model_dir, load_file(saved), 32 / 4)
    whole = list[dict[str, Tensor]]()
    for seed in range(3):
        data = ratio_data("ppo", seed)
        train(rank, body_of(data, "importance_sampling"))
        oracle.loss(data, "importance_sampling", {}).backward()
        whole.append(gradient_of(rank))
    assert_gradient(whole[-1], oracle)
    step(rank, learning_rate=0.0, weight_decay=0.0)
    assert gradient_of(rank) == {}
    train(rank, body_of(ratio_data("ppo", 2), "importance_sampling"))
    for key, one in gradient_of(rank).items():
        assert torch.equal(whole[1][key] + one, whole[2][key])


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "dro"])
def test_masked_positions_have_no_loss(
    rank: TinkerRank, tiny_model_dir: Path, tmp_path: Path, loss: str
) -> None:
    saved = open_random(rank, tmp_path)
    oracle = Oracle(tiny_model_dir, load_file(saved), 32 / 4)
    data = ratio_data(loss)
    if loss == "cross_entropy":
        data = weighted_data(0, 4)
    masked = {0: [4, 5], 1: [0, 2, 5]}
    body = body_of(data, loss, RATIO_LOSSES.get(loss))
    whole = train(rank, body)
    rank.load(api.FileCall(adapter="a", path=saved))
    found = train(rank, body, masked=masked)
    assert found.logprobs == whole.logprobs
    for index, places in masked.items():
        for name, sent in data[index].loss_fn_inputs.items():
            if name != "target_tokens":
                changed = np.array(sent.to_numpy()).reshape(sent.shape)
                changed[places] = 0
                data[index].loss_fn_inputs[name] = types.TensorData.from_numpy(changed)
    expected = oracle.loss(data, loss, RATIO_LOSSES.get(loss, {}))
    assert found.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    assert_gradient(gradient_of(rank), oracle)


def test_adapters_train_as_if_alone(
    make_rank: Callable[..., TinkerRank], tmp_path: Path
) -> None:
    def story(rank: TinkerRank, names: str) -> None:
        for name in names:
            open_random(rank, tmp_path, name, seed=ord(name))
        for seed in range(3):
            for loss in ("ppo", "gspo"):
                for name in names:
                    data = ratio_data(loss, seed + ord(name))
                    train(rank, body_of(data, loss), name)
            for name in names:
                step(rank, name)

    together = make_rank()
    story(together, "ab")
    for name in "ab":
        alone = make_rank()
        story(alone, name)
        found = weights_of(together, tmp_path, name)
        assert_same(found, weights_of(alone, tmp_path, name))
        assert found["optimizer.step." + min(gradient_names(alone, name))] == 3


def gradient_names(rank: TinkerRank, name: str) -> list[str]:
    return [*rank._table.trained(name).masters.named]


def test_saved_adapter_continues_bit_for_bit(rank: TinkerRank, tmp_path: Path) -> None:
    open_random(rank, tmp_path)
    body = body_of(ratio_data("ppo"), "ppo")
    train(rank, body)
    step(rank)
    saved = tmp_path / "saved"
    rank.save(api.FileCall(adapter="a", path=saved, with_optimizer=True))
    train(rank, body)
    step(rank)
    expected = weights_of(rank, tmp_path)
    rank.open(api.OpenCall(adapter="b", rank=4, seed=9, parts=ALL))
    train(rank, body, "b")
    rank.load(api.FileCall(adapter="b", path=saved, with_optimizer=True))
    assert gradient_of(rank, "b") == {}
    train(rank, body, "b")
    step(rank, "b")
    assert_same(weights_of(rank, tmp_path, "b"), expected)
    rank.load(api.FileCall(adapter="b", path=saved))
    fresh = weights_of(rank, tmp_path, "b")
    assert all(key.startswith("weights.") for key in fresh), "AdamW begins again"
    assert_same(fresh, {key: load_file(saved)[key] for key in fresh})
    assert [one.name for one in tmp_path.glob(".*")] == []


def test_export_is_what_engines_read(rank: TinkerRank, tmp_path: Path) -> None:
    saved = load_file(open_random(rank, tmp_path))
    path = tmp_path / "export"
    made = rank.export(api.FileCall(adapter="a", path=path))
    tensors = load_file(path)
    assert_same({f"weights.{key}": one for key, one in tensors.items()}, saved)
    assert made.digest == digest_tensors(tensors)
    assert made.num_tensors == len(tensors)
    assert made.num_bytes == sum(one.nbytes for one in tensors.values())


def test_engine_samples_as_the_trainer_scores(
    rank: TinkerRank, tiny_model_dir: Path, tmp_path: Path
) -> None:
    open_random(rank, tmp_path)
    made = rank.export(api.FileCall(adapter="a", path=tmp_path / "export"))
    opened = rank.open(api.OpenCall(adapter="b", rank=4, seed=0, parts=ALL))
    engine = build_engine(
        engine_spec(
            tiny_model_dir,
            adapters={"rank": 1, "scale": 32.0, "targets": "all"},
            max_adapters=2,
            dtype="float32",
        )
    )
    request = OpenAdapterRequest(adapter="a", rank=4, **opened.model_dump())
    iterate_until(engine, engine.open_adapter(request))
    loaded = engine.weights_of("a").prepare(
        PrepareRequest(
            adapter="a", version=1, path=str(tmp_path / "export"), **made.model_dump()
        )
    )
    assert loaded.digest == made.digest
    commit = CommitRequest(adapter="a", version=1, digest=made.digest)
    iterate_until(engine, engine.commit(commit))
    (part,) = segments_of(engine, make_request(adapter="a", max_tokens=30))
    ids = [1, 2, 3, *part.token_ids]
    target = np.array(ids[1:])
    weights = np.zeros(len(target), np.float32)
    sent = datum(ids[:-1], target_tokens=target, weights=weights)
    answer = train(rank, body_of([sent], "cross_entropy"))
    np.testing.assert_allclose(answer.logprobs[0][2:], part.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("parts", "ends"),
    [
        (["attn"], ["q_proj", "k_proj", "v_proj", "o_proj"]),
        (["mlp"], ["gate_proj", "up_proj", "down_proj"]),
        (["unembed"], ["lm_head"]),
    ],
)
def test_parts_choose_layers(
    rank: TinkerRank, parts: list[api.Part], ends: list[str]
) -> None:
    call = api.OpenCall(adapter="a", rank=8, seed=0, parts=parts)
    opened = rank.open(call)
    assert {name.rpartition(".")[2] for name in opened.targets} == {*ends}
    assert opened.scale == 4.0
    with pytest.raises(Refused, match="is open"):
        rank.open(call)
    assert rank.drop(call).adapters == []


# ---- refusals

GOOD = {
    "target_tokens": np.array([1, 2, 3]),
    "logprobs": np.array([0, -1, -2], np.float32),
    "advantages": np.array([0, 1, -1], np.float32),
}


def changed(ids: Sequence[int] = (1, 2, 3), **inputs: np.ndarray | None) -> types.Datum:
    given = {**GOOD, **inputs}
    return datum(ids, **{key: one for key, one in given.items() if one is not None})


def image() -> types.Datum:
    chunk = types.ImageChunk(data=b"x", format="png", expected_tokens=3)
    sent = changed()
    return types.Datum(
        model_input=types.ModelInput(chunks=[chunk]), loss_fn_inputs=sent.loss_fn_inputs
    )


HUGE = datum([1, 2], target_tokens=np.ones(2, int), weights=np.full(2, 3e38, "f"))
REFUSED: list[tuple[str, str, dict[str, float | str], types.Datum]] = [
    ("'sft' is unknown", "sft", {}, changed()),
    ("unknown key 'beta'", "ppo", {"beta": 1.0}, changed()),
    ("clip_low_threshold='x'", "ppo", {"clip_low_threshold": "x"}, changed()),
    ("has the bounds", "ppo", {"clip_low_threshold": 2.0}, changed()),
    ("datum 1: logprobs is missing", "ppo", {}, changed(logprobs=None)),
    ("datum 1: weights is not an input", "ppo", {}, changed(weights=GOOD["logprobs"])),
    ("datum 1: advantages has shape", "ppo", {}, changed(advantages=np.ones(4, "f"))),
    ("datum 1: target_tokens has shape", "ppo", {}, changed(target_tokens=np.ones((3, 2), int))),
    ("datum 1: target_tokens has another dtype", "ppo", {}, changed(target_tokens=GOOD["logprobs"])),
    ("datum 1: advantages has another dtype", "ppo", {}, changed(advantages=GOOD["target_tokens"])),
    ("datum 1: logprobs has NaN", "ppo", {}, changed(logprobs=np.full(3, np.nan, "f"))),
    ("datum 1: advantages has NaN or inf", "ppo", {}, changed(advantages=np.full(3, np.inf, "f"))),
    ("datum 1: target_tokens has the id 99", "ppo", {}, changed(target_tokens=np.array([1, 99, 2]))),
    ("datum 1: model_input has the id -1", "ppo", {}, changed(ids=(1, -1, 3))),
    ("datum 1: model_input has 0 tokens", "ppo", {}, changed(ids=())),
    ("datum 1: model_input has 513 tokens", "ppo", {}, changed(ids=[1] * 513)),
    ("datum 1: model_input has images", "ppo", {}, image()),
    ("loss:sum is", "importance_sampling", {}, changed(logprobs=np.full(3, -1e30, "f"))),
    ("gradient is not finite", "cross_entropy", {}, HUGE),
]  # fmt: skip


@pytest.mark.parametrize(("words", "loss", "config", "wrong"), REFUSED)
def test_refused_request_changes_nothing(
    rank: TinkerRank,
    tmp_path: Path,
    words: str,
    loss: str,
    config: dict[str, float | str],
    wrong: types.Datum,
) -> None:
    open_random(rank, tmp_path)
    train(rank, body_of([changed()], "ppo", {"max_staleness": 2, "on_overdue": "mask"}))
    weights, gradient = weights_of(rank, tmp_path), gradient_of(rank)
    good = changed()
    if loss == "cross_entropy":
        good = datum([1], target_tokens=np.ones(1, int), weights=np.ones(1, "f"))
    with pytest.raises(Refused, match=words) as refused:
        train(rank, body_of([good, wrong], loss, config))
    assert refused.value.status == 400
    assert_same(gradient_of(rank), gradient)
    assert_same(weights_of(rank, tmp_path), weights)


def test_malformed_sparse_tensors_are_refused(rank: TinkerRank, tmp_path: Path) -> None:
    open_random(rank, tmp_path)
    body = body_of(weighted_data(2), "cross_entropy")
    for crow, column, columns in [
        ([0, 1, 2, 3, 4, 5, 7], [0] * 6, 2),
        ([0, 1, 2, 1, 4, 5, 6], [0] * 6, 2),
        ([0, 1, 2, 3, 4, 5, 6], [0] * 5 + [2], 2),
        ([0, 1, 2, 3, 4, 5, 6], [0] * 5, 2),
        ([0, 1, 2], [0] * 6, 2),
        ([0, 1, 2, 3, 4, 5, 6], [0] * 6, 10**12),
    ]:
        request = pb.ForwardBackwardRequest.FromString(body)
        sent = request.data[0].loss_fn_inputs["target_tokens"]
        sent.sparse_csr.values = np.zeros(6, np.int64).tobytes()
        sent.sparse_csr.crow_indices = np.array(crow).tobytes()
        sent.sparse_csr.col_indices = np.array(column).tobytes()
        sent.shape[1] = columns
        with pytest.raises(Refused, match="datum 0: target_tokens "):
            train(rank, request.SerializeToString())
    assert gradient_of(rank) == {}


def test_step_needs_a_finite_gradient(rank: TinkerRank, tmp_path: Path) -> None:
    open_random(rank, tmp_path)
    before = weights_of(rank, tmp_path)
    with pytest.raises(Refused, match="has no gradient"):
        step(rank)
    # Each gradient is finite, but not their sum.
    large = datum([1, 2], target_tokens=np.ones(2, int), weights=np.full(2, 1e37, "f"))
    train(rank, body_of([large], "cross_entropy"))
    with pytest.raises(Refused, match="norm of the gradient is inf"):
        step(rank)
    assert gradient_of(rank) == {}
    assert_same(weights_of(rank, tmp_path), before)


def test_unknown_adapters_and_files_are_refused(
    rank: TinkerRank, tmp_path: Path
) -> None:
    saved = open_random(rank, tmp_path)
    before = weights_of(rank, tmp_path)
    for path in ("missing", "foreign"):
        (tmp_path / "foreign").write_bytes(b"no tensors")
        with pytest.raises(Refused, match="cannot write or read"):
            rank.load(api.FileCall(adapter="a", path=tmp_path / path))
    rank.open(api.OpenCall(adapter="small", rank=2, seed=0, parts=["mlp"]))
    with pytest.raises(Refused, match="another model"):
        rank.load(api.FileCall(adapter="small", path=saved))
    with pytest.raises(Refused, match="cannot write or read"):
        rank.save(api.FileCall(adapter="a", path=tmp_path / "none" / "x"))
    assert_same(weights_of(rank, tmp_path), before)
    with pytest.raises(Refused, match="no adapter 'b'"):
        train(rank, body_of([changed()], "ppo"), "b")
    rank.drop(api.AdapterCall(adapter="a"))
    with pytest.raises(Refused, match="no adapter 'a'"):
        step(rank)


# ---- the process


@contextmanager
def trainer_process(spec_file: Path, log: Path) -> Iterator[str]:
    """Start the process, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as output:
        process = popen(
            [
                sys.executable,
                "-m",
                "asyncrl.extensions.tinker.trainer_process",
                "--spec",
                str(spec_file),
                "--fd",
                str(listener.fileno()),
            ],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stderr=output,
            env=os.environ | {SECRET_ENV: "s3cret"},
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.kill()
            process.communicate()


def test_process_answers_a_client(tiny_model_dir: Path, tmp_path: Path) -> None:
    lora = {"rank": 1, "targets": "all"}
    spec = make_spec(tiny_model_dir, tmp_path, trainer={"lora": lora})
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(spec.model_dump_json())
    data = ratio_data("ppo")
    saved = tmp_path / "saved"

    async def story(url: str) -> Answer:
        trainer = api.TinkerTrainer(Caller("trainer", url, "s3cret"), timeout_s=120.0)
        try:
            opened = await trainer.open("s:train:0", 4, 7, {*ALL})
            assert opened.scale == 8.0
            assert "lm_head" in opened.targets
            body = body_of(data, "ppo")
            # The trainer computes both, one after the other.
            answers = await asyncio.gather(
                trainer.forward_backward("s:train:0", body),
                trainer.forward_backward("s:train:0", body, {0: [19]}),
            )
            metrics = await trainer.optim_step("s:train:0", PARAMS)
            assert metrics["grad_norm:mean"] > 0
            assert metrics["num_steps:max"] == 1
            with pytest.raises(CallRefused, match="has no gradient") as refused:
                await trainer.optim_step("s:train:0", PARAMS)
            assert refused.value.status == 400
            await trainer.save("s:train:0", saved, with_optimizer=True)
            await trainer.load("s:train:0", saved, with_optimizer=True)
            made = await trainer.export("s:train:0", tmp_path / "export")
            assert made.digest == digest_tensors(load_file(tmp_path / "export"))
            await trainer.drop("s:train:0")
            return read_answer(answers[0])
        finally:
            await trainer.aclose()

    with trainer_process(spec_file, tmp_path / "log") as url:
        answer = asyncio.run(story(url))
    rank = TinkerRank(spec)
    rank.open(api.OpenCall(adapter="a", rank=4, seed=7, parts=ALL))
    assert answer == train(rank, body_of(data, "ppo"))
