"""Training requests of Tinker clients: each has one effect, in the order of its number,
whatever is repeated, reordered, lost or killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("tinker")

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.base.errors import ErrorBody
from asyncrl.base.http import CallLost, CallRefused
from asyncrl.extensions.tinker import training_queue as module
from asyncrl.extensions.tinker.ledger import Ledger, Model, Request
from asyncrl.extensions.tinker.token_ages import AgeRule, Bound
from asyncrl.extensions.tinker.trainer_calls import ExportedAdapter, OpenedAdapter
from asyncrl.extensions.tinker.training_queue import Training

pytestmark = [pytest.mark.extras, pytest.mark.extension("tinker")]
MODEL = "s:train:0"


def refused(error: str) -> CallRefused:
    return CallRefused("trainer", "/call", 400, ErrorBody(error=error))


class FakeTrainer:
    """Keeps what was done to each adapter as text, in memory that a loss clears. `losses`:
    numbers of the calls that break, before or after their effect.
    """

    def __init__(self, losses: dict[int, bool]) -> None:
        self.weights = dict[str, str]()
        self.gradient = dict[str, str]()
        self.num_calls = 0
        self._losses = losses
        self.on_loss: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def _call(self) -> Any:
        self.num_calls += 1
        is_after = self._losses.pop(self.num_calls, None)
        if is_after is not True:
            if is_after is None:
                yield
                return
            self._lose()
        yield
        self._lose()

    def _lose(self) -> None:
        self.weights.clear()
        self.gradient.clear()
        self.on_loss()
        raise CallLost("trainer", "/call", "it is gone")

    async def open(self, name: str, *_: object) -> OpenedAdapter:
        with self._call():
            self.weights[name], self.gradient[name] = "", ""
        return OpenedAdapter(targets=["layer"], scale=1.0)

    async def drop(self, name: str) -> None:
        with self._call():
            del self.weights[name]

    async def forward_backward(self, name: str, body: bytes, _: object) -> bytes:
        asked = pb.ForwardBackwardRequest.FromString(body)
        with self._call():
            if asked.loss_fn == "bad":
                raise refused("datum 0 is bad")
            if not asked.forward_only:
                self.gradient[name] += f"+{asked.loss_fn}"
        return pb.ForwardBackwardOutput(metrics={"loss:sum": 1.0}).SerializeToString()

    async def optim_step(self, name: str, _: object) -> dict[str, float]:
        with self._call():
            if not self.gradient[name]:
                raise refused("there is no gradient")
            self.weights[name] += f"({self.gradient[name]})"
            self.gradient[name] = ""
        return {"grad_norm:mean": 1.0}

    async def drop_gradient(self, name: str) -> None:
        with self._call():
            self.gradient[name] = ""

    async def save(self, name: str, path: Path, _: bool) -> None:
        with self._call():
            path.write_text(self.weights[name])  # noqa: ASYNC240

    async def load(self, name: str, path: Path, _: bool) -> None:
        with self._call():
            self.weights[name], self.gradient[name] = path.read_text(), ""  # noqa: ASYNC240

    async def export(self, name: str, path: Path) -> ExportedAdapter:
        with self._call():
            path.write_text(self.weights[name])  # noqa: ASYNC240
        return ExportedAdapter(digest="d", num_tensors=1, num_bytes=1)


def body_of(kind: str, seq: int) -> bytes:
    if kind in ("forward", "backward", "bad"):
        loss = "bad" if kind == "bad" else f"{seq}"
        return pb.ForwardBackwardRequest(
            model_id=MODEL, seq_id=seq, loss_fn=loss, forward_only=kind == "forward"
        ).SerializeToString()
    known: dict[str, Any] = {"model_id": MODEL, "seq_id": seq}
    if kind == "optim_step":
        known |= {"adam_params": {}}
    if kind == "save_weights":
        known |= {"path": f"s{seq}"}
    if kind == "load_weights":
        known |= {"path": f"tinker://{MODEL}/weights/s{seq - 2}", "optimizer": True}
    return json.dumps(known).encode()


def request(kind: str, seq: int) -> Request:
    name = "forward_backward" if kind in ("forward", "backward", "bad") else kind
    return Request(MODEL, seq, name, body_of(kind, seq))


def expected_weights(kinds: list[str]) -> str:
    """What an uninterrupted trainer has: a few lines that share nothing with the server."""
    weights = gradient = ""
    has_failed = False
    saved = dict[int, str]()
    for seq, kind in enumerate(kinds, 1):
        if kind == "save_weights":
            saved[seq] = weights
        if kind == "load_weights" and seq - 2 in saved:
            weights, gradient, has_failed = saved[seq - 2], "", False
        if kind == "backward":
            gradient += f"+{seq}"
        elif kind == "bad":
            has_failed = True
        elif kind == "optim_step":
            if gradient and not has_failed:
                weights += f"({gradient})"
            gradient, has_failed = "", False
    return weights


async def serve_until(
    folder: Path,
    trainer: FakeTrainer,
    use: Callable[[Training, Ledger], Coroutine[Any, Any, None]],
) -> None:
    """Serve from a folder while `use` runs, then die without a word."""
    ledger = Ledger(folder / "ledger.sqlite")
    training = Training(ledger, trainer, folder, AgeRule(ledger, Bound(None, "mask")))  # type: ignore[arg-type]
    await training.restore(await ledger.find(Model))

    def come_back() -> None:
        training.trainer_lost()
        asyncio.get_running_loop().call_later(0.001, training.trainer_up)

    trainer.on_loss = come_back
    serving = asyncio.ensure_future(training.serve())
    using = asyncio.ensure_future(use(training, ledger))
    try:
        await asyncio.wait({serving, using}, return_when=asyncio.FIRST_COMPLETED)
        if not using.done():
            await serving  # raises its error
        await using
    finally:
        for task in (serving, using):
            task.cancel()
        await asyncio.gather(serving, using, return_exceptions=True)
        await ledger.aclose()


KINDS = st.sampled_from(
    [
        "backward",
        "backward",
        "optim_step",
        "optim_step",
        "forward",
        "bad",
        "save_weights",
        "save_weights",
        "load_weights",
    ]
)


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(KINDS, min_size=1, max_size=14),
    st.randoms(use_true_random=False),
    st.dictionaries(st.integers(1, 40), st.booleans(), max_size=4),
    st.lists(st.integers(0, 14), max_size=3),
)
def test_each_request_has_one_effect(
    kinds: list[str], rng: Any, losses: dict[int, bool], stops: list[int]
) -> None:
    requests = [request(kind, seq) for seq, kind in enumerate(kinds, 1)]
    arrivals = [*requests, *rng.sample(requests, len(requests) // 2)]
    rng.shuffle(arrivals)
    cuts = sorted({min(stop, len(arrivals)) for stop in stops} | {len(arrivals)})
    answers = dict[int, bytes]()

    async def life(folder: Path) -> str:
        first = Model(MODEL, "s", "ann", 4, 1, ["attn"])
        start, weights = 0, ""
        for end in cuts:
            trainer = FakeTrainer(losses)

            async def use(
                training: Training,
                ledger: Ledger,
                arrived: list[Request] = arrivals[start:end],
                is_last: bool = end == len(arrivals),
            ) -> None:
                create = request("create_model", 0)
                await training.submit(create, first)
                for one in arrived:
                    await training.submit(one)
                if not is_last:
                    await asyncio.sleep(rng.choice([0, 0.002, 0.01]))
                    return
                for one in requests:
                    done = await training.answer_of(MODEL, one.seq, 30)
                    assert done is not None
                    assert done.answer is not None
                    answers[one.seq] = done.answer
                # A further request needs the trainer's whole state.
                await training.submit(request("save_weights", len(requests) + 1))
                await training.answer_of(MODEL, len(requests) + 1, 30)

            await serve_until(folder, trainer, use)
            start, weights = end, trainer.weights.get(MODEL, "")
        return weights

    module.KEEP_STEPS = rng.choice([1, 2, 8])
    with TemporaryDirectory() as folder:
        assert asyncio.run(life(Path(folder))) == expected_weights(kinds)
    assert set(answers) == set(range(1, len(kinds) + 1))


def test_each_request_of_the_package_has_a_row() -> None:
    table = Path(module.__file__).with_name("requests.csv")
    with table.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    known = {name for name in dir(types) if name.endswith("Request")}
    assert {row["request"] for row in rows} == known
    states = {"supported", "translated", "refused"}
    assert {row["state"] for row in rows} == states


def test_missing_number_fails_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOLE_S", 0.3)

    async def use(training: Training, ledger: Ledger) -> None:
        await training.submit(
            request("create_model", 0), Model(MODEL, "s", "ann", 4, 1, ["attn"])
        )
        for seq, kind in ((2, "backward"), (3, "optim_step")):
            await training.submit(request(kind, seq))
        watching = asyncio.ensure_future(training.watch_holes())
        for seq in (2, 3, 1):
            done = await training.answer_of(MODEL, seq, 30)
            assert done is not None
            assert done.answer is not None
            assert (
                "request 1 of this model never came" in json.loads(done.answer)["error"]
            )
        # Later numbers go on, and the late one has no effect.
        await training.submit(request("backward", 4))
        assert (await training.answer_of(MODEL, 4, 30)).form == "proto"  # type: ignore[union-attr]
        await training.submit(request("backward", 1))
        late = await training.answer_of(MODEL, 1, 30)
        assert late is not None
        assert late.form == "error"
        await training.submit(request("optim_step", 5))
        stepped = await training.answer_of(MODEL, 5, 30)
        assert stepped is not None
        assert stepped.form == "json"
        # A missing number may be a part of a gradient, which then is not whole.
        await training.submit(request("backward", 6))
        await training.submit(request("save_weights", 8))
        assert (await training.answer_of(MODEL, 8, 30)).form == "error"  # type: ignore[union-attr]
        await training.submit(request("optim_step", 9))
        assert (await training.answer_of(MODEL, 9, 30)).form == "error"  # type: ignore[union-attr]
        watching.cancel()

    trainer = FakeTrainer({})
    asyncio.run(serve_until(tmp_path, trainer, use))
    assert trainer.weights[MODEL] == "(+4)"


def test_models_take_turns_by_tokens(tmp_path: Path) -> None:
    """A model with long requests does not hold up one with short ones."""
    order = list[str]()

    class Noting(FakeTrainer):
        async def forward_backward(
            self, name: str, body: bytes, masked: object
        ) -> bytes:
            order.append(name)
            return await super().forward_backward(name, body, masked)

    def backward(model: str, seq: int, num_tokens: int) -> Request:
        chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(4 * num_tokens)))
        body = pb.ForwardBackwardRequest(
            model_id=model,
            seq_id=seq,
            loss_fn="x",
            data=[pb.Datum(model_input=[chunk])],
        )
        return Request(model, seq, "forward_backward", body.SerializeToString())

    async def use(training: Training, ledger: Ledger) -> None:
        for name in ("long", "short"):
            created = Request(name, 0, "create_model", b"{}")
            await training.submit(created, Model(name, "s", name, 4, 1, ["attn"]))
        training.trainer_lost()
        for seq in range(1, 5):
            await training.submit(backward("long", seq, 900))
        for seq in range(1, 9):
            await training.submit(backward("short", seq, 100))
        training.trainer_up()
        await training.answer_of("long", 4, 30)

    asyncio.run(serve_until(tmp_path, Noting({}), use))
    assert order.index("long", 1) > 6
    assert order[:9].count("short") >= 7
