"""What the embedded engine samples with logit bias, penalties, a grammar, top_p, top_k
and min_p has ratio 1 in the trainer: over segments, turns, branches, the journal and
the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_in_process import make_qwen3, make_request, make_spec
from engine_replies import ask
from gateway_capture_cases import CharRenderer
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from logit_oracle import ADJUSTED, adjusted_logits
from test_engine_resumed import SMALL, iterate_until
from text_tokenizers import byte_level, save
from token_cases import masked_tokens
from trainer_cases import changed
from trainer_cases import make_spec as trainer_spec

from asyncrl.agents.endpoint.capture import Capture
from asyncrl.base.http import Refused
from asyncrl.config.trainer_config import ADJUSTED_BYTES, MOST_ADJUSTED
from asyncrl.engines.pool import SegmentJoin
from asyncrl.journal.schema import (
    decode_partial,
    decode_trajectory,
    encode_partial,
    encode_trajectory,
)
from asyncrl.messages.records import (
    Adjustment,
    Batch,
    CallSpan,
    Completion,
    Group,
    GroupId,
    Outcome,
    Prompt,
    Trajectory,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SUPPORT, Ragged, Tokens
from asyncrl.messages.trainer_api import BatchHeader, pack_batch, unpack_batch
from asyncrl.rollouts.rollout import make_trajectory
from asyncrl.trainer.adjustments import (
    PLAIN,
    AdjustedCall,
    AdjustedCalls,
    changed_calls,
    find_adjusted,
)
from asyncrl.trainer.packing import Costs, LogitSets, PackRules, micro_batches
from asyncrl.trainer.policy import Policy, Scores
from asyncrl.trainer.rank import TrainerRank
from asyncrl.trainer.ranks import ONE_RANK
from asyncrl.trainer.supports import find_supports
from asyncrl.trainer.trainer_client import pack_groups
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

VOCAB = 440
LIMIT = 2e-6
"""Of the ratio's distance to 1: float32 rounding of logits up to 4."""


@dataclass
class World:
    """An engine, and trainers of its weights by (temperature, LoRA)."""

    engine: Engine
    make: Callable[..., TrainerRank]
    ranks: dict[Any, TrainerRank]

    def rank(self, temperature: float, *, has_lora: bool) -> TrainerRank:
        key = temperature, has_lora
        if key not in self.ranks:
            trainer: dict[str, Any] = {"learning_rate": 1e-30}
            if has_lora:
                trainer["lora"] = {"rank": 2}
            algorithm = {"kl_coefficient": 0.1}
            self.ranks[key] = self.make(
                temperature=temperature,
                trainer=trainer,
                algorithm=algorithm,
                measures_gap=True,
            )
        return self.ranks[key]

    def sample(self, request: SamplingRequest, cut: int = 0) -> Completion:
        """In two segments if `cut`, the first of them from the journal."""
        join = SegmentJoin(request)
        if 0 < cut < request.max_tokens:
            (begun,) = ask(self.engine, [replace(request, max_tokens=cut)])
            iterate_until(self.engine, begun)
            join.add(begun.result()._replace(finish_reason="abort"))
            partial = decode_partial(encode_partial(0, 0, join.completion()), 0, 0)
            join = SegmentJoin(request, partial)
        (rest,) = ask(self.engine, [join.next_request()])
        iterate_until(self.engine, rest)
        join.add(rest.result())
        return join.completion()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = make_qwen3(
        tmp_path_factory.mktemp("replay") / "model",
        vocab_size=VOCAB,
        eos_token_id=1,
        initializer_range=0.08,
        **SMALL,
    )
    save(byte_level(), folder)
    scratch = tmp_path_factory.mktemp("trainer")
    (scratch / "staging").mkdir()
    return World(
        build_engine(make_spec(folder)),
        lambda **values: TrainerRank(trainer_spec(folder, scratch, **values)),
        {},
    )


CUTS = st.fixed_dictionaries(
    {
        "top_p": st.sampled_from([0.3, 0.8, 0.95, 1.0]),
        "top_k": st.sampled_from([0, 1, 2, 50, VOCAB + 1]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
    }
)


ADJUSTMENTS = st.fixed_dictionaries(
    {
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1) | st.integers(ord("A"), ord("z")),
            st.floats(-100, 100) | st.floats(-3, 3),
            max_size=6,
        ),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -2.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.6]),
    }
)
GRAMMARS = [None, None, "start: /[a-z ]{3,40}/", "start: /[ab]{20}/"]


