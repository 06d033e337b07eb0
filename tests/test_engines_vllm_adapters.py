"""Several adapters in vLLM do not notice each other."""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import DOWN_PROJ, Q_PROJ, SCALE, adapters, merged
from torch import Tensor
from vllm_house import World, vllm_house
from vllm_process import SECRET, vllm_process

from asyncrl.base.errors import AdapterMissing, EngineError, EngineLost
from asyncrl.base.http import Caller
from asyncrl.engines.openai_scope import Json
from asyncrl.extensions.vllm.vllm_process import lora_name
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.messages.engine_api import Interrupt, OpenAdapterRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl.messages.trainer_api import ExportChunkResponse
from asyncrl.weights.export import export_weights

pytestmark = [
    pytest.mark.extension("vllm"),
    pytest.mark.slow,
    pytest.mark.vllm,
]
RANKS = {"a": 4, "b": 8, "c": 4}
SPEC: dict[str, Any] = {"adapters": {"rank": 4, "scale": SCALE}, "max_adapters": 3}
FACTS = {"adapter_rank": 4, "adapter_scale": SCALE, "max_adapters": 3}
HEAD = "lm_head"
PROMPT = [10, 11, 12]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with vllm_house(tmp_path_factory.mktemp("vllm"), **SPEC) as world:
        # With its own head, which an adapter may change.
        world.model = copy.deepcopy(world.model)
        world.model.lm_head.weight = torch.nn.Parameter(
            world.base["model.embed_tokens.weight"].clone()
        )
        yield world


class Policies:
    """The adapters of one story: their weights, merged, and their pushes."""

    def __init__(self, world: World, server: VllmServer) -> None:
        self.world = world
        self.server = server
        embedding = world.base["model.embed_tokens.weight"]
        self.base = {**world.base, "lm_head.weight": embedding}
        self.merged: dict[str, dict[str, Tensor]] = {}
        self.opened = set[str]()

    async def open(self, name: str) -> list[str]:
        request = OpenAdapterRequest(adapter=name, rank=RANKS[name], scale=SCALE)
        self.opened.add(name)
        return (await self.server.open_adapter(request)).names

    def tensors(self, name: str, seed: int, *more: str) -> dict[str, Tensor]:
        """Make an adapter, and remember its merged weights."""
        modules = (Q_PROJ, DOWN_PROJ, *more)
        rank = RANKS.get(name, 4)
        tensors = adapters(self.world.model_path, modules, seed=seed, rank=rank)
        plain = {key: one for key, one in tensors.items() if HEAD not in key}
        weights = {**self.base, **merged(self.world.model_path, plain, torch.float32)}
        if HEAD in more:
            low_out, low_in = (tensors[f"{HEAD}.lora_{kind}.weight"] for kind in "BA")
            weights["lm_head.weight"] = self.base["lm_head.weight"] + SCALE * (
                low_out @ low_in
            )
        self.merged[name] = weights
        return tensors

    async def prepare(
        self, name: str, version: int, *, seed: int = 0, more: tuple[str, ...] = ()
    ) -> str:
        tensors = self.tensors(name, seed, *more)
        path = self.world.scratch / f"adapter-{name}.safetensors"
        canary = self.world.canary(self.merged[name])
        manifest = export_weights(tensors, path, version)
        changes = {"adapter": name, "canary": canary}
        digest = await self.server.prepare(manifest.model_copy(update=changes))
        assert digest == manifest.digest
        return digest

    async def push(
        self,
        name: str,
        version: int,
        interrupt: Interrupt = "abort",
        **how: Any,
    ) -> int:
        digest = await self.prepare(name, version, **how)
        answer = await self.server.commit(version, digest, interrupt, name)
        return answer.num_interrupted

    def sample(self, name: str, **fields: Any) -> asyncio.Future[SegmentPart]:
        request = self.world.request(adapter=name, **fields)
        return asyncio.ensure_future(self.server.generate_segment(request))

    async def started(
        self, name: str, max_tokens: int
    ) -> tuple[asyncio.Future[SegmentPart], list[SegmentPart]]:
        """Return a request that has its first token, and its chunks."""
        begun = asyncio.Event()
        chunks = list[SegmentPart]()

        def on_chunk(part: SegmentPart) -> None:
            chunks.append(part)
            begun.set()

        request = self.world.request(adapter=name, max_tokens=max_tokens)
        running = asyncio.ensure_future(
            self.server.generate_segment(request, on_chunk=on_chunk)
        )
        await begun.wait()
        return running, chunks

    def assert_right(
        self,
        part: SegmentPart,
        name: str,
        version: int,
        weights: dict[str, Tensor] | None = None,
        prompt_ids: list[int] = PROMPT,
    ) -> None:
        weights = weights or self.merged.get(name) or self.base
        gap = self.world.gap(weights, prompt_ids, part.token_ids, part.logprobs)
        assert gap <= 1e-4
        assert [span.version for span in part.sampled.spans] == [version]

    async def drop_all(self) -> None:
        for name in self.opened:
            await self.server.drop_adapter(name)


