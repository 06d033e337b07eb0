"""Spec, model, forward pass, sampling and device transfers of an embedded engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from asyncrl.base.http import Refused, fail
from asyncrl.messages.engine_api import AdapterSpec
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.token_grammars import GrammarError, TokenGrammars
from asyncrl.messages.tokens import SUPPORT, TOP_IDS, TOP_LOGPROBS
from asyncrl.models.devices import choose_device, own_memory, to_device
from asyncrl.models.loading import load_language_model, loading
from asyncrl.models.low_rank import LowRank, find_targets, kind_of, noted_calls
from asyncrl.models.rope_lengths import refuse_lengths
from asyncrl.models.structure import NUM_TOKENS, find_structure
from asyncrl.models.support import has_experts, has_states
from asyncrl.weights.aside import give_back
from asyncrl.weights.export import routers_of
from asyncrl.weights.ipc import limit_memory
from asyncrl.weights.tensor_files import Pieces, stored_pieces, weights_of
from asyncrl_servers.embedded.kv_attention import (
    NAME,
    CacheShape,
    Pass,
    ProbePass,
    RoutedExperts,
    in_force,
)
from asyncrl_servers.embedded.row_adapters import RANK_STEP, Adapter, Added, padded
from asyncrl_servers.embedded.slot_states import Cut, Mixer
from asyncrl_servers.engine_routes import EngineSpec, uniform_draws

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
NUM_PROBED, LONGEST_PROBED = 24, 128
"""Fewest tokens of a check, and the longest window that it crosses at its real size."""
SHORT = 8
"""Size of longer windows during a check."""
STATIC_ROPE = frozenset({"default", "linear", "llama3"})
"""Rotary embeddings that depend only on position."""
CHECKED_RANKS = (8, 32)
"""Ranks of other adapters during a check."""
NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""oneDNN's AMX kernels round a row of a bfloat16 product by the number of rows; its
AVX-512 kernels do not, and take up to 1.8 times as long for a decode step (SmolLM2).
The trainer keeps AMX: the engine's logprobs differ from the trainer's as much with it
as without it.
"""


class EmbeddedSpec(EngineSpec):
    model_path: str
    """Hugging Face folder with config, weights and (for stop strings) tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weight dtype; auto: bfloat16 on CUDA, float32 on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default=1, ge=1)
    deterministic: Literal["auto"] | bool = "auto"
    """On CPU: batch-invariant, checked at start. auto: true unless the model has
    experts or states.
    """
    roles: dict[str, AdapterSpec] = {}
    """Adapters that pushes bring together, in place of `adapters`. A request names one."""
    max_adapters: int = Field(default=0, ge=0)
    """Adapters that /open_adapter may add to the run's own."""
    num_kept: int = Field(default=0, ge=0)
    """Finished sequences cached for their next turns."""
    score_slots: int = Field(default=0, ge=0)
    """Texts that POST /score reads at once (0: it refuses them)."""
    stays: bool = False
    """Sleeping parts keep their memory."""
    moves: bool = False
    """Sleeps give memory to another process, again and again."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of CUDA memory for torch (none = all)."""
    returns_routing: bool = False
    """Return each token's experts (algorithm.router_replay)."""
    fused_decode: bool = False
    """Decode with compiled layers, merged weights and a Triton kernel; not in exact
    mode.
    """
    profile_steps: tuple[int, ...] = ()
    """Trainer steps during which its own work is profiled."""
    profile_dir: Path = Path("profile")
    aside_dir: Path | None = None
    """A sleep keeps the weights; what leaves a CPU is in a file there (none = a sleep
    drops them, and a push brings others).
    """