def batch_of(world: World, seed: int, cut: int, **sampling: Any) -> Any:
    """Two plain rollouts, and an agent of two turns with a fork of the second one."""

    def request(name: str, prompt: Any, **values: Any) -> SamplingRequest:
        given = sampling | {"max_tokens": 12, "seed": seed} | values
        return make_request(name, tuple(prompt), **given)

    single = [
        make_trajectory(
            number, world.sample(request("plain", (5, 6), seed=seed + number), cut), 1.0
        )
        for number in range(2)
    ]
    capture = Capture(CharRenderer())
    text = list[int]()
    for number, added in enumerate(([1, 2], [3], [4])):
        planned = capture.plan([*text, *added])
        # A call may have settings of its own.
        own = {"repetition_penalty": 1.1} if number == 1 and sampling else {}
        turn = request("turn", planned.prompt_ids, **own)
        answer = world.sample(turn, cut * (number % 2))
        capture.record(
            planned, answer, {"role": "assistant", "content": ""}, f"{number}"
        )
        if number == 0:
            text = answer.tokens.ids.tolist()
    branches = capture.rollout(2, Outcome(reward=0.5), 0.5)
    assert len(branches) == 2
    journaled = [
        decode_trajectory(encode_trajectory(0, one), 0, one.sample_index, one.branch)
        for one in (*single, *branches)
    ]
    group = Group(GroupId(0), Prompt("0/0", ()), tuple(journaled))
    return unpack_batch(pack_batch(*pack_groups(Batch(0, (group,), 0))))


def train(rank: TrainerRank, header: BatchHeader, arrays: Tokens) -> dict[str, float]:
    """As if the engine had served the rank's version."""
    version = rank.policy_version
    versions = np.where(arrays.is_sampled, version, -1).astype(np.int32)
    fields = {"version": version, "min_version": version}
    return rank.train(
        header.model_copy(update=fields), changed(arrays, versions=versions)
    )


@settings(deadline=None, max_examples=40)
@given(
    CUTS,
    ADJUSTMENTS,
    st.sampled_from(GRAMMARS),
    st.sampled_from([0.6, 1.0, 1.4]),
    st.booleans(),
    st.integers(0, 10**6),
    st.integers(0, 11),
)
def test_ratio_is_one_over_the_support(
    world: World,
    cuts: dict[str, Any],
    adjustments: dict[str, Any],
    grammar: str | None,
    temperature: float,
    has_lora: bool,
    seed: int,
    cut: int,
) -> None:
    given = cuts | adjustments | {"grammar": grammar, "temperature": temperature}
    header, arrays = batch_of(world, seed, cut, **given)
    support = arrays.column(SUPPORT)
    sizes = support.sizes[arrays.is_sampled]
    assert support.sizes[~arrays.is_sampled].sum() == 0
    if cuts["top_k"] in (1, 2):
        assert set(sizes.tolist()) <= {1, 2}
    metrics = train(world.rank(temperature, has_lora=has_lora), header, arrays)
    assert metrics["policy/logprob_gap_max"] < LIMIT
    # The reference has the same weights, and is renormalised over the same tokens.
    assert abs(metrics["policy/kl_reference"]) < LIMIT
    if (sizes == 1).all():
        assert metrics["policy/entropy"] == 0.0
        assert metrics["policy/grad_norm"] == 0.0
        assert (arrays.behaviour_logprobs == 0.0).all()


def test_without_the_support_the_ratio_is_wrong(world: World) -> None:
    cuts = {"temperature": 1.4, "top_p": 0.8, "top_k": 50}
    header, arrays = batch_of(world, 3, 5, **cuts)
    whole = Tokens(
        arrays.ids,
        arrays.spans,
        {name: one for name, one in arrays.columns.items() if name != SUPPORT},
    )
    metrics = train(world.rank(1.4, has_lora=False), header, whole)
    assert metrics["policy/logprob_gap_max"] > 0.1


@pytest.mark.parametrize("given", ADJUSTED)
def test_without_the_adjustment_the_ratio_is_wrong(
    world: World, given: dict[str, Any]
) -> None:
    header, arrays = batch_of(world, 3, 5, **given)
    assert len(arrays.calls) == 5
    rank = world.rank(1.0, has_lora=False)
    plain = replace(arrays, calls=())
    gaps = [
        train(rank, header, one)["policy/logprob_gap_max"] for one in (arrays, plain)
    ]
    assert gaps[0] < LIMIT
    assert gaps[1] > 0.01


