"""The language model as the trainer sees it: packed tokens in, logprobs out. Knows transformers; knows no loss.

Two plans, chosen at the start by comparing both with one plain forward pass a sequence (plan_check.py):

    packed   every token once, no padding, shared prefixes computed once (attention.py). All usual architectures.
    padded   rows of similar length padded on the right, where causality alone keeps padding away from real tokens. Slower;
             for whatever the packed plan gets wrong: recurrent state, attention of the model's own, sliding windows that
             are shorter than a sequence.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import ATTENTION
from asyncrl.trainer.logprobs import head_logprobs, highest_logprob
from asyncrl.trainer.packing import MicroBatch
from asyncrl.trainer.plan_check import Plan, find_plan, packed_inputs

log = logging.getLogger("asyncrl.trainer")

PADDED_SPREAD_TOKENS = 32
"""On the padded plan, rows whose lengths differ by no more than this share one forward pass."""


class Policy(nn.Module):
    """A Hugging Face causal language model and the plan by which it is run.

    Everything that calls the model's forward is in here, and every weight is used inside forward(): FSDP2 wraps this module.
    """

    def __init__(self, model: Any, plan: Plan | None = None) -> None:
        """Finds the plan by running the model on a few tokens, unless one is given."""
        super().__init__()
        self.model = model
        self.plan = find_plan(model) if plan is None else plan
        if self.plan.is_packed and model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        if not self.plan.is_packed:
            log.warning("%s is trained on padded rows, which is slower: %s", type(model).__name__, self.plan.reason)

    def forward(self, micro: MicroBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(logprob_M with gradient, entropy_M without): float32 nats of softmax(logits / temperature)."""
        return self._packed(micro, temperature) if self._fits(micro) else self._padded(micro, temperature)

    @torch.no_grad()
    def text_logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Of one sequence: (logprob_M of its targets; the highest logprob where the last one stands), in nats at temperature 1.

        As forward() computes them, without a gradient. What shards a policy must know of this second way in.
        """
        inputs = packed_inputs(micro) if self._fits(micro) else {"input_ids": micro.token_ids_N[None]}
        if self.plan.has_plain_head:
            hidden_MD = self.model.base_model(**inputs, use_cache=False).last_hidden_state[0, micro.predict_M]
            head = self.model.get_output_embeddings()
            logprob_M, _ = head_logprobs(hidden_MD, head.weight, head.bias, micro.target_M, 1.0)
            return logprob_M, highest_logprob(hidden_MD[-1], head.weight, head.bias)
        logprob_MV = torch.log_softmax(self.model(**inputs, use_cache=False).logits[0, micro.predict_M].float(), dim=-1)
        return logprob_MV.gather(-1, micro.target_M[:, None]).squeeze(-1), logprob_MV[-1].max()

    def enable_gradient_checkpointing(self) -> None:
        """Keep only each layer's input for the backward pass, which then computes the layer once more. Raises ConfigError."""
        model = self.model
        # The old name warns that it goes in transformers v6; the new one came in the course of v5.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise ConfigError(
                f"trainer.gradient_checkpointing=true, but {type(model).__name__} cannot do it ({error})",
                way_out="set trainer.gradient_checkpointing=false and a smaller trainer.micro_batch_tokens.",
            ) from error
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                # transformers checkpoints layers in training mode alone; their children stay without dropout.
                module.training = True

    def _fits(self, micro: MicroBatch) -> bool:
        """Whether the packed plan can have it."""
        return self.plan.is_packed and (self.plan.window is None or micro.layout.longest <= self.plan.window)

    def _packed(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return self._run(packed_inputs(micro), None, micro.predict_M, micro.target_M, temperature)

    def _padded(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        column_M = micro.position_N[micro.predict_M]
        logprobs, entropies, order = [], [], []
        for rows in _similar_rows([prefix + own for _, prefix, _, own in micro.layout.rows]):
            index_BT = torch.from_numpy(_row_index([micro.layout.rows[row] for row in rows])).to(micro.token_ids_N.device)
            place_S = torch.full((len(micro.layout.rows),), -1, device=index_BT.device)
            place_S[torch.tensor(rows, device=index_BT.device)] = torch.arange(len(rows), device=index_BT.device)
            row_M = place_S[micro.sequence_M]
            here = (row_M >= 0).nonzero().squeeze(-1)
            inputs = {"input_ids": micro.token_ids_N[index_BT]}
            logprob, entropy = self._run(inputs, row_M[here], column_M[here], micro.target_M[here], temperature)
            logprobs.append(logprob)
            entropies.append(entropy)
            order.append(here)
        place_M = torch.cat(order).argsort()
        return torch.cat(logprobs)[place_M], torch.cat(entropies)[place_M]

    def _run(
        self, inputs: dict[str, Any], row_M: Tensor | None, column_M: Tensor, target_M: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Forward, and the logprobs of the targets that the hidden states at [row, column] predict."""
        if self.plan.has_plain_head:
            hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            head = self.model.get_output_embeddings()
            chosen = hidden[0].index_select(0, column_M) if row_M is None else hidden[row_M, column_M]
            return head_logprobs(chosen, head.weight, head.bias, target_M, temperature)
        logits = self.model(**inputs, use_cache=False).logits
        logits_MV = (logits[0, column_M] if row_M is None else logits[row_M, column_M]).float() / temperature
        logprob_MV = torch.log_softmax(logits_MV, dim=-1)
        with torch.no_grad():
            entropy_M = torch.special.entr(logprob_MV.exp()).sum(dim=-1)
        return logprob_MV.gather(-1, target_M[:, None]).squeeze(-1), entropy_M


def _similar_rows(lengths: list[int]) -> list[list[int]]:
    """Numbers of the sequences, cut into rows of similar length, longest first."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not batches or lengths[batches[-1][0]] - lengths[row] > PADDED_SPREAD_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


def _row_index(rows: list[tuple[int, int, int, int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[B, T] where each row's tokens stand among the packed ones; 0, any token, where there is none."""
    width = max(prefix + own for _, prefix, _, own in rows)
    index_BT = np.zeros((len(rows), width), np.int64)
    for row, (prefix_start, prefix, own_start, own) in enumerate(rows):
        index_BT[row, :prefix] = prefix_start + np.arange(prefix)
        index_BT[row, prefix : prefix + own] = own_start + np.arange(own)
    return index_BT
