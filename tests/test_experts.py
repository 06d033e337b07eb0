"""Models with experts: exported and loaded by the names of the checkpoint, and replayed
routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from costly_cases import slow
from engine_in_process import (
    answered,
    make_request,
    publish,
    running_engine,
    stage_file,
)
from engine_in_process import make_spec as engine_spec
from engine_replies import ask
from gateway_cases import HI, ByteTokenizer, in_loop, talking
from job_runs import read_lines, run, write_config
from model_zoo import TYPES, make_config, random_model
from rank_processes import running
from safetensors.torch import load_file
from segment_cases import chunk, rest
from segment_cases import make_request as segment_request
from tiny_model import MOE, SHAPE, STACKED, make_tiny_moe
from torch import Tensor
from trainer_cases import changed, learned, make_batch, make_spec, weights_digest
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3PreTrainedModel,
)
from vllm_house import CANARY_LIMIT, World
from vllm_process import vllm_process
from weight_cases import chunks_of, prepare_request

from asyncrl.base.errors import ConfigError
from asyncrl.engines.link import SegmentCheck
from asyncrl.engines.pool import EnginePool, SegmentJoin
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.journal.read import read_batch, reading
from asyncrl.journal.schema import (
    decode_partial,
    decode_trajectory,
    encode_partial,
    encode_trajectory,
)
from asyncrl.messages.engine_api import (
    CommitRequest,
    Interrupt,
)
from asyncrl.messages.records import (
    Batch,
    Completion,
    Group,
    GroupId,
    Outcome,
    Prompt,
    Trajectory,
    VersionSpan,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import NO_EXPERT, ROUTING, SegmentPart, Tokens
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.rollouts.rollout import make_trajectory
from asyncrl.trainer.model.build_model import RouterReplay
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.trainer_client import pack_groups
from asyncrl.weights.export import TrainerEnd, named_weights, routers_of
from asyncrl.weights.nccl import BroadcastTransport
from asyncrl.weights.tensor_files import digest_tensors
from asyncrl_servers.embedded import embedded_engine
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine
from asyncrl_servers.embedded.kv_attention import RoutedExperts


@pytest.mark.parametrize("model_type", STACKED)
def test_every_way_out_names_experts_alike(tmp_path: Path, model_type: str) -> None:
    folder = make_tiny_moe(tmp_path / "model", model_type, **STACKED[model_type])
    stored = load_file(folder / "model.safetensors")
    step = make_step(folder, tmp_path)
    assert any(
        one.endswith(".experts.gate_up_proj")
        for one in named_weights(step.policy.model)
    ), "stacked"
    before = load_file(step.begin_export(tmp_path / "v0.safetensors")().path)
    assert before.keys() == stored.keys()
    assert all(torch.equal(before[name], one) for name, one in stored.items())
    step.train(*make_batch())
    answer = step.begin_export(tmp_path / "v1.safetensors")()
    whole, chunks = load_file(answer.path), chunks_of(step)
    assert (answer.num_tensors, answer.digest) == (len(whole), digest_tensors(whole))
    assert len(chunks) > 2
    in_chunks = {
        name: tensor for _, tensors in chunks for name, tensor in tensors.items()
    }
    step.save(tmp_path / "saved")
    for found in (in_chunks, load_file(tmp_path / "saved" / "model.safetensors")):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], one) for name, one in whole.items())
    assert chunks[-1][0].whole_digest == answer.digest
    broadcast = BroadcastTransport(
        TrainerEnd(torch.device("cpu"), torch.float32, 10_000)
    )
    held = broadcast.begin(1, step.exports.pushed(), tmp_path).result()
    assert (held.digest, held.num_tensors) == (answer.digest, answer.num_tensors)


def make_step(folder: Path, scratch: Path, **values: Any) -> TrainerRank:
    (scratch / "staging").mkdir(exist_ok=True)
    return TrainerRank(make_spec(folder, scratch, **{"chunk_bytes": 10_000, **values}))


def test_float32_router_is_pushed_unrounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.24 has DeepSeek-V3's router in float32 in a bfloat16 model."""
    kept = ["e_score_correction_bias", "gate.weight"]
    monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keep_in_fp32_modules_strict", kept)
    folder = make_tiny_moe(tmp_path / "model", "deepseek_v3", **STACKED["deepseek_v3"])
    name = "model.layers.1.mlp.gate.weight"
    values = {"dtype": "bfloat16", "trainer": {"learning_rate": 1e-3}}
    step = make_step(folder, tmp_path, **values)
    step.train(*make_batch())
    answer = step.begin_export(tmp_path / "v1.safetensors")()
    router = load_file(answer.path)[name]
    assert not torch.equal(router, router.bfloat16().float())
    with running_engine(folder, dtype="bfloat16") as engine:
        publish(engine, prepare_request(answer))
        assert engine.weights.digest == answer.digest


