"""Layers that are compiled as a whole: the same function as transformers'."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tiny_model import STACKED, make_tiny_moe
from torch import Tensor
from torch._dynamo.utils import get_compilation_metrics
from trainer_cases import (
    changed,
    learned,
    make_batch,
    make_spec,
    mesh_of_one,
    weights_digest,
)
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.config import ModelConfig
from asyncrl.launch.model_sizes import model_shape
from asyncrl.trainer.attention.forward_plan import find_plan
from asyncrl.trainer.loss import step_metrics
from asyncrl.trainer.loss.packing import MicroBatch, pack_texts
from asyncrl.trainer.loss.step_metrics import StepMeter
from asyncrl.trainer.model import build_model, policy
from asyncrl.trainer.model import compiled as compiled_layers
from asyncrl.trainer.model.compiled import why_not_compiled
from asyncrl.trainer.model.policy import ForwardPlan, Policy
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.ranks import ONE_RANK
from asyncrl.weights.export import routers_of

if TYPE_CHECKING:
    from torch._dynamo.testing import CompileCounterWithBackend

GUARDED = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:.*Function.*should not be instantiated:DeprecationWarning",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
)
"""Warnings to the tracer of torch itself."""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Trace and differentiate graphs as for a device, and count them."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled_layers, "BACKEND", counter)
    compiled_layers.compiled.cache_clear()
    yield counter
    torch._dynamo.reset()
    compiled_layers.compiled.cache_clear()


@pytest.mark.slow
@GUARDED
def test_compiled_layers_learn_the_same_for_all_lengths(
    compiler: CompileCounterWithBackend,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shards, adapters, checkpointing and a sliced head."""
    monkeypatch.setitem(policy.MOST_LOGITS, "cpu", 60 * 16)
    monkeypatch.setattr(policy, "MIN_SLICE", 1)
    settings: dict[str, Any] = {"learning_rate": 1e-3, "micro_batch_tokens": 60}
    settings |= {"lora": {"rank": 2}, "gradient_checkpointing": True}
    with mesh_of_one(tmp_path) as ranks:
        eager, compiled = (
            TrainerRank(
                make_spec(
                    tiny_model_dir, tmp_path, trainer=settings | {"compile": is_on}
                ),
                ranks,
            )
            for is_on in ("auto", True)
        )
        assert not eager.policy.is_compiled, "auto is for CUDA"
        num_graphs, compile_s = list[int](), list[float]()
        for version in range(3):  # others in number and length
            batch = make_batch(version=version, seed=version, num_groups=2 + version)
            wanted, found = (one.train(*batch) for one in (eager, compiled))
            assert learned(found) == pytest.approx(learned(wanted), rel=1e-3, abs=1e-4)
            num_graphs.append(compiler.frame_count)
            compile_s.append(found["perf/compile_s"])
    assert num_graphs[0] > 0
    assert num_graphs == num_graphs[:1] * 3
    assert compile_s[0] > 0
    assert compile_s[1:] == [0, 0]


