"""Scores of given texts, and ends of answers by token ids, in the embedded engine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_cases import MODULES, drop_adapter, open_adapter, push, spec, tensors_of
from engine_cases import SCALE, iterate_until, segments_of
from engine_in_process import make_qwen3, make_request, make_spec
from engine_processes import SECRET, engine_process
from transformers import Qwen3ForCausalLM

from asyncrl.base.errors import AdapterMissing, EngineError, RequestRefused
from asyncrl.base.http import Caller, Refused
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse, WakeRequest
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

VOCABULARY = 50
RANKS = {"a": 4, "b": 8, "c": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("model") / "qwen3")


def scoring_engine(folder: Path, **overrides: Any) -> Engine:
    fields = {"score_slots": 4, "max_length": 600, **overrides}
    return build_engine(make_spec(folder, **fields))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return scoring_engine(folder)


@pytest.fixture(scope="module")
def with_adapters(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, dict[str, dict[str, torch.Tensor]]]:
    engine = scoring_engine(folder, adapters=spec(), max_adapters=3)
    tensors = dict[str, dict[str, torch.Tensor]]()
    for seed, (name, rank) in enumerate(RANKS.items()):
        open_adapter(engine, name, rank)
        tensors[name] = tensors_of(folder, seed, rank)
        pushed = push(
            engine, name, tensors[name], 3 + seed, tmp_path_factory.mktemp(name)
        )
        iterate_until(engine, pushed)
    return engine, tensors


def text_of(length: int, seed: int = 0) -> list[int]:
    numbers = np.random.default_rng(seed)
    ids: list[int] = numbers.integers(VOCABULARY, size=length).tolist()
    return ids


def scores_of(engine: Engine, *requests: ScoreRequest) -> list[ScoreResponse]:
    futures = [engine.score(request) for request in requests]
    iterate_until(engine, *futures)
    return [future.result() for future in futures]


@torch.no_grad()
def logprobs_by_transformers(
    folder: Path,
    ids: list[int],
    temperature: float = 1.0,
    tensors: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """float32 [T - 1, V]: row p predicts token p + 1."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name in MODULES if tensors else ():
        down, up = (tensors[f"{name}.lora_{side}.weight"] for side in "AB")
        module = model.get_submodule(name)
        # A new parameter: the head is tied to the embedding, which has no adapter.
        module.weight = torch.nn.Parameter(module.weight + SCALE * up @ down)
    logits_TV = model(torch.tensor([ids])).logits[0, :-1]
    return (logits_TV / temperature).log_softmax(-1)


def assert_near(found: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        torch.tensor(found), expected.flatten(), rtol=0, atol=1e-4
    )


# ---- the numbers


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_transformers(
    engine: Engine, folder: Path, temperature: float
) -> None:
    places = [(1, 1), (2, 1), (17, 5), (257, 1), (300, 280), (600, 1), (40, 60)]
    texts = [(text_of(length, length), start) for length, start in places]
    requests = [
        ScoreRequest(token_ids=ids, start=start, temperature=temperature, top_k=3)
        for ids, start in texts
    ]
    # More texts than score_slots, longer and shorter than a part of a call.
    answers = scores_of(engine, *requests)
    for (ids, start), answer in zip(texts, answers, strict=True):
        expected_TV = logprobs_by_transformers(folder, ids, temperature)[start - 1 :]
        own_T = expected_TV.gather(1, torch.tensor(ids[start:])[:, None].long())
        assert len(answer.logprobs) == max(0, len(ids) - start)
        assert_near(answer.logprobs, own_T)
        top = expected_TV.topk(3)
        assert answer.top_ids == top.indices.flatten().tolist()
        assert_near(answer.top_logprobs, top.values)
        assert not answer.target_logprobs
        assert not answer.draw_ids


