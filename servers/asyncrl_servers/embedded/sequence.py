"""One request on its way through the engine, and how its tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.messages.calls import GenerateRequest, GenerateResponse
from asyncrl_servers.engine_app import TokenStream, spans_of, uniform_draws

_SLACK = 8
"""Tokens looked at beyond the longest stop string's bytes (each token holds a byte or more, but for special
ones).
"""


class StopWatch:
    """Tells when the decoded text of a request contains one of its stop strings.

    Only the tail is decoded: as many tokens as the longest stop string has bytes, and a few more. Special
    tokens have no text, but a stop string that is one special token's name stops at that token.
    """

    def __init__(self, stop: list[str], tokenizer: Any, resumed_ids: list[int]) -> None:
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._stop_ids = {special[text] for text in self._stop if text in special}
        self._window = max((len(text.encode()) for text in self._stop), default=0) + _SLACK
        self._tail = list(resumed_ids[-self._window :])

    def is_complete(self, token_id: int) -> bool:
        """Take one more token; true if it completes a stop string."""
        self._tail = [*self._tail, token_id][-self._window :]
        if token_id in self._stop_ids:
            return True
        text = self._tokenizer.decode(self._tail, skip_special_tokens=True)
        return any(stop in text for stop in self._stop)


class RunningSequence:
    """A request from its arrival to its answer.

    Life: queued -> running in a slot -> answered, or queued -> answered (aborted). `answer` is set exactly
        once.
    """

    def __init__(
        self,
        request: GenerateRequest,
        answer: Future[GenerateResponse],
        stop_watch: StopWatch | None,
        stream: TokenStream | None,
    ) -> None:
        self.request, self.answer, self.stop_watch, self.stream = request, answer, stop_watch, stream
        self.prompt_ids = tuple(request.prompt_ids)
        self.prompt_logits_V: Tensor | None = None
        """After the last prompt token, once it runs."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.marks: list[tuple[int, int]] = []
        """(index of the first sampled token, policy_version) of each version it ran under."""

    @property
    def length(self) -> int:
        """Tokens so far, prompt included; the newest sampled one is not in the KV cache yet."""
        return len(self.prompt_ids) + len(self.token_ids)

    def finish(self, reason: Literal["stop", "length", "abort"]) -> None:
        """Answer with what was sampled."""
        self.answer.set_result(
            GenerateResponse(
                request_id=self.request.request_id,
                token_ids=self.token_ids,
                logprobs=self.logprobs,
                version_spans=spans_of(self.marks, len(self.token_ids)),
                finish_reason=reason,
            )
        )


def sample(
    logits_NV: Tensor, requests: Sequence[GenerateRequest], positions: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Draw a token for each request: (ids int64 [N], logprobs float32 [N] in nats of the distribution drawn
    from). `positions` are those of the tokens to be drawn.

    The draw inverts the cumulative distribution in order of token ids, in float64. Temperature 0 is the
    largest logit, with the logprob of temperature 1.
    """
    device = logits_NV.device
    temperatures = np.array([request.temperature for request in requests], np.float32)
    top_ps = np.array([request.top_p for request in requests])
    seeds = np.array([request.seed for request in requests], np.uint64)
    logits_NV = logits_NV.float()
    if (temperatures != 1.0).any():
        divisors = np.where(temperatures == 0.0, np.float32(1.0), temperatures)
        logits_NV = logits_NV / torch.from_numpy(divisors).to(device)[:, None]
    is_cut = (top_ps < 1.0) & (temperatures > 0.0)
    if is_cut.any():
        logits_NV = _cut_top_p(logits_NV, np.flatnonzero(is_cut), top_ps)
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    draws = torch.from_numpy(uniform_draws(seeds, np.array(positions))).to(device)[:, None]
    tokens_N1 = torch.searchsorted(cdf_NV, draws * cdf_NV[:, -1:], right=True)
    # A product that rounds up to the total lands behind the last token; the last one of probability above 0
    # is meant.
    tokens_N1 = torch.minimum(tokens_N1, torch.searchsorted(cdf_NV, cdf_NV[:, -1:].contiguous()))
    if (is_greedy := temperatures == 0.0).any():
        chosen = torch.from_numpy(np.flatnonzero(is_greedy)).to(device)
        tokens_N1[chosen, 0] = logits_NV[chosen].argmax(-1)
    # Only logits that are not finite land behind the last token still; their logprob tells the caller.
    tokens_N1.clamp_(max=logits_NV.shape[1] - 1)
    picked_N1 = logprobs_NV.gather(1, tokens_N1)
    return tokens_N1[:, 0].cpu().numpy(), picked_N1[:, 0].cpu().numpy()


def _cut_top_p(logits_NV: Tensor, cut: npt.NDArray[np.int64], top_ps: npt.NDArray[np.float64]) -> Tensor:
    """Keep, in the rows `cut`, the fewest most likely tokens whose probabilities add up to top_p (Holtzman et
    al. 2020).
    """
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
