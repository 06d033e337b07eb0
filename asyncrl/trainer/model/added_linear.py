"""Linear layers with low-rank adapters. A pass uses one adapter for all rows, or an
adapter for each stretch of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncrl.models.low_rank import LowRank


class Pair(nn.Module):
    """A [rank, in] and B [out, rank] of an adapter in one layer, float32."""

    def __init__(self, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(down)
        self.lora_B = nn.Parameter(up)
        self.scale = scale

    @property
    def low_rank(self) -> LowRank:
        # FSDP2 replaces the parameters around a pass, so a pass reads them here.
        return LowRank(self.lora_A, self.lora_B, self.scale)


Used = tuple[slice | None, Pair | None]
"""Rows, and the pair that computes them. The rows are None for all rows. The pair is None
if the adapter does not change the layer.
"""


class AddedLinear(nn.Linear):
    """W x + scale * B (A x), in the dtype of x, as engines compute it.

    `used`: the stretches of the next pass, in their order. Pairs of the run's own adapters
    are parts of the module.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight = base.weight
        self.bias = base.bias
        self.used: list[Used] = []

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        parts: list[Tensor] = []  # torch.compile does not know list[Tensor]()
        for rows, pair in self.used:
            x_part, part = x, product
            if rows is not None:
                last, _ = self.used[-1]
                assert last is not None
                assert x.numel() == last.stop * x.shape[-1], (
                    "layers that get other rows than the packed tokens have one adapter in a micro-batch"
                )
                x_part, part = x[..., rows, :], product[..., rows, :]
            parts.append(part if pair is None else pair.low_rank.add(part, x_part))
        if not parts:
            return product
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def as_head(
        self, hidden_MD: Tensor, place_M: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return scale * A h [M, R] and B [V, R] for the hidden states at the packed
        places `place_M`, None without an adapter.

        The ranks of several adapters are joined. Each row is 0 in the columns of others.
        """
        narrow = list[Tensor]()
        ups = list[Tensor]()
        for rows, pair in self.used:
            if pair is None:
                continue
            narrow_MR = pair.low_rank.narrow(hidden_MD)
            if rows is not None:
                is_own_M = (place_M >= rows.start) & (place_M < rows.stop)
                narrow_MR = torch.where(is_own_M[:, None], narrow_MR, 0.0)
            narrow.append(narrow_MR)
            ups.append(pair.low_rank.up.to(hidden_MD.dtype))
        if not ups:
            return None, None
        if len(ups) == 1:
            return narrow[0], ups[0]
        return torch.cat(narrow, dim=1), torch.cat(ups, dim=1)
