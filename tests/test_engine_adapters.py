"""Several adapters in the embedded engine do not notice each other."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import (
    OF_PEFT,
    assert_of_peft,
    drop_adapter,
    open_adapter,
    push,
    spec,
    tensors_of,
)
from engine_cases import iterate_until, segments_of
from engine_in_process import drawn, make_qwen3, make_request, make_spec, stage_file
from engine_processes import SECRET, engine_process
from engine_replies import Reply, ask
from model_zoo import make_config, random_model

from asyncrl.base.errors import AdapterMissing
from asyncrl.base.http import Caller, Refused
from asyncrl.engines.engine import EngineServer
from asyncrl.messages.engine_api import (
    CommitRequest,
    CommitResponse,
    DropAdapterRequest,
    LoadChunkRequest,
    OpenAdapterRequest,
    PrepareRequest,
    WakeRequest,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.models.low_rank import LowRank, noted_calls
from asyncrl.weights.tensor_files import SUFFIXES
from asyncrl_servers.embedded import decoder
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine
from asyncrl_servers.embedded.row_adapters import (
    RANK_STEP,
    Adapter,
    Added,
    JoinedAdapters,
    adapted,
    padded,
)
from asyncrl_servers.embedded.runner import Runner

pytestmark = OF_PEFT
RANKS = {"a": 4, "b": 8, "c": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("model") / "qwen3")


def make_engine(folder: Path, **overrides: Any) -> Engine:
    fields = {"adapters": spec(), "max_adapters": 3, "slots": 12, **overrides}
    return build_engine(make_spec(folder, **fields))


def served(folder: Path, scratch: Path, *names: str, **overrides: Any) -> Engine:
    """An engine with version 1 of these adapters."""
    engine = make_engine(folder, **overrides)
    for seed, (name, rank) in enumerate(RANKS.items()):
        if name in names:
            open_adapter(engine, name, rank)
            tensors = tensors_of(folder, seed, rank)
            iterate_until(engine, push(engine, name, tensors, 1, scratch))
    return engine


def request_to(adapter: str, **fields: Any) -> SamplingRequest:
    given = {"max_tokens": 40, **fields}
    return make_request(given.pop("request_id", adapter), adapter=adapter, **given)


def mixed(names: str) -> list[SamplingRequest]:
    """Requests of all adapters and lengths, and of the run's own adapter."""
    return [
        request_to(
            name,
            request_id=f"{name} {turn}",
            prompt_ids=(1, 2 + turn, 3) * (1 + 13 * turn),
            max_tokens=12 + 9 * turn + at,
            seed=turn,
        )
        for turn in range(3)
        for at, name in enumerate(["", *names])
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_adapters_have_the_bits_of_each_alone(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    engine = served(folder, tmp_path, *RANKS, dtype=dtype, deterministic=True)
    wanted = [request_to(name) for name in RANKS]
    answers = segments_of(engine, *wanted, *mixed("abc"))
    for seed, (name, rank) in enumerate(RANKS.items()):
        only = make_engine(folder, adapters=spec(rank), max_adapters=0, dtype=dtype)
        tensors = tensors_of(folder, seed, rank)
        iterate_until(only, push(only, "", tensors, 1, tmp_path))
        (alone,) = segments_of(only, request_to(""))
        assert drawn(answers[seed]) == drawn(alone)
        if dtype == "float32":
            assert_of_peft(answers[seed], folder, tensors, tmp_path / name)
    assert len({tuple(one.token_ids) for one in answers[:3]}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_adapters_have_the_bits_of_each_alone(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    """Two blocks of adapters, with other ranks, scales and layers in one block."""
    engine = make_engine(folder, max_adapters=6, dtype=dtype, deterministic=True)
    ranks = {"a": 4, "b": 8, "c": 16, "d": 20, "e": 4, "f": 1}
    for seed, (name, rank) in enumerate(ranks.items()):
        targets = ["q_proj"] if name == "b" else ["q_proj", "down_proj", "lm_head"]
        request = OpenAdapterRequest(
            adapter=name, rank=rank, scale=0.3 + seed, targets=targets
        )
        iterate_until(engine, engine.open_adapter(request))
        kept = engine.weights_of(name).adapters[""].tensors
        tensors = {
            key: one
            for key, one in tensors_of(folder, seed, rank).items()
            if key in kept
        }
        iterate_until(engine, push(engine, name, tensors, 1, tmp_path))
    requests = [request_to(name, max_tokens=12) for name in ["", *ranks]]
    together = segments_of(engine, *requests)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = segments_of(engine, request)
        assert drawn(answer) == drawn(alone), request.adapter
    assert len({tuple(one.token_ids) for one in together}) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 96), (640, 1920), (1920, 640), (1024, 1024)])
def test_joined_layers_have_the_bits_of_each_alone(
    dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    num_in, num_out = sizes
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=generator)
    for ranks in ((4, 8, 16, 1, 32), (64, 64, 20), (16,) * 16):
        adapters = list[Adapter]()
        for rank in ranks:
            width = padded(rank, RANK_STEP)
            down, up = torch.zeros(width, num_in), torch.zeros(num_out, width)
            down[:rank], up[:, :rank] = random(rank, num_in), random(num_out, rank)
            low_rank = LowRank(down.to(dtype), up.to(dtype), 0.3 * rank)
            adapters.append(Adapter({"layer": low_rank}, rank))
        owners = [adapters[row % len(adapters)] for row in range(30)]
        x, product = random(32, num_in).to(dtype), random(32, num_out).to(dtype)
        added = Added("layer", is_head=False, own=None)
        several = JoinedAdapters().of_rows(owners, len(x))
        with adapted(several, None):
            found = added.add(product.clone(), x)
        assert torch.equal(found[30:], product[30:]), "padding"
        for number, adapter in enumerate(adapters):
            alone = JoinedAdapters().of_rows([adapter], len(x))
            with adapted(alone, None):
                expected = added.add(product.clone(), x)
            own = slice(number, 30, len(adapters))
            assert torch.equal(found[own], expected[own]), (ranks, number)


def test_joined_adapters_follow_pushes(folder: Path, tmp_path: Path) -> None:
    engine = served(folder, tmp_path, "a", "b")
    requests = [request_to("a", max_tokens=8), request_to("b", max_tokens=8)]
    before = segments_of(engine, *requests)
    tensors = tensors_of(folder, 9, 8)
    iterate_until(engine, push(engine, "b", tensors, 2, tmp_path))
    of_a, of_b = segments_of(engine, *requests)
    (alone,) = segments_of(engine, requests[1])
    assert drawn(of_a) == drawn(before[0])
    assert drawn(of_b) == drawn(alone) != drawn(before[1])


def test_joined_copies_end_with_a_drop_and_a_sleep(
    folder: Path, tmp_path: Path
) -> None:
    engine = served(folder, tmp_path, "a", "b")
    requests = [request_to("a", max_tokens=3), request_to("b", max_tokens=3)]
    copies = []
    drop = partial(engine.drop_adapter, DropAdapterRequest(adapter="b"))
    for end in (drop, engine.sleep):
        assert not engine.runner.joined.layers
        segments_of(engine, *requests)
        layer = engine.runner.joined.layers["lm_head"]
        copies.append(weakref.ref(layer.up))
        del layer
        iterate_until(engine, end())
        requests[1] = request_to("", max_tokens=3)
    assert [copy() for copy in copies] == [None, None]


def test_layers_with_some_tokens_refuse_several_adapters(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts that are modules of their own."""

    @contextmanager
    def noted(model: Any) -> Any:
        with noted_calls(model) as called:
            yield called
        called["model.layers.#.mlp.down_proj"].add(7)

    monkeypatch.setattr(decoder, "noted_calls", noted)
    engine = make_engine(folder, adapters=spec(4, "q_proj"))
    opened = engine.open_adapter(OpenAdapterRequest(adapter="a", **spec()))
    iterate_until(engine, opened)
    with pytest.raises(Refused, match="layers.0.mlp.down_proj") as refusal:
        opened.result()
    assert refusal.value.status == 422
    other = OpenAdapterRequest(adapter="a", **spec(4, "q_proj", "lm_head"))
    opened = engine.open_adapter(other)
    iterate_until(engine, opened)
    assert opened.result().names == ["", "a"]


def test_a_generic_forward_has_the_bits_of_each_alone(
    folder: Path, tmp_path: Path
) -> None:
    engine = served(folder, tmp_path, "a", "b", deterministic=True)
    plain = segments_of(engine, *mixed("ab"))
    engine = served(folder, tmp_path, "a", "b", deterministic=True)
    engine.runner.plain = None
    generic = segments_of(engine, *mixed("ab"))
    for one, other, request in zip(plain, generic, mixed("ab"), strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-4
        )
        (alone,) = segments_of(engine, request)
        assert drawn(other) == drawn(alone)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "gemma3_text"])
def test_adapters_of_other_families_are_added_by_row(name: str, tmp_path: Path) -> None:
    config = make_config(name)
    config.get_text_config().eos_token_id = None
    random_model(config, 0).save_pretrained(tmp_path / "model")
    every = {"rank": 4, "scale": 1.0, "targets": "all-linear"}
    engine = build_engine(
        make_spec(tmp_path / "model", adapters=every, max_adapters=2, slots=12)
    )
    for seed, one in enumerate("ab"):
        opened = engine.open_adapter(OpenAdapterRequest(adapter=one, **every))
        iterate_until(engine, opened)
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            key: torch.randn(tensor.shape, generator=generator) * 0.1
            for key, tensor in engine.weights_of(one).adapters[""].tensors.items()
        }
        iterate_until(engine, push(engine, one, tensors, 1, tmp_path))
    found = segments_of(engine, *mixed("ab"))
    for part, request in zip(found, mixed("ab"), strict=True):
        (alone,) = segments_of(engine, request)
        assert part.token_ids == alone.token_ids
        torch.testing.assert_close(
            torch.tensor(part.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-4
        )
    assert len({tuple(one.token_ids[:12]) for one in found[:3]}) == 3


def test_the_check_at_start_reads_several_adapters(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[tuple[int, ...]]()
    step = Runner.step

    def noted(self: Any, *of: Any, adapters: Any = (), **named: Any) -> torch.Tensor:
        ranks = [one.rank for one in adapters[:4]]
        seen.add(tuple(ranks))
        return step(self, *of, adapters=adapters, **named)

    monkeypatch.setattr(Runner, "step", noted)
    engine = make_engine(folder)
    assert (4, 8, 32, 4) in seen
    assert engine.runner.is_exact
    assert not any(one.any() for one in engine.weights.adapters[""].tensors.values())


def halfway(engine: Engine, *requests: SamplingRequest) -> list[Reply]:
    replies = [*ask(engine, requests, ends=False)]
    for _ in range(15):
        engine.iterate()
    return replies


@pytest.mark.parametrize("interrupt", ["abort", "keep", "keep_kv", "wait"])
def test_a_push_does_not_touch_other_adapters(
    folder: Path, tmp_path: Path, interrupt: str
) -> None:
    engine = served(folder, tmp_path, "a", "b")
    (alone,) = segments_of(engine, request_to("a"))
    of_a, of_b, other_a = halfway(
        engine, request_to("a"), request_to("b"), request_to("a", seed=1)
    )
    committed = push(engine, "b", tensors_of(folder, 9, 8), 2, tmp_path, interrupt)
    late = ask(engine, [request_to("b", max_tokens=3)])
    iterate_until(engine, of_a, other_a, committed)
    assert drawn(of_a.result()) == drawn(alone)
    assert [row.then for row in of_a.rows] == ["length"], "not interrupted"
    assert [span.version for span in of_a.result().tokens.spans] == [1]
    assert committed.result().num_interrupted == (interrupt != "wait")
    if interrupt == "abort":
        assert [row.then for row in of_b.rows] == ["interrupted"]
        of_b.resume()
    iterate_until(engine, of_b, *late)
    versions = [1] if interrupt == "wait" else [1, 2]
    spans = [span.version for row in of_b.rows for span in row.tokens.spans]
    assert spans == versions
    assert [span.version for span in late[0].result().tokens.spans] == [2]
    (again,) = segments_of(engine, request_to("a"))
    assert drawn(again) == drawn(alone)


def read_by(engine: Engine, request: SamplingRequest) -> int:
    """Sample, and return the number of tokens that were read before the first one."""
    num_read = list[int]()
    step = engine.runner.step

    def counted(jobs: Any, *how: Any, **named: Any) -> torch.Tensor:
        num_read.extend(len(ids) - first for _, ids, first in jobs)
        return step(jobs, *how, **named)

    engine.runner.step = counted  # type: ignore[method-assign]
    segments_of(engine, request)
    engine.runner.step = step  # type: ignore[method-assign]
    return sum(num_read)


def test_prefixes_are_shared_only_within_an_adapter_version(
    folder: Path, tmp_path: Path
) -> None:
    engine = served(folder, tmp_path, "a", "b", num_kept=8)
    prompt = tuple(range(2, 47)) * 2

    def asked(name: str) -> SamplingRequest:
        return request_to(name, prompt_ids=prompt, max_tokens=2)

    assert [read_by(engine, asked(name)) for name in ("a", "b", "")] == [90, 90, 90]
    assert [read_by(engine, asked(name)) for name in ("a", "b", "")] == [1, 1, 1]
    tensors = tensors_of(folder, 9, 8)
    iterate_until(engine, push(engine, "b", tensors, 2, tmp_path))
    assert [read_by(engine, asked(name)) for name in ("b", "a", "")] == [90, 1, 1]
    drop_adapter(engine, "b")
    open_adapter(engine, "b", 8)
    iterate_until(engine, push(engine, "b", tensors_of(folder, 1, 8), 1, tmp_path))
    assert read_by(engine, asked("b")) == 90
    # Also those that run, and that arrive in one step.
    replies = ask(engine, [asked(name) for name in ("a", "b", "", "a", "b")])
    iterate_until(engine, *replies)
    fresh = served(folder, tmp_path, "a", "b")
    expected = [
        drawn(segments_of(fresh, asked(name))[0]) for name in ("a", "b", "", "a", "b")
    ]
    assert [drawn(one.result()) for one in replies] == expected


def test_requests_without_an_adapter_are_refused(folder: Path, tmp_path: Path) -> None:
    engine = served(folder, tmp_path, "a")
    assert open_adapter(engine, "b", 8) == ["", "a", "b"]
    for name, status in (("nobody", 404), ("b", 409)):
        (reply,) = ask(engine, [request_to(name)])
        iterate_until(engine, reply)
        with pytest.raises(Refused, match=f"{name}.*'a', 'b'") as refusal:
            reply.result()
        assert refusal.value.status == status
    with pytest.raises(Refused, match="nobody"):
        engine.weights_of("nobody")
    commit = engine.commit(CommitRequest(adapter="nobody", version=1, digest=""))
    iterate_until(engine, commit)
    with pytest.raises(Refused, match="nobody"):
        commit.result()


def test_more_adapters_than_the_limit_are_refused(folder: Path, tmp_path: Path) -> None:
    engine = served(folder, tmp_path, "a", "b", max_adapters=2)
    for name in ("c", "a"):
        with pytest.raises(Refused, match=f"{name}.* open are \\['', 'a', 'b'\\]"):
            open_adapter(engine, name)
    assert drop_adapter(engine, "a") == ["", "b"]
    assert open_adapter(engine, "c", 16) == ["", "b", "c"]
    drop_adapter(engine, "c")
    request = OpenAdapterRequest(adapter="d", rank=2, scale=1.0, targets=["nonesuch"])
    opened = engine.open_adapter(request)
    iterate_until(engine, opened)
    with pytest.raises(Refused, match="no layer nonesuch"):
        opened.result()


def test_dropped_adapter_ends_its_requests_only(folder: Path, tmp_path: Path) -> None:
    engine = served(folder, tmp_path, "a", "b", slots=3)
    (alone,) = segments_of(engine, request_to("a"))
    of_a, running = halfway(engine, request_to("a"), request_to("b"))
    waits = push(engine, "b", tensors_of(folder, 9, 8), 2, tmp_path, "wait")
    queued, late = ask(engine, [request_to("b")]), Reply(engine, request_to("b"))
    drop_adapter(engine, "b")
    engine.submit([late.run])
    iterate_until(engine, of_a, running, waits, late, *queued)
    assert drawn(of_a.result()) == drawn(alone)
    assert 0 < len(running.result().token_ids) < 40
    assert {running.result().finish_reason, queued[0].result().finish_reason} == {
        "abort"
    }
    assert waits.result().version == 2, "as for a sleep"
    with pytest.raises(Refused, match="'b' has no weights here"):
        late.result()
    with pytest.raises(Refused, match="'b' has no weights here"):
        drop_adapter(engine, "b")


def test_interrupted_requests_of_a_dropped_adapter_end(
    folder: Path, tmp_path: Path
) -> None:
    engine = served(folder, tmp_path, "b", slots=1)
    (reply,) = halfway(engine, request_to("b"))
    tensors = tensors_of(folder, 9, 8)
    iterate_until(engine, push(engine, "b", tensors, 2, tmp_path))
    assert [row.then for row in reply.rows] == ["interrupted"]
    drop_adapter(engine, "b")
    iterate_until(engine, reply)
    assert reply.result().finish_reason == "abort"
    reply.resume()
    assert segments_of(engine, request_to("")), "its slot is free"


def test_every_adapter_waits_for_its_push_after_a_sleep(
    folder: Path, tmp_path: Path
) -> None:
    engine = served(folder, tmp_path, "a", "b", aside_dir=tmp_path)
    before = segments_of(engine, request_to("a"), request_to("b"))
    of_a, of_b = halfway(engine, request_to("a"), request_to("b"))
    parts = WakeRequest(parts=["weights", "kv"])
    iterate_until(engine, engine.sleep(), engine.wake(parts))
    assert {row.then for one in (of_a, of_b) for row in one.rows} == {"interrupted"}
    of_a.resume()
    of_b.resume()
    (refused,) = ask(engine, [request_to("a")])
    iterate_until(engine, refused)
    assert refused.exception(timeout=0).status == 409  # type: ignore[union-attr]
    for seed, name in enumerate("ab"):
        tensors = tensors_of(folder, seed, RANKS[name])
        iterate_until(engine, push(engine, name, tensors, 1, tmp_path))
    iterate_until(engine, of_a, of_b)
    for one, whole in zip((of_a, of_b), before, strict=True):
        assert drawn(one.result()) == drawn(whole)


def test_chunks_bring_a_new_adapter(folder: Path, tmp_path: Path) -> None:
    engine = served(folder, tmp_path, "a")
    (of_a,) = halfway(engine, request_to("a"))
    open_adapter(engine, "b", 8)
    tensors = tensors_of(folder, 1, 8)
    staged = stage_file(tensors, 1, tmp_path).model_dump(exclude={"member"})
    chunk = LoadChunkRequest(**staged | {"adapter": "b"}, index=0, is_last=True)
    engine.weights_of("b").load_chunk(chunk)
    commit = CommitRequest(adapter="b", version=1, digest=chunk.digest)
    iterate_until(engine, engine.commit(commit), of_a)
    assert [row.then for row in of_a.rows] == ["length"]
    expected = segments_of(served(folder, tmp_path, "b"), request_to("b"))
    assert drawn(segments_of(engine, request_to("b"))[0]) == drawn(expected[0])


def test_a_diverged_adapter_ends_only_its_requests(
    folder: Path, tmp_path: Path
) -> None:
    engine = served(folder, tmp_path, "a", "b", slots=2, num_kept=2)
    expected = segments_of(engine, *mixed("a"))
    of_a, of_b = halfway(engine, request_to("a"), request_to("b"))
    (alone,) = segments_of(served(folder, tmp_path, "a"), request_to("a"))
    broken = {
        key: one * torch.nan if key.endswith(SUFFIXES[1]) else one
        for key, one in tensors_of(folder, 1, 8).items()
    }
    iterate_until(engine, push(engine, "b", broken, 2, tmp_path, "keep_kv"), of_a, of_b)
    assert drawn(of_a.result()) == drawn(alone)
    with pytest.raises(Refused, match="'b'.*policy_version 2.*non-finite"):
        of_b.result()
    found = segments_of(engine, *mixed("a"))
    assert [*map(drawn, found)] == [*map(drawn, expected)]


async def push_to(engine: EngineServer, staged: PrepareRequest) -> CommitResponse:
    manifest = ExportResponse(**staged.model_dump(exclude={"member"}))
    digest = await engine.prepare(manifest)
    return await engine.commit(staged.version, digest, "keep", staged.adapter)


async def versions_of_adapters(folder: Path, scratch: Path, caller: Caller) -> None:
    engine = EngineServer(caller)
    for name in ("a", "b"):
        await engine.open_adapter(OpenAdapterRequest(adapter=name, **spec(8)))
        with pytest.raises(AdapterMissing, match=f"'{name}'.*'a'"):
            await engine.generate_segment(request_to(name))
        staged = stage_file(tensors_of(folder, 1, 8), 7, scratch)
        await push_to(engine, staged.model_copy(update={"adapter": name}))
    endless = request_to("a", max_tokens=4000)
    running = asyncio.ensure_future(engine.generate_segment(endless))
    first, again, own = await asyncio.gather(
        *map(engine.generate_segment, map(request_to, ("a", "b", "")))
    )
    assert drawn(first) == drawn(again) != drawn(own)
    assert [one.tokens.spans[0].version for one in (first, own)] == [7, 0]
    # Version 0 has been confirmed for the run's own, and 7 for the others.
    staged = stage_file(tensors_of(folder, 2, 8), 8, scratch)
    newer = staged.model_copy(update={"adapter": "b"})
    assert (await push_to(engine, newer)).num_interrupted == 0
    part = await engine.generate_segment(request_to("b"))
    assert part.tokens.spans[0].version == 8
    await engine.drop_adapter("a")
    assert (await running).finish_reason == "abort"
    with pytest.raises(AdapterMissing, match="'a' has no weights here"):
        await engine.generate_segment(request_to("a"))
    await engine.open_adapter(OpenAdapterRequest(adapter="a", **spec(8)))
    staged = stage_file(tensors_of(folder, 1, 8), 1, scratch)
    await push_to(engine, staged.model_copy(update={"adapter": "a"}))
    part = await engine.generate_segment(request_to("a"))
    assert part.tokens.spans[0].version == 1, "it begins again"
    assert part.logprobs == first.logprobs
    engine.disconnect_nowait()


def test_the_client_knows_a_version_for_each_adapter(
    folder: Path, tmp_path: Path
) -> None:
    fields = {"adapters": spec(), "max_adapters": 2, "max_length": 4096}
    body = make_spec(folder, **fields).model_dump(mode="json")

    async def story(url: str) -> None:
        async with aclosing(Caller("engine-0", url, SECRET)) as caller:
            await versions_of_adapters(folder, tmp_path, caller)

    with engine_process("embedded", body, tmp_path / "server") as child:
        asyncio.run(story(child.url))