def test_targets_are_scored_beside_the_text(engine: Engine, folder: Path) -> None:
    start, ids = 270, text_of(280)
    targets = [text_of(3, seed) for seed in range(10)]
    targets[4] = [-1, -1, -1]
    targets[7][1] = -1
    request = ScoreRequest(token_ids=ids, start=start, targets=targets)
    (answer,) = scores_of(engine, request)
    expected_TV = logprobs_by_transformers(folder, ids)[start - 1 :]
    targets_TK = torch.tensor(targets)
    expected_TK = expected_TV.gather(1, targets_TK.clamp(min=0))
    expected_TK[targets_TK < 0] = 0.0
    assert_near(answer.target_logprobs, expected_TK)
    assert len(answer.logprobs) == 10
    assert not answer.top_ids


# ---- draws


def test_draws_follow_the_distribution_of_each_place(
    engine: Engine, folder: Path
) -> None:
    ids, num = text_of(6), 20_000
    request = ScoreRequest(token_ids=ids, start=2, draws=num, seed=11)
    (answer,) = scores_of(engine, request)
    logprobs_TV = logprobs_by_transformers(folder, ids)[1:]
    drawn_TD = torch.tensor(answer.draw_ids).view(-1, num)
    assert_near(answer.draw_logprobs, logprobs_TV.gather(1, drawn_TD))
    for expected_V, drawn_D in zip(logprobs_TV.exp() * num, drawn_TD, strict=True):
        counts_V = torch.bincount(drawn_D, minlength=VOCABULARY)
        # Rare tokens count as one: chi-square needs a few of each.
        is_rare = expected_V < 10
        expected = [*expected_V[~is_rare].tolist(), float(expected_V[is_rare].sum())]
        counts = [*counts_V[~is_rare].tolist(), int(counts_V[is_rare].sum())]
        distance = sum(
            (count - mean) ** 2 / max(mean, 1.0)
            for count, mean in zip(counts, expected, strict=True)
        )
        num_free = len(expected) - 1
        assert distance < num_free + 4 * (2 * num_free) ** 0.5


def test_draws_depend_on_seed_and_place_only(engine: Engine) -> None:
    request = ScoreRequest(token_ids=text_of(300), draws=3, seed=2**64 - 1)
    (alone,) = scores_of(engine, request)
    others = [ScoreRequest(token_ids=text_of(9 * n, n), draws=n) for n in range(1, 8)]
    *_, beside = scores_of(engine, *others, request)
    assert beside == alone
    (late,) = scores_of(engine, request.model_copy(update={"start": 290}))
    assert late.draw_ids == alone.draw_ids[-30:]
    (more,) = scores_of(engine, request.model_copy(update={"draws": 5}))
    more_TD = np.reshape(more.draw_ids, (-1, 5))
    assert more_TD[:, :3].ravel().tolist() == alone.draw_ids
    assert (np.reshape(alone.draw_ids, (-1, 3)) != more_TD[:, 2:]).any()
    (other,) = scores_of(engine, request.model_copy(update={"seed": 0}))
    assert other.draw_ids != alone.draw_ids


def test_the_first_draw_is_the_token_that_sampling_draws(engine: Engine) -> None:
    (answer,) = segments_of(engine, make_request(max_tokens=60, seed=5))
    ids = [1, 2, 3, *answer.token_ids]
    request = ScoreRequest(token_ids=ids, start=3, draws=1, seed=5)
    (scored,) = scores_of(engine, request)
    assert scored.draw_ids == answer.token_ids
    assert scored.draw_logprobs == answer.logprobs


# ---- adapters


def test_scores_have_the_same_bits_beside_other_adapters(
    folder: Path, with_adapters: tuple[Engine, dict[str, dict[str, torch.Tensor]]]
) -> None:
    engine, tensors = with_adapters
    requests = [
        ScoreRequest(
            token_ids=text_of(length, length),
            top_k=2,
            targets=[[3, 4]] * (length - 1),
            draws=2,
            adapter=adapter,
        )
        for length, adapter in [
            (300, "a"),
            (5, "b"),
            (600, "c"),
            (33, ""),
            (34, "a"),
            (257, "c"),
            (2, "b"),
        ]
    ]
    mixed = scores_of(engine, *requests)
    assert scores_of(engine, *reversed(requests)) == [*reversed(mixed)]
    for request, answer in zip(requests, mixed, strict=True):
        (alone,) = scores_of(engine, request)
        assert alone == answer
        assert answer.version == {"": 0, "a": 3, "b": 4, "c": 5}[request.adapter]