def test_adapters_of_one_step_equal_their_merged_weights(world: World) -> None:
    async def story(server: VllmServer) -> None:
        policies = Policies(world, server)
        for seed, name in enumerate(RANKS):
            await policies.open(name)
            more = (HEAD,) if name == "c" else ()
            others = [policies.sample(one, max_tokens=60) for one in policies.merged]
            await policies.push(name, 3 + seed, seed=seed, more=more)
            for one in others:
                assert (await one).finish_reason == "length"
        names = ["", *RANKS]
        parts = [
            policies.sample(name, max_tokens=40, seed=seed)
            for seed in range(2)
            for name in names
        ]
        for part, name in zip(parts, names * 2, strict=True):
            version = {"a": 3, "b": 4, "c": 5}.get(name, server.policy_version)
            policies.assert_right(await part, name, version)
        texts = {tuple((await part).token_ids) for part in parts}
        assert len(texts) == len(parts)
        await policies.drop_all()

    world.run(story, facts=FACTS)


def test_a_push_leaves_requests_of_other_adapters_whole(world: World) -> None:
    async def story(server: VllmServer) -> None:
        policies = Policies(world, server)
        for name in "ab":
            await policies.open(name)
            await policies.push(name, 1, seed=ord(name))
        moves: list[tuple[str, Interrupt]] = [("a", "abort"), ("a", "keep")]
        moves += [("a", "wait"), ("", "keep")]
        version = {"a": 1, "": server.policy_version}
        for seed, (name, interrupt) in enumerate(moves):
            old = version[name]
            version[name] += 1
            # Requests that are interrupted would not end by themselves.
            is_cut = interrupt != "wait"
            running, chunks = await policies.started(name, 2000 if is_cut else 60)
            before = policies.merged.get(name)
            of_b, chunks_b = await policies.started("b", 120)
            digest = await policies.prepare(name, version[name], seed=seed)
            committed = asyncio.ensure_future(
                server.commit(version[name], digest, interrupt, name)
            )
            await asyncio.sleep(0)
            late = policies.sample(name, max_tokens=10)
            assert (await committed).num_interrupted == is_cut
            policies.assert_right(await late, name, version[name])
            part = await running
            assert part.finish_reason == ("abort" if is_cut else "length")
            ids = [token for one in (*chunks, part) for token in one.token_ids]
            logprobs = [value for one in (*chunks, part) for value in one.logprobs]
            weights = before or policies.base
            assert world.gap(weights, PROMPT, ids, logprobs) <= 1e-4
            spans = {
                span.version for one in (*chunks, part) for span in one.tokens.spans
            }
            assert spans == {old}
            resumed = policies.sample(
                name, prompt_ids=[*PROMPT, *ids], num_resumed=len(ids), max_tokens=10
            )
            policies.assert_right(
                await resumed, name, version[name], prompt_ids=[*PROMPT, *ids]
            )
            last = await of_b
            assert last.finish_reason == "length"
            ids = [token for one in (*chunks_b, last) for token in one.token_ids]
            logprobs = [value for one in (*chunks_b, last) for value in one.logprobs]
            assert len(ids) == 120
            assert world.gap(policies.merged["b"], PROMPT, ids, logprobs) <= 1e-4
            told = (*chunks_b, last)
            assert {span.version for one in told for span in one.tokens.spans} == {1}
        for name in ("a", ""):
            digest = await policies.prepare(name, version[name] + 1, seed=9)
            with pytest.raises(EngineError, match=f"KV cache of adapter '{name}'"):
                await server.commit(version[name] + 1, digest, "keep_kv", name)
        # It serves what it served before.
        policies.tensors("a", 2)
        policies.assert_right(await policies.sample("a"), "a", version["a"])
        await policies.drop_all()

    world.run(story, facts=FACTS)


