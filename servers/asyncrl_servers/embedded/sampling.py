"""Draw tokens, within their grammars."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import GenerateRequest
from asyncrl.messages.records import TopLogprobs
from asyncrl.messages.token_grammars import GrammarError, TokenMatcher
from asyncrl_servers.embedded.decoder import to_device, to_host
from asyncrl_servers.engine_routes import uniform_draws

Drawn = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], dict[int, TopLogprobs]]


def sample(
    logits_NV: Tensor,
    temperatures: npt.NDArray[np.float32],
    top_ps: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    num_top: Mapping[int, int] | None = None,
) -> Drawn:
    """Draw a token per row: ids int64 [N], logprobs float32 [N] in nats, and by row the `num_top` likeliest
    tokens.

    Inverts the cumulative distribution in token-id order, in float64. Temperature 0 is greedy.
    """
    device = logits_NV.device
    logits_NV = logits_NV.float()
    if (temperatures != 1.0).any():
        divisors = np.where(temperatures == 0.0, np.float32(1.0), temperatures)
        logits_NV = logits_NV / to_device(divisors, device)[:, None]
    is_cut = (top_ps < 1.0) & (temperatures > 0.0)
    if is_cut.any():
        logits_NV = _cut_top_p(logits_NV, np.flatnonzero(is_cut), top_ps)
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    draws = to_device(uniform_draws(seeds, positions), device)[:, None]
    tokens_N1 = torch.searchsorted(cdf_NV, draws * cdf_NV[:, -1:], right=True)
    # A product may round up to the total; take the last token with probability above 0.
    tokens_N1 = torch.minimum(tokens_N1, torch.searchsorted(cdf_NV, cdf_NV[:, -1:].contiguous()))
    if (is_greedy := temperatures == 0.0).any():
        chosen = to_device(np.flatnonzero(is_greedy), device)
        tokens_N1[chosen, 0] = logits_NV[chosen].argmax(-1)
    # Only non-finite logits still exceed the last token.
    tokens_N1.clamp_(max=logits_NV.shape[1] - 1)
    picked_N1 = logprobs_NV.gather(1, tokens_N1)
    num_top = num_top or {}
    likeliest = [logprobs_NV[row].topk(min(num, logprobs_NV.shape[1])) for row, num in num_top.items()]
    token_ids, logprobs, *found = to_host(tokens_N1[:, 0], picked_N1[:, 0], *chain.from_iterable(likeliest))
    top = dict[int, TopLogprobs]()
    for row, values, ids in zip(num_top, found[::2], found[1::2], strict=True):
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        top[row] = [(token, value) for token, value in pairs if value > -np.inf]
    return token_ids, logprobs, top


def _cut_top_p(logits_NV: Tensor, cut: npt.NDArray[np.int64], top_ps: npt.NDArray[np.float64]) -> Tensor:
    """Nucleus sampling in the rows `cut` (Holtzman et al. 2020)."""
    index = to_device(cut, logits_NV.device)
    limits = to_device(top_ps[cut], logits_NV.device)[:, None]
    chosen_MV = logits_NV[index]
    ordered_MV, order_MV = chosen_MV.sort(dim=-1, descending=True, stable=True)
    probabilities_MV = torch.softmax(ordered_MV, dim=-1).double()
    is_out_MV = probabilities_MV.cumsum(-1) - probabilities_MV >= limits
    is_out_MV[:, 0] = False
    ordered_MV = ordered_MV.masked_fill(is_out_MV, float("-inf"))
    result = logits_NV.clone()
    result[index] = chosen_MV.scatter(1, order_MV, ordered_MV)
    return result


def mask(matchers: Mapping[int, TokenMatcher], logits_NV: Tensor) -> dict[int, GrammarError]:
    """Mask forbidden tokens in place. Return the rows whose grammar failed."""
    allowed = dict[int, npt.NDArray[np.bool_]]()
    failed = dict[int, GrammarError]()
    for row, matcher in matchers.items():
        try:
            allowed[row] = matcher.allowed()
        except GrammarError as error:
            failed[row] = error
    if allowed:
        index = to_device(np.array([*allowed]), logits_NV.device)
        allowed_MV = to_device(np.stack([*allowed.values()]), logits_NV.device)
        logits_NV[index] = logits_NV[index].masked_fill(~allowed_MV, float("-inf"))
    return failed


def grammar_refusal(request: GenerateRequest, error: GrammarError) -> Refused:
    return Refused(
        400,
        f"request {request.request_id} has a grammar that cannot be followed: {error}",
        rule="a grammar is llguidance's Lark text, within the limits of asyncrl/messages/token_grammars.py",
        way_out="make the schema smaller or simpler.",
    )