@pytest.mark.slow
def test_compilation_after_the_first_step_warns_of_its_cause(
    compiler: CompileCounterWithBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(step_metrics, "COMPILE_WARNING_S", 0.0)
    double, root = (
        compiled_layers.compiled(function)
        for function in (lambda x_N: 2 * x_N, torch.sqrt)
    )
    meter = StepMeter(ONE_RANK, "float32", None, get_compilation_metrics)
    found = list[list[str]]()
    for function, dtype in (
        (double, "float32"),
        (double, "float32"),
        (double, "float64"),
        (root, "float32"),
    ):
        caplog.clear()
        meter.start()
        function(torch.ones(2, dtype=getattr(torch, dtype)))
        assert (meter.numbers()["perf/compile_s"] > 0) == (len(found) != 1)
        warned = (
            one.getMessage() for one in caplog.records if one.name == "asyncrl.trainer"
        )
        found.append([message.partition("compilation: ")[2] for message in warned])
    assert found[:2] == [[], []]
    assert "tensor 'x_N' dtype mismatch. expected Float, actual Double" in found[2][0]
    assert found[3][0].endswith("ran for the first time")


@pytest.mark.slow
@GUARDED
@pytest.mark.skipif(
    not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"),
    reason="transformers 5.17 cannot compile experts on a CPU",
)
@pytest.mark.usefixtures("compiler")
def test_compiled_experts_learn_the_same_in_one_graph(tmp_path: Path) -> None:
    """Layers without experts add one graph; replay adds none."""
    from torch._dynamo.utils import counters

    counters.clear()
    heads = {"qk_nope_head_dim": 8}  # 12, and 8 of a value
    folder = make_tiny_moe(
        tmp_path / "model", "deepseek_v3", **STACKED["deepseek_v3"] | heads
    )
    settings = {"learning_rate": 1e-3, "micro_batch_tokens": 60}
    values: dict[str, Any] = {"algorithm": {"router_replay": True}}
    eager, compiled = (
        TrainerRank(
            make_spec(folder, tmp_path, trainer=settings | {"compile": is_on}, **values)
        )
        for is_on in (False, True)
    )
    assert compiled.policy.is_compiled
    width = sum(router.top_k for router in routers_of(compiled.policy.model))
    for version in range(3):
        header, arrays = make_batch(
            version=version, seed=version, num_groups=2 + version
        )
        drawn = np.random.default_rng(version).integers(
            0, 4, (len(arrays.is_sampled), width)
        )
        arrays = changed(arrays, routing=drawn.astype(np.uint16))
        wanted, found = (
            learned(one.train(header, arrays)) for one in (eager, compiled)
        )
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    # the compiler's own count includes restarted graphs
    assert counters["stats"]["unique_graphs"] == 2 + 2, (
        "layers, and both passes of the head"
    )


@GUARDED
@pytest.mark.slow
def test_activation_budget_saves_memory_and_changes_no_bit(
    compiler: CompileCounterWithBackend,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # with Inductor's partitioner
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager_decomp_partition")
    digests, saved = list[str](), list[int]()

    def save(tensor: Tensor) -> Tensor:
        saved[-1] += tensor.nbytes
        return tensor

    for kept in (False, 0.3):
        torch._dynamo.reset()
        compiled_layers.compiled.cache_clear()
        trainer = {
            "compile": True,
            "gradient_checkpointing": kept,
            "learning_rate": 1e-3,
        }
        step = TrainerRank(make_spec(tiny_model_dir, tmp_path, trainer=trainer))
        saved.append(0)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            step.train(*make_batch(num_groups=2))
        digests.append(weights_digest(step))
    torch._functorch.config.activation_memory_budget = 1.0
    assert len(set(digests)) == 1
    assert saved[0] > 1.2 * saved[1], saved


WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "vocab_size": 99,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COUNTED: dict[str, dict[str, Any]] = {
    "qwen2": {"num_attention_heads": 4},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 320,
    },
    "llama": {},
    "gemma3_text": {"sliding_window": 4096, "query_pre_attn_scalar": 96},
}
"""Shapes where numbers per head matter little."""


def count_saved_bytes(policy: Policy, micro: MicroBatch) -> int:
    """Run the trainer's forward pass; return the bytes of all storages saved for its
    backward pass.
    """
    weights = {
        parameter.untyped_storage().data_ptr() for parameter in policy.parameters()
    }
    saved = dict[int, torch.UntypedStorage]()

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        policy(micro)
    return sum(
        storage.nbytes() for address, storage in saved.items() if address not in weights
    )


@GUARDED
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("model_type", COUNTED)
def test_plan_counts_the_tensors_that_autograd_saves(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with Inductor's partitioner where layers are compiled on CUDA."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager_decomp_partition")
    architecture = {"model_type": model_type, **WIDE, **COUNTED[model_type]}
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    shape = model_shape(ModelConfig(path=str(tmp_path)))
    config = AutoConfig.for_model(**architecture)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plan = find_plan(model)
    assert plan.is_packed
    assert why_not_compiled(model, torch.device("cpu")) == ""
    # The plan counts layers with windows as uncompiled, twice their compiled size.
    is_compiled = model_type != "gemma3_text"
    policy = Policy(model, plan, is_compiled=is_compiled)
    micro = pack_texts(
        [np.arange(length) % 99 for length in (113, 400)], torch.device("cpu")
    )

    def planned(kept: float) -> int:
        return shape.saved_bytes(micro.layout.num_tokens, item=2, kept=kept)

    counted = count_saved_bytes(policy, micro)
    assert planned(1.0) == pytest.approx(counted, rel=0.02)
    policy.enable_gradient_checkpointing()
    inputs = count_saved_bytes(policy, micro)
    recomputed = (counted - inputs) / shape.layers
    assert planned(0.0) == pytest.approx(inputs + recomputed, rel=0.02)
    if model_type == "llama":  # a budget keeps the whole tensors that fit
        torch._dynamo.reset()
        compiled_layers.compiled.cache_clear()
        model.eval()  # without checkpointing
        with torch._functorch.config.patch(activation_memory_budget=0.8):
            counted = count_saved_bytes(Policy(model, plan, is_compiled=True), micro)
        assert 0.75 * planned(0.8) < counted < planned(0.8)


def test_slow_kernels_on_cuda_are_reported(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(compiled_layers.shutil, "which", lambda _: None)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    spec = make_spec(tiny_model_dir, tmp_path)
    is_compiled = build_model.should_compile(spec, model, ForwardPlan(True, True), cuda)
    kernels = build_model.choose_kernels(cuda, is_compiled=is_compiled)
    assert kernels == {"trainer/compiled": 0.0, "trainer/flash_attention": 2.0}
    warned = [
        record.message for record in caplog.records if record.levelname == "WARNING"
    ]
    assert [words.rpartition("install ")[2].rstrip(")") for words in warned] == [
        "gcc",
        "flash-attn-3",
    ]


def test_uncompilable_model_is_left_or_refused(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    packed, by_rows = (
        ForwardPlan(True, True),
        ForwardPlan(True, True, mixers=(torch.nn.Linear,)),
    )
    auto, asked = (
        make_spec(tiny_model_dir, tmp_path, trainer={"compile": one})
        for one in ("auto", True)
    )
    for spec, plan, expected in ((auto, packed, False), (asked, packed, True)):
        assert build_model.should_compile(spec, model, plan, cpu) == expected
    kept = make_spec(tiny_model_dir, tmp_path, trainer={"gradient_checkpointing": 0.5})
    with pytest.raises(
        ConfigError, match="gradient_checkpointing=0.5, and the layers are not compiled"
    ):
        build_model.should_compile(kept, model, packed, cpu)
    with pytest.raises(ConfigError, match="a Qwen3ForCausalLM .* packed tokens alone"):
        build_model.should_compile(asked, model, by_rows, cpu)
    monkeypatch.setattr(compiled_layers.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="no C compiler"):
        build_model.should_compile(asked, model, packed, cpu)


@GUARDED
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_inductor_learns_the_same_on_a_cpu(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler of CUDA, in shards as there; layers and head."""
    # Inductor sets it for good
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    with mesh_of_one(tmp_path) as ranks:
        eager, compiled = (
            TrainerRank(
                make_spec(
                    tiny_model_dir,
                    tmp_path,
                    trainer={"learning_rate": 1e-3, "compile": is_on},
                ),
                ranks,
            )
            for is_on in (False, True)
        )
        assert compiled.policy.is_compiled
        for version in range(2):
            batch = make_batch(version=version, seed=version, num_groups=2 + version)
            wanted, found = (learned(one.train(*batch)) for one in (eager, compiled))
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    torch._dynamo.reset()
    compiled_layers.compiled.cache_clear()
