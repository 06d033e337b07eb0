"""Logits in, tokens and their logprobs out. Knows tensors and seeds; knows no sequence, no model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl_servers.draws import uniform_draws


@dataclass(slots=True)
class SamplingRows:
    """The sampling settings of N rows; positions are those of the tokens to be drawn."""

    temperatures: npt.NDArray[np.float32]
    top_ps: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]


def sample(logits_NV: Tensor, rows: SamplingRows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Draw one token a row: (ids int64 [N], logprobs float32 [N] in nats of the distribution drawn from).

    The draw inverts the cumulative distribution in order of token ids, in float64. Temperature 0 is the largest
    logit, with the logprob of temperature 1.
    """
    device = logits_NV.device
    logits_NV = logits_NV.float()
    if (rows.temperatures != 1.0).any():
        divisors = np.where(rows.temperatures == 0.0, np.float32(1.0), rows.temperatures)
        logits_NV = logits_NV / torch.from_numpy(divisors).to(device)[:, None]
    is_cut = (rows.top_ps < 1.0) & (rows.temperatures > 0.0)
    if is_cut.any():
        logits_NV = _cut_top_p(logits_NV, np.flatnonzero(is_cut), rows.top_ps)
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    draws = torch.from_numpy(uniform_draws(rows.seeds, rows.positions)).to(device)[:, None]
    tokens_N1 = torch.searchsorted(cdf_NV, draws * cdf_NV[:, -1:], right=True)
    # A product that rounds up to the total lands behind the last token; the last one of probability above 0 is meant.
    tokens_N1 = torch.minimum(tokens_N1, torch.searchsorted(cdf_NV, cdf_NV[:, -1:].contiguous()))
    is_greedy = rows.temperatures == 0.0
    if is_greedy.any():
        chosen = torch.from_numpy(np.flatnonzero(is_greedy)).to(device)
        tokens_N1[chosen, 0] = logits_NV[chosen].argmax(-1)
    tokens_N1.clamp_(max=logits_NV.shape[1] - 1)  # only logits that are not finite get there; their logprob tells the caller
    picked_N1 = logprobs_NV.gather(1, tokens_N1)
    return tokens_N1[:, 0].cpu().numpy(), picked_N1[:, 0].cpu().numpy()


def _cut_top_p(logits_NV: Tensor, cut: npt.NDArray[np.int64], top_ps: npt.NDArray[np.float64]) -> Tensor:
    """Keep, in the rows `cut`, the fewest most likely tokens whose probabilities add up to top_p (Holtzman et al. 2020)."""
    index = torch.from_numpy(cut).to(logits_NV.device)
    limits = torch.from_numpy(top_ps[cut]).to(logits_NV.device)[:, None]
    chosen_MV = logits_NV[index]
    ordered_MV, order_MV = chosen_MV.sort(dim=-1, descending=True, stable=True)
    probabilities_MV = torch.softmax(ordered_MV, dim=-1).double()
    is_out_MV = probabilities_MV.cumsum(-1) - probabilities_MV >= limits
    is_out_MV[:, 0] = False
    ordered_MV = ordered_MV.masked_fill(is_out_MV, float("-inf"))
    result = logits_NV.clone()
    result[index] = chosen_MV.scatter(1, order_MV, ordered_MV)
    return result
