"""The embedded engine's way to CUDA, without a device: how often a step waits for it, and its graphs, which
are recorded and played again on the CPU. That the same holds on CUDA has not been run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_in_process import drawn, make_qwen3, make_request, make_spec, stage_file, weights_of
from engine_replies import ask
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from asyncrl.messages.calls import CommitRequest, GenerateResponse, SleepRequest, WakeRequest
from asyncrl_servers.embedded.build_engine import build_engine
from asyncrl_servers.embedded.decode_loop import Engine
from asyncrl_servers.embedded.decoder import CudaCaptures, LoadedModel
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.runner import MOST_GRAPHS, DecodeGraphs, Runner

HERE, THERE = torch.device("cpu"), torch.device("meta")
LOOKS = {"item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique"}


class There(Tensor):
    """A tensor of a device, as far as the product can tell; its values stand on the CPU."""

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=THERE,
        )
        made.here = here
        return made  # type: ignore[no-any-return]

    here: Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside Device")


class Device(TorchDispatchMode):
    """Counts where the host waits for a device: a look at a value, or a transfer that is not from pinned
    memory to there. Operands on two devices are refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._pinned: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if name.endswith("pin_memory"):
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        sides = [isinstance(one, There) for one in operands]
        goes_there = any(sides) if kwargs.get("device") is None else kwargs["device"] == THERE
        is_move = name == "copy_" or (kwargs.get("device") is not None and operands)
        if is_move:
            source, is_from, is_to = operands[-1], sides[-1], sides[0] if name == "copy_" else goes_there
            is_asked = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
            is_free = is_asked and any(source is one for one in self._pinned)
            if is_from != is_to and not (is_to and is_free):
                self.waits.append(str(func))
        else:
            sizes = {side for one, side in zip(operands, sides, strict=True) if side or one.dim()}
            assert len(sizes) <= 1, f"{func} has operands on two devices"
            is_masked = name.startswith("index") and any(one.dtype == torch.bool for one in operands[1:])
            if any(sides) and (name in LOOKS or is_masked):
                self.waits.append(str(func))
        known = {id(one.here): one for one in operands if isinstance(one, There)}

        def to_here(one: Any) -> Any:
            is_device = isinstance(one, torch.device)
            return one.here if isinstance(one, There) else HERE if is_device and one == THERE else one

        def as_found(one: Any) -> Any:
            if not isinstance(one, Tensor) or not goes_there:
                return one
            return known[id(one)] if id(one) in known else There(one)

        return tree_map(as_found, func(*tree_map(to_here, args), **tree_map(to_here, kwargs)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("device") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("device") / "other", seed=1, num_hidden_layers=2)


def put_there(loaded: LoadedModel) -> None:
    loaded.device, moved = THERE, dict[int, torch.nn.Parameter]()
    for module in loaded.model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                moved.setdefault(id(one), torch.nn.Parameter(There(one.data), requires_grad=False))
                module._parameters[name] = moved[id(one)]
        for name, one in module._buffers.items():
            module._buffers[name] = There(one)


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0},
    {"top_logprobs": 3},
]


class Again:
    """Captures that compute once more."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function


@pytest.mark.parametrize("has_graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("num", [1, 4, 12])
def test_a_step_waits_for_its_device_once_whatever_runs_in_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num: int, has_graphs: bool
) -> None:
    """Prompts that are read and tokens that are drawn, in any way: what was drawn comes in one transfer."""
    monkeypatch.setattr(DecodeGraphs, "_drop_moved", lambda _: None)  # these tensors have no addresses
    spec = make_spec(folder, slots=12, deterministic=False)
    requests = [
        make_request(f"r{seed}", prompt_ids=(5, seed), seed=seed, max_tokens=6, **ASKED[seed % 4])
        for seed in range(num)
    ]
    expected = ask(engine := build_engine(spec), requests)
    while engine.num_queued or not expected[-1].done():
        engine.turn()
    for owner, name in ((Engine, "turn"), (DecodeGraphs, "check"), (DecodeGraphs, "_take_logits")):
        # Inference mode has no tensors like There.
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    with torch.no_grad(), Device() as device:
        loaded = LoadedModel(spec)
        put_there(loaded)
        runner = Runner(loaded, spec.slots, spec.max_length, is_exact=False)
        if has_graphs:
            runner.take_graphs(spec.slots, Again)
        futures = ask(engine := Engine(spec, runner, Weights(loaded, spec)), requests)
        for _ in range(6):
            device.waits.clear()
            engine.turn()
            assert len(device.waits) == 1, device.waits
    assert runner.graphs is None or runner.graphs.state == "on"
    found = [future.result(timeout=0) for future in futures]
    assert [one.token_ids for one in found] == [one.result(timeout=0).token_ids for one in expected]


class Recorded:
    """Graphs of what runs on a CPU: each kernel again, on the memory that it had, into what it made then."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        calls = list[tuple[Any, Any, Any, Any]]()

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                made = func(*args, **kwargs or {})
                calls.append((func, *tree_map(at_this_address, (args, kwargs or {})), made))
                return made

        def at_this_address(one: Any) -> Any:
            return one.detach() if isinstance(one, torch.nn.Parameter) else one

        with Recorder():
            function()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            for func, args, kwargs, made in calls:
                for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


