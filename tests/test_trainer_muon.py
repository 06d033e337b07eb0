"""Muon's updates are those of the paper on any number of ranks, and each weight has its
rule.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import muon_ranks
import numpy as np
import pytest
import torch
from costly_cases import every_third_is_quick
from model_zoo import TYPES, make_config
from muon_ranks import SETTINGS
from torch import nn
from trainer_cases import MakeStep, make_batch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from asyncrl.trainer.ranks.optimizer import hidden_matrices

MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
"""AdamW's state."""

# ---- which weights

NO_MATRIX = """A_log D dt_proj_bias dt_proj_weight x_proj_weight static_weight fn hc_fn position_bias
    proj query scale e_score_correction_bias gate_up_proj_bias down_proj_bias input_gate_bias
    recurrent_gate_bias input_gate_weight recurrent_gate_weight time_mix_key time_mix_receptance
    time_mix_value""".split()
"""Ends of names of weights with several axes that are numbers of an architecture, and no
matrix of a linear layer. RecurrentGemma's and Zamba's are stacks of blocks.
"""
STACKED_ROWS = ("w1", "v1", "w2")
"""DBRX's experts, stored one below the other in one matrix, which AdamW trains."""
TOKENS = re.compile(r"(?!relative_pos).*(embed|wte|wpe|lm_head).*|w|head")
"""Modules with a row per token or position. ProphetNet's relative_pos_embeddings are a
linear layer.
"""


@pytest.mark.parametrize("name", every_third_is_quick(zip(TYPES, strict=True)))
def test_each_weight_of_each_model_has_its_rule(name: str) -> None:
    """Names decide here, and modules in the code."""
    if name.partition(" ")[0] not in CONFIG_MAPPING:
        pytest.skip("transformers does not know this type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(name).get_text_config())
    names = NO_MATRIX + [*STACKED_ROWS] * (name == "dbrx")
    wanted = list[str]()
    for path, weight in model.named_parameters():
        *_, module, end = path.split(".")
        is_other = TOKENS.fullmatch(module) or "conv" in module or end in names
        if weight.ndim > 1 and not is_other:
            wanted.append(path)
    assert hidden_matrices(model) == wanted
    head = model.get_output_embeddings().weight
    assert not any(model.get_parameter(path) is head for path in wanted)


def test_head_of_a_critic_is_not_hidden(make_step: MakeStep) -> None:
    values = {"algorithm": {"advantage": "gae"}, "critic": {"learning_rate": 1e-2}}
    step = make_step(trainer={"optimizer": "muon"}, **values)
    step.train(*make_batch())
    assert step.critic is not None
    trained = step.critic.trained
    head = trained.masters.named["lm_head.weight"]
    assert {*trained.optimizer.state[head]} == MOMENTS


# ---- which updates

Float64 = np.ndarray[Any, np.dtype[np.float64]]


def nearly_orthogonal(matrix: Float64) -> Float64:
    """Newton-Schulz as in https://kellerjordan.github.io/posts/muon/, in float64."""
    if len(matrix) > matrix.shape[1]:
        return nearly_orthogonal(matrix.T).T
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def moved(start: Float64, slopes: list[Float64]) -> Float64:
    """Return the change of a matrix by algorithm 1 of https://arxiv.org/abs/2502.16982. No
    gradient is no update.
    """
    weight, momentum = start, np.zeros_like(start)
    for slope in slopes:
        momentum = 0.95 * momentum + 0.05 * slope
        update = nearly_orthogonal(0.05 * slope + 0.95 * momentum)
        scaled = 0.2 * math.sqrt(max(start.shape)) * update * slope.any()
        weight = weight - 1e-2 * (scaled + 0.1 * weight)
    return weight - start


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2", "qwen3_next"])
def test_updates_are_those_of_the_paper_and_of_adamw(name: str) -> None:
    """Each expert is a matrix of its stack."""
    gradients = [muon_ranks.drawn_gradients(name, step) for step in range(3)]
    model = muon_ranks.random_model(make_config(name))
    masters, optimizer = muon_ranks.train(name)
    for key, weight in model.named_parameters():
        after, slopes = masters.named[key], [one[key] for one in gradients]
        kinds = {*optimizer.state[after]}
        if key not in masters.hidden:
            own = nn.Parameter(weight.detach().clone())
            decay = SETTINGS.weight_decay if weight.ndim > 1 else 0.0
            values: dict[str, Any] = {
                "lr": 1e-2,
                "betas": SETTINGS.betas,
                "fused": True,
            }
            adamw = torch.optim.AdamW([own], weight_decay=decay, **values)
            for slope in slopes:
                own.grad = slope
                adamw.step()
            assert torch.equal(after, own), key
            assert kinds == MOMENTS
            continue
        assert kinds == {"momentum_buffer"}
        stacks = [
            one.detach().double().numpy().reshape(-1, *weight.shape[-2:])
            for one in (weight, after, *slopes)
        ]
        for start, end, *rows in zip(*stacks, strict=True):
            expected = moved(start, rows)
            # Of 45 products in bfloat16.
            error = np.linalg.norm(end - start - expected)
            assert error < 0.03 * np.linalg.norm(expected), key


def test_groups_of_equal_rewards_move_no_matrix(make_step: MakeStep) -> None:
    """Else the momentum of an earlier batch would, for hundreds of steps."""
    step = make_step(trainer={"optimizer": "muon", "learning_rate": 1e-3})
    masters = step.masters
    step.train(*make_batch())
    before = {name: masters.named[name].clone() for name in masters.hidden}
    header, arrays = make_batch(version=1)
    same = [one.model_copy(update={"reward": 1.0}) for one in header.trajectories]
    step.train(header.model_copy(update={"trajectories": same}), arrays)
    for name, weight in before.items():
        assert torch.equal(masters.named[name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_bits_of_one(tmp_path: Path, size: int) -> None:
    """The last of three ranks has no expert, and rows are uneven."""
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(
        muon_ranks.compare_with_one, ("qwen3_moe", size, str(tmp_path / "store")), size
    )
