"""Fused decode steps of the embedded engine: on the CPU with the reference operator."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from costly_cases import slow
from engine_cases import (
    SCALE,
    Recorded,
    adapters,
    answers,
    check_same,
    publish_halfway,
)
from engine_in_process import make_qwen3, make_request, make_spec, stage_file
from engine_replies import ask
from tiny_model import make_tiny_moe
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.messages.engine_api import CommitRequest, WakeRequest
from asyncrl_servers.embedded import fixed_memory, fused_decode
from asyncrl_servers.embedded.decoder import Layer, LoadedModel, layer_of, layer_step
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine
from asyncrl_servers.embedded.fused_decode import (
    FusedSteps,
    decode_attention,
    fused_layer,
)
from asyncrl_servers.embedded.kv_attention import SPLITS

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32, "sliding_window": None},
}


@decode_attention.register_kernel("cpu")
def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Mask all positions of the table's pages; the first part has all real ones."""
    (rows, heads, head_dim), (_, kv_heads, page, _) = query.shape, keys.shape
    rows_R = lengths.nonzero()[:, 0]
    newest_R = lengths[rows_R].long() - 1
    pages_R = table[rows_R, newest_R // page]
    keys[pages_R, :, newest_R % page] = key[rows_R]
    values[pages_R, :, newest_R % page] = value[rows_R]
    is_after_RP = torch.arange(table.shape[1] * page) > newest_R[:, None]

    def of_slots(cached: Tensor) -> Tensor:
        by_head = cached[table[rows_R]].transpose(1, 2).flatten(2, 3).float()
        return by_head.repeat_interleave(heads // kv_heads, dim=1)

    scores_RHP = (of_slots(keys) @ query[rows_R].float()[..., None])[..., 0] * scale
    weights_RHP = scores_RHP.masked_fill(is_after_RP[:, None], -torch.inf).softmax(-1)
    parts = torch.zeros(rows, heads, SPLITS, head_dim)
    parts[rows_R, :, 0] = (weights_RHP[:, :, None] @ of_slots(values))[:, :, 0]
    logsums = torch.full((rows, heads, SPLITS), -torch.inf)
    logsums[:, :, 0] = 0.0
    return parts, logsums


@pytest.fixture(autouse=True)
def cpu_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode, "KERNEL_DEVICES", {"cpu"})


def make_family(folder: Path, model_type: str) -> Path:
    shape = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }
    shape |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(
        model_type, **shape, **ends, **FAMILIES[model_type], initializer_range=0.15
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("fused") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(
        tmp_path_factory.mktemp("fused") / "other", seed=1, num_hidden_layers=2
    )


def build_fused(folder: Path, **fields: Any) -> Engine:
    engine = build_engine(
        make_spec(folder, deterministic=False, fused_decode=True, **fields)
    )
    assert isinstance(engine.runner.graphs, FusedSteps)
    return engine


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fused_logprobs_equal_transformers(tmp_path: Path, model_type: str) -> None:
    folder = make_family(tmp_path / model_type, model_type)
    found = answers(build_fused(folder, slots=10))
    model = AutoModelForCausalLM.from_pretrained(folder)
    for seed, answer in enumerate(found):
        prompt = [2 + at % 48 for at in range(3 if seed % 3 else 90)]
        with torch.inference_mode():
            logits_TV = model(torch.tensor([prompt + answer.token_ids])).logits[
                0, len(prompt) - 1 : -1
            ]
        logprobs_TV = logits_TV.log_softmax(-1)
        expected = logprobs_TV.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


SAMPLING: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"temperature": 0.7}, True),
    ({"temperature": 1e-50}, False),  # 0 in float32
    ({"temperature": 0.0}, False),
    ({"top_p": 0.8}, False),
    ({"top_k": 5}, False),
    ({"min_p": 0.05}, False),
    ({"top_logprobs": 3}, False),
    ({"presence_penalty": 0.5}, False),
]
"""Settings of a request, and whether the graph draws its tokens."""


