"""Finds out how a model can be run, by running it on a few tokens. Knows transformers; knows no batch and no
loss.

The packed plan is taken only if it gives the hidden states of one plain forward pass a sequence. What fails,
or differs, is run on padded rows: recurrent state, attention that does not go through transformers'
AttentionInterface, soft caps, sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.trainer.model.attention import ATTENTION, CannotPackError
from asyncrl.trainer.model.packing import MicroBatch, pack_texts

MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, CannotPackError)
"""What a model raises that cannot take packed tokens."""
LARGE_LOGIT = 1000.0
"""Far above every soft cap, which are 2 to 50."""
PREFIX, OWN = 20, (9, 1, 5)
"""Tokens of the sequences that are tried: a shared prefix with own tokens, and one more sequence without."""


@dataclass(frozen=True)
class Plan:
    """What a model can do. `window`: longest sequence that the packed plan may have (None = any). `reason`:
    why not packed.
    """

    is_packed: bool
    has_plain_head: bool
    window: int | None = None
    reason: str = ""


def packed_inputs(micro: MicroBatch) -> dict[str, Any]:
    """Keywords for a model that runs on packed tokens."""
    return {
        "input_ids": micro.token_ids_N[None],
        "position_ids": micro.position_N[None],
        # A mask that already has four dimensions is handed on as it is: none of [N, N] is made.
        "attention_mask": torch.zeros((1, 1, 1, 1), device=micro.token_ids_N.device),
        "packed_layout": micro.layout,
    }


@torch.no_grad()
def find_plan(model: Any) -> Plan:
    """Compare packed tokens with one plain forward a sequence. Leaves the model's attention as it was."""
    micro, sequences = _example(model)
    has_plain_head = _has_plain_head(model, sequences[0])
    expected = [
        model.base_model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0, :-1]
        for ids_T in sequences
    ]
    before, windows = model.config._attn_implementation, set[int]()
    try:
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            return Plan(False, has_plain_head, reason="its attention cannot be exchanged")
        inputs = packed_inputs(micro)
        hidden_ND = model.base_model(**inputs, windows_seen=windows, use_cache=False).last_hidden_state[0]
    except MODEL_ERRORS as error:
        return Plan(
            False,
            has_plain_head,
            reason=f"it refuses packed tokens ({type(error).__name__}: {str(error)[:200]})",
        )
    finally:
        model.set_attn_implementation(before)
    difference = _difference(hidden_ND, micro, expected)
    # Mean distance, in units of the hidden state. Measured: 2e-7 in float32, 3e-3 in bfloat16, 0.3 and more
    # if tokens mix.
    limit = 1e-4 if hidden_ND.dtype in (torch.float32, torch.float64) else 3e-2
    if not difference <= limit:
        return Plan(
            False,
            has_plain_head,
            reason=f"packed tokens give hidden states that are {difference:.2g} away from the plain ones",
        )
    return Plan(True, has_plain_head, window=min(windows, default=None))


def _difference(hidden_ND: Tensor, micro: MicroBatch, expected: list[Tensor]) -> float:
    distances = []
    for (prefix_start, prefix, own_start, own), plain_TD in zip(micro.layout.rows, expected, strict=True):
        found_TD = torch.cat(
            [hidden_ND[prefix_start : prefix_start + prefix], hidden_ND[own_start : own_start + own]]
        )
        distances.append((found_TD.float() - plain_TD.float()).norm(dim=-1) / plain_TD.float().norm(dim=-1))
    return float(torch.cat(distances).mean())


def _has_plain_head(model: Any, ids_T: Tensor) -> bool:
    """Whether logits are exactly the output embedding applied to the last hidden state: no cap, scale or
    other step between.

    Asked as the model is, and once more with large logits: a soft cap hardly changes those of an untrained or
    a small model, and each architecture calls it otherwise (final_logit_softcapping, logits_soft_cap, ...) or
    has it in its code.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    hidden_TD = model.base_model(input_ids=ids_T[None], use_cache=False).last_hidden_state

    def is_plain() -> bool:
        return bool(
            torch.allclose(
                model(input_ids=ids_T[None], use_cache=False).logits, head(hidden_TD), rtol=1e-4, atol=1e-5
            )
        )

    if not is_plain():
        return False
    with head.register_forward_hook(_enlarge):
        return is_plain()


def _enlarge(head: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
    """Hook: logits far from 0, whatever the weights are."""
    return logits + torch.linspace(-LARGE_LOGIT, LARGE_LOGIT, logits.shape[-1], device=logits.device).to(
        logits.dtype
    )


def _example(model: Any) -> tuple[MicroBatch, list[Tensor]]:
    """Random tokens, all of which carry loss: a group that shares a prefix, and a sequence of its own."""
    device, vocab_size = next(model.parameters()).device, model.get_input_embeddings().num_embeddings
    random = np.random.default_rng(0)
    prefix = random.integers(0, vocab_size, PREFIX)
    family = [np.concatenate([prefix, random.integers(0, vocab_size, own)]) for own in OWN]
    lone = random.integers(0, vocab_size, PREFIX)
    micro = pack_texts([family, [lone]], device)
    return micro, [torch.from_numpy(row).to(device) for row in (*family, lone)]