# ---- router replay


def read_after(
    cache: DynamicCache, folder: Path, token_ids: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the experts int64 [T, E] and logprobs [T, V] of transformers' own forward,
    after the keys and values of `cache`, which it extends.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen = list[Tensor]()
    for router in routers_of(model):
        router.register_forward_hook(lambda _, inputs, found: chosen.append(found[2]))
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), cache=cache).logits[0]
    return torch.cat(chosen, dim=1), logits.log_softmax(-1)


def chosen_by(folder: Path, token_ids: list[int]) -> Tensor:
    return read_after(DynamicCache(), folder, token_ids)[0]


def read_by(tokens: Tokens) -> Tensor:
    """int64 [T - 1, E]: the experts that read each token but the last, recorded with
    the token after it.
    """
    routing = tokens.columns[ROUTING]
    assert (routing[0] == NO_EXPERT).all()
    return torch.from_numpy(routing[1:].astype(np.int64))


def test_engine_tells_which_experts_read_each_token(tmp_path: Path) -> None:
    """Also prompts that share the start of a slot, and the number of experts of
    Kimi-K2.
    """
    folder = make_tiny_moe(tmp_path / "model", **MOE | {"num_experts": 384})
    head = tuple(range(6, 46))
    prompts = [(7, 8, 9), head, head, (*head[:35], 9, 9), (14,)]
    with running_engine(
        folder, deterministic=False, returns_routing=True, slots=3
    ) as engine:
        requests = [
            make_request(str(at), prompt_ids=one, seed=at)
            for at, one in enumerate(prompts)
        ]
        answers = [future.result(timeout=60) for future in ask(engine, requests)]
        answers.append(answered(engine, prompt_ids=head, seed=9))
    for prompt, answer in zip([*prompts, head], answers, strict=True):
        expected = chosen_by(folder, [*prompt, *answer.token_ids])
        made = routed_trajectory(prompt, answer)
        assert torch.equal(read_by(made.tokens), expected[:-1])
        known = read_by(decode_trajectory(encode_trajectory(0, made), 0, 0, 0).tokens)
        assert torch.equal(known, expected[:-1]), "by way of the journal"
        assert known.max() > 255


class SteppedServer:
    """An engine of this process as a pool's server. It pushes after `push_in` steps."""

    def __init__(self, folder: Path, push: Callable[[], None]) -> None:
        self.name, self.push_in, self.push = "engine-0", 0, push
        spec = engine_spec(folder, deterministic=False, returns_routing=True)
        self.engine = build_engine(spec)
        self.is_streamed = False

    @property
    def policy_version(self) -> int:
        return self.engine.weights.version

    async def generate_segment(
        self, request: SamplingRequest, *, on_chunk: Any, on_interrupted: Any
    ) -> SegmentPart:
        how = {"is_streamed": self.is_streamed, "ends": False}
        (reply,) = ask(self.engine, [request], **how)
        check = SegmentCheck(self.name, request, oldest=self.policy_version)
        while True:
            await asyncio.sleep(0)
            self.engine.iterate()
            self.push_in -= 1
            if self.push_in == 0:
                self.push()
            rows, reply.rows = reply.rows, []
            for row in rows:
                check.accept(row.part, newest=self.policy_version)
                if row.then == "more":
                    on_chunk(row.part)
                elif row.then != "interrupted":
                    return row.part
                elif on_interrupted(row.part):
                    reply.resume()