def test_requests_and_pushes_of_missing_adapters_are_refused(world: World) -> None:
    async def story(server: VllmServer) -> None:
        policies = Policies(world, server)
        assert await policies.open("a") == ["", "a"]
        for name in ("a", "nobody"):
            with pytest.raises(AdapterMissing, match=f"'{name}'.*'', 'a'"):
                await policies.sample(name)
        for refused in (policies.prepare("nobody", 1), server.drop_adapter("nobody")):
            with pytest.raises(EngineError, match="'nobody' has no .*'', 'a'"):
                await refused
        with pytest.raises(EngineError, match="'nobody' has no weights here"):
            await server.commit(1, "", "abort", "nobody")
        large = OpenAdapterRequest(adapter="large", rank=16, scale=1.0)
        with pytest.raises(EngineError, match="rank 16.*max_lora_rank=8"):
            await server.open_adapter(large)
        await policies.open("b")
        await policies.open("c")
        for name in ("a", "d"):
            request = OpenAdapterRequest(adapter=name, rank=4, scale=1.0)
            with pytest.raises(EngineError, match="open are.*'a', 'b', 'c'"):
                await server.open_adapter(request)
        await policies.push("a", 7)
        running, _ = await policies.started("a", 2000)
        of_own, _ = await policies.started("", 40)
        await server.drop_adapter("a")
        assert (await running).finish_reason == "abort"
        assert (await of_own).finish_reason == "length"
        with pytest.raises(AdapterMissing, match="'a' has no weights here"):
            await policies.sample("a")
        await policies.open("a")
        with pytest.raises(AdapterMissing, match="'a' has no weights here"):
            await policies.sample("a")
        await policies.push("a", 1, seed=1)
        policies.assert_right(await policies.sample("a"), "a", 1)
        # vLLM leaves layers out that it does not know.
        tensors = {
            name.replace("model.", "model.text."): one
            for name, one in policies.tensors("b", 0).items()
        }
        manifest = export_weights(tensors, world.scratch / "unknown.safetensors", 1)
        manifest = manifest.model_copy(update={"adapter": "b"})
        digest = await server.prepare(manifest)
        with pytest.raises(EngineError, match="uses no adapters of 2 layers.*'b'"):
            await server.commit(1, digest, "abort", "b")
        with pytest.raises(AdapterMissing, match="'b' has no weights here"):
            await policies.sample("b")
        await policies.push("b", 1)
        for name in "ab":
            policies.assert_right(await policies.sample(name), name, 1)
        await policies.drop_all()

    world.run(story, facts=FACTS)