def test_an_engine_of_one_adapter_has_the_same_bits(
    folder: Path,
    with_adapters: tuple[Engine, dict[str, dict[str, torch.Tensor]]],
    tmp_path: Path,
) -> None:
    engine, tensors = with_adapters
    ids = text_of(280)
    requests = [ScoreRequest(token_ids=ids, adapter=name) for name in RANKS]
    answers = scores_of(engine, *requests)
    for (name, rank), answer in zip(RANKS.items(), answers, strict=True):
        only = scoring_engine(folder, adapters=spec(rank))
        iterate_until(only, push(only, "", tensors[name], 1, tmp_path))
        (alone,) = scores_of(only, ScoreRequest(token_ids=ids))
        assert alone.logprobs == answer.logprobs


def test_scores_of_an_adapter_are_those_of_merged_weights(
    folder: Path, with_adapters: tuple[Engine, dict[str, dict[str, torch.Tensor]]]
) -> None:
    engine, tensors = with_adapters
    ids = text_of(40)
    requests = [ScoreRequest(token_ids=ids, adapter=name) for name in RANKS]
    for name, answer in zip(RANKS, scores_of(engine, *requests), strict=True):
        expected_TV = logprobs_by_transformers(folder, ids, tensors=tensors[name])
        own_T = expected_TV.gather(1, torch.tensor(ids[1:])[:, None])
        assert_near(answer.logprobs, own_T)


def test_scores_are_the_logprobs_that_sampling_reported(
    with_adapters: tuple[Engine, dict[str, dict[str, torch.Tensor]]],
) -> None:
    engine, _ = with_adapters
    names = ["a", "b", "c", ""]
    answers = segments_of(engine, *(make_request(n, adapter=n) for n in names))
    requests = [
        ScoreRequest(token_ids=[1, 2, 3, *answer.token_ids], start=3, adapter=name)
        for name, answer in zip(names, answers, strict=True)
    ]
    scored = scores_of(engine, *requests)
    assert [one.logprobs for one in scored] == [one.logprobs for one in answers]


# ---- refusals and waits


