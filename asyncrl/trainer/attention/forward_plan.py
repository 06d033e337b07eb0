"""Choose how a model's sequences share a forward pass: by its structure, then by
comparing numbers.

A pass is packed if tokens see each other only through attention of a known kind, or
inside of modules that can run row by row. The comparison, in float32, puts the packed
pass of a small random model next to plain passes, module by module, so that no small
multiplier hides an error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from asyncrl.models.attention_kinds import UnknownAttentionError
from asyncrl.models.rope_lengths import LengthBorder, forget_lengths, length_border
from asyncrl.models.structure import (
    MODEL_ERRORS,
    backbone_of,
    find_structure,
    hooked,
    map_rows,
    outermost,
    parts_of_layers,
)
from asyncrl.trainer.attention.tree import IntN, places_of
from asyncrl.trainer.loss.packing import MicroBatch, pack_texts
from asyncrl.trainer.model.policy import ForwardPlan, Policy

REFUSALS = (*MODEL_ERRORS, UnknownAttentionError)
LARGE_STATE = 100.0
LARGE_LOGIT = 1000.0
"""Above all soft caps, which are 2 to 50."""
PREFIX, OWN = 20, (9, 3, 5, 14)
"""Lengths of the texts: a shared prefix, and what follows it."""
MIN_LAYERS, MOST_ENTRIES, MOST_WIDTH = 2, 1024, 512
SHORT_BORDER = 26
SHORT_LENGTHS = (
    ("original_max_position_embeddings", SHORT_BORDER),
    ("window", 24),
    ("attention_chunk_size", 22),
    ("floor_scale", 16),
    ("topk|budget", 12),
)
"""Names of lengths in a config, and their values in a short model, among the lengths of
the texts.
"""
LIMIT = LEAK = 1e-4
"""Relative distance of float32 results (measured: 2e-7 to 1e-5; at least 0.01 if tokens
mix).
"""

LayerFact = tuple[str, type[nn.Module], frozenset[tuple[str, bool | str | None]]]
"""Name and class of a module of a layer, and the flags and names that it keeps."""


class NotCausalError(Exception):
    """A token of the plain model depends on later tokens."""


def probe_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Return a small random model with each kind of layer. Raises transformers' errors."""
    small = _with_few_layers(config)
    text = small.get_text_config()
    _cut_experts(text)
    # Only the layers are under test. A real vocabulary would be most of the memory.
    text.vocab_size = min(text.vocab_size, MOST_ENTRIES)
    # An embedding refuses a padding id beyond its entries.
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    # attention needs the residual's weight at any width
    if hasattr(text, "initializer_range"):
        text.initializer_range = text.hidden_size**-0.5
    try:
        return _random_model(_with_narrow_mlp(small), device)
    except MODEL_ERRORS:  # the width of a Mamba mixer has this name too
        return _random_model(small, device)


def _with_narrow_mlp(config: PreTrainedConfig) -> PreTrainedConfig:
    narrow = copy.deepcopy(config)
    text = narrow.get_text_config()
    for name, value in dict(vars(text)).items():
        if name.endswith("intermediate_size") and isinstance(value, int):
            setattr(text, name, min(value, MOST_WIDTH))
    return narrow


def _random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Return a float32 model with random weights. Norms, gates and scales are not 1 or 0, which
    would hide them.
    """
    # Without fork_rng, adapters made later would be drawn from this seed, not from the
    # run's.
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.device(device),
    ):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def _with_few_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy with the first layer of each kind, else with the first layers up to
    the last new kind.
    """
    text = config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", None)
    if num_layers is None or num_layers <= MIN_LAYERS:
        return copy.deepcopy(config)
    meta = torch.device("meta")
    kinds = _layer_kinds(_random_model(copy.deepcopy(config), meta))
    # The last layers of some models (Gemma 3n) read the keys and values of earlier
    # ones: another kind of layer.
    num_shared = getattr(text, "num_kv_shared_layers", None) or 0
    by_layer = _lists_by_layer(text).values()
    first_of = dict[tuple[object, ...], int]()
    for layer in range(num_layers):
        names = (str(value[layer]) for value in by_layer)
        first_of.setdefault((layer >= num_layers - num_shared, *names), layer)
    firsts = [*first_of.values()]
    last = max(kinds.index(kind) for kind in kinds)
    for layers in (
        firsts if len(firsts) >= MIN_LAYERS else [0, 1],
        [*range(max(last + 1, MIN_LAYERS))],
    ):
        small = _with_layers(config, layers)
        try:
            found = _layer_kinds(_random_model(copy.deepcopy(small), meta))
        except MODEL_ERRORS:  # some models name their tied layers by number
            continue
        if set(found) >= set(kinds):
            return small
    return copy.deepcopy(config)


def _with_layers(config: PreTrainedConfig, layers: list[int]) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    text = small.get_text_config()
    by_layer = _lists_by_layer(text)
    num_shared = getattr(text, "num_kv_shared_layers", None) or 0
    first_shared = text.num_hidden_layers - num_shared
    text.num_hidden_layers = len(layers)
    for name, value in by_layer.items():
        setattr(text, name, [value[layer] for layer in layers])
    if num_shared:
        text.num_kv_shared_layers = sum(layer >= first_shared for layer in layers)
    return small


