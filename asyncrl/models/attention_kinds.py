"""The kinds of attention that packed tokens and the slot cache can compute.

A Hugging Face attention module calls its attention function with keywords. kind_of
reads them, and refuses whatever is not known, by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HARMLESS = frozenset(
    {
        "dropout",
        "scaling",
        "is_causal",
        "sliding_window",
        "softcap",
        "s_aux",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "packed_layout",
    }
)
"""Keywords that kind_of reads, or that change nothing."""


class UnknownAttentionError(Exception):
    """The attention of a module cannot be reproduced; the text names the reason."""


class AttentionKind(NamedTuple):
    """Query i sees key j <= i, if window and chunk allow it.

    `window`: i - j < window. `chunk`: i // chunk == j // chunk. `softcap`: scores
    become softcap * tanh(score / softcap).
    """

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None

    def within(self, length: int) -> AttentionKind:
        """Return the kind without a window or a chunk that no text up to `length`
        crosses.
        """
        window, chunk = (
            size if size and size < length else None
            for size in (self.window, self.chunk)
        )
        return self._replace(window=window, chunk=chunk)


def kind_of(
    module: nn.Module, attention_mask: Tensor | None, options: dict[str, Any]
) -> AttentionKind:
    """Return the kind of attention that `module` asks for. Raises
    UnknownAttentionError.
    """
    if attention_mask is not None:
        raise UnknownAttentionError("it has an attention mask of its own")
    # A keyword of tomorrow's model may change what a token sees. The packed pass would
    # ignore it, and the numbers would be wrong without an error. So only known ones
    # pass.
    unknown = [
        name
        for name, value in options.items()
        if value is not None and name not in HARMLESS
    ]
    if unknown:
        raise UnknownAttentionError(
            f"its attention has {' and '.join(sorted(unknown))}"
        )
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnknownAttentionError("its attention is not causal")
    config = getattr(module, "config", None)
    window = options.get("sliding_window")
    # Some modules pass their window as a keyword. Others have it only in the config,
    # for the layers that layer_types names.
    of_config = {"chunked_attention": getattr(config, "attention_chunk_size", None)}
    if window is None:
        of_config["sliding_attention"] = getattr(config, "sliding_window", None)
    chunk = None
    # torch.compile makes one graph for each index of a layer that is read.
    if any(of_config.values()):
        kinds = getattr(config, "layer_types", None) or []
        layer = getattr(module, "layer_idx", None)
        named = kinds[layer] if isinstance(layer, int) and layer < len(kinds) else None
        if named == "chunked_attention":
            chunk = of_config[named]
        elif named in of_config:
            window = of_config[named]
    return AttentionKind(window, chunk, options.get("softcap"))


def by_position(module: Any, query: Tensor, position_N: Tensor) -> Tensor:
    """Return queries [B, heads, T, d] like a call of one text, for N = B * T
    tokens.

    Llama 4 scales the queries of layers without rotary embedding by a token's place in
    the call, which is its position only in a call of one text. Other models have no
    such factor.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(
        module, "use_rope", True
    ):
        return query
    position_BT = position_N.view(len(query), -1)
    # In packed tokens, the count runs on over all sequences.
    counted_BT = torch.arange(query.shape[2], device=query.device).expand_as(
        position_BT
    )
    floors_2BT = torch.floor(
        (torch.stack((position_BT, counted_BT)) + 1.0) / module.floor_scale
    )
    # The model has already multiplied by the wrong factor, so the correction is the
    # quotient.
    right_BT, wrong_BT = torch.log1p(floors_2BT) * module.attn_scale + 1.0
    factor_BT: Tensor = right_BT / wrong_BT
    return (query * factor_BT[:, None, :, None]).to(query.dtype)