@pytest.mark.parametrize(
    ("fields", "status", "match"),
    [
        ({"token_ids": [1, 50]}, 400, "token id 50 cannot be scored"),
        ({"token_ids": [-1, 1]}, 400, "token id -1 cannot be scored"),
        ({"token_ids": [1, 2**70]}, 400, f"token id {2**70} cannot be scored"),
        ({"token_ids": [1] * 601}, 400, "a text of 601 tokens"),
        ({"token_ids": [1, 2], "top_k": 51}, 400, "top_k=51"),
        ({"token_ids": [1, 2], "targets": [[-2]]}, 400, "token id -2"),
        ({"token_ids": [1, 2], "targets": [[50]]}, 400, "token id 50"),
        ({"token_ids": [1, 2], "targets": []}, 400, "targets are of 0 tokens"),
        ({"token_ids": [1, 2, 3], "targets": [[1], [1, 2]]}, 400, "2 are scored"),
        ({"token_ids": [1, 2], "adapter": "x"}, 404, "adapter 'x' has no weights"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(
    engine: Engine, fields: dict[str, Any], status: int, match: str
) -> None:
    with pytest.raises(Refused, match=match) as refusal:
        scores_of(engine, ScoreRequest(**fields))
    assert refusal.value.status == status
    (answer,) = scores_of(engine, ScoreRequest(token_ids=[1, 2]))
    assert len(answer.logprobs) == 1


def test_an_engine_of_roles_refuses_texts_without_one(folder: Path) -> None:
    engine = scoring_engine(folder, roles={"solver": spec(), "critic": spec()})
    with pytest.raises(Refused, match="role '' has no adapter here"):
        scores_of(engine, ScoreRequest(token_ids=[1, 2]))


def test_texts_wait_for_a_sleeping_engine(folder: Path, tmp_path: Path) -> None:
    fields = {"adapters": spec(), "max_adapters": 1, "aside_dir": tmp_path}
    engine = scoring_engine(folder, **fields)
    open_adapter(engine, "a")
    iterate_until(engine, push(engine, "a", tensors_of(folder, 0), 1, tmp_path))
    iterate_until(engine, engine.sleep())
    dropped = engine.score(ScoreRequest(token_ids=[1, 2], adapter="a"))
    waiting = engine.score(ScoreRequest(token_ids=[1, 2]))
    drop_adapter(engine, "a")
    with pytest.raises(Refused, match="'a' has no weights"):
        dropped.result(timeout=0)
    for _ in range(3):
        engine.iterate()
    assert not waiting.done()
    iterate_until(engine, engine.wake(WakeRequest(parts=["weights", "kv"])))
    own = push(engine, "", tensors_of(folder, 1), 1, tmp_path)
    iterate_until(engine, own, waiting)
    assert waiting.result().version == 1


async def scored_by_a_server(url: str) -> None:
    async with aclosing(Caller("engine-0", url, SECRET)) as caller:
        engine = EngineServer(caller)
        request = ScoreRequest(token_ids=[1, 2, 3], targets=[[4], [-1]], draws=1)
        answer = await engine.score(request)
        assert len(answer.logprobs) == len(answer.draw_ids) == 2
        assert answer.target_logprobs[1] == 0.0
        with pytest.raises(RequestRefused, match="answered 400 to /score"):
            await engine.score(ScoreRequest(token_ids=[50]))
        with pytest.raises(AdapterMissing, match="'x'"):
            await engine.score(ScoreRequest(token_ids=[1], adapter="x"))
        with pytest.raises(EngineError, match="cannot score given texts"):
            await EngineClient.score(engine, request)
        free = await engine.generate_segment(make_request("free"))
        ends = {"stop_ids": (free.token_ids[3],)}
        ended = await engine.generate_segment(make_request("ended", **ends))
        assert ended.finish_reason == "stop"
        assert ended.token_ids[-1] == free.token_ids[3]
        engine.disconnect_nowait()


def test_the_client_scores_and_tells_refusals(folder: Path, tmp_path: Path) -> None:
    body = make_spec(folder, score_slots=2).model_dump(mode="json")
    with engine_process("embedded", body, tmp_path / "server") as child:
        asyncio.run(scored_by_a_server(child.url))


def test_an_engine_without_score_slots_says_so(folder: Path) -> None:
    engine = build_engine(make_spec(folder))
    with pytest.raises(Refused, match="engine-0 scores no texts") as refusal:
        engine.score(ScoreRequest(token_ids=[1, 2]))
    assert refusal.value.status == 501


# ---- ends of answers


def test_rows_of_a_batch_end_by_their_own_ids(folder: Path, tmp_path: Path) -> None:
    eos = [7, 8]
    with_eos = make_qwen3(tmp_path / "eos", eos_token_id=eos)
    free, ended = (build_engine(make_spec(one)) for one in (folder, with_eos))
    wanted = {"max_tokens": 200, "seed": 3}
    (longest,) = segments_of(free, make_request(**wanted))
    ids = longest.token_ids
    assert longest.finish_reason == "length"
    others = {ids[20], ids[30]} - {*eos}
    ways: list[tuple[dict[str, Any], set[int]]] = [
        ({}, {*eos}),
        ({"ignore_eos": True}, set()),
        ({"stop_ids": tuple(others)}, others | {*eos}),
        ({"stop_ids": tuple(others), "ignore_eos": True}, others),
        ({"stop_ids": (8,), "ignore_eos": True}, {8}),
    ]
    requests = [
        make_request(f"r{at}", **wanted, **fields)
        for at, (fields, _) in enumerate(ways)
    ]
    together = segments_of(ended, *requests)
    for (_, ends), answer in zip(ways, together, strict=True):
        places = [at for at, one in enumerate(ids) if one in ends]
        end = places[0] + 1 if places else len(ids)
        assert answer.token_ids == ids[:end]
        assert answer.finish_reason == ("stop" if places else "length")
        assert answer.logprobs == longest.logprobs[:end]
    assert len(together[0].token_ids) != len(together[3].token_ids)