@pytest.mark.parametrize(
    ("interrupt", "is_streamed"),
    [
        ("abort", True),
        slow("keep", False),
        ("keep_kv", False),
        slow("keep_kv", True),
    ],
)
@in_loop
async def test_agent_records_the_experts_that_read_its_fresh_tokens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupt: Interrupt,
    is_streamed: bool,
) -> None:
    """Pushes within answers and between two turns, and a fork. Transformers reads the
    text with the weights that the engine had.
    """
    monkeypatch.setattr(embedded_engine, "STREAM_S", 0)
    shape = MOE | {"vocab_size": 258}
    folders = [
        make_tiny_moe(tmp_path / f"{seed}", seed=seed, **shape) for seed in range(2)
    ]

    def push() -> None:
        version = server.policy_version + 1
        weights = load_file(folders[version % 2] / "model.safetensors")
        staged = stage_file(weights, version, tmp_path)
        digest = server.engine.weights.prepare(staged).digest
        order = CommitRequest(version=version, digest=digest, interrupt=interrupt)
        server.engine.commit(order)
        server.engine.iterate()

    server = SteppedServer(folders[0], push)
    server.is_streamed = is_streamed
    pool: Any = EnginePool([cast(Any, server)], slots=4)
    async with talking(engine=pool, tokenizer=ByteTokenizer()) as talk:

        async def chat(messages: list[Any], push_in: int) -> list[Any]:
            server.push_in = push_in
            stream = await talk.chat(messages, max_tokens=24, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [*messages, {"role": "assistant", "content": "".join(texts)}]

        said = await chat(HI, 9)
        push()
        for text, push_in in (("Ho", 7), ("Hey", 8)):
            await chat([*said, {"role": "user", "content": text}], push_in)
        branches = talk.world.session.rollout(0, Outcome(), 1.0)
    assert sorted(branch.tokens.versions.max() for branch in branches) == [3, 4]
    for branch in branches:
        tokens = branch.tokens
        newest = int(tokens.versions.max())
        (fresh,) = np.nonzero(tokens.versions == newest)
        # With keep_kv, new weights begin with the last token that old ones sampled.
        start = int(fresh[0]) - 1 if interrupt == "keep_kv" else 0
        cache, ids = DynamicCache(), tokens.ids.tolist()
        parts = [(newest, ids[start:])]
        if start:
            parts = [(newest - 1, ids[:start]), *parts]
        read = [read_after(cache, folders[one % 2], part) for one, part in parts]
        experts, logprobs = (torch.cat(both) for both in zip(*read, strict=True))
        assert torch.equal(read_by(tokens), experts[:-1])
        expected = logprobs[fresh - 1, tokens.ids[fresh]]
        found = torch.from_numpy(tokens.behaviour_logprobs[fresh])
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def routed(
    part: SegmentPart, experts: Sequence[int], context: Sequence[int] = ()
) -> SegmentPart:
    """Add experts of the context and of the new tokens, 2 a token."""
    tokens = Tokens.join([Tokens(np.array(context, np.int32)), part.tokens])
    routing = np.array(experts, "<u2").reshape(-1, 2)
    return part._replace(tokens=tokens.with_columns({ROUTING: routing}))


UNKNOWN = [NO_EXPERT] * 2


@pytest.mark.parametrize("says_at_the_end", [False, True])
def test_experts_of_a_lost_server_stay_until_the_next_reading(
    says_at_the_end: bool,
) -> None:
    """Prompts of 2 tokens, 2 experts a token. vLLM reports all experts with the end of
    a segment.
    """
    reported = list[Completion]()
    join = SegmentJoin(segment_request(5), None, reported.append)
    first = [*UNKNOWN, *range(300, 304)]
    if says_at_the_end:
        join.add(chunk(5))
        join.add(routed(rest("abort", 6), [*first, 304, 305], context=[1, 2, 5]))
    else:
        join.add(routed(chunk(5), first, context=[1, 2]))
        join.add(routed(rest("abort", 6), [304, 305]))
    join.add(routed(rest("abort", 7), [306, 307]))

    def experts(completion: Completion) -> list[int]:
        return completion.tokens.columns[ROUTING].reshape(-1).tolist()

    known = [*first, *range(304, 308)]
    kept = decode_partial(encode_partial(0, 0, reported[-1]), 0, 0)
    assert experts(kept) == experts(reported[-1]) == known
    # another server, and a resumed run
    for life in (join, SegmentJoin(segment_request(5), kept)):
        life.add(chunk(8))
        # the server is lost, and with it what it would have reported at the end
        life.cut()
        assert experts(life.completion()) == [*known, *UNKNOWN]
        life.add(
            routed(
                rest("length", 9), [77] * 12 + [310, 311], context=[1, 2, 5, 6, 7, 8]
            )
        )
        assert experts(life.completion()) == [77] * 12 + [310, 311]


PROMPTS = [(7, 8, 9), (10, 11, 12, 13), (14,), (15, 16)]


def routed_batch(engine: Engine, version: int = 0) -> tuple[BatchHeader, Tokens]:
    answers = [
        answered(engine, prompt_ids=one, seed=seed) for seed, one in enumerate(PROMPTS)
    ]
    return batch_from(answers, version)


def routed_trajectory(
    prompt: Sequence[int], answer: SegmentPart, index: int = 0, version: int = 0
) -> Trajectory:
    spans = (VersionSpan(answer.tokens.num_context, len(answer.tokens), version),)
    join = SegmentJoin(SamplingRequest("r", tuple(prompt), len(answer.token_ids)))
    join.add(SegmentPart(replace(answer.tokens, spans=spans), "length"))
    return make_trajectory(index, join.completion(), float(index % 2))


def batch_from(
    answers: Sequence[SegmentPart], version: int = 0
) -> tuple[BatchHeader, Tokens]:
    """Make a group from answers to PROMPTS, through the journal's record."""
    trajectories = []
    for index, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        made = routed_trajectory(prompt, answer, index, version)
        trajectories.append(decode_trajectory(encode_trajectory(0, made), 0, index, 0))
    group = Group(GroupId(0), Prompt("0/0", ()), tuple(trajectories))
    return pack_groups(Batch(version=version, groups=(group,), min_version=version))


def test_replayed_experts_close_the_gap_between_engine_and_trainer(
    tmp_path: Path,
) -> None:
    """The noise simulates rounding: near a tie another expert wins."""
    folder, gaps, weights = make_tiny_moe(tmp_path / "model"), [], []
    with running_engine(folder, deterministic=False, returns_routing=True) as engine:
        header, arrays = routed_batch(engine)
    unknown = changed(arrays, routing=np.full_like(arrays.columns[ROUTING], NO_EXPERT))
    without = arrays.kept(lambda column: column.name != ROUTING)
    checkpointing = {"trainer": {"gradient_checkpointing": True}}
    for given, values in ((arrays, checkpointing), (unknown, {}), (without, {})):
        step = make_step(folder, tmp_path, algorithm={"router_replay": True}, **values)
        router, *_ = routers_of(step.policy.model)
        with torch.no_grad():
            router.weight += 0.02 * torch.randn(
                router.weight.shape, generator=torch.Generator().manual_seed(3)
            )
        before = router.weight.detach().clone()
        gaps.append(step.train(header, given)["policy/logprob_gap_mean"])
        assert not torch.equal(router.weight, before), "its weights have a gradient"
        weights.append(weights_digest(step))
    with_replay, own, off = gaps
    assert (own, weights[1]) == (off, weights[2]), (
        "the trainer chooses unknown experts itself"
    )
    assert with_replay < 0.8 * off, gaps


@pytest.mark.slow
def test_ranks_replay_and_export_experts_as_one_process_does(tmp_path: Path) -> None:
    folder = make_tiny_moe(tmp_path / "model")
    # The balance loss alone depends on the cut into micro-batches, so it is tiny here.
    values: dict[str, Any] = {"trainer": {"router_aux_loss": 1e-9}}
    values["algorithm"] = {"router_replay": True}
    with running_engine(folder, deterministic=False, returns_routing=True) as engine:
        header, arrays = routed_batch(engine)
    # each has gone to other experts
    others = changed(arrays, routing=(arrays.columns[ROUTING] + 1) % 4)
    alone = make_step(folder, tmp_path, **values)
    metrics = learned(alone.train(header, others))
    assert metrics.pop("policy/router_aux_loss") > 1
    expected = load_file(alone.begin_export(tmp_path / "alone.safetensors")().path)
    with running(folder, tmp_path / "ranks", 2, chunk_bytes=10_000, **values) as group:
        of_ranks = learned(group.train(header, others).metrics)
        assert of_ranks.pop("policy/router_aux_loss") > 1
        assert of_ranks == pytest.approx(metrics, rel=1e-4, abs=1e-4)
        found = load_file(group.export().path)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, atol=1e-5, rtol=0, msg=name)