@pytest.mark.parametrize(("fields", "in_graph"), SAMPLING)
def test_tokens_drawn_in_the_graph_are_those_of_sample(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    in_graph: bool,
) -> None:
    num_drawn = list[int]()
    draw = FusedSteps.draw

    def counted(self: FusedSteps, *args: Any) -> Any:
        num_drawn.append(len(args[0]))
        return draw(self, *args)

    monkeypatch.setattr(FusedSteps, "draw", counted)
    monkeypatch.setattr(fused_decode, "DRAWN_ROWS", 1)
    plain = build_engine(make_spec(folder, deterministic=False))
    for company in ({}, {"temperature": 1.3}):
        replies = []
        for engine in (plain, build_fused(folder)):
            requests = [
                make_request("a", seed=3, **fields),
                make_request("b", (4, 5, 6, 7), seed=4, **company),
            ]
            asked = ask(engine, requests)
            while not all(one.done() for one in asked):
                engine.iterate()
            replies.append([one.result(timeout=0) for one in asked])
        check_same(replies[1], replies[0])
        columns = [reply[0].tokens.columns.keys() for reply in replies]
        assert columns[0] == columns[1]
    # Both rows in one step, or a row whose company has ended.
    assert (2 in num_drawn) == in_graph


class RecordedSteps(FusedSteps):
    num_captured = num_replayed = 0
    capture = Recorded.capture


