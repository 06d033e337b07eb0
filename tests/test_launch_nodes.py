"""Where the processes of a run go on several nodes: what each form of `placement` takes, what is refused, and
what each node has to hold.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_cases import EVAL, OWN, TAUGHT, TURNS, VLLM, load, machine

from asyncrl.base.errors import ConfigError
from asyncrl.config import PlacementConfig, RunConfig
from asyncrl.config.operation import NodesConfig
from asyncrl.job.engine_kinds import EnginePlace, engine_kind
from asyncrl.launch.choice import NO_DEVICE, NodeDevice
from asyncrl.launch.devices import Placement, chunk_devices, place
from asyncrl.launch.fit import refuse_what_cannot_fit, settle, settle_share
from asyncrl.launch.nodes import Node, described_nodes
from asyncrl.launch.plan import make_plan, plan_text

RAY, ZERO = "launcher=ray", "buffer.max_staleness=0"


def nodes(*num_cuda: int) -> tuple[Node, ...]:
    """Of so many CUDA devices each, somewhere else: this machine is not asked for vLLM."""
    there = (replace(machine(num), is_here=False) for num in num_cuda)
    return tuple(Node(f"n{at}", f"10.0.0.{at}", one) for at, one in enumerate(there))


def on(num_cuda: tuple[int, ...], *overrides: str) -> Placement:
    return place(load(RAY, *overrides), nodes(*num_cuda))


def sizes(ranks: int, engines: int = 1, split: int = 1) -> list[str]:
    parallel = [VLLM, f"rollout.tensor_parallel={split}"] if split > 1 else []
    many = ["rollout.group_size=16", f"trainer.world_size={ranks}", f"rollout.num_engines={engines}"]
    return [*many, *parallel]


def where(devices: object) -> str:
    """Names of devices by node: 0: 0 1 2; CPUs are c."""
    found: dict[int, list[str]] = {}
    for node, name in devices:  # type: ignore[attr-defined]
        found.setdefault(node, []).append(name.removeprefix("cuda:")[:1])
    return ", ".join(f"{node}: {''.join(names)}" for node, names in found.items())


ALL, EIGHTS = "{nodes: all, gpus: all}", "0: 01234567, 1: 01234567"


@pytest.mark.parametrize(
    ("num_cuda", "trainer", "rollout", "more", "ranks", "engines"),
    [
        # apart: nodes of their own where there are enough
        ((8, 8), "{nodes: 1, gpus: 8}", "{nodes: 1, gpus: 8}", sizes(8, 8), "0: 01234567", "1: 01234567"),
        ((4, 4, 4), "{nodes: 2}", "{nodes: 1}", sizes(8, 4), "0: 0123, 1: 0123", "2: 0123"),
        ((4, 4), "{nodes: 1, gpus: 2}", "{nodes: 1, gpus: 2}", sizes(2, 2), "0: 01", "1: 01"),
        ((4, 4), "{nodes: 2, gpus: 2}", "{nodes: 2, gpus: 2}", sizes(4, 4), "0: 01, 1: 01", "0: 23, 1: 23"),
        ((4, 4), "{nodes: all, gpus: 3}", "{nodes: all, gpus: 1}",
         sizes(6, 2), "0: 012, 1: 012", "0: 3, 1: 3"),
        # unequal: a node of just the size first
        ((8, 4), "{nodes: 1, gpus: 4}", "{nodes: 1, gpus: 8}", sizes(4, 8), "1: 0123", "0: 01234567"),
        ((0, 4, 4), "{nodes: 1, gpus: all}", "auto", sizes(4, 4), "1: 0123", "2: 0123"),
        ((1, 2, 3), ALL, "trainer", [*sizes(6, 6), ZERO], "0: 0, 1: 01, 2: 012", "0: 0, 1: 01, 2: 012"),
        # as many as needed: one node, else whole nodes
        ((2, 4), "auto", "auto", sizes(4, 2), "1: 0123", "0: 01"),
        ((4, 4, 2), "auto", "auto", sizes(8, 2), "0: 0123, 1: 0123", "2: 01"),
        ((4, 4), "auto", "auto", sizes(6, 2), "0: 0123, 1: 01", "1: 23"),
        ((8, 8), "0-7", "auto", sizes(8, 2, split=4), "0: 01234567", "1: 01234567"),
        ((8, 3, 3), "0-7", "auto", sizes(8, 2, split=2), "0: 01234567", "1: 01, 2: 01"),
        ((8, 4, 4), "auto", "{nodes: 1, gpus: 8}", sizes(8, 8), "1: 0123, 2: 0123", "0: 01234567"),
        ((2, 2), "auto", "{nodes: 1, gpus: 2}", sizes(2, 4), "1: 01", "0: 0101"),
        ((2, 2), "0-1", "auto", sizes(2, 3), "0: 01", "1: 010"),
        ((4, 4), "{nodes: 1, gpus: 4}", "cpu", sizes(4, 2), "1: 0123", "0: cc"),
        # in turns
        ((8, 8), ALL, "trainer", [*sizes(16, 16), ZERO], EIGHTS, EIGHTS),
        ((2, 2), "all", "trainer", [*sizes(4, 2, split=2), ZERO], "0: 01, 1: 01", "0: 01, 1: 01"),
        ((2, 2), "{nodes: 2, gpus: 2}", "{nodes: 2, gpus: 2}",
         [*sizes(4, 4), ZERO], "0: 01, 1: 01", "0: 01, 1: 01"),
        ((2, 2), "auto", "auto", [*sizes(4, 4), ZERO], "0: 01, 1: 01", "0: 01, 1: 01"),
        # CPUs
        ((0, 0, 0), "{nodes: 1}", "{nodes: 2}", sizes(2, 4), "0: cc", "1: cc, 2: cc"),
        ((0, 0), "{nodes: 2}", "{nodes: 2}", sizes(4, 2), "0: cc, 1: cc", "0: c, 1: c"),
        ((0, 0, 0), "auto", "auto", sizes(2, 4), "0: cc", "1: cc, 2: cc"),
        ((0, 0), "cpu", "cpu", sizes(2, 2), "0: cc", "0: cc"),
        ((0, 0), "{nodes: 2}", "trainer", [*sizes(2, 2), ZERO], "0: c, 1: c", "0: c, 1: c"),
        ((4, 4), "{nodes: 2, gpus: 0}", "{nodes: 2, gpus: 4}", sizes(2, 8), "0: c, 1: c", "0: 0123, 1: 0123"),
    ],
)  # fmt: skip
def test_each_side_gets_nodes_of_its_own_where_they_suffice_else_devices_else_turns(
    num_cuda: tuple[int, ...], trainer: str, rollout: str, more: list[str], ranks: str, engines: str
) -> None:
    placement = on(num_cuda, *more, f"placement.trainer={trainer}", f"placement.rollout={rollout}")
    assert where(placement.ranks) == ranks
    each = zip(placement.engine_nodes, placement.engines, strict=True)
    assert (
        where(sorted(((node, name) for node, names in each for name in names), key=lambda one: one[0]))
        == engines
    )
    assert (placement.mode == "colocated") == (ZERO in more)


@pytest.mark.parametrize(
    ("num_cuda", "trainer", "rollout", "more", "words"),
    [
        ((8, 8), "{nodes: 3, gpus: 8}", "auto", sizes(8), "n0 8 of 8, n1 8 of 8"),
        ((8, 4), "{nodes: 2, gpus: 8}", "auto", sizes(8), "n0 8 of 8, n1 4 of 4"),
        ((4, 4), "{nodes: 2, gpus: 4}", "{nodes: 1, gpus: 4}", sizes(8, 4), "n0 0 of 4, n1 0 of 4"),
        ((4, 4), "{nodes: 1, gpus: 4}", ALL, sizes(4, 8), "n0 0 of 4, n1 4 of 4"),
        ((4, 4), "{nodes: 2, gpus: 4}", "trainer", sizes(8, 8), "set buffer.max_staleness=0"),
        ((4, 4), "{nodes: 2, gpus: 4}", "cpu", sizes(4), "set trainer.world_size=8"),
        ((0, 0), "{nodes: 2}", "auto", sizes(3), "2 devices for trainer.world_size=3"),
        ((0, 0), "cpu", "{nodes: 2}", sizes(1), "set rollout.num_engines=2"),
        ((0, 0), "cpu", "{nodes: 3}", sizes(1), "n0 1 of 1, n1 1 of 1"),
        ((0, 0), "{nodes: 2, gpus: 4}", "cpu", sizes(8), "no CUDA device"),
        ((0, 2), "0-1", "auto", sizes(2), "n0, which has 0 CUDA devices.*set placement.trainer=auto"),
        ((8, 6, 6), "0-7", "{nodes: 2, gpus: 6}", sizes(8, 3, split=4), "6 . 6 devices.*tensor_parallel=6"),
        ((1, 1), "{nodes: 1}", "{nodes: 1}",
         [*sizes(1), VLLM, "weight_sync.transport=ipc"], "weight_sync.transport"),
        ((0, 4), "auto", "auto", [*sizes(2), EVAL, "placement.eval=0"], "set placement.eval=auto"),
        ((2, 2), "0", "1", [*sizes(1), EVAL, "weight_sync.transport=shm"], "the run is on 2 nodes"),
        ((2, 2), ALL, "trainer", [*sizes(4, 4), ZERO, EVAL, OWN], "n0/cuda:.*placement.eval=cpu"),
    ],
)  # fmt: skip
def test_what_nodes_do_not_have_is_refused_with_their_numbers(
    num_cuda: tuple[int, ...], trainer: str, rollout: str, more: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        on(num_cuda, *more, f"placement.trainer={trainer}", f"placement.rollout={rollout}")
    assert re.search(words, str(caught.value), re.DOTALL), caught.value


@pytest.mark.parametrize(
    "text", ["{nodes: 2, gpus: 8}", "{nodes: all, gpus: all}", "{nodes: 2}", "{nodes: 1, gpus: 0}"]
)
def test_a_form_of_nodes_reads_back_as_it_is_written(text: str) -> None:
    written = load(RAY, f"placement.trainer={text}").placement.trainer
    assert isinstance(written, NodesConfig)
    assert str(written) == text


@pytest.mark.parametrize(
    "text", ["{nodes: 0}", "{gpus: 8}", "{nodes: 2, gpu: 8}", "{nodes: two}", "{nodes: 2, gpus: -1}",
             "'nodes: 2, gpus: 8'", "{nodes: true}", "{}", "{engines: 16}"]
)  # fmt: skip
def test_what_is_no_form_of_nodes_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("{nodes: 2, gpus: 8}, {nodes: all, gpus: all}")):
        load(RAY, f"placement.rollout={text}")


def test_several_nodes_need_a_launcher_that_has_them() -> None:
    with pytest.raises(ConfigError, match="set launcher=ray, or placement.trainer.nodes=1"):
        load("placement.trainer={nodes: 2, gpus: 4}")
    with pytest.raises(ConfigError, match="launcher=local starts processes on this machine, and there are 2"):
        place(load(), nodes(1, 1))
    with pytest.raises(ConfigError, match="give local, ray, or ray:HOST:PORT"):
        load("launcher=slurm")
    config = load("placement.trainer={nodes: all}", "placement.rollout={nodes: 1, gpus: 0}")
    assert place(config, nodes(1)).trainer == ("cuda:0",)


# ---- what works beside both sides

APART, ON_CPU = ["placement.trainer=0", "placement.rollout=1"], "placement.eval=cpu"


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "beside"),
    [
        ((3, 2), [*APART, EVAL], (0, "cuda:2", None)),
        ((2, 3), [*APART, EVAL], (1, "cuda:0", None)),
        ((3, 3), [*APART, EVAL, *TAUGHT], (1, "cuda:0", "cuda:1")),
        ((0, 2), ["placement.trainer={nodes: 1, gpus: 1}", EVAL, OWN], (1, "cuda:1", None)),
        ((1, 1), [EVAL, OWN], (1, "cuda:0", None)),
        ((1, 1), [EVAL], (1, None, None)),
        ((2, 2), [*TURNS, *sizes(4, 4), "placement.trainer=all", EVAL, ON_CPU], (0, "cpu", None)),
        ((2, 2), ["placement.eval=1", EVAL, *APART], (0, "cuda:1", None)),
        ((0, 0), [EVAL, *TAUGHT], (0, "cpu", "cpu")),
        ((1, 1), ["rollout.engine=simulated", EVAL], (0, "none", None)),
    ],
)  # fmt: skip
def test_eval_engine_and_teacher_are_on_the_controllers_node_where_it_has_a_device_for_them(
    num_cuda: tuple[int, ...], overrides: list[str], beside: tuple[int, str | None, str | None]
) -> None:
    placement = on(num_cuda, *overrides)
    assert (placement.beside_node, placement.evaluation, placement.teacher) == beside


# ---- any placement keeps the rules


@st.composite
def forms(draw: st.DrawFn) -> str:
    counts = draw(st.sampled_from(["", ", gpus: 0", ", gpus: 1", ", gpus: 2", ", gpus: all"]))
    mapping = f"{{nodes: {draw(st.sampled_from([1, 2, 3, 'all']))}{counts}}}"
    return draw(st.sampled_from(["auto", "cpu", "all", "0", "[1, 0]", mapping, mapping, mapping]))


BASE = {split: load(RAY, *sizes(1, 1, split), EVAL, *TAUGHT) for split in (1, 2)}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    forms(),
    st.one_of(forms(), st.just("trainer")),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 2]),
)
def test_whatever_is_not_refused_keeps_the_rules(
    num_cuda: list[int], trainer: str, rollout: str, size: int, engines: int, split: int, bound: int
) -> None:
    sides = {"trainer": yaml.safe_load(trainer), "rollout": yaml.safe_load(rollout)}
    there, base = nodes(*num_cuda), BASE[split]
    changes = {
        "placement": PlacementConfig.model_validate(sides),
        "trainer": base.trainer.model_copy(update={"world_size": size}),
        "rollout": base.rollout.model_copy(update={"num_engines": engines}),
        "buffer": base.buffer.model_copy(update={"max_staleness": bound}),
    }
    config = base.model_copy(update=changes)
    try:
        placement = place(config, there)
    except ConfigError:
        return
    assert placement == place(config, there), "it is the same each time"
    ranks, on_cuda = placement.ranks, {one for one in placement.ranks if one.name != "cpu"}
    used = set(placement.engine_devices)
    assert (len(ranks), len(placement.engines), len(placement.engine_nodes)) == (size, engines, engines)
    assert len(on_cuda) in (0, size), "two ranks share a device"
    assert list(placement.rank_nodes) == sorted(placement.rank_nodes), "ranks of a node are adjacent"
    for node, name in (*ranks, *used):
        assert name == "cpu" or int(name.removeprefix("cuda:")) < num_cuda[node]
    assert all(len(set(devices)) == split for devices in placement.engines), "one engine has a device twice"
    shared = on_cuda & used
    assert shared == (on_cuda if placement.mode == "colocated" else set())
    assert placement.mode == "apart" or (bound == 0 and {*ranks} == used)
    beside = {
        NodeDevice(placement.beside_node, name) for name in (placement.evaluation, placement.teacher) if name
    }
    assert not beside & on_cuda
    plan = make_plan(config, there)
    assert {process.device for process in plan.processes} <= {*plan.memory, NO_DEVICE}
    assert {process.name for process in plan.processes} >= {f"engine-{at}" for at in range(engines)}
    assert plan_text(plan, config) == plan_text(make_plan(config, there), config)


# ---- the plan


def planned(config: RunConfig, *num_cuda: int) -> dict[str, list[tuple[int, int]]]:
    """(node, threads) of all that has this name."""
    found: dict[str, list[tuple[int, int]]] = {}
    config, _ = settle(config, nodes(*num_cuda))
    for one in make_plan(config, nodes(*num_cuda)).processes:
        found.setdefault(one.name, []).append((one.node, one.threads))
    return found


def test_cores_and_memory_are_counted_on_each_node() -> None:
    threads = ["rollout.threads=auto", "trainer.threads=auto"]
    written = "placement={trainer: {nodes: 1}, rollout: {nodes: 2}}"
    apart = planned(load(RAY, *threads, *sizes(2, 4), written), 0, 0, 0)
    assert apart["trainer-0"] == apart["trainer-1"] == [(0, 4)], "eight cores, and no engine is there"
    assert [apart[f"engine-{at}"] for at in range(4)] == [[(1, 2)], [(2, 2)], [(1, 2)], [(2, 2)]]
    spread = make_plan(
        load(RAY, *sizes(4, 2), "placement={trainer: {nodes: 2}, rollout: {nodes: 2}}"), nodes(0, 0)
    )
    alone = make_plan(load(*sizes(4, 2), "placement={trainer: cpu, rollout: cpu}"), nodes(0))
    assert sum(spread.needed_bytes(f"n{at}/cpu") for at in (0, 1)) == alone.needed_bytes("cpu")


def test_what_does_not_fit_a_node_is_refused_with_its_name() -> None:
    config = load(RAY, "placement={trainer: {nodes: 1}, rollout: {nodes: 1}}", "rollout.slots=1000000")
    with pytest.raises(ConfigError, match="n1/cpu needs .* has 64.00 GiB free"):
        refuse_what_cannot_fit(make_plan(config, nodes(0, 0)), config)


def test_the_share_of_a_device_is_divided_by_its_engines() -> None:
    config = load(RAY, *TURNS, *sizes(4, 4), "placement.trainer={nodes: all, gpus: all}")
    plan, _ = settle_share(make_plan(config, nodes(2, 2)), config)
    assert chunk_devices(config, plan.placement) == plan.placement.ranks
    assert (plan.placement.stays, plan.placement.share_of(3)) == (True, plan.placement.share)
    twice = place(
        load(RAY, *TURNS, *sizes(2, 4), "placement.trainer=all", "placement.share=0.4"), nodes(1, 1)
    )
    assert [twice.share_of(engine) for engine in range(4)] == [0.2] * 4


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "transport"),
    [
        ((1, 1), [], "stream"),
        ((0, 0), [], "stream"),
        ((2, 1), ["placement.trainer=0", "placement.rollout=1"], "nccl"),
        ((2, 2), ["placement.trainer=0", "placement.rollout=1", EVAL], "stream"),
        ((2, 2), ["placement.trainer=0", "placement.rollout=1", *TAUGHT], "nccl"),
        ((0, 1), ["placement.trainer={nodes: 1, gpus: 1}", *TURNS], "stream"),
    ],
)
def test_weights_go_as_a_stream_once_anything_is_off_the_controllers_node(
    num_cuda: tuple[int, ...], overrides: list[str], transport: str
) -> None:
    config, words = settle(load(RAY, "weight_sync.transport=auto", *overrides), nodes(*num_cuda))
    assert config.weight_sync.settled == transport, words


def test_the_table_names_nodes() -> None:
    config = load(RAY, *sizes(2, 1), "placement={trainer: {nodes: 1, gpus: 2}, rollout: {nodes: 1, gpus: 1}}")
    text = plan_text(make_plan(config, nodes(2, 1, 4)), config)
    found = dict(re.findall(r"^(trainer-\d|engine-\d|controller) +(\S+)", text, re.MULTILINE))
    trainer = {"trainer-0": "n0/cuda:0", "trainer-1": "n0/cuda:1"}
    assert found == {"controller": "n0/cpu", **trainer, "engine-0": "n1/cuda:0"}
    assert re.search("n2/cpu, n2/cuda:0, .*: not used", text)


def test_colocated_cpu_nodes_fetch_chunks_as_files() -> None:
    both = [RAY, *TURNS, *sizes(2, 2), "placement.trainer={nodes: 2}"]
    config, _ = settle(load(*both), nodes(0, 0))
    assert chunk_devices(config, place(config, nodes(0, 0))) == ()


def test_an_engine_has_a_quarter_of_the_cores_of_its_own_node() -> None:
    for name in ("embedded", "vllm"):
        kind = engine_kind(
            load("rollout.threads=auto", f"rollout.engine={name}", "weight_sync.transport=shm")
        )
        assert kind.spec(Path("model"), "engine-0", EnginePlace("cpu", cores=20))["threads"] == 5


# ---- nodes that are described


@pytest.mark.parametrize(
    ("devices", "cores", "memory", "each"),
    [
        (["2x8xH200-141GB"], [192], ["2TB"], [(8, 192), (8, 192)]),
        (["2x8x80GB"], [192], ["2TB"], [(8, 192), (8, 192)]),
        (["3xcpu"], [4], ["16GB"], [(0, 4)] * 3),
        (["2xA100-80GB", "2x1x24GB", "cpu"], [64, 16, 8], ["1TB"], [(2, 64), (1, 16), (1, 16), (0, 8)]),
    ],
)
def test_nodes_are_described_one_after_the_other(
    devices: list[str], cores: list[int], memory: list[str], each: list[tuple[int, int]]
) -> None:
    made = described_nodes(devices, cores, memory)
    assert made is not None
    assert [(len(node.machine.cuda), node.machine.cores) for node in made] == each
    assert [node.name for node in made] == [f"node-{at}" for at in range(len(each))]


@pytest.mark.parametrize(
    ("devices", "cores", "words"),
    [
        (["2x8xH200"], [1], "describes no machine"),
        (["0x8x80GB"], [1], "describes no machine"),
        (["2xcpu"], [1, 2], "--cores is there 2 times, and --devices 1 times.* write --cores once for all"),
        ([], [1], "describes no machine"),
        (["cpu", "2x80GB"], [], "describes no machine"),
    ],
)
def test_nodes_that_are_not_described_are_refused(devices: list[str], cores: list[int], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        described_nodes(devices, cores, ["1TB"])
    assert re.search(words, str(caught.value), re.DOTALL), caught.value