def test_replay_is_refused_without_routers(tiny_model_dir: Path) -> None:
    with pytest.raises(SystemExit):
        build_engine(engine_spec(tiny_model_dir, returns_routing=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_agent_trains_with_the_experts_that_sampled(tmp_path: Path) -> None:
    """Several turns and an edited history, on policy; the experts are transformers'
    own.
    """
    shape = SHAPE | MOE | {"model_type": "qwen3_moe"}
    scratch = {"characters": "abcdefgh0123456789 ", "architecture": shape}
    config = write_config(
        tmp_path,
        model={"scratch": scratch},
        generator={"python": "agents_for_test:edits_its_history"},
        rollout={"max_tokens": 8, "max_prompt_tokens": 160},
        trainer={"num_steps": 2, "num_groups": 2},
        algorithm={"router_replay": True},
        journal={"keep": "all"},
    )
    ended = run(config, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    with reading(tmp_path / "run" / "journal.sqlite") as connection:
        groups = read_batch(connection, 0).groups
    branches = [branch for group in groups for branch in group.trajectories]
    assert len(branches) == 2 * 2 * 4
    for branch in branches:
        expected = chosen_by(tmp_path / "run" / "model", branch.token_ids.tolist())
        assert torch.equal(read_by(branch.tokens), expected[:-1])
    gaps = [
        step["policy/logprob_gap_mean"]
        for step in read_lines(tmp_path / "run" / "metrics.jsonl")
    ]
    assert max(gaps) < 1e-6


@torch.no_grad()
def check_replay(model: Any) -> None:
    """Check that its own experts change nothing and that others change the logits.
    Raises ConfigError or ValueError.
    """

    def logits() -> tuple[Tensor, Tensor]:
        found = model(torch.arange(12)[None] * 4, use_cache=False).logits
        return found, routed.take().int()

    routed, replay = RoutedExperts(model), RouterReplay(model)
    plain, own_NE = logits()
    replay(own_NE)
    assert torch.equal(logits()[0], plain)
    replay((own_NE + 1) % 4)
    moved, told_NE = logits()
    assert torch.equal(told_NE, (own_NE + 1) % 4)
    assert (moved - plain).abs().max() > 0.1


REFUSED = {
    "dbrx": "DbrxRouter",
    "deepseek_v4": "DeepseekV4HashRouter",
    "inkling2_loop_text": "Inkling2LoopTopKRouter",
    "inkling_text": "InklingTopkRouter",
    "jetmoe": "JetMoeForCausalLM",
    "llama4": "Llama4Router",
    "llama4_text": "Llama4Router",
    "phimoe": "PhimoeTopKRouter",
    "phimoe longrope": "PhimoeTopKRouter",
    "zaya": "ZayaRouter",
}
"""They choose without topk or twice in a pass, or do not return their choice."""


@pytest.mark.slow
def test_every_model_with_experts_is_replayed_or_refused_by_name() -> None:
    known = [name for name in TYPES if name.partition(" ")[0] in CONFIG_MAPPING]
    refused = dict[str, str]()
    for name in known:
        model = random_model(make_config(name))
        if any(type(one).__name__.endswith("Experts") for one in model.modules()):
            try:
                check_replay(model)
            except (ConfigError, ValueError) as error:
                refused[name] = str(error)
    assert refused.keys() == REFUSED.keys() & {*known}
    assert all(REFUSED[name] in why for name, why in refused.items()), refused


WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "initializer_range": 0.1,
}
WIDE |= {"moe_intermediate_size": 32}
"""vLLM's kernels for the CPU know no smaller heads and experts."""


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_reports_each_tokens_experts_and_loads_pushed_experts(
    tmp_path: Path,
) -> None:
    """A model with a layer without experts, and two prompts that hit the prefix cache."""
    shape = WIDE | {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 300}
    folder = make_tiny_moe(tmp_path / "model", **MOE | shape)
    replay: dict[str, Any] = {"algorithm": {"router_replay": True}}
    step = make_step(folder, tmp_path, canary_tokens=160, **replay)
    long = tuple(range(6, 46)) * 4
    facts = {"max_length": 512, "slots": 4, "returns_routing": True}
    given = {
        "name": "engine-0",
        "model_path": str(folder),
        "dtype": "float32",
        "device": "cpu",
    } | facts
    answers: list[SegmentPart] = []

    def sets(experts: Tensor) -> Tensor:
        """Sort the experts of each router: their order decides nothing."""
        return experts.view(len(experts), -1, 2).sort(dim=-1).values

    async def story(server: VllmServer) -> None:
        for number, prompt in enumerate([*PROMPTS, long, long]):
            request = SamplingRequest(
                request_id=f"r{number}",
                prompt_ids=list(prompt),
                max_tokens=20,
                seed=number,
            )
            join = SegmentJoin(request)
            streams = number == len(PROMPTS) + 1  # like an agent's next turn
            answer = await server.generate_segment(
                request, on_chunk=join.add if streams else None
            )
            join.add(answer)
            if number < len(PROMPTS):
                answers.append(answer)
            sampled = join.completion()
            expected = chosen_by(folder, [*prompt, *sampled.token_ids])[:-1]
            assert expected.max() > 255
            assert torch.equal(sets(read_by(sampled.tokens)), sets(expected))
        assert step.train(*batch_from(answers))["policy/logprob_gap_max"] < 1e-4
        manifest = step.begin_export(tmp_path / "v1.safetensors")()
        assert manifest.canary is not None
        assert await server.prepare(manifest) == manifest.digest
        # the canary agrees, or it is refused
        await server.commit(1, manifest.digest, "abort")
        assert server.policy_version == 1

    with vllm_process(given, tmp_path / "server") as process:
        process.wait_ready(800)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        World(process, folder, tmp_path, {}, tokenizer, step.policy.model).run(
            story, CANARY_LIMIT, facts
        )
