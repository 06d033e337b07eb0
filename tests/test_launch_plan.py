"""The plan of a run: memory and threads of each process, what cannot fit, each auto,
and vLLM's Python.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_cases import (
    COLOCATED,
    RAY,
    TAUGHT,
    URLS,
    VLLM,
    ZERO,
    load,
    machine,
    make_python,
    nodes,
    single_node,
)
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.config import ModelConfig, RolloutConfig
from asyncrl.job.roles import extra_servers
from asyncrl.launch.machine import described_nodes, find_python
from asyncrl.launch.memory import Memory, num_trained, rank_memory
from asyncrl.launch.model_sizes import model_shape
from asyncrl.launch.placement import place
from asyncrl.launch.plan import (
    DISK,
    Plan,
    ProcessPlan,
    make_plan,
    plan_run,
    plan_text,
    refuse_over_capacity,
    resolve_auto,
)
from asyncrl_servers.embedded.fused_decode import DRAWN_ROWS

ON_CPU = ["placement.trainer=cpu", "placement.rollout=cpu"]


def planned(num_cuda: int, *overrides: str) -> Plan:
    config = load(*overrides)
    return make_plan(config, single_node(machine(num_cuda)), extra_servers(config))


def memory(plan: Plan, name: str) -> Memory:
    return next(process.memory for process in plan.processes if process.name == name)


def besides(plan: Plan) -> int:
    names = ("python", "load or save", "batches")
    return sum(memory(plan, name).total for name in names)


def test_model_of_unknown_size_is_not_refused() -> None:
    config = load("model.scratch=none", "model.path=org/name@v1")
    plan = make_plan(config, single_node(machine(0)))
    refuse_over_capacity(plan, config)
    assert "size unknown" in plan_text(plan, config)


def test_time_sharing_needs_the_larger_side() -> None:
    apart, shared = (
        planned(0, *ON_CPU, ZERO),
        planned(0, "placement.trainer=cpu", *COLOCATED),
    )
    trainer, engine = memory(shared, "trainer-0"), memory(shared, "engine-0")
    assert engine.copies == 0, "the next weights replace the current ones"
    held = max(trainer.total, engine.total) + besides(shared)
    assert shared.needed_bytes("cpu") == held
    apart_held = trainer.total + engine.total + memory(apart, "engine-0").copies
    assert apart.needed_bytes("cpu") == apart_held + besides(apart)


ROUTED = [
    "model.scratch.architecture.model_type=qwen3_moe",
    "model.scratch.architecture.num_experts=8",
    "model.scratch.architecture.num_experts_per_tok=2",
    "algorithm.router_replay=true",
]
TOP_50 = [*TAUGHT, "algorithm.distill_loss=jsd", "algorithm.distill_top_k=50"]


@pytest.mark.parametrize(
    ("overrides", "num", "token_bytes"),
    [
        ([ZERO], 2, 16),
        (["buffer.max_staleness=1"], 4, 16),
        # Rank 1 gets a batch when its step begins.
        (["buffer.max_staleness=1", "trainer.world_size=2"], 5, 16),
        # Four layers; two bytes for an expert, eight for an id and its logprob.
        ([ZERO, *ROUTED], 2, 16 + 4 * 2 * 2),
        ([ZERO, *TOP_50], 2, 16 + 50 * 8),
    ],
)
def test_host_holds_the_batches_of_controller_and_ranks(
    overrides: list[str], num: int, token_bytes: int
) -> None:
    plan = planned(0, *ON_CPU, *overrides)
    num_tokens = 8 * 8 * (8 + 48)
    # Tokens, and the request that contains them.
    assert memory(plan, "batches").total == 2 * num * num_tokens * token_bytes
    num_steps = load().trainer.num_steps
    journal = next(one.memory for one in plan.processes if one.name == "journal")
    assert journal.total <= num_steps * num_tokens * token_bytes


# ---- both sides in the memory of one device

SHARE, SIZED = "placement.share=0.4", "rollout.vllm={gpu_memory_utilization: 0.9}"


@pytest.mark.parametrize(
    ("num_cuda", "free", "overrides", "stays"),
    [
        (0, 2**36, COLOCATED, True),
        (0, 2**36, [*COLOCATED, "placement.share=none"], False),
        (1, 2**34, [ZERO], True),
        (1, 2**30, [ZERO], False),
        (1, 2**34, [ZERO, VLLM, SIZED], False),
        (1, 2**34, [ZERO, SHARE], True),
    ],
)
def test_both_sides_stay_resident_if_they_fit(
    num_cuda: int, free: int, overrides: list[str], stays: bool
) -> None:
    here = machine(num_cuda, free) if num_cuda else replace(machine(0), memory=free)
    plan, _ = plan_run(load(*overrides), single_node(here))
    assert plan.placement.resident == stays
    host = {one.device for one in plan.processes if one.name == "trainer-0/host"}
    assert host == (set() if stays else {"cpu" if num_cuda else DISK})
    assert (plan.placement.memory_fraction is not None) == (num_cuda == 1 and stays)


# ---- parts that leave the trainer's device

GAE = ["algorithm.advantage=gae", "rollout.group_size=1", "critic={}"]
ONE_TOKEN = "trainer.micro_batch_tokens=1"


def test_part_that_leaves_is_counted_where_it_works() -> None:
    plain, gone = (
        memory(planned(2, ONE_TOKEN, *more), "trainer-0")
        for more in ([], ["trainer.offload.optimizer=always"])
    )
    num = planned(2).shape.num_parameters
    # Two moments; on CUDA the float32 shards are the optimizer's weights, too.
    assert plain.total - gone.total == min(8 * num, plain.micro_batch)
    gone_plan = planned(2, ONE_TOKEN, "trainer.offload.optimizer=always")
    assert memory(gone_plan, "trainer-0/host").copies == 8 * num


ALL_LEAVE = "{weights: always, gradients: always, optimizer: always}"


def test_muon_has_one_momentum_and_needs_whole_matrices_in_its_step() -> None:
    always = "trainer.offload.optimizer=always"
    adamw, muon = (
        planned(2, ONE_TOKEN, f"trainer.optimizer={name}") for name in ("adamw", "muon")
    )
    shape = muon.shape
    matrices = shape.num_parameters - shape.embeddings
    saved = memory(adamw, "trainer-0").optimizer - memory(muon, "trainer-0").optimizer
    assert saved == 4 * matrices
    moments = memory(planned(2, always, "trainer.optimizer=muon"), "trainer-0/host")
    assert moments.copies == 8 * shape.num_parameters - saved
    # The step is the peak, with gate and up as one matrix.
    config = load(ONE_TOKEN, always, "trainer.optimizer=muon")
    peak = rank_memory(config, shape, "cuda:0").peak(config.offload_rules)
    assert peak.micro_batch == 16 * 2 * shape.hidden * shape.active


def test_models_that_share_by_time_need_the_largest() -> None:
    rules = [f"trainer.offload={ALL_LEAVE}"]
    plain, gone = (
        memory(planned(2, *GAE, *more), "trainer-0").total for more in ([], rules)
    )
    # The head of the quickstart's model is tied: the critic has the same number of weights.
    assert plain - gone == 24 * planned(2).shape.num_parameters


@pytest.mark.parametrize(
    ("rules", "stays"),
    [
        ([], 0),
        (["trainer.offload.optimizer=never", "trainer.offload.weights=always"], 8),
        (["trainer.offload.optimizer=never", "trainer.offload.weights=never"], 12),
    ],
)
def test_part_that_never_leaves_is_beside_the_engines(
    rules: list[str], stays: int
) -> None:
    slots = "rollout.slots=100000"
    apart, config = planned(1, ZERO, slots), load(ZERO, slots, *rules)
    assert memory(apart, "engine-0").total > memory(apart, "trainer-0").total
    plan = make_plan(config, single_node(machine(1)))
    num = plan.shape.num_parameters
    held = plan.needed_bytes("cuda:0") - apart.needed_bytes("cuda:0")
    assert held == stays * num
    # vLLM gets the rest of the device; the trainer keeps all of it in its time slice.
    vllm = [VLLM, "placement.share=none", ZERO, *rules]
    placement = plan_run(load(*vllm), single_node(machine(1)))[0].placement
    assert (placement.memory_fraction is None) == (not rules)


REWARDED = "task={files: [rows.jsonl], reward: {model: {path: m}}}"


@pytest.mark.parametrize(
    "overrides",
    [
        [*TAUGHT, "teacher.engine=vllm", "rollout.temperature=1"],
        [
            REWARDED,
            "placement.trainer=0",
            "placement.reward=0",
            f"eval={{{REWARDED.replace('=', ': ')}, engine: own}}",
        ],
    ],
    ids=["its weights are lost", "evaluations ask it"],
)
def test_server_that_cannot_sleep_stays(overrides: list[str]) -> None:
    colocated = [ZERO, "placement.rollout=trainer", "buffer.filter=none"]
    num_cuda = 2 if REWARDED in overrides else 1
    plan = planned(num_cuda, *colocated, *overrides)
    assert plan.placement.extra
    assert not any(map(plan.placement.leaves, plan.placement.extra))


@pytest.mark.extension("scoring")
def test_server_that_leaves_is_planned_with_the_engines(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 48, "num_attention_heads": 4, "vocab_size": 100}
    sizes = {"hidden_size": 512, "intermediate_size": 2048, **layers}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    taught = [f"teacher.path={tmp_path}", "algorithm.distill_weight=1", ZERO]
    taught += ["buffer.filter=none", "placement.share=none"]
    config = load(*taught)
    here = single_node(machine(1))
    servers = extra_servers(config)
    alone = make_plan(config, here)
    plan = make_plan(config, here, servers)
    teacher = memory(plan, "teacher")
    trainer = memory(plan, "trainer-0").total
    engines = memory(plan, "engine-0").total
    assert teacher.total > trainer
    assert plan.needed_bytes("cuda:0") == engines + teacher.total
    host = plan.needed_bytes("cpu") - alone.needed_bytes("cpu")
    assert host >= memory(plan, "teacher/host").total == teacher.parameters
    # Both sides would fit.
    config = load(*taught, "placement.share=auto")
    placement = plan_run(config, here, extra_servers(config))[0].placement
    assert not placement.leaves("teacher")
    assert (placement.memory_fraction or 1.0) < 1.0, "engines get the rest"


# ---- what cannot fit


@pytest.mark.parametrize(("num_cuda", "where"), [(0, []), (1, [ZERO]), (2, [])])
def test_plan_over_capacity_is_refused_with_the_numbers(
    num_cuda: int, where: list[str]
) -> None:
    config = load("rollout.slots=4000000", *where)
    plan = make_plan(config, single_node(machine(num_cuda)))
    device = plan.placement.engines[0][0].name
    with pytest.raises(ConfigError) as caught:
        refuse_over_capacity(plan, config)
    assert (
        f"{device} needs {plan.needed_bytes(device) / 2**30:.2f} GiB"
        in caught.value.what
    )
    assert (
        f"engine-0 {memory(plan, 'engine-0').total / 2**30:.2f} GiB"
        in caught.value.what
    )
    refuse_over_capacity(planned(num_cuda, *where), load(*where))
    # Offloading the optimizer, for example, would only make a host's shortage worse.
    cures = {device: "rollout.slots", "/dev/shm": "--shm-size"}
    if num_cuda:
        cures["cpu"] = "set trainer.lora={rank: 16}, give placement.trainer"
    for short, cure in cures.items():
        few = replace(plan, memory={short: (1, None)})
        few = replace(
            few, processes=(*few.processes, replace(SHARED_COPY, device=short))
        )
        with pytest.raises(ConfigError) as caught:
            refuse_over_capacity(few, config)
        assert cure in caught.value.way_out, short


SHARED_COPY = ProcessPlan("weights", "host", "/dev/shm", 0, Memory(copies=2))

# ---- several nodes


TWO_EACH_NODE = [
    "trainer.world_size=2",
    "rollout.num_engines=4",
    "rollout.group_size=16",
]


def test_graphs_of_fused_steps_stay_beside_the_trainer() -> None:
    large = [ZERO, "rollout.slots=4", "trainer.micro_batch_tokens=1000000"]
    plain, fused = (
        planned(1, *large, *more) for more in ([], ["rollout.fused_decode=true"])
    )
    assert plain.placement.moves
    held = plain.shape.vocab * (4 * 4 + 40 * DRAWN_ROWS)  # float32 logits, draws
    assert fused.needed_bytes("cuda:0") - plain.needed_bytes("cuda:0") == held
    engines = [memory(one, "engine-0").total for one in (plain, fused)]
    assert engines[1] - engines[0] == held


STREAMED: dict[str, tuple[int, list[str], str]] = {
    "devices apart": (2, [ZERO], "on: groups are trained as they end"),
    "on a CPU": (0, [ZERO, *ON_CPU], "on: groups are trained as they end"),
    "both stay": (1, [ZERO, "placement.share=0.5"], "on: groups are trained"),
    "engines leave": (
        1,
        [ZERO, "placement.share=none"],
        "off: the engines must leave the devices",
    ),
    "engines leave a CPU": (
        0,
        [*ON_CPU, *COLOCATED, "placement.rollout=trainer", "placement.share=none"],
        "off: the engines must leave the devices",
    ),
    "several steps": (2, [ZERO, "trainer.mini_batches=2"], "off: trainer.mini_batches"),
    "offload": (
        2,
        [ZERO, "trainer.offload.optimizer=always"],
        "off: trainer.offload moves a part",
    ),
    "routers": (
        2,
        [
            ZERO,
            "model.scratch.architecture.model_type=qwen3_moe",
            "model.scratch.architecture.num_experts=4",
        ],
        "off: trainer.router_aux_loss is not 0",
    ),
    "a balance of 0": (
        2,
        [
            ZERO,
            "model.scratch.architecture.model_type=qwen3_moe",
            "model.scratch.architecture.num_experts=4",
            "trainer.router_aux_loss=0",
        ],
        "on: ",
    ),
}


@pytest.mark.parametrize("name", STREAMED)
def test_plan_says_why_groups_are_not_trained_as_they_end(name: str) -> None:
    num_cuda, overrides, text = STREAMED[name]
    config = load(*overrides)
    _, messages = plan_run(config, single_node(machine(num_cuda)))
    (said,) = [message for message in messages if "trainer.stream" in message]
    assert said.startswith(f"trainer.stream: auto is {text}")
    for silent in (["buffer.max_staleness=1"], [ZERO, "trainer.stream=off"]):
        _, messages = plan_run(load(*silent), single_node(machine(2)))
        assert not any("trainer.stream" in message for message in messages)


def test_sums_of_parts_are_counted_and_left_out_if_they_have_no_room() -> None:
    config = load(ZERO, "trainer.stream=auto", "model.dtype=float32")
    ample, whole = (
        make_plan(one, single_node(machine(2)))
        for one in (config, load(ZERO, "trainer.mini_batches=2", "model.dtype=float32"))
    )
    sums = memory(ample, "trainer-0").total - memory(whole, "trainer-0").total
    assert sums == 8 * ample.shape.num_parameters
    device = ample.placement.label(ample.placement.trainer[0])
    too_few = ample.needed_bytes(device) - 1
    plan, messages = plan_run(config, single_node(machine(2, too_few)))
    assert not plan.placement.in_parts
    assert plan.needed_bytes(device) == whole.needed_bytes(device)
    assert any("for each trained weight, do not fit" in one for one in messages)


def test_cores_are_counted_on_each_node() -> None:
    threads = ["rollout.threads=auto", "trainer.threads=auto"]
    written = "placement={trainer: {nodes: 1}, rollout: {nodes: 2}}"
    plan = make_plan(load(RAY, *threads, *TWO_EACH_NODE, written), nodes(0, 0, 0))
    found = {one.name: (one.device, one.threads) for one in plan.processes}
    assert found["trainer-0"] == found["trainer-1"] == ("n0/cpu", 4), (
        "eight cores, and no engine exists"
    )
    assert [found[f"engine-{at}"] for at in range(4)] == [
        ("n1/cpu", 2),
        ("n2/cpu", 2),
    ] * 2


# ---- what a run promises of its tokens


@pytest.mark.parametrize(("num_cuda", "overrides"), [(2, []), (0, [VLLM]), (0, URLS)])
def test_impossible_determinism_is_refused(num_cuda: int, overrides: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.deterministic=true, and .* cannot promise"
    ):
        planned(num_cuda, *overrides, "rollout.deterministic=true")


EXPERTS = "{model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2}"
STATES = "{model_type: lfm2, layer_types: [conv, full_attention]}"


@pytest.mark.parametrize(("more", "why"), [(EXPERTS, "expert"), (STATES, "states")])
def test_determinism_is_refused_for_models_that_round_by_company(
    more: str, why: str
) -> None:
    architecture = f"model.scratch.architecture={more}"
    place = single_node(machine(0))
    _, messages = plan_run(load(*ON_CPU, architecture), place)
    assert "rollout.deterministic: auto is false" in messages
    with pytest.raises(ConfigError, match=why):
        plan_run(load(*ON_CPU, architecture, "rollout.deterministic=true"), place)


@pytest.mark.parametrize(("dtype", "says_so"), [("float32", False), ("bfloat16", True)])
def test_a_run_says_that_its_engines_use_no_amx_kernels(
    dtype: str, says_so: bool
) -> None:
    config = load(*ON_CPU, f"model.dtype={dtype}")
    _, messages = plan_run(config, single_node(machine(0)))
    text = next(one for one in messages if one.startswith("rollout.deterministic"))
    assert ("no AMX kernels" in text) == says_so


# ---- the type of the weights


@pytest.mark.parametrize(
    ("setting", "num_cuda", "has_bf16", "dtype"),
    [
        ("model.dtype=auto", 0, False, "float32"),
        ("model.dtype=auto", 0, True, "bfloat16"),
        ("model.dtype=auto", 2, False, "bfloat16"),
        ("model.dtype=bfloat16", 0, False, "bfloat16"),
    ],
)
def test_auto_dtype_is_bfloat16_if_all_devices_have_it(
    setting: str, num_cuda: int, has_bf16: bool, dtype: str
) -> None:
    written = load("model.dtype=auto", "weight_sync.transport=shm", setting)
    config, messages = resolve_auto(
        written, single_node(machine(num_cuda, has_bfloat16=has_bf16))
    )
    assert config.model.dtype == dtype
    says_auto = any("auto is" in one for one in messages)
    assert says_auto == (written.model.dtype == "auto")


@pytest.mark.parametrize(
    ("cards", "dtype"),
    [
        ("1xT4-16GB", "float32"),
        ("1xV100-SXM2-32GB", "float32"),
        ("1xRTX 2080-8GB", "float32"),
        ("1xRTX 6000 Ada-48GB", "bfloat16"),
        ("1xA100-40GB", "bfloat16"),
        ("1x80GB", "bfloat16"),
    ],
)
def test_auto_dtype_is_float32_on_cards_without_bfloat16(
    cards: str, dtype: str
) -> None:
    written = load("model.dtype=auto", "placement={trainer: 0, rollout: cpu}")
    nodes = described_nodes(cards, 8, "64GB")
    assert nodes is not None
    (node,) = nodes
    here = replace(node, machine=replace(node.machine, has_bfloat16=True))
    assert resolve_auto(written, [here])[0].model.dtype == dtype
    fixed = load("model.dtype=bfloat16", "placement={trainer: 0, rollout: cpu}")
    _, messages = resolve_auto(fixed, [here])
    is_warned = any("warning: cuda:0 computes bfloat16" in one for one in messages)
    assert is_warned == (dtype == "float32")


SPREAD = [RAY, "weight_sync.transport=auto"]


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "transport"),
    [
        ((2,), [VLLM, "weight_sync.disk_dir=/shared"], "disk"),
        ((1, 1), SPREAD, "nccl"),
        (
            (0, 0),
            [
                *SPREAD,
                "rollout.num_engines=2",
                "placement={trainer: {nodes: 1}, rollout: {nodes: 2}}",
            ],
            "stream",
        ),
        (
            (0, 1),
            [*SPREAD, "placement.trainer={nodes: 1, gpus: 1}", *COLOCATED],
            "stream",
        ),
    ],
)
def test_auto_transport_fits_the_devices_of_both_sides(
    num_cuda: tuple[int, ...], overrides: list[str], transport: str
) -> None:
    there = nodes(*num_cuda)
    config, messages = resolve_auto(load(*overrides), there)
    assert config.weight_sync.settled == transport
    assert f"weight_sync.transport: auto is {transport}: " in messages[-1]
    place(config, there)  # not refused


AT_ONCE = [
    "placement={trainer: all, rollout: all, share: 0.4}",
    "buffer.max_staleness=1",
]
FILES = ["shm", "disk", "stream"]
SIDES: dict[str, tuple[int, list[str], str, list[str], list[str]]] = {
    "own devices": (2, [], "nccl", [*FILES, "nccl"], ["nccl"]),
    "one device at once": (1, AT_ONCE, "ipc", [*FILES, "ipc"], ["ipc"]),
    "two devices at once": (2, [*AT_ONCE, "trainer.world_size=2", "rollout.num_engines=2"], "shm",
                            [*FILES], []),
    "one device time-shared": (1, COLOCATED, "ipc", [*FILES, "ipc"], []),
    "two devices time-shared": (2, [*COLOCATED, "trainer.world_size=2", "rollout.num_engines=2"], "ipc",
                             [*FILES, "ipc"], []),
    "the CPU": (0, ON_CPU, "shm", [*FILES, "nccl", "ipc"], ["nccl", "ipc"]),
    "the CPU time-shared": (0, ["placement.trainer=cpu", *COLOCATED], "shm", [*FILES, "ipc"], []),
}  # fmt: skip
"""CUDA devices, settings, what auto is, transports that work, and those that hold a
version on the device.
"""


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("transport", ["auto", *FILES, "nccl", "ipc"])
def test_transport_works_between_these_sides_or_is_refused(
    engine: str, sides: str, transport: str
) -> None:
    num_cuda, settings, auto, working, holding = SIDES[sides]
    if engine == "vllm" and sides == "the CPU time-shared":
        pytest.skip("vLLM does not sleep on a CPU")
    there = single_node(machine(num_cuda))
    given = [
        f"weight_sync.transport={transport}",
        f"rollout.engine={engine}",
        "trainer.lora={rank: 4}",
    ]
    given += ["model.dtype=float32"]
    given += ["weight_sync.disk_dir=/shared"] if transport == "disk" else []
    written = load(*settings, *given)
    if transport not in ("auto", *working):
        with pytest.raises(ConfigError, match=f"weight_sync.transport={transport}"):
            place(written, there)
        return
    config, _ = resolve_auto(written, there)
    assert config.weight_sync.settled == (auto if transport == "auto" else transport)
    plan = make_plan(config, there)
    files = config.weight_sync.model_copy(update={"transport": "shm"})
    by_file = make_plan(config.model_copy(update={"weight_sync": files}), there)
    held = memory(plan, "trainer-0").copies - memory(by_file, "trainer-0").copies
    assert held == (
        4 * num_trained(config, plan.shape)
        if config.weight_sync.settled in holding
        else 0
    )


@pytest.mark.extension("vllm")
def test_vllms_python_is_named_or_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_python(tmp_path / "vllm" / "bin" / "python")
    without = make_python(tmp_path / "without", exit_code=1)
    assert (
        find_python(RolloutConfig(engine="vllm", vllm_python=str(python)), "vllm")
        == python
    )
    with pytest.raises(ConfigError, match="cannot import vllm") as caught:
        find_python(RolloutConfig(engine="vllm", vllm_python=str(without)), "vllm")
    assert "make setup-vllm" in caught.value.way_out
    monkeypatch.setattr(sys, "executable", str(without))
    monkeypatch.setattr("asyncrl.launch.machine.CHECKOUT", tmp_path)
    monkeypatch.delenv("VENV_VLLM", raising=False)
    (tmp_path / ".venv-vllm").symlink_to(python.parent.parent)
    auto = RolloutConfig(engine="vllm")
    assert find_python(auto, "vllm") == tmp_path / ".venv-vllm" / "bin" / "python"
    monkeypatch.setenv("VENV_VLLM", str(python.parent.parent))
    assert find_python(auto, "vllm") == python
    make_python(without)  # vLLM is installed there, and the same process tries again
    assert find_python(auto, "vllm") == without


SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_attention_heads": 8,
}
SMALL |= {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "num_hidden_layers": 4,
}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def parameters_of(**architecture: Any) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    model.tie_weights()
    return model.num_parameters()


@pytest.mark.parametrize(
    ("model_type", "more", "active"),
    [
        ("qwen3", {}, 160),
        ("llama", {"tie_word_embeddings": True}, 160),
        ("qwen3_moe", SPARSE, 96),
        ("qwen2_moe", {**SPARSE, "shared_expert_intermediate_size": 96}, 192),
        ("mixtral", {"num_local_experts": 8}, 320),
    ],
)
def test_config_json_gives_the_number_of_parameters(
    model_type: str, more: dict[str, Any], active: int, tmp_path: Path
) -> None:
    architecture = {**SMALL, "num_experts_per_tok": 2, "model_type": model_type, **more}
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    shape = model_shape(ModelConfig(path=str(tmp_path)))
    assert shape.num_parameters == pytest.approx(
        parameters_of(**architecture), rel=0.02
    )
    assert (shape.active, shape.cached, bool(shape.inexact)) == (
        active,
        64,
        active != 160,
    )