def test_equal_texts_of_other_calls_have_their_own_logprobs(world: World) -> None:
    """What one call has sampled is the prompt of another, so penalties differ."""
    ids = [5, 6, 7, 7, 8, 7, 9, 7, 7, 11, 12, 13]
    places = np.arange(len(ids))

    def scores(starts: list[int]) -> list[float]:
        given = Adjustment(frequency_penalty=1.5)
        trajectories = []
        for index, start in enumerate(starts):
            tokens = masked_tokens(ids, places >= start, np.zeros(len(ids)))
            calls = (CallSpan(start, len(ids), None, given),)
            trajectories.append(Trajectory(index, replace(tokens, calls=calls), 1.0))
        group = Group(GroupId(0), Prompt("0/0", ()), tuple(trajectories))
        packed = pack_batch(*pack_groups(Batch(0, (group,), 0)))
        case = Case(*unpack_batch(packed))
        found, micro, _ = scores_of(world.rank(1.0, has_lora=False).policy, case)
        assert micro.layout.num_tokens < len(ids), "they share the text"
        logprobs: list[float] = found.logprob_M.tolist()
        return logprobs

    alone = scores([4]) + scores([2])
    assert scores([4, 2]) == pytest.approx(alone, abs=1e-6)
    # The token 7 at place 8, which the second call has sampled twice more before.
    assert alone[4] - alone[8 + 6] == pytest.approx(3.0 / 0.7, abs=0.1)


def test_calls_with_one_bias_are_changed_at_once() -> None:
    """Each change launches some kernels. The counts of penalties need a call's own."""
    ids = np.arange(40, dtype=np.int32)
    for adjustment, num_changes in (
        (Adjustment(logit_bias={3: 1.0}), 1),
        (Adjustment(logit_bias={3: 1.0}, presence_penalty=0.5), 10),
    ):
        calls = [AdjustedCall(at, at + 1, at + 4, adjustment) for at in range(0, 40, 4)]
        set_N = np.where(np.arange(40) % 4 == 0, PLAIN, 0).astype(np.int32)
        places = np.flatnonzero(set_N == 0)
        adjusted = AdjustedCalls(calls, set_N)
        found = changed_calls(adjusted, ids, places, torch.device("cpu"))
        assert len(found) == num_changes
        logits = torch.zeros(len(places), 40)
        for one in found:
            _ = [*one.apply_to(logits, slice(0, 40), 1.0)]
        assert logits[1:, 3].tolist() == [1.0] * (len(places) - 1)


def test_memory_of_penalties_does_not_grow_with_the_length() -> None:
    """The plan counts what changes at once. A list of all changed logits of this answer
    would take 158 MB.
    """
    num_tokens, start = 8000, 100
    ids = (np.random.default_rng(0).zipf(1.3, num_tokens) % 3000).astype(np.int32)
    penalties = Adjustment(frequency_penalty=0.5, repetition_penalty=1.2)
    call = AdjustedCall(0, start, num_tokens, penalties)
    own = np.where(np.arange(num_tokens) >= start, 0, PLAIN).astype(np.int32)
    adjusted = AdjustedCalls([call], own)
    places = np.arange(start, num_tokens)
    (changes,) = changed_calls(adjusted, ids, places, torch.device("cpu"))
    assert len(changes.begin_A) <= num_tokens
    logits_MC = torch.zeros(num_tokens - start, 512)
    num_changed = len(logits_MC) * int(np.searchsorted(changes.ids, 512))
    assert num_changed > 2 * MOST_ADJUSTED
    with LiveBytes() as live:
        for block in [*changes.apply_to(logits_MC, slice(0, 512), 1.0)]:
            block.correct(logits_MC, None)
    found = live.most - logits_MC.nbytes
    planned = num_changed + ADJUSTED_BYTES * MOST_ADJUSTED
    assert 0.7 * planned < found <= planned


def test_first_token_has_nothing_to_penalise(world: World) -> None:
    """A batch of answers of one token: with supports there was an IndexError."""
    penalty = {"frequency_penalty": 0.5, "top_k": 3, "max_tokens": 1}
    join = SegmentJoin(make_request("one", (5, 6), **penalty))
    (reply,) = ask(world.engine, [join.next_request()])
    iterate_until(world.engine, reply)
    join.add(reply.result())
    group = Group(
        GroupId(0), Prompt("0/0", ()), (make_trajectory(0, join.completion(), 1.0),)
    )
    case = unpack_batch(pack_batch(*pack_groups(Batch(0, (group,), 0))))
    found = train(world.rank(1.0, has_lora=False), *case)
    assert found["policy/logprob_gap_max"] < LIMIT


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_bias_of_a_token_that_the_model_does_not_know_is_refused(
    world: World, token_id: int
) -> None:
    header, arrays = batch_of(world, 3, 0)
    wrong = CallSpan(2, 3, None, Adjustment(logit_bias={token_id: 1.0}))
    with pytest.raises(Refused, match=f"logit_bias of token id {token_id}"):
        train(world.rank(1.0, has_lora=False), header, replace(arrays, calls=(wrong,)))