def test_replayed_fused_steps_read_changed_inputs(
    folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    plain = build_engine(make_spec(folder, slots=10, deterministic=False))
    expected = answers(plain, publish_halfway(plain, other_folder, tmp_path))
    engine = build_fused(folder, slots=10)
    assert engine.runner.plain is not None
    engine.runner.graphs = recorded = RecordedSteps(
        engine.runner, engine.runner.plain, 10
    )
    recorded.is_refused = False
    recorded.capture_all()
    assert recorded.num_captured == 4  # 2, 4, 8 and 10 rows
    engine.weights.keeps_place = True
    check_same(
        answers(engine, publish_halfway(engine, other_folder, tmp_path)), expected
    )
    assert 4 == recorded.num_captured < recorded.num_replayed


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True])
def test_one_compilation_serves_all_layers_and_numbers_of_rows(
    folder: Path, moves: bool
) -> None:
    engine = build_fused(folder, slots=10, moves=moves)
    steps = engine.runner.graphs
    assert isinstance(steps, FusedSteps)
    torch._dynamo.reset()
    steps.run_layer = torch.compile(fused_layer, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = answers(engine)
    check_same(
        found, answers(build_engine(make_spec(folder, slots=10, deterministic=False)))
    )


def after(engine: Engine, asked: Future[Any]) -> Any:
    """Return the answer to a call, after a turn of the engine's loop."""
    engine.iterate()
    return asked.result(timeout=0)


@pytest.mark.parametrize("stays", [slow(False), True])
def test_fused_steps_sleep_and_wake_to_other_weights(
    folder: Path, other_folder: Path, tmp_path: Path, stays: bool
) -> None:
    engine = build_fused(folder, slots=10, num_kept=4, stays=stays)
    answers(engine)
    slept = after(engine, engine.sleep())
    woken = after(engine, engine.wake(WakeRequest(parts=["weights"])))
    woken_kv = after(engine, engine.wake(WakeRequest(parts=["kv"])))
    assert slept.num_bytes == woken.num_bytes + woken_kv.num_bytes
    staged = engine.weights.prepare(stage_file(other_folder, 1, tmp_path))
    after(
        engine,
        engine.commit(
            CommitRequest(version=1, digest=staged.digest, interrupt="abort")
        ),
    )
    check_same(
        answers(engine),
        answers(build_engine(make_spec(other_folder, slots=10, deterministic=False))),
    )


@pytest.mark.parametrize("moves", [slow(False), True])
def test_fused_steps_use_adapters_over_the_initial_weights(
    folder: Path, tmp_path: Path, moves: bool
) -> None:
    spec = {"rank": 4, "scale": SCALE, "targets": ["q_proj", "v_proj", "lm_head"]}
    plain = build_engine(make_spec(folder, deterministic=False, adapters=spec))
    engine = build_fused(folder, moves=moves, adapters=spec)
    names = [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(plain.runner.loaded.model.config.num_hidden_layers)
        for name in ("q_proj", "v_proj")
    ]
    for version in (1, 2):
        tensors = adapters(folder, (*names, "lm_head"), seed=version)
        request = stage_file(tensors, version, tmp_path)
        for one in (plain, engine):
            staged = one.weights.prepare(request)
            commit = CommitRequest(
                version=version, digest=staged.digest, interrupt="abort"
            )
            after(one, one.commit(commit))
        check_same(answers(engine), answers(plain))


@pytest.mark.parametrize("adapters_of_run", [None, {"rank": 4, "scale": SCALE}])
def test_one_trace_serves_all_layers(
    folder: Path, adapters_of_run: dict[str, Any] | None
) -> None:
    loaded = LoadedModel(make_spec(folder, adapters=adapters_of_run))
    layers = [layer_of(one, fused_decode.merged) for one in loaded.model.model.layers]
    traces = list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        traces.append(graph)
        return graph.forward

    width, head_dim = loaded.model.config.hidden_size, layers[0].head_dim
    states_RH = torch.randn(8, width)
    rotation = [torch.ones(8, 1, head_dim), torch.zeros(8, 1, head_dim)]

    def step(layer: Layer) -> tuple[Tensor, Tensor]:
        return layer_step(
            states_RH, torch.zeros_like(states_RH), layer, rotation, lambda q, *_: q
        )

    traced = torch.compile(step, fullgraph=True, backend=backend)
    with torch.inference_mode():
        for layer in layers:
            for found, expected in zip(traced(layer), step(layer), strict=True):
                assert torch.equal(found, expected)
    assert len(traces) == 1


def test_without_fixed_addresses_sleeps_drop_the_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("cuMemAddressReserve failed with 801: not supported")

    monkeypatch.setattr(fixed_memory, "HostPages", refuse)
    engine = build_fused(folder, moves=True)
    assert "captured again after each sleep" in caplog.text
    check_same(
        answers(engine), answers(build_engine(make_spec(folder, deterministic=False)))
    )
    slept = after(engine, engine.sleep())
    assert engine.runner.cache.num_bytes == 0
    woken = after(engine, engine.wake(WakeRequest(parts=["weights", "kv"])))
    assert slept.num_bytes == woken.num_bytes > 0


def test_a_model_without_plain_decoder_decodes_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_moe(tmp_path / "moe")
    engine = build_engine(make_spec(folder, fused_decode=True))
    assert engine.runner.graphs is None
    assert "not fused: model type qwen3_moe has no plain decoder" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "group", "head_dim", "page"), [(3, 2, 128, 64), (40, 7, 64, 2080)]
)
def test_the_kernel_agrees_with_the_reference(
    dtype: torch.dtype, rows: int, group: int, head_dim: int, page: int
) -> None:
    kv_heads, num_pages = 8, -(-2080 // page)
    random = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    merged = made(rows, (group + 2) * kv_heads, head_dim)
    query, key, value = merged.split((group * kv_heads, kv_heads, kv_heads), dim=1)
    cache = [made(rows * num_pages, kv_heads, page, head_dim) for _ in range(2)]
    table = (
        torch.randperm(rows * num_pages, generator=random).view(rows, num_pages).int()
    )
    lengths = torch.randint(1, 2080, (rows,), generator=random).int()
    lengths[:2] = torch.tensor([1, 2080])
    places = [table, lengths]
    given = [query.contiguous(), key.contiguous(), value, *cache, *places]
    on_device = [one.cuda() for one in given]
    found, expected = (
        (parts * logsums.softmax(-1)[..., None]).sum(2).cpu()
        for parts, logsums in (
            decode_attention(*inputs, 0.1) for inputs in (on_device, given)
        )
    )
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=limit, rtol=limit)
    for ours, theirs in zip(on_device[3:5], given[3:5], strict=True):
        assert torch.equal(ours.cpu(), theirs)
