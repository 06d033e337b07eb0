"""The canary: what the trainer says of a fixed short text with the weights that it exports. Knows a policy;
knows no file, no engine.

Whoever has loaded an export computes the same text and compares: other weights, in any layer, give other
logprobs.

The forward pass is the policy's own, the one that the loss gets its logprobs from, at temperature 1: its
weights are the export's, bit for bit. In float32 they are the masters. In bfloat16 they are the masters
rounded once, in MasterWeights or where FSDP2 gathers them, as the export rounds them; an adapter is merged in
that dtype, as an engine merges it. A pass with the float32 masters would be closer to what is trained, and be
off from every engine by the rounding of each weight. So what is left between trainer and engine is how each
of them rounds inside a layer: 1e-5 nats in float32, hundredths in bfloat16, the size of
policy/logprob_gap_mean.

What changes logprobs by less than that, it cannot show: a tensor that is one step old at a learning rate of
1e-6, say. Digests do.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import Canary
from asyncrl.trainer.model.packing import pack_texts
from asyncrl.trainer.model.parts import reshard
from asyncrl.trainer.model.policy import Policy


def canary_ids(vocab_size: int, num_tokens: int) -> list[int]:
    """The text: ids that are random over the whole vocabulary, and always the same."""
    return [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, num_tokens)]


@torch.no_grad()
def make_canary(policy: Policy, num_tokens: int) -> Canary:
    """One forward pass; on all ranks of a sharded policy, each of which computes the whole of it. May not be
    finite: see checked().
    """
    ids = canary_ids(policy.model.get_input_embeddings().num_embeddings, num_tokens)
    text = np.array([*ids, 0])  # the last is only predicted: so the pass reads all of the text
    logprob_M, next_logprob = policy.text_logprobs(pack_texts([[text]], next(policy.parameters()).device))
    reshard(policy)
    return Canary(token_ids=ids, logprobs=logprob_M[:-1].tolist(), next_logprob=float(next_logprob))


def checked(canary: Canary | None) -> Canary | None:
    """The canary, if it can be compared with anything. Raises Refused."""
    if canary is None or all(map(math.isfinite, [*canary.logprobs, canary.next_logprob])):
        return canary
    num_bad = sum(not math.isfinite(logprob) for logprob in canary.logprobs)
    raise Refused(
        422,
        f"the weights give logprobs that are not finite, for {num_bad} of the {len(canary.logprobs)} tokens "
        f"of the canary",
        rule="weights are published with the logprobs of a fixed text, which every engine that loads them "
        "must find again",
        way_out="go on from a checkpoint with a lower trainer.learning_rate; weight_sync.canary_limit=none "
        "publishes without this check.",
    )
