"""Which modules mix tokens, how sequences share a pass then, and that rows change
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import make_config, random_model
from policy_cases import assert_same, run, run_plain
from torch import Tensor, nn
from trainer_cases import random_groups

from asyncrl.base.errors import ConfigError
from asyncrl.models.attention_kinds import UnknownAttentionError
from asyncrl.models.rope_lengths import (
    LengthBorder,
    forget_lengths,
    length_border,
    pin_length,
)
from asyncrl.models.rows import MixerRows, row_calls
from asyncrl.models.structure import Structure, find_structure
from asyncrl.models.support import has_states
from asyncrl.trainer.attention import forward_plan
from asyncrl.trainer.attention.forward_plan import (
    NotCausalError,
    find_plan,
    probe_model,
)
from asyncrl.trainer.model.build_model import plan_of
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.trainer_client import TrainerSpec

CPU = torch.device("cpu")
GROUPS = random_groups([[5, 60, 1, 9], [40], [3, 3, 30]])
HYBRIDS = {
    "falcon_h1": "mamba",
    "qwen3_5_text": "linear_attn",
    "lfm2": "conv",
    "mamba2": "mixer",
    "recurrent_gemma": "temporal_block",
}


def plan_for(config: Any) -> forward_plan.ForwardPlan:
    return find_plan(probe_model(config, CPU))


@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrences_and_convolutions_run_on_rows(name: str) -> None:
    config = make_config(name)
    model = random_model(config)
    plan = plan_for(config)
    assert plan.is_packed, plan.reason
    mixers = find_structure(model).mixers
    assert has_states(config.to_dict())
    assert {mixer.rpartition(".")[2] for mixer in mixers} == {HYBRIDS[name]}
    assert {type(model.get_submodule(mixer)) for mixer in mixers} == set(plan.mixers)
    expected = run_plain(model, GROUPS, 0.7)
    assert_same(run(Policy(model, plan), GROUPS, 100, 0.7), expected, 1e-4)


def test_small_multipliers_hide_no_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon-H1's own multipliers make its recurrence small compared to its attention."""
    config = make_config("falcon_h1")
    config.ssm_out_multiplier = 1e-4
    assert find_structure(probe_model(config, CPU)).mixers
    found = find_structure(probe_model(config, CPU))
    monkeypatch.setattr(
        forward_plan, "find_structure", lambda _: Structure((), found.kinds)
    )
    assert "other values in model.layers.0.mamba" in plan_for(config).reason
    monkeypatch.setattr(forward_plan, "LIMIT", torch.inf)
    assert "reaches other sequences" in plan_for(make_config("falcon_h1")).reason


@pytest.mark.parametrize("name", ["inkling_text", "doge"])
def test_unknown_attention_is_trained_without_packing_and_named(name: str) -> None:
    config = make_config(name)
    with pytest.raises(UnknownAttentionError, match="position_bias|mask of its own"):
        find_structure(random_model(config))
    plan = plan_for(config)
    assert not plan.is_packed
    assert "UnknownAttentionError" in plan.reason


def spec_of(folder: Path, **changes: Any) -> TrainerSpec:
    record = folder / "trained.jsonl"
    return TrainerSpec(
        model_path=str(folder), staging_dir=folder, record_path=record, **changes
    )


@pytest.mark.parametrize("name", ["deepseek_v32", "prophetnet"])
def test_model_that_sees_later_tokens_is_refused(tmp_path: Path, name: str) -> None:
    config = make_config(name)
    with pytest.raises(NotCausalError):
        plan_for(config)
    with pytest.raises(ConfigError, match="cannot be trained exactly"):
        plan_of(spec_of(tmp_path), random_model(config), CPU)


# ---- rotary embeddings that depend on the length


def test_border_is_the_length_where_frequencies_change() -> None:
    assert length_border(make_config("phi3 longrope")) == LengthBorder(
        "longrope", 32, is_stepwise=True
    )
    assert length_border(make_config("llama dynamic")) == LengthBorder(
        "dynamic", 32, is_stepwise=False
    )
    assert length_border(make_config("llama yarn")) is None


@pytest.mark.parametrize(
    "name", ["phi3 longrope", "phimoe longrope", "llama dynamic", "nemotron dynamic"]
)
def test_sequences_on_two_sides_of_the_border_never_share(name: str) -> None:
    config = make_config(name)
    model = random_model(config)
    plan = plan_for(config)
    assert plan.is_packed == (name != "nemotron dynamic"), plan.reason
    assert plan.border is not None
    assert plan.border.length == 32
    for groups in (GROUPS, GROUPS[::-1]):
        forget_lengths(model)
        found = run(Policy(model, plan), groups, temperature=0.7)
        pieces = list[Tensor]()
        for row in (row for group in groups for row in group):
            plain = random_model(config)  # it remembers longer texts
            pieces.append(run_plain(plain, [[row]], 0.7)[0])
        torch.testing.assert_close(
            found[0].float(), torch.cat(pieces).float(), rtol=0, atol=1e-4
        )


def test_pinned_length_decides_for_short_texts_too() -> None:
    model, plain = (random_model(make_config("phi3 longrope")) for _ in range(2))
    ids = torch.arange(40)[None] % 90
    expected = plain(input_ids=ids, use_cache=False).logits[:, :10]
    pin_length(model, 40)
    torch.testing.assert_close(
        model(input_ids=ids[:, :10], use_cache=False).logits, expected
    )


@pytest.mark.extension("vllm")
def test_with_vllm_its_maximum_length_decides(tmp_path: Path) -> None:
    """The rule of vLLM's Phi3LongRoPEScaledRotaryEmbedding."""
    model, plain = (random_model(make_config("phi3 longrope")) for _ in range(2))
    plan = plan_of(spec_of(tmp_path, pinned_length=40), model, CPU)
    assert plan.border is None
    found = run(Policy(model, plan), [GROUPS[2]])
    pin_length(plain, 40)
    assert_same(found, run_plain(plain, [GROUPS[2]]), 1e-4)
    with pytest.raises(
        ConfigError, match="rollout.engine=vllm, and the model's RoPE is dynamic"
    ):
        plan_of(
            spec_of(tmp_path, pinned_length=40),
            random_model(make_config("llama dynamic")),
            CPU,
        )


# ---- rows


class Sums(nn.Module):
    """The sum of all tokens of a row so far."""

    def forward(self, states: Tensor) -> Tensor:
        return states.cumsum(dim=1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(0, 20),
    st.integers(0, 99),
)
def test_rows_give_every_packed_token_its_own_past(
    lengths: list[int], num_shared: int, seed: int
) -> None:
    """Rows begin with the same shared tokens, as in a prefix tree."""
    own = np.split(np.arange(sum(lengths)) + num_shared, np.cumsum(lengths)[:-1])
    rows = [np.concatenate([np.arange(num_shared), one]) for one in own]
    calls = row_calls(rows, CPU)
    num_tokens = num_shared + sum(lengths)
    places = torch.cat([call.place_R for call in calls])
    assert sorted(places.tolist()) == list(range(num_tokens))
    states_1ND = torch.from_numpy(
        np.random.default_rng(seed).normal(size=(1, num_tokens, 3))
    )
    model = nn.Sequential(Sums())
    mixers = MixerRows(model, (Sums,))
    mixers.use(calls, num_tokens)
    found_ND = model(states_1ND)[0]
    for row in rows:
        torch.testing.assert_close(found_ND[row], states_1ND[0, row].cumsum(0))
    mixers.close()
    torch.testing.assert_close(model(states_1ND), states_1ND.cumsum(1))