def answers(engine: Engine, halfway: Callable[[], None] = lambda: None) -> list[GenerateResponse]:
    """Of requests that come and go: more than there are slots, short and long ones, some of one prompt."""
    ends, futures = [40, 9, 25, 60, 33, 12, 50, 21, 44, 30, 18, 27, 36, 55], []
    for seed, end in enumerate(ends):
        prompt = tuple(2 + at % 48 for at in range(3 if seed % 3 else 90))
        futures += ask(engine, [make_request(f"r{seed}", prompt_ids=prompt, seed=seed, max_tokens=end)])
    for turn in range(2000):
        if all(future.done() for future in futures):
            return [future.result(timeout=0) for future in futures]
        if turn == 20:
            halfway()
        engine.turn()
    raise AssertionError("the requests have not ended in 2000 steps")


def check_same(found: list[GenerateResponse], expected: list[GenerateResponse]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(drawn(ours)[1], drawn(theirs)[1], atol=1e-4)


def publish_halfway(engine: Engine, other: Path | dict[str, Tensor], tmp_path: Path) -> Callable[[], None]:
    staged = engine.weights.prepare(stage_file(other, 1, tmp_path))
    commit = CommitRequest(version=1, digest=staged.digest, interrupt="keep")
    return lambda: engine.commit(commit) and None


@pytest.mark.parametrize("keeps_place", [True, False], ids=["in place", "moved"])
def test_replayed_steps_draw_what_computed_ones_do_across_a_publish(
    folder: Path, other_folder: Path, tmp_path: Path, keeps_place: bool
) -> None:
    """Weights that are copied into place leave the graphs; where they move, all are captured again."""
    spec, recorded = make_spec(folder, slots=10, keeps_turns=True, deterministic=False), Recorded()
    plain = build_engine(spec)
    expected = answers(plain, publish_halfway(plain, other_folder, tmp_path))
    assert len({tuple(one.token_ids) for one in expected}) == len(expected)
    engine = build_engine(spec)
    engine.runner.take_graphs(spec.slots, lambda: recorded)
    engine.weights.keeps_place = keeps_place
    addresses = [one.data_ptr() for one in engine.runner.loaded.model.parameters()]
    check_same(answers(engine, publish_halfway(engine, other_folder, tmp_path)), expected)
    is_there = addresses == [one.data_ptr() for one in engine.runner.loaded.model.parameters()]
    assert is_there == keeps_place
    assert recorded.num_replayed > 2 * recorded.num_captured > 4
    assert (engine.health().graphs, plain.health().graphs) == ("on", "")
    again = recorded.num_captured
    check_same(answers(engine), answers(plain))
    assert recorded.num_captured - again <= MOST_GRAPHS


def test_a_sleep_frees_the_graphs_and_steps_after_it_are_captured_again(folder: Path, tmp_path: Path) -> None:
    made: list[Recorded] = []

    def make() -> Recorded:
        made.append(Recorded())
        return made[-1]

    spec = make_spec(folder, slots=10, deterministic=False, takes_turns=True)
    engine = build_engine(spec)
    engine.runner.take_graphs(spec.slots, make)
    expected = answers(engine)
    engine.sleep(SleepRequest(parts=["weights", "kv"]))
    engine.turn()
    graphs = engine.runner.graphs
    assert graphs is not None
    assert not graphs._replays
    engine.wake(WakeRequest(parts=["weights", "kv"]))
    engine.turn()
    staged = engine.weights.prepare(stage_file(folder, 0, tmp_path))
    engine.commit(CommitRequest(version=0, digest=staged.digest))
    engine.turn()
    check_same(answers(engine), expected)
    assert len(made) == 2
    assert all(one.num_replayed for one in made)


class Frozen(Recorded):
    """Replays give what was captured, whatever the inputs are."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return lambda: None


class Refusing(Recorded):
    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


class Failing(Recorded):
    """Only what comes after the check of the start cannot be captured."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        if self.num_captured == 2:
            raise RuntimeError("out of memory")
        return super().capture(function)


@pytest.mark.parametrize(
    ("captures", "why"),
    [(Frozen, "differs by"), (Refusing, "cannot be captured: operation not"), (Failing, "out of memory")],
)
def test_graphs_that_do_not_give_what_is_computed_are_given_up_and_told(
    folder: Path, captures: type[Recorded], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec, one = make_spec(folder, slots=10, deterministic=False), captures()
    engine = build_engine(spec)
    engine.runner.take_graphs(spec.slots, lambda: one)
    check_same(answers(engine), answers(build_engine(spec)))
    assert engine.health().graphs.startswith("off: ")
    assert why in engine.health().graphs
    assert f"without CUDA graphs: {engine.runner.graphs and engine.runner.graphs.given_up}" in caplog.text


def test_an_engine_that_promises_the_bits_of_a_step_has_no_graphs(folder: Path) -> None:
    engine = build_engine(make_spec(folder))
    engine.runner.take_graphs(4, Recorded)
    assert engine.runner.graphs is None


class Stream:
    """Stands for the CUDA streams: which of them is current, and what was done in which."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")


def fake_cuda(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> list[Stream]:
    """The calls of torch.cuda that a capture makes; returns a list whose last one is the current stream."""
    current, real_graph = [Stream("main", told)], inspect.signature(torch.cuda.graph)

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    @contextmanager
    def graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        asked = real_graph.bind(*args, **kwargs).arguments
        current.append(asked["stream"])
        told.append(f"capture in {asked['pool']}, {asked['capture_error_mode']}")
        yield
        current.pop()  # not where it fails: torch leaves its stream in place, too

    fakes = {"Stream": lambda: Stream("side", told), "graph_pool_handle": lambda: "pool", "graph": graph}
    fakes |= {"current_stream": lambda: current[-1], "stream": stream, "set_stream": current.append}
    for name, fake in {**fakes, "CUDAGraph": lambda: SimpleNamespace(replay="replay")}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return current


def test_a_capture_follows_a_first_run_beside_and_leaves_its_stream_even_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = list[str]()
    current = fake_cuda(monkeypatch, told)
    captures: Any = CudaCaptures()
    assert captures.capture(lambda: told.append(f"runs in {current[-1].name}")) == "replay"
    waits = ["side waits for main", "runs in side", "main waits for side"]
    assert told == [*waits, "capture in pool, thread_local", "runs in side"]
    assert current[-1].name == "main"
    told.clear()

    def fail_in_a_capture() -> None:
        if told[-1].startswith("capture"):
            raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        captures.capture(fail_in_a_capture)
    assert current[-1].name == "main"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_a_device_give_the_bits_of_what_is_computed(
    folder: Path, other_folder: Path, tmp_path: Path, dtype: str
) -> None:
    spec = make_spec(folder, slots=10, device="cuda", dtype=dtype, deterministic=False)
    other = {name: one.to(getattr(torch, dtype)) for name, one in weights_of(other_folder).items()}
    found = []
    for is_replayed in (True, False):
        engine = build_engine(spec)
        assert engine.runner.graphs is not None
        if not is_replayed:
            engine.runner.graphs._replay_of = lambda layout, logits: None  # type: ignore[method-assign]
        found.append([drawn(one) for one in answers(engine, publish_halfway(engine, other, tmp_path))])
        assert engine.health().graphs == "on"
    assert found[0] == found[1]