def test_prefixes_are_shared_only_within_an_adapter_version(world: World) -> None:
    # More than two blocks of the prefix cache.
    prompt = [(7 * index) % 90 for index in range(300)]

    async def story(server: VllmServer) -> None:
        policies = Policies(world, server)

        async def check(name: str, version: int) -> None:
            for _ in range(2):
                part = await policies.sample(name, prompt_ids=prompt, max_tokens=3)
                policies.assert_right(part, name, version, prompt_ids=prompt)

        for seed, name in enumerate("ab"):
            await policies.open(name)
            await policies.push(name, 1, seed=seed)
            await check(name, 1)
        await policies.push("a", 2, seed=2)
        await check("a", 2)
        await check("b", 1)
        await server.drop_adapter("a")
        await policies.open("a")
        await policies.push("a", 2, seed=3)
        await check("a", 2)
        await policies.drop_all()

    world.run(story, facts=FACTS)


def test_an_adapter_that_vllm_lost_is_loaded_again(world: World) -> None:
    async def story(server: VllmServer) -> None:
        policies = Policies(world, server)
        await policies.open("a")
        await policies.push("a", 1)
        caller = Caller("another client", world.process.url, SECRET)

        async def unload() -> None:
            body = Json({"lora_name": lora_name("a")})
            await caller.read("POST", "/v1/unload_lora_adapter", body, 60)

        await unload()
        parts = [policies.sample("a", seed=seed) for seed in range(2)]
        for part in parts:
            policies.assert_right(await part, "a", 1)
        await unload()
        for folder in world.process.scratch().glob("adapter-*"):
            shutil.rmtree(folder)
        for _ in range(2):
            with pytest.raises(AdapterMissing):
                await policies.sample("a")
        await policies.push("a", 1)
        policies.assert_right(await policies.sample("a"), "a", 1)
        await policies.drop_all()
        await caller.aclose()

    world.run(story, facts=FACTS)


def test_chunks_and_a_sleep_bring_adapters(world: World) -> None:
    async def story(server: VllmServer) -> None:
        policies = Policies(world, server)
        await policies.open("a")
        tensors = policies.tensors("a", 4)
        path = world.scratch / "chunk.safetensors"
        whole = export_weights(tensors, path, 1).model_dump(
            exclude={"is_held", "memory", "canary"}
        )
        chunk = ExportChunkResponse(
            **whole | {"adapter": "a"},
            index=0,
            is_last=True,
            whole_digest=whole["digest"],
        )
        assert await server.load_chunk(chunk) == chunk.digest
        await server.commit(1, chunk.digest, "abort", "a")
        policies.assert_right(await policies.sample("a"), "a", 1)
        await policies.open("b")
        await policies.push("b", 1, seed=5)
        await server.sleep()
        await server.wake(["weights"])
        waits = policies.sample("a")
        await policies.push("a", 2, seed=6)
        own = server.policy_version + 1
        await policies.push("", own, seed=7)
        await server.wake(["kv"])
        policies.assert_right(await waits, "a", 2)
        for name, version in (("", own), ("a", 2), ("b", 1)):
            policies.assert_right(await policies.sample(name), name, version)
        await policies.drop_all()

    world.run(story, facts={**FACTS, "stays": True})


def test_a_new_process_has_no_adapters(tmp_path: Path) -> None:
    with vllm_house(tmp_path, **SPEC) as world:

        async def story(server: VllmServer) -> None:
            policies = Policies(world, server)
            await policies.open("a")
            await policies.push("a", 4)
            running = policies.sample("a", max_tokens=2000)
            policies.assert_right(await policies.sample("a"), "a", 4)
            world.process.process.kill()
            with pytest.raises(EngineLost):
                await running
            world.process.wait_group_ended()
            server.reset_nowait()
            spec = {
                **SPEC,
                "name": "engine-0",
                "model_path": str(world.model_path),
                "max_length": 2600,
                "slots": 4,
            }
            port = int(world.process.url.rpartition(":")[2])
            with vllm_process(spec, tmp_path / "again", port):
                await server.ready(400)
                with pytest.raises(AdapterMissing, match="'a' has no weights here"):
                    await policies.sample("a")
                await policies.open("a")
                await policies.push("a", 4)
                policies.assert_right(await policies.sample("a"), "a", 4)

        world.run(story, facts=FACTS)
