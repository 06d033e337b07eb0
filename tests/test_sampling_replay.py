"""What the embedded engine samples with a grammar, top_p, top_k and min_p has ratio 1 in
the trainer: over segments, turns, branches, the journal and the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import SMALL, iterate_until
from engine_in_process import make_qwen3, make_request, make_spec
from engine_replies import ask
from gateway_capture_cases import CharRenderer
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_level, save
from trainer_cases import changed
from trainer_cases import make_spec as trainer_spec

from asyncrl.agents.endpoint.capture import Capture
from asyncrl.base.http import Refused
from asyncrl.engines.pool import SegmentJoin
from asyncrl.journal.schema import (
    decode_partial,
    decode_trajectory,
    encode_partial,
    encode_trajectory,
)
from asyncrl.messages.records import (
    Batch,
    Completion,
    Group,
    GroupId,
    Outcome,
    Prompt,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SUPPORT, Ragged, Tokens
from asyncrl.messages.trainer_api import BatchHeader, pack_batch, unpack_batch
from asyncrl.rollouts.rollout import make_trajectory
from asyncrl.trainer.loss.packing import Costs, LogitSets, PackRules, micro_batches
from asyncrl.trainer.loss.supports import find_supports
from asyncrl.trainer.model.policy import Policy, Scores
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.ranks import ONE_RANK
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
        turn = request("turn", planned.prompt_ids)
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


@settings(deadline=None, max_examples=20)
@given(
    CUTS,
    st.sampled_from(GRAMMARS),
    st.sampled_from([0.6, 1.0, 1.4]),
    st.booleans(),
    st.integers(0, 10**6),
    st.integers(0, 11),
)
def test_ratio_is_one_over_the_support(
    world: World,
    cuts: dict[str, Any],
    grammar: str | None,
    temperature: float,
    has_lora: bool,
    seed: int,
    cut: int,
) -> None:
    given = cuts | {"grammar": grammar, "temperature": temperature}
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
    ((micro, _),) = micro_batches(
        case.header,
        case.arrays,
        has_loss,
        PackRules(10**6),
        torch.device("cpu"),
        ONE_RANK,
        Costs(0.1, 0.1),
        LogitSets(supports=supports),
    )
    order = np.argsort(micro.source_M)
    scores = policy(micro, 0.7)
    return Scores(*(one[order] for one in scores[:3])), micro, order


@pytest.mark.parametrize("has_plain_head", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_head_is_a_log_softmax_over_supports(
    world: World, has_plain_head: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supports of `share` of the tokens; the others have the whole vocabulary. In slices
    of 32 ids.
    """
    from asyncrl.trainer.model import policy as policy_module

    header, arrays = batch_of(world, 5, 0)
    rng = np.random.default_rng(0)
    lists = [
        sorted({int(token), *rng.integers(0, VOCAB, rng.integers(0, 40)).tolist()})
        if is_sampled and rng.random() < share
        else []
        for token, is_sampled in zip(arrays.ids, arrays.is_sampled, strict=True)
    ]
    case = Case(header, changed(arrays, support=Ragged.of(lists, "<i4")))
    policy = world.rank(1.0, has_lora=False).policy
    plan = policy.plan._replace(has_plain_head=has_plain_head)
    monkeypatch.setattr(policy, "plan", plan)
    found, micro, _ = scores_of(policy, case)
    num_tokens = len(micro.target_U)
    monkeypatch.setitem(policy_module.MOST_LOGITS, "cpu", 32 * num_tokens)
    monkeypatch.setattr(policy_module, "MIN_SLICE", 1)
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
    logprobs, entropies = [], []
    for place in sorted(rows):
        kept = lists[place] or [*range(VOCAB)]
        logits = head(hidden[rows[place]])
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