@pytest.mark.parametrize("support", [[3, 9], [9, 7], [7, 7], [-1, 7], [7, VOCAB]])
def test_support_that_no_token_was_drawn_from_is_refused(
    world: World, support: list[int]
) -> None:
    header, arrays = batch_of(world, 3, 0)
    place = int(np.flatnonzero(arrays.is_sampled)[0])
    ids = arrays.ids.copy()
    ids[place] = 7
    lists = [support if at == place else [] for at in range(len(ids))]
    broken = changed(arrays, ids=ids, support=Ragged.of(lists, "<i4"))
    rank = world.rank(1.0, has_lora=False)
    version = rank.policy_version
    with pytest.raises(Refused, match=f"id 7 with a support of {len(support)}"):
        train(rank, header, broken)
    assert rank.policy_version == version


# ---- the head


@dataclass
class Case:
    header: BatchHeader
    arrays: Tokens


def scores_of(policy: Policy, case: Case) -> tuple[Scores, Any, Any]:
    """Scores in the order of the batch's tokens."""
    has_loss = case.arrays.is_sampled.copy()
    supports = find_supports(case.arrays, has_loss)
    adjusted = find_adjusted(case.header, case.arrays, has_loss)
    ((micro, _),) = micro_batches(
        case.header,
        case.arrays,
        has_loss,
        PackRules(10**6),
        torch.device("cpu"),
        ONE_RANK,
        Costs(0.1, 0.1),
        LogitSets(adjusted=adjusted, supports=supports),
    )
    order = np.argsort(micro.source_M)
    scores = policy(micro, 0.7)
    return Scores(*(one[order] for one in scores[:3])), micro, order


@pytest.mark.parametrize("has_plain_head", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("given", [{}, *ADJUSTED])
def test_head_is_a_log_softmax_of_adjusted_logits_over_supports(
    world: World,
    has_plain_head: bool,
    share: float,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Supports of `share` of the tokens; the others have the whole vocabulary. In slices
    of 32 ids, and in pieces of 7 changed logits.
    """
    from asyncrl.trainer import adjustments as adjustments_module
    from asyncrl.trainer import policy as policy_module

    header, arrays = batch_of(world, 5, 0, **given)
    rng = np.random.default_rng(0)
    lists = [
        sorted({int(token), *rng.integers(0, VOCAB, rng.integers(0, 40)).tolist()})
        if is_sampled and rng.random() < share
        else []
        for token, is_sampled in zip(arrays.ids, arrays.is_sampled, strict=True)
    ]
    case = Case(header, changed(arrays, support=Ragged.of(lists, "<i4")))
    policy = world.rank(1.0, has_lora=False).policy
    plan = replace(policy.plan, has_plain_head=has_plain_head)
    monkeypatch.setattr(policy, "plan", plan)
    found, micro, _ = scores_of(policy, case)
    num_tokens = len(micro.target_U)
    monkeypatch.setitem(policy_module.MOST_LOGITS, "cpu", 32 * num_tokens)
    monkeypatch.setattr(policy_module, "MIN_SLICE", 1)
    monkeypatch.setattr(adjustments_module, "MOST_ADJUSTED", 7)
    found, _, _ = scores_of(policy, case)

    # The same by the whole logits.
    hidden = policy.states(micro)
    head = policy.model.get_output_embeddings()
    rows = {
        int(source): place
        for source, place in zip(
            micro.source_M, micro.predict_U[micro.pair_M].tolist(), strict=True
        )
    }
    starts = [entry.start for entry in header.trajectories]
    logprobs, entropies = [], []
    for place in sorted(rows):
        kept = lists[place] or [*range(VOCAB)]
        logits = head(hidden[rows[place]])
        text = max(start for start in starts if start <= place)
        for call in arrays.calls:
            if call.start <= place < call.end:
                ids = arrays.ids[text:place].tolist()
                # One call of the batch has other settings than `given`.
                settings = {} if call.adjustment is None else asdict(call.adjustment)
                logits = adjusted_logits(logits, ids, call.start - text, **settings)
        logits = (logits[kept] / 0.7).log_softmax(-1)
        logprobs.append(logits[kept.index(int(arrays.ids[place]))])
        entropies.append(-(logits.exp() * logits).sum())
    expected = torch.stack(logprobs)
    torch.testing.assert_close(found.logprob_M, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(
        found.entropy_M, torch.stack(entropies).detach(), rtol=0, atol=1e-5
    )
    weights = [*policy.model.parameters()]
    factors = torch.from_numpy(rng.normal(size=len(expected))).float()
    gradients = [
        torch.autograd.grad((one * factors).sum(), weights, allow_unused=True)
        for one in (found.logprob_M, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