class LoadedModel:
    def __init__(self, spec: EmbeddedSpec) -> None:
        """Load and probe the model; exit if it is unsupported. Raises ConfigError if it
        cannot be loaded.
        """
        self.folder = Path(spec.model_path)
        self.device, self.dtype = choose_device(spec.device, spec.dtype)
        limit_memory(self.device, spec.share)
        with loading(self.folder):
            model = load_language_model(
                self.folder, dtype=self.dtype, attn_implementation="eager"
            )
            self.model = model.to(self.device).eval().requires_grad_(False)
        own_memory(self.model)
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        if spec.returns_routing and not routers_of(self.model):
            what = f"{type(self.model).__name__} has no routers"
            fail(what, way_out="set algorithm.router_replay=false.")
        refuse_lengths(self.model.config, spec.max_length)
        self.is_exact = self._is_exact(spec)
        if self.is_exact and self.dtype == torch.bfloat16:
            # oneDNN reads its environment at its first product, which is below. A
            # setting of the user wins.
            os.environ.update(NO_AMX | os.environ)
        try:
            self._use_slots(spec)
        except Exception as error:
            what = (
                f"the embedded engine cannot serve {type(self.model).__name__}: {error}"
            )
            fail(what, way_out="set rollout.engine=vllm.")
        forms = spec.roles or ({"": spec.adapters} if spec.adapters else {})
        self.adapters = {role: self.make_adapter(one) for role, one in forms.items()}
        """The run's own, by role; "" is the only one."""
        if forms:
            self._use_adapters()
        has_tokenizer = any(
            (self.folder / f"tokenizer{end}.json").is_file() for end in ("", "_config")
        )
        self.tokenizer: PreTrainedTokenizerFast | None = (
            PreTrainedTokenizerFast.from_pretrained(self.folder)
            if has_tokenizer
            else None
        )
        added = {} if self.tokenizer is None else self.tokenizer.added_tokens_decoder
        self.special_ids = {
            str(token): index for index, token in added.items() if token.special
        }
        self.eos_ids = _eos_ids(self.model, self.tokenizer)
        linear = [one for one in self.model.modules() if isinstance(one, nn.Linear)]
        self.spare_rows = int(any(one.out_features % 2 for one in linear))
        """Padding rows of an exact call: elementwise kernels compute the remainder
        after whole vector pairs (32 floats) differently (measured for silu and gelu);
        odd widths have one.
        """

    @cached_property
    def pieces(self) -> Pieces:
        weights = weights_of(self.model)
        head = self.model.get_output_embeddings()
        # A tied head is not listed, but its adapter is named like its weight.
        weights |= {
            f"{name}.weight": one.weight
            for name, one in self.model.named_modules()
            if one is head and isinstance(one, nn.Linear)
        }
        return stored_pieces(self.model, weights)

    @cached_property
    def grammars(self) -> TokenGrammars:
        """Made at the first request with a grammar. Raises GrammarError."""
        return TokenGrammars(self.tokenizer, self.vocab_size)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        assert self.tokenizer is not None, "stop strings need a tokenizer"
        return str(
            self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def give_back(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        give_back(self.device)

    @contextmanager
    def short_windows(self, max_length: int) -> Iterator[None]:
        """Shorten windows and chunks that probes do not reach, so that a check of few
        tokens crosses them.
        """
        changed = list[tuple[object, str, int]]()
        for one in (self.model.config.get_text_config(), *self.model.modules()):
            for name in ("sliding_window", "attention_chunk_size"):
                size = getattr(one, name, None)
                if isinstance(size, int) and LONGEST_PROBED < size < max_length:
                    changed.append((one, name, size))
                    setattr(one, name, SHORT)
        yield
        for one, name, size in changed:
            setattr(one, name, size)

    def make_adapter(self, spec: AdapterSpec) -> Adapter:
        """Return an adapter of zeros. Raises ConfigError."""
        low_ranks = dict[str, LowRank]()
        rank = padded(spec.rank, RANK_STEP)
        for name in find_targets(self.model, spec.targets, self._called):
            weight = self.model.get_submodule(name).get_parameter("weight")
            num_out, num_in = weight.shape
            down = weight.new_zeros(rank, num_in, dtype=self.dtype)
            up = weight.new_zeros(num_out, rank, dtype=self.dtype)
            low_ranks[name] = LowRank(down, up, spec.scale)
        return Adapter(low_ranks, spec.rank)

    def partial_layer(self, adapters: Iterable[Adapter]) -> str | None:
        """Return the name of an adapted layer that does not get all tokens of a call, for
        example an expert that is a module of its own.
        """
        everything = {len(self.probe_ids)}
        for name in chain.from_iterable(one.low_ranks for one in adapters):
            if self._called[kind_of(name)] != everything:
                return name
        return None

    def _use_adapters(self) -> None:
        """Let all linear layers add their adapters."""
        head = self.model.get_output_embeddings()
        layer: Any
        for name, layer in self.model.named_modules():
            if type(layer).forward is nn.Linear.forward:
                own = self.adapters.get("")
                low_rank = None if own is None else own.low_ranks.get(name)
                layer.added = Added(name, layer is head, low_rank)
                # PlainDecoder reads `added`; the hook is for layers that are called.
                layer.register_forward_hook(
                    lambda layer, inputs, output: layer.added.add(output, inputs[0])
                )

    @contextmanager
    def random_adapters(self, spec: EmbeddedSpec) -> Iterator[list[Adapter]]:
        """Fill the run's adapters with random numbers for a check, and yield them, and
        others of CHECKED_RANKS.
        """
        adapters = [*self.adapters.values()]
        if spec.adapters is not None and spec.max_adapters:
            own = spec.adapters
            ranked = [own.model_copy(update={"rank": one}) for one in CHECKED_RANKS]
            adapters += map(self.make_adapter, ranked)
        generator = torch.Generator().manual_seed(0)
        for tensor in chain.from_iterable(one.tensors.values() for one in adapters):
            tensor.normal_(std=tensor.shape[1] ** -0.5, generator=generator)
        yield adapters
        for one in self.adapters.values():
            for tensor in one.tensors.values():
                tensor.zero_()

    def _is_exact(self, spec: EmbeddedSpec) -> bool:
        """Return whether logits shall not depend on the batch. Always False on CUDA,
        which picks kernels by size.
        """
        if self.device.type != "cpu":
            return False
        if spec.deterministic != "auto":
            return spec.deterministic
        # An expert's rounding changes with the number of rows routed to it. A prompt's
        # recurrence is summed in another order than decoded tokens.
        architecture = self.model.config.get_text_config().to_dict()
        return not (has_experts(architecture) or has_states(architecture))

    @torch.inference_mode()
    def _use_slots(self, spec: EmbeddedSpec) -> None:
        """Compute the model's own logits, then install our attention and find the
        cache's shape. Raises what the model cannot do.
        """
        structure = find_structure(self.model)
        sizes = [
            size
            for kind in structure.kinds
            for size in (kind.window, kind.chunk)
            if size
        ]
        num_probed = max(
            [NUM_PROBED, *(size + SHORT for size in sizes if size <= LONGEST_PROBED)]
        )
        self.probe_ids = [
            (7 * i + 3) % self.vocab_size
            for i in range(min(num_probed, spec.max_length))
        ]
        ids_1T = torch.tensor([self.probe_ids], device=self.device)
        # Before set_attn_implementation: check_same_model compares our attention with
        # these.
        with (
            self.short_windows(spec.max_length),
            noted_calls(self.model) as self._called,
        ):
            self.reference_logits: Tensor = (
                self.model(input_ids=ids_1T, use_cache=False).logits[0].float()
            )
        """The model's own logits for `probe_ids`."""
        self.mixers = [
            Mixer(name, self.model.get_submodule(name)) for name in structure.mixers
        ]
        self.routed = RoutedExperts(self.model) if spec.returns_routing else None
        # From here on the model calls _attention of kv_attention.py in every layer.
        self.model.set_attn_implementation(NAME)
        positions_R = torch.arange(NUM_TOKENS, device=self.device)
        state = DynamicCache(config=self.model.config) if self.mixers else None
        probe = ProbePass(positions_R, [Cut(positions_R[None], state, is_first=True)])
        with in_force(probe, spec.max_length):
            ids_1R = positions_R[None] % self.vocab_size
            self.model(
                input_ids=ids_1R, position_ids=positions_R[None], use_cache=False
            )
        num_routed = 0 if self.routed is None else self.routed.take().shape[1]
        self.shape = CacheShape(tuple(probe.layers), num_routed, state)


def to_host(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """Copy all tensors in one transfer. Values must be exact in float64."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    # Each transfer waits for the device, so a decode step has one. float64 holds every
    # token id and float32 value exactly.
    packed = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    pieces = zip(
        packed.split_with_sizes([tensor.numel() for tensor in tensors]),
        tensors,
        strict=True,
    )
    return [
        piece.to(tensor.dtype).view(tensor.shape).numpy() for piece, tensor in pieces
    ]


def _eos_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None
) -> frozenset[int]:
    """Return all end-of-sequence ids of the configs and the tokenizer."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [int(value)])
    return frozenset(found)


class PlainDecoder:
    """Forward pass of Llama-like models. Python in transformers is half of a small
    model's decode step.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self._model, self._layers = (
            model,
            [layer_of(one, separate) for one in model.model.layers],
        )
        first = model.model.layers[0].self_attn
        self.scaling: float = first.scaling
        embedding = model.model.embed_tokens.weight
        positions = torch.arange(max_length, device=embedding.device)
        cos_1PD, sin_1PD = model.model.rotary_emb(embedding[:1][None], positions[None])
        half = first.head_dim // 2
        self._cos_PD = cos_1PD[0]
        # The table holds the sign of rotate_half.
        self._sin_PD = torch.cat((-sin_1PD[0, :, :half], sin_1PD[0, :, half:]), dim=-1)

    @classmethod
    def of(cls, model: PreTrainedModel, max_length: int) -> PlainDecoder | None:
        """Return None if the model's forward may differ."""
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        is_plain = (
            config.model_type in MODEL_TYPES
            and config.hidden_act in ("silu", "swish")
            and rope.get("rope_type", "default") in STATIC_ROPE
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )
        return cls(model, max_length) if is_plain else None

    def forward(
        self, pass_: Pass, ids_R: Tensor, positions_R: Tensor, keep: Tensor | None
    ) -> Tensor:
        """Return logits [rows, V] of the rows `keep` (None: all)."""
        base = self._model.model
        hidden_RH = functional.embedding(ids_R, base.embed_tokens.weight)
        added_RH = torch.zeros_like(hidden_RH)
        rotation = self.rotation(positions_R)
        for number, layer in enumerate(self._layers):
            attend = partial(pass_.attend, number, scaling=self.scaling)
            hidden_RH, added_RH = layer_step(
                hidden_RH, added_RH, layer, rotation, attend
            )
        hidden_RH = hidden_RH + added_RH
        if keep is not None:
            hidden_RH = hidden_RH[keep]
        return self.logits(hidden_RH)

    def rotation(self, positions_R: Tensor) -> list[Tensor]:
        """Return cosines and signed sines [R, 1, d]."""
        return [
            table_PD[positions_R].unsqueeze(1)
            for table_PD in (self._cos_PD, self._sin_PD)
        ]

    def logits(self, hidden_RH: Tensor) -> Tensor:
        normed_RH = torch.rms_norm(hidden_RH, *norm_of(self._model.model.norm))
        return cast(Tensor, self._model.lm_head(normed_RH))


class Maps(NamedTuple):
    """Linear maps of the same input: (weight, bias) of each, or a merged map."""

    tensors: list[tuple[Tensor, Tensor | None]]
    sizes: list[int]
    """Output sizes of the maps."""
    adds: Sequence[Added | LowRank | None]
    """What each map's adapters add."""

    def __call__(self, states_RH: Tensor) -> Sequence[Tensor]:
        products: Sequence[Tensor] = [
            functional.linear(states_RH, *one) for one in self.tensors
        ]
        if len(products) == 1:
            products = products[0].split_with_sizes(self.sizes, dim=1)
        return [
            product if one is None else one.add(product, states_RH)
            for product, one in zip(products, self.adds, strict=True)
        ]


Norm = tuple[torch.Size, Tensor, float]


class Layer(NamedTuple):
    """Weights of a layer. Norms are (shape, weight, epsilon)."""

    norm: Norm
    mlp_norm: Norm
    head_norms: list[Norm]
    """Norms of queries and keys, if the model has any."""
    to_heads: Maps
    out: Maps
    gate_up: Maps
    down: Maps
    head_dim: int


def layer_step(
    hidden_RH: Tensor,
    added_RH: Tensor,
    layer: Layer,
    rotation: list[Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the hidden states before the last sum, and its summand: the next layer's
    norm computes the sum in its own kernel, if layers are compiled.
    """
    num_rows, half = len(hidden_RH), layer.head_dim // 2
    cos_R1D, sin_R1D = rotation
    hidden_RH = hidden_RH + added_RH
    of_heads = layer.to_heads(torch.rms_norm(hidden_RH, *layer.norm))
    query, key, value = (one.view(num_rows, -1, layer.head_dim) for one in of_heads)
    if layer.head_norms:
        query, key = (
            torch.rms_norm(query, *layer.head_norms[0]),
            torch.rms_norm(key, *layer.head_norms[1]),
        )
    query = query * cos_R1D + query.roll(half, -1) * sin_R1D
    key = key * cos_R1D + key.roll(half, -1) * sin_R1D
    mixed = attend(query, key, value)
    hidden_RH = hidden_RH + layer.out(mixed.reshape(num_rows, -1))[0]
    gate, up = layer.gate_up(torch.rms_norm(hidden_RH, *layer.mlp_norm))
    return hidden_RH, layer.down(functional.silu(gate) * up)[0]


def layer_of(module: Any, join: Callable[..., Maps]) -> Layer:
    """Return a module's weights; `join` gets the maps of the same input."""
    attention, mlp = module.self_attn, module.mlp
    head_norms = (
        (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
    )
    return Layer(
        norm_of(module.input_layernorm),
        norm_of(module.post_attention_layernorm),
        [norm_of(one) for one in head_norms],
        join(attention.q_proj, attention.k_proj, attention.v_proj),
        join(attention.o_proj),
        join(mlp.gate_proj, mlp.up_proj),
        join(mlp.down_proj),
        attention.head_dim,
    )


def separate(*maps: nn.Linear) -> Maps:
    return Maps(
        [(one.weight, one.bias) for one in maps],
        [one.out_features for one in maps],
        [getattr(one, "added", None) for one in maps],
    )


def norm_of(module: Any) -> Norm:
    return module.weight.shape, module.weight, module.variance_epsilon


MOST_LIKELY = 1024
"""Logits that top_p sorts first: most nuclei end here, and on a CPU a sort of 49,152
logits takes 14 ms, the largest 1,024 of them 0.6 ms.
"""


class Drawn(NamedTuple):
    """A token per row: `ids` int64 [N], `logprobs` float32 [N] in nats. `lists`: by
    column and row: TOP_IDS and TOP_LOGPROBS of the likeliest tokens, in order, and as
    SUPPORT the ids that a cut row was drawn from (ascending; empty: all).
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    lists: dict[str, dict[int, npt.NDArray[np.generic]]]


def draws_from_all(sampling: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return which rows draw from the whole vocabulary, bool [N]."""
    is_full = (sampling["top_p"] == 1.0) & (sampling["top_k"] == 0.0)
    is_full &= sampling["min_p"] == 0.0
    # As float32, in which a tiny temperature is 0: greedy.
    temperatures = sampling["temperature"].astype(np.float32)
    return cast("npt.NDArray[np.bool_]", is_full & (temperatures > 0.0))


def draw(logits_NV: Tensor, draws_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Draw token ids [N, D] by uniform `draws_ND`, and return with them all logprobs
    [N, V]; no step waits for a CUDA device.

    Inverts the cumulative distribution in token-id order, in float64.
    """
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    # In float32 the sum over a large vocabulary would round away rare tokens.
    cdf_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    # right=True skips tokens of probability 0, which add nothing to the sum. The total
    # is a factor because it is not exactly 1.
    tokens_ND = torch.searchsorted(cdf_NV, draws_ND * cdf_NV[:, -1:], right=True)
    # A product may round up to the total; take the last token with probability above 0.
    tokens_ND = torch.minimum(
        tokens_ND, torch.searchsorted(cdf_NV, cdf_NV[:, -1:].contiguous())
    )
    # Only non-finite logits still exceed the last token.
    return tokens_ND.clamp_(max=logits_NV.shape[1] - 1), logprobs_NV


def sample(
    logits_NV: Tensor,
    sampling: npt.NDArray[np.void],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    num_top: Mapping[int, int] | None = None,
) -> Drawn:
    """Draw a token per row, and return with it the `num_top` likeliest tokens by row.

    `sampling` [N] has a field for each of DRAW_PARAMETERS; temperature 0 is greedy.
    """
    device = logits_NV.device
    logits_NV = logits_NV.float()
    temperatures = sampling["temperature"].astype(np.float32)
    if (temperatures != 1.0).any():
        # A greedy row keeps its logits: its logprobs are of temperature 1.
        divisors = np.where(temperatures == 0.0, np.float32(1.0), temperatures)
        logits_NV = logits_NV / to_device(divisors, device)[:, None]
    cut = np.flatnonzero(~draws_from_all(sampling) & (temperatures > 0.0))
    supports = dict[int, npt.NDArray[np.generic]]()
    if len(cut):
        index = to_device(cut, device)
        kept_MV = _cut(logits_NV[index], sampling[cut])
        # Read from what is drawn from, not computed a second time: the trainer's ratio
        # is exact only over the very same set.
        supports = dict(zip(cut.tolist(), _supports(kept_MV), strict=True))
        logits_NV = logits_NV.index_copy(0, index, kept_MV)
    draws = to_device(uniform_draws(seeds, positions), device)[:, None]
    tokens_N1, logprobs_NV = draw(logits_NV, draws)
    if (is_greedy := temperatures == 0.0).any():
        chosen = to_device(np.flatnonzero(is_greedy), device)
        tokens_N1[chosen, 0] = logits_NV[chosen].argmax(-1)
    picked_N1 = logprobs_NV.gather(1, tokens_N1)
    num_top = num_top or {}
    likeliest = [
        logprobs_NV[row].topk(min(num, logprobs_NV.shape[1]))
        for row, num in num_top.items()
    ]
    token_ids, logprobs, *found = to_host(
        tokens_N1[:, 0], picked_N1[:, 0], *chain.from_iterable(likeliest)
    )
    top_ids = dict[int, npt.NDArray[np.generic]]()
    top_logprobs = dict[int, npt.NDArray[np.generic]]()
    for row, values, ids in zip(num_top, found[::2], found[1::2], strict=True):
        is_possible = values > -np.inf
        top_ids[row] = ids[is_possible].astype(np.int32)
        top_logprobs[row] = values[is_possible]
    lists = {TOP_IDS: top_ids, TOP_LOGPROBS: top_logprobs, SUPPORT: supports}
    return Drawn(token_ids, logprobs, lists)


def _supports(logits_MV: Tensor) -> list[npt.NDArray[np.int32]]:
    """Return the ids with a logit above -inf, ascending, for each row (empty: all)."""
    row_E, id_E = (logits_MV > -torch.inf).nonzero(as_tuple=True)
    rows, ids = to_host(row_E, id_E)
    sizes = np.bincount(rows, minlength=len(logits_MV))
    parts = np.split(ids.astype(np.int32), sizes.cumsum()[:-1])
    num_tokens = logits_MV.shape[1]
    return [part[:0] if len(part) == num_tokens else part for part in parts]


def _cut(logits_MV: Tensor, sampling: npt.NDArray[np.void]) -> Tensor:
    """Set the logits that min_p, then top_k, then top_p exclude to -inf.

    Each of them keeps the logits from a limit on, so tokens of equal logits stay or go
    together, in whichever order a device sorts them.
    """
    min_p_M1, top_k_M1, top_p_M1 = (
        to_device(sampling[name], logits_MV.device)[:, None]
        for name in ("min_p", "top_k", "top_p")
    )
    num_tokens = logits_MV.shape[1]
    width = min(max(MOST_LIKELY, int(sampling["top_k"].max())), num_tokens)
    ordered_MW = logits_MV.topk(width).values
    limit_M1 = ordered_MW[:, :1] + min_p_M1.log().float()
    last_M1 = top_k_M1.clamp(1, width).long() - 1
    of_top_k_M1 = torch.where(top_k_M1 > 0, ordered_MW.gather(1, last_M1), -torch.inf)
    limit_M1 = limit_M1.maximum(of_top_k_M1)
    if (sampling["top_p"] < 1.0).any():
        # Over the whole vocabulary, like the sum below from its start on: a row's limit
        # must not depend on how many tokens another row needs.
        total_M1 = logits_MV.masked_fill(logits_MV < limit_M1, -torch.inf).logsumexp(
            -1, keepdim=True
        )
        of_top_p_M1, is_reached = _top_p_limit(ordered_MW, total_M1, top_p_M1)
        if not is_reached and width < num_tokens:
            ordered_MV = logits_MV.sort(dim=-1, descending=True).values
            of_top_p_M1, _ = _top_p_limit(ordered_MV, total_M1, top_p_M1)
        limit_M1 = limit_M1.maximum(of_top_p_M1)
    return logits_MV.masked_fill(logits_MV < limit_M1, -torch.inf)


def _top_p_limit(
    ordered_MW: Tensor, total_M1: Tensor, top_p_M1: Tensor
) -> tuple[Tensor, bool]:
    """Return the lowest logit of each nucleus (https://arxiv.org/abs/1904.09751), and
    whether all of them end within these logits.
    """
    sums_MW = (ordered_MW - total_M1).exp().cumsum(-1, dtype=torch.float64)
    # Without its own probability: the token that reaches top_p stays in.
    before_MW = functional.pad(sums_MW, (1, 0))[:, :-1]
    num_kept_M1 = (before_MW < top_p_M1).sum(-1, keepdim=True)
    limit_M1 = ordered_MW.gather(1, (num_kept_M1 - 1).clamp(min=0))
    # Rounding must not cut the tail of a row whose top_p is 1.
    is_cut_M1 = top_p_M1 < 1.0
    is_reached = bool(((sums_MW[:, -1:] >= top_p_M1) | ~is_cut_M1).all())
    return torch.where(is_cut_M1, limit_M1, -torch.inf), is_reached


def mask(allowed: Mapping[int, npt.NDArray[np.bool_]], logits_NV: Tensor) -> None:
    """Mask forbidden tokens of these rows in place."""
    if allowed:
        index = to_device(np.array([*allowed]), logits_NV.device)
        allowed_MV = to_device(np.stack([*allowed.values()]), logits_NV.device)
        logits_NV[index] = logits_NV[index].masked_fill(~allowed_MV, float("-inf"))


def grammar_refusal(request: SamplingRequest, error: GrammarError) -> Refused:
    what = (
        f"request {request.request_id} has a grammar that cannot be followed: {error}"
    )
    return Refused(400, what, way_out="make the schema smaller or simpler.")
