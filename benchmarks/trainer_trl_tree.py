"""TRL's prefix trees, the second peer of benchmarks/trainer.py, a process of its own.

    python benchmarks/trainer_trl_tree.py CASE.json RESULT.json

The parts are those of trl.experimental.async_grpo, whose trainer itself needs vLLM: the planner
(TokenBudgetBatcher), the trie (TreeRow), its attention function, the fused output head, and the loss that
AsyncGRPOTrainer.compute_loss writes out, divided by the batch's tokens. That attention calls a kernel which
is there for CUDA alone (FlashAttention 3); on the CPU torch's SDPA takes its place, path by path.

Counted are forward, backward, clipping and optimizer.step. Not counted: planning and building the tries,
which TRL does in its data loader, and advantages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from torch.nn import functional
from trainer_case import CLIP, LEARNING_RATE, MAX_GRAD_NORM, Case, Meter, write_result
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import packing
from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher
from trl.trainer.utils import add_fused_lm_head


def samples(case: Case) -> Iterator[dict[str, Any]]:
    """The batch in TRL's terms. Advantages as GRPOTrainer has them, over the rollouts of a group."""
    header, arrays = case.batch()
    rewards: dict[int, dict[int, float]] = {}
    for entry in header.trajectories:
        rewards.setdefault(entry.group_id, {})[entry.sample_index] = entry.reward
    for entry in header.trajectories:
        part = slice(entry.start, entry.end)
        of_group = torch.tensor(list(rewards[entry.group_id].values()))
        yield {
            "input_ids": torch.from_numpy(arrays.token_ids[part]),
            "completion_mask": torch.from_numpy(arrays.loss_mask[part]).long(),
            "old_log_probs": torch.from_numpy(arrays.behaviour_logprobs[part]),
            "advantage": float((entry.reward - of_group.mean()) / (of_group.std() + 1e-4)),
            "group_id": entry.group_id,
        }


def planned(case: Case) -> list[dict[str, Tensor]]:
    """The micro-batches of at most case.micro_batch tokens."""
    given = list(samples(case))
    batcher = TokenBudgetBatcher(given, num_processes=1, token_budget=case.micro_batch, metrics={})
    # The planner hands out what is full: a sample that fits nowhere beside the others closes the last one.
    full = {**given[-1], "input_ids": torch.arange(case.micro_batch) % 7, "group_id": -1}
    full["completion_mask"] = torch.ones(case.micro_batch)
    full["old_log_probs"] = torch.zeros(case.micro_batch)
    batcher.dataset = [*given, full]
    packed = [row.pack() for (row,) in batcher]
    if sum(len(one["token_index"]) for one in packed) != sum(
        int(one["completion_mask"].sum()) for one in given
    ):
        raise SystemExit("TRL's planner left tokens out")
    return [{name: value.to(case.device) for name, value in one.items()} for one in packed]


def varlen(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, *_: Any, **options: Any
) -> Tensor:
    """In the place of flash_attn_varlen_func: rows [T, heads, head_dim], causal from the last key back."""
    outputs = []
    lengths = ends_q.diff().tolist(), ends_k.diff().tolist()
    cuts = query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1])
    for pieces in zip(*cuts, strict=True):
        heads = [piece.transpose(0, 1)[None] for piece in pieces]
        num_queries, num_keys = len(pieces[0]), len(pieces[1])
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        output = functional.scaled_dot_product_attention(
            *heads,
            attn_mask=None if num_queries == num_keys else seen,
            is_causal=num_queries == num_keys,
            scale=options["softmax_scale"],
            enable_gqa=True,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def loss_of(model: Any, batch: dict[str, Tensor], num_tokens: int) -> Tensor:
    """As AsyncGRPOTrainer.compute_loss."""
    ends = {name: batch[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    longest_q, longest_k = batch["tree_max_seqlens"].tolist()
    outputs = model(
        **{name: batch[name][None] for name in ("input_ids", "position_ids", "shift_labels")},
        **ends,
        tree_max_seqlen_q=longest_q,
        tree_max_seqlen_k=longest_k,
        fused_lm_head=True,
    )
    log_probs = outputs.log_probs.flatten()[batch["token_index"]]
    ratio = torch.exp(log_probs - batch["old_log_probs"])
    advantages = batch["advantages"]
    clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    return -torch.min(ratio * advantages, clipped * advantages).sum() / num_tokens


def main() -> None:
    """Train until the case's seconds are over."""
    case = Case.load(sys.argv[1])
    torch.set_num_threads(case.threads)
    if case.device == "cpu":
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
    packing.register_tree_attention()
    options = {"dtype": torch.float32, "attn_implementation": packing.TREE_ATTENTION}
    model = AutoModelForCausalLM.from_pretrained(case.model_path, **options).to(case.device).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    batches = planned(case)
    num_tokens = sum(len(batch["token_index"]) for batch in batches)
    is_narrow = case.dtype == "bfloat16"
    meter, first = Meter(case), list[tuple[float, float]]()
    meter.mark_loaded()
    while not meter.is_over():
        loss = 0.0
        meter.start()
        for batch in batches:
            with torch.autocast(case.device, torch.bfloat16) if is_narrow else nullcontext():
                share = loss_of(model, batch, num_tokens)
            share.backward()
            loss += float(share.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        meter.stop()
        meter.end_step()
        optimizer.zero_grad()
        first.append((loss, float(norm)))
    write_result(sys.argv[2], meter, loss=first[0][0], grad_norm=first[0][1])


if __name__ == "__main__":
    main()