def _lists_by_layer(text: PreTrainedConfig) -> dict[str, list[object]]:
    return {
        name: list(value)
        for name, value in vars(text).items()
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers
    }


def _layer_kinds(model: PreTrainedModel) -> list[frozenset[LayerFact]]:
    """Return each layer's modules, with the flags and names that they keep."""
    lists = outermost(model, nn.ModuleList).values()
    longest = max(lists, key=len, default=nn.ModuleList())
    kinds = []
    for layer in longest:
        facts = set[LayerFact]()
        for name, module in layer.named_modules():
            kept = frozenset(
                (key, value)
                for key, value in vars(module).items()
                if not key.startswith("_")
                and (value is None or isinstance(value, bool | str))
            )
            facts.add((name, type(module), kept))
        kinds.append(frozenset(facts))
    return kinds


def _cut_experts(text: PreTrainedConfig) -> None:
    """Keep a few more experts than a token uses."""
    num_chosen = getattr(text, "num_experts_per_tok", None) or 1
    # Group-limited routers (DeepSeek-V3) score a group by its two best experts: keep a
    # multiple of two per group.
    num_groups = getattr(text, "n_group", None) or 1
    most = max(8, 2 * num_chosen)
    most = -(-most // (2 * num_groups)) * 2 * num_groups
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        number = getattr(text, name, None)
        if isinstance(number, int) and number > most:
            setattr(text, name, most)


def _shortened(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy that names short lengths, so that the texts are on both sides of
    each.
    """
    short = copy.deepcopy(config)
    text = short.get_text_config()
    _shorten_values(dict(vars(text)), partial(setattr, text))
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(text, name, None) or {}
        for one in (rope, *rope.values()):
            if isinstance(one, dict):
                _shorten_values(dict(one), one.__setitem__)
    border = length_border(text)
    if border is not None and not border.is_stepwise:
        text.max_position_embeddings = SHORT_BORDER
    return short


def _shorten_values(
    values: dict[str, object], assign: Callable[[str, int], None]
) -> None:
    for name, value in values.items():
        shorts = [short for pattern, short in SHORT_LENGTHS if re.search(pattern, name)]
        if shorts and isinstance(value, int | float) and value > shorts[0]:
            assign(name, shorts[0])


@torch.no_grad()
def find_plan(model: PreTrainedModel) -> ForwardPlan:
    """Choose a plan for `model`, which may be a probe_model. Raises NotCausalError."""
    border = length_border(model.config)
    device = next(model.parameters()).device
    # Texts beyond a real window or RoPE border would have thousands of tokens. Short
    # lengths put the same code on both of its sides.
    short = _random_model(_shortened(model.config), device)
    short_border = length_border(short.config)
    texts = _random_texts(short)
    ids_1T = _on(short, texts[-1])
    has_plain_head = _has_plain_head(short, ids_1T)
    _check_causal(short, ids_1T, short_border)
    try:
        mixers = find_structure(model).mixers
        classes = tuple({type(model.get_submodule(name)) for name in mixers})
        plan = ForwardPlan(True, has_plain_head, classes, border)
        short_plan = plan._replace(border=short_border)
        reasons = [
            _compare(short, short_plan, side) for side in _sides(texts, short_border)
        ]
        reason = next(filter(None, reasons), "")
    except REFUSALS as error:
        reason = (
            f"it refuses packed tokens ({type(error).__name__}: {str(error)[:200]})"
        )
    return (
        ForwardPlan(False, has_plain_head, border=border, reason=reason)
        if reason
        else plan
    )


def _random_texts(model: PreTrainedModel) -> list[IntN]:
    random = np.random.default_rng(0)
    num_ids = model.get_input_embeddings().num_embeddings
    # A padding id, 0, may have no embedding.
    prefix = random.integers(1, num_ids, PREFIX)
    return [
        np.concatenate([prefix, random.integers(1, num_ids, length)]) for length in OWN
    ]


def _on(model: PreTrainedModel, text: IntN) -> Tensor:
    return torch.from_numpy(text).to(next(model.parameters()).device)[None]


def _sides(texts: list[IntN], border: LengthBorder | None) -> list[list[IntN]]:
    """Return the texts that may share a pass."""
    if border is None:
        return [texts]
    above = [text for text in texts if len(text) - 1 > border.length]
    below = [text for text in texts if len(text) - 1 <= border.length]
    return [
        side for side in (below, above if border.is_stepwise else above[:1]) if side
    ]


def _plain(model: PreTrainedModel, ids_1T: Tensor) -> Tensor:
    """Return the last hidden states [T, D]."""
    states: Tensor = _run(backbone_of(model), ids_1T).last_hidden_state[0]
    return states


def _plain_logits(model: PreTrainedModel, ids_1T: Tensor) -> Tensor:
    """Return the logits [T, V]."""
    logits: Tensor = _run(model, ids_1T).logits[0]
    return logits


def _run(model: PreTrainedModel, ids_1T: Tensor) -> Any:
    forget_lengths(model)
    return model(input_ids=ids_1T, use_cache=False)


def _check_causal(
    model: PreTrainedModel, ids_1T: Tensor, border: LengthBorder | None
) -> None:
    if border is not None:  # above it, another length has other frequencies
        ids_1T = ids_1T[:, : border.length]
    # ProphetNet predicts from other states than its last ones.
    for name, run in (("states", _plain), ("logits", _plain_logits)):
        whole_TD = run(model, ids_1T)
        for num_left in (ids_1T.shape[1] - 1, ids_1T.shape[1] * 2 // 3):
            left_TD = run(model, ids_1T[:, :num_left])
            distance = float(_distances(whole_TD[:num_left], left_TD).max())
            if not distance <= LIMIT:
                raise NotCausalError(
                    f"later tokens change the {name} of earlier ones, by {distance:.2g}"
                )


def _distances(found_TD: Tensor, expected_TD: Tensor) -> Tensor:
    """Return the relative distance [T] of each token."""
    found_TD = found_TD.float().flatten(1)
    expected_TD = expected_TD.float().flatten(1)
    norm_T = expected_TD.norm(dim=-1)
    distance_T: Tensor = (found_TD - expected_TD).norm(dim=-1)
    relative_T: Tensor = distance_T / (norm_T + 1e-3 * norm_T.mean() + 1e-12)
    return relative_T


def _compare(model: PreTrainedModel, plan: ForwardPlan, texts: list[IntN]) -> str:
    """Return how a packed pass differs from plain ones, or ""."""
    reads = [text[:-1] for text in texts]  # the last token is only predicted
    expected = [
        _outputs(model, len(read), partial(_plain, model, _on(model, read)))
        for read in reads
    ]
    # Policy installs packed attention in the model, which may run plainly again
    # afterwards.
    before = model.config._attn_implementation
    policy = Policy(model, plan)
    try:
        micro = pack_texts(texts, next(model.parameters()).device)
        rows = [places_of(runs) for runs in micro.layout.rows]
        found = _outputs(model, micro.layout.num_tokens, lambda: policy.states(micro))
        for name, states_ND in found.items():
            pairs = [
                (states_ND[row], one[name])
                for row, one in zip(rows, expected, strict=True)
            ]
            distance = max(float(_distances(*pair).mean()) for pair in pairs)
            if not distance <= LIMIT:
                return f"packed tokens get other values in {name}, {distance:.2g} away from the plain ones"
        leaks = _leaks(policy, micro, rows, found["its last states"])
    finally:
        policy.close()
        model.set_attn_implementation(before)
    return "a token reaches other sequences" if leaks else ""


def _outputs(
    model: PreTrainedModel, num_tokens: int, run: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """Return the outputs [T, width] of the layers and their parts, in order, and the
    last states.
    """
    found = dict[str, Tensor]()

    def keep(name: str, _: nn.Module, inputs: object, output: object) -> None:
        def kept(states_1TD: Tensor) -> Tensor:
            found.setdefault(name, states_1TD[0])
            return states_1TD

        map_rows(kept, output, num_tokens)

    with hooked(parts_of_layers(model), keep):
        states_TD = run()
    return {**found, "its last states": states_TD}


def _leaks(
    policy: Policy, micro: MicroBatch, rows: list[IntN], states_ND: Tensor
) -> bool:
    """Return whether another token in the first text changes the states of other texts."""
    others = (
        np.unique(np.concatenate(rows[1:])) if len(rows) > 1 else np.zeros(0, np.int64)
    )
    place = int(np.setdiff1d(rows[0], others)[0])

    def change(name: str, _: nn.Module, inputs: object, output: Tensor) -> Tensor:
        changed_1ND = output.clone()
        # A small change of one token could stay below LEAK at the others.
        changed_1ND[:, place] *= -LARGE_STATE
        return changed_1ND

    with hooked({policy.model.get_input_embeddings(): ""}, change):
        changed_ND = policy.states(micro)
    return bool((_distances(changed_ND[others], states_ND[others]) > LEAK).any())


def _has_plain_head(model: PreTrainedModel, ids_1T: Tensor) -> bool:
    """Return whether logits are the plain output embedding, without a soft cap or a
    scale.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False

    # Small random logits pass a soft cap almost unchanged. These do not.
    def enlarged(head: nn.Module, inputs: object, logits: Tensor) -> Tensor:
        spread = torch.linspace(
            -LARGE_LOGIT, LARGE_LOGIT, logits.shape[-1], device=logits.device
        )
        return logits + spread.to(logits.dtype)

    with head.register_forward_hook(enlarged):
        logits = _plain_logits(model, ids_1T)
        plain = head(_plain(model, ids_1T))
    return torch.allclose(logits, plain, rtol=1e-4, atol=1e-5)
