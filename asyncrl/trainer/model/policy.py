"""The trainer's language model: packed tokens in, logprobs out.

Sequences share a pass as a ForwardPlan says (forward_plan.py):

    packed   every token once, without padding (attention.py); recurrences by rows (models/rows.py).
    single   sequence by sequence. Slower; for models that cannot be packed.

The head computes logits [M, V] in chunks with an online softmax, in float32 or the
weights' float64.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from inspect import signature
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.base.errors import ConfigError
from asyncrl.config.trainer_config import MIN_SLICE, MOST_LOGITS
from asyncrl.models.rope_lengths import LengthBorder, forget_lengths
from asyncrl.models.rows import MixerRows, RowCall, row_calls
from asyncrl.models.structure import backbone_of
from asyncrl.trainer.attention.packed_attention import ATTENTION, number_of
from asyncrl.trainer.attention.tree import Layout, places_of
from asyncrl.trainer.loss.packing import (
    AdapterStretch,
    AllowedRows,
    MicroBatch,
    PackRules,
    costs_of,
)
from asyncrl.trainer.loss.supports import Entries, EntriesPart, SupportRows
from asyncrl.trainer.model.added_linear import AddedLinear
from asyncrl.trainer.model.compiled import compile_layers, compiled, layers_of

log = logging.getLogger("asyncrl.trainer")
LOSS = "load_balancing_loss_func"
"""In transformers' modules of models whose routers have this loss."""
T = TypeVar("T")


class Scores(NamedTuple):
    """Scores of M tokens, float32 nats of softmax(logits / temperature) over the
    token's support. Only `logprob_M` and `entry_E` have a gradient. `entry_E`: the
    logprobs of MicroBatch.distilled's entries. `balance`: the routers' loss
    (BalanceLoss) times the number of tokens, with a gradient too.
    """

    logprob_M: Tensor
    entropy_M: Tensor
    highest_M: Tensor
    entry_E: Tensor | None = None
    balance: Tensor | None = None


def head_scores(head: HeadWeights, target_M: Tensor, use: HeadUse) -> Scores:
    """Score `target_M`, and the entries."""
    return Scores(*_HeadScores.apply(*head, target_M, use))  # type: ignore[no-untyped-call]


class HeadWeights(NamedTuple):
    """The head and its input. With an adapter, its B [V, rank] and scale * A h [M, rank]
    are a second product, which is added to each slice of logits.
    """

    hidden_MD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    narrow_MR: Tensor | None = None
    up_VR: Tensor | None = None

    @classmethod
    def of(cls, head: Any, hidden_MD: Tensor, place_M: Tensor) -> HeadWeights:
        """`head`: the module. `place_M`: the packed token of each row."""
        plain = cls(hidden_MD, head.weight, head.bias)
        if not isinstance(head, AddedLinear):
            return plain
        narrow_MR, up_VR = head.as_head(hidden_MD, place_M)
        return plain._replace(narrow_MR=narrow_MR, up_VR=up_VR)

    def rows(self, part: slice) -> HeadWeights:
        """Return the head for a part of the M rows."""
        narrow_MR = None if self.narrow_MR is None else self.narrow_MR[part]
        return self._replace(hidden_MD=self.hidden_MD[part], narrow_MR=narrow_MR)

    def logits(self, part: slice, temperature: float) -> Tensor:
        """Return logits [M, C] over `temperature` of a part of the vocabulary."""
        logits_MC = _product(self.hidden_MD, self.weight_VD[part])
        if self.narrow_MR is not None and self.up_VR is not None:
            logits_MC += _product(self.narrow_MR, self.up_VR[part])
        if self.bias_V is not None:
            logits_MC += self.bias_V[part]
        return logits_MC if temperature == 1.0 else logits_MC.mul_(1.0 / temperature)


class _HeadGradients:
    """Gradients of HeadWeights, slice by slice of the vocabulary. `make`: how tensors
    of weights begin.
    """

    def __init__(
        self,
        head: HeadWeights,
        needed: Sequence[bool],
        wide: torch.dtype,
        make: Callable[[Tensor], Tensor] = torch.empty_like,
    ) -> None:
        self._products = [(head.hidden_MD, head.weight_VD, 0, 1)]
        if head.narrow_MR is not None and head.up_VR is not None:
            self._products.append((head.narrow_MR, head.up_VR, 3, 4))
        self.grads: list[Tensor | None] = [None] * len(head)
        for rows, weight, of_rows, of_weight in self._products:
            self.grads[of_rows] = torch.zeros_like(rows, dtype=wide)
            if needed[of_weight]:
                self.grads[of_weight] = make(weight)

    def add(self, part: slice, narrow_MC: Tensor) -> None:
        """Add the gradient of a slice's logits, in the dtype of the weights."""
        for rows, weight, of_rows, of_weight in self._products:
            total, of_slices = self.grads[of_rows], self.grads[of_weight]
            assert total is not None
            total += narrow_MC @ weight[part]
            if of_slices is not None:
                of_slices[part] = narrow_MC.t() @ rows

    def finish(self, grad_bias_V: Tensor | None) -> list[Tensor | None]:
        """Return a gradient for each field of the head."""
        for rows, _, of_rows, _ in self._products:
            total = self.grads[of_rows]
            assert total is not None
            self.grads[of_rows] = total.to(rows.dtype)
        self.grads[2] = grad_bias_V
        return self.grads


class HeadUse(NamedTuple):
    """`entries` are in rows without a mask. `is_compiled`: fuse the passes over each
    slice of logits.
    """

    temperature: float
    allowed_M: AllowedRows | None = None
    entries: Entries | None = None
    is_compiled: bool = False

    def entries_in(self, part: slice) -> EntriesPart | None:
        return None if self.entries is None else self.entries.within(part)

    def logits(self, head: HeadWeights, part: slice) -> Tensor:
        logits_MC = head.logits(part, self.temperature)
        if self.allowed_M is not None:
            self.allowed_M.mask(logits_MC, part)
        return logits_MC

    def body(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return `function`, compiled or overwriting the logits."""
        return (
            compiled(function)
            if self.is_compiled
            else partial(function, is_in_place=True)
        )


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # Fields of the head apart, because gradients go to arguments that are tensors.
        target_M: Tensor
        use: HeadUse
        *of_head, target_M, use = inputs
        head = HeadWeights(*of_head)
        hidden_MD, weight_VD = head[:2]
        add_slice = use.body(_add_slice)
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        target_logit_M, sum_M, product_M = hidden_MD.new_zeros(
            (3, len(hidden_MD)), dtype=wide
        ).unbind()
        highest_M = torch.full_like(sum_M, -torch.inf)
        entries = use.entries
        value_E = sum_M.new_empty(0 if entries is None else len(entries.ids))
        for part in _slices(target_M, weight_VD):
            logits_MC = use.logits(head, part)
            of_part = use.entries_in(part)
            # Before add_slice, which may overwrite the logits.
            if of_part is not None:
                value_E[of_part.entries] = logits_MC[of_part.places]
            sums = (target_logit_M, highest_M, sum_M, product_M)
            target_logit_M, highest_M, sum_M, product_M = add_slice(
                logits_MC, target_M - part.start, sums
            )
            del logits_MC
        ctx.save_for_backward(*head, target_M, highest_M, sum_M)
        ctx.use = use
        # Separate terms preserve digits of large logits.
        logsum_M = sum_M.log()
        scores = (
            (target_logit_M - highest_M) - logsum_M,
            logsum_M - product_M / sum_M,
            -logsum_M,
        )
        ctx.mark_non_differentiable(*scores[1:])
        if entries is None:
            return scores
        entry_E = (value_E - highest_M[entries.row_E]) - logsum_M[entries.row_E]
        return *scores, entry_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *of_head, target_M, highest_M, sum_M = ctx.saved_tensors
        head = HeadWeights(*of_head)
        weight_VD, bias_V = head.weight_VD, head.bias_V
        # Logits are computed again, slice by slice. Kept from the forward pass, they
        # would be a float32 tensor [M, V], which the slices avoid.
        gradients = _HeadGradients(head, ctx.needs_input_grad, sum_M.dtype)
        grad_bias_V = (
            torch.empty_like(bias_V)
            if bias_V is not None and ctx.needs_input_grad[2]
            else None
        )
        grad_M = grads[0] / ctx.use.temperature
        # Each logprob of a row, its target's or an entry's, has the same logsum.
        total_M = grad_M
        entries = ctx.use.entries
        if entries is not None:
            grad_E = grads[3] / ctx.use.temperature
            total_M = grad_M.index_add(0, entries.row_E, grad_E)
        slice_gradient = ctx.use.body(_slice_gradient)
        for part in _slices(target_M, weight_VD):
            logits_MC = ctx.use.logits(head, part)
            sums = (highest_M, sum_M, grad_M, total_M)
            has_bias = grad_bias_V is not None
            place_M = target_M - part.start
            of_entries = None
            of_part = ctx.use.entries_in(part)
            if of_part is not None:
                of_entries = (*of_part.places, grad_E[of_part.entries])
            narrow_MC, grad_bias_C = slice_gradient(
                logits_MC, place_M, sums, weight_VD.dtype, has_bias, of_entries
            )
            if grad_bias_V is not None:
                grad_bias_V[part] = grad_bias_C
            gradients.add(part, narrow_MC)
            del logits_MC, narrow_MC
        return (*gradients.finish(grad_bias_V), None, None)


class _SupportLogits(torch.autograd.Function):
    """The head over supports. Of the logits [R, V] it keeps the E entries, so the
    backward pass computes no logits again, and nobody takes the exponential of a whole
    slice.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        supports: SupportRows
        temperature: float
        *of_head, supports, temperature = inputs
        head = HeadWeights(*of_head)
        hidden_RD, weight_VD = head[:2]
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        value_E = hidden_RD.new_empty(len(supports.ids), dtype=wide)
        for part in _slices(hidden_RD, weight_VD):
            of_part = supports.within(part)
            if of_part is None:
                continue
            logits_RC = head.logits(part, temperature)
            value_E[of_part.entries] = logits_RC[of_part.places]
            del logits_RC
        ctx.save_for_backward(*head)
        ctx.supports, ctx.temperature = supports, temperature
        return value_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        head = HeadWeights(*ctx.saved_tensors)
        hidden_RD, weight_VD, bias_V = head[:3]
        supports = ctx.supports
        needs_bias = ctx.needs_input_grad[2]
        grad_E = grads[0] / ctx.temperature
        narrow_E = grad_E.to(weight_VD.dtype)
        gradients = _HeadGradients(
            head, ctx.needs_input_grad, grad_E.dtype, torch.zeros_like
        )
        grad_bias_V = None
        if bias_V is not None and needs_bias:
            wide_V = grad_E.new_zeros(len(bias_V)).index_add(0, supports.id_E, grad_E)
            grad_bias_V = wide_V.to(bias_V.dtype)
        for part in _slices(hidden_RD, weight_VD):
            of_part = supports.within(part)
            if of_part is None:
                continue
            narrow_RC = narrow_E.new_zeros(len(hidden_RD), part.stop - part.start)
            narrow_RC[of_part.places] = narrow_E[of_part.entries]
            gradients.add(part, narrow_RC)
        return (*gradients.finish(grad_bias_V), None, None)


def _slices(target_M: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    size = max(
        MOST_LOGITS.get(target_M.device.type, 2**26) // max(len(target_M), 1), MIN_SLICE
    )
    for start in range(0, len(weight_VD), size):
        yield slice(start, min(start + size, len(weight_VD)))


def _add_slice(
    logits_MC: Tensor,
    place_M: Tensor,
    sums: tuple[Tensor, ...],
    *,
    is_in_place: bool = False,
) -> tuple[Tensor, ...]:
    """Add a slice to (target logit, highest, sum, product) [M]. `is_in_place`
    overwrites the logits.
    """
    target_logit_M, highest_M, sum_M, product_M = sums
    work_MC = logits_MC if is_in_place else None
    inside_M = place_M.clamp(0, logits_MC.shape[1] - 1)
    found_M = logits_MC.gather(1, inside_M[:, None])[:, 0]
    target_logit_M = target_logit_M + torch.where(inside_M == place_M, found_M, 0.0)
    # Online softmax, x = a logit, h = the highest so far: sum = sum of e^(x - h),
    # product = sum of (x - h) e^(x - h). Then the entropy is log sum - product / sum. A
    # higher h shrinks both sums by e^change, and moves each (x - h) in the product by
    # change.
    top_M = torch.maximum(logits_MC.amax(dim=-1), highest_M)
    # the first is -inf, and -inf * 0 is NaN
    change_M = (highest_M - top_M).clamp(min=-1e30)
    product_M = (product_M + sum_M * change_M) * change_M.exp()
    logits_MC = torch.sub(logits_MC, top_M[:, None], out=work_MC)
    exponential_MC = logits_MC.exp()
    sum_M = sum_M * change_M.exp() + exponential_MC.sum(dim=-1)
    product_M = product_M + torch.mul(logits_MC, exponential_MC, out=work_MC).sum(
        dim=-1
    )
    return target_logit_M, top_M, sum_M, product_M


def _slice_gradient(
    logits_MC: Tensor,
    place_M: Tensor,
    sums: tuple[Tensor, Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    has_bias: bool,
    of_entries: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    is_in_place: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of a slice's logits, `dtype` [M, C], and of its bias [C].
    `of_entries`: (row, column, gradient) of its entries.
    """
    highest_M, sum_M, grad_M, total_M = sums
    scale_M = -total_M / sum_M
    if is_in_place:
        grad_MC = logits_MC.sub_(highest_M[:, None]).exp_().mul_(scale_M[:, None])
        inside_M = place_M.clamp(0, logits_MC.shape[1] - 1)
        own_M = torch.where(inside_M == place_M, grad_M, 0.0)
        grad_MC.scatter_add_(1, inside_M[:, None], own_M[:, None])
    else:
        column_C = torch.arange(logits_MC.shape[1], device=logits_MC.device)
        own_MC = torch.where(column_C == place_M[:, None], grad_M[:, None], 0.0)
        grad_MC = (logits_MC - highest_M[:, None]).exp() * scale_M[:, None] + own_MC
    if of_entries is not None:
        row_E, column_E, grad_E = of_entries
        grad_MC = grad_MC.index_put_((row_E, column_E), grad_E, accumulate=True)
    return grad_MC.to(dtype), grad_MC.sum(dim=0) if has_bias else None


def _product(rows_MD: Tensor, weight_CD: Tensor) -> Tensor:
    """Return rows_MD @ weight_CD.T [M, C], in float32 or wider."""
    if rows_MD.is_cuda and weight_CD.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(rows_MD, weight_CD.t(), out_dtype=torch.float32)
    wide = torch.promote_types(weight_CD.dtype, torch.float32)
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    # Products of bfloat16 numbers are exact, and faster on some CPUs.
    matmul.fp32_precision = "bf16" if weight_CD.dtype == torch.bfloat16 else before
    product_MC: Tensor = rows_MD.to(wide) @ weight_CD.to(wide).t()
    matmul.fp32_precision = before
    return product_MC


class ForwardPlan(NamedTuple):
    """How sequences share a forward pass.

    `mixers`: classes that run on rows (models/rows.py). `border`: sequences on its two
    sides never share a pass. `reason`: why sequences are not packed.
    """

    is_packed: bool
    has_plain_head: bool
    mixers: tuple[type[nn.Module], ...] = ()
    border: LengthBorder | None = None
    reason: str = ""

    def rules(self, max_tokens: int, *, reads_all: bool = False) -> PackRules:
        return PackRules(max_tokens if self.is_packed else 0, self.border, reads_all)


class BalanceLoss:
    """The load-balancing loss of all routers (Switch Transformer,
    https://arxiv.org/abs/2101.03961), by the model's own function in transformers.
    `weight`: its factor in the loss.
    """

    def __init__(
        self, model: PreTrainedModel, setting: float | Literal["auto"]
    ) -> None:
        """Raises ConfigError for a weight that this model cannot have."""
        function: Any = vars(sys.modules[type(model).__module__]).get(LOSS)
        routers = list[nn.Module]()
        # Doge's function needs more, so it has none here.
        if function is not None and len(signature(function).parameters) == 4:
            recorded: Any = backbone_of(model)._can_record_outputs["router_logits"]
            kind = recorded.target_class
            routers = [one for one in model.modules() if isinstance(one, kind)]
        own = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
        if setting == "auto":
            setting = own if own and routers else 0.0
        elif setting > 0 and not routers:
            raise ConfigError(
                f"trainer.router_aux_loss={setting} for a {type(model).__name__}",
                rule="the model's class has routers and a load-balancing loss in transformers",
                way_out="set trainer.router_aux_loss=auto, or 0.",
            )
        self.weight = setting
        self.is_recording = False
        self._logits = list[Tensor]()
        if setting > 0:
            self._loss = partial(
                function,
                num_experts=model.num_experts,
                top_k=model.num_experts_per_tok,
            )
            for router in routers:
                router.register_forward_hook(partial(self._note, recorded.index))

    def _note(self, place: int, _: nn.Module, args: object, found: Any) -> None:
        # Recomputed layers must not record again: their graphs would stay in memory.
        if self.is_recording:
            self._logits.append(found[place])

    def take(self, layout: Layout) -> Tensor:
        """Return the loss of the pass that was recorded, times its tokens. A token that
        several sequences share counts for each of them.
        """
        logits, self._logits = tuple(self._logits), []
        self.is_recording = False
        places = np.concatenate([places_of(runs) for runs in layout.rows])
        count_N = torch.from_numpy(np.bincount(places, minlength=layout.num_tokens))
        loss: Tensor = self._loss(logits, attention_mask=count_N)
        return loss * len(places)


class Policy(nn.Module):
    """A Hugging Face causal language model. All weights are used inside forward(), for
    FSDP2.
    """

    needs_head: ClassVar = True
    """False: prepare() replaces the head of the loaded model."""

    def __init__(
        self, model: PreTrainedModel, plan: ForwardPlan, *, is_compiled: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.plan = plan
        self.costs = costs_of(model)
        self.replay: Callable[[Tensor | None], None] = lambda _: None
        self.select: Callable[[Sequence[AdapterStretch]], None] = lambda _: None
        """Choose the adapters of the next pass and its backward pass."""
        self.balance: BalanceLoss | None = None
        if self.plan.is_packed and model.config._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        self._rows = MixerRows(model, self.plan.mixers)
        self.is_compiled = is_compiled
        if is_compiled:
            compile_layers(model)
        if not self.plan.is_packed:
            name = type(model).__name__
            log.warning(
                "%s is trained sequence by sequence, which is slower: %s",
                name,
                self.plan.reason,
            )

    @staticmethod
    def prepare(model: PreTrainedModel) -> None:
        """Change a loaded model before it is wrapped, sharded and filled."""

    def forward(self, micro: MicroBatch, temperature: float = 1.0) -> Scores:
        self.select(micro.stretches)
        self.replay(micro.routing_N)
        if self.balance is not None:
            self.balance.is_recording = torch.is_grad_enabled()
        scores = self._scores(micro, temperature)
        logprob_M, entropy_M, highest_M = (
            score_U.index_select(0, micro.pair_M) for score_U in scores[:3]
        )
        balance = None
        if self.balance is not None and self.balance.is_recording:
            balance = self.balance.take(micro.layout)
        return Scores(logprob_M, entropy_M, highest_M, scores.entry_E, balance)

    def inputs(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Prepare the model for a micro-batch, and return its arguments."""
        # Dynamic RoPE in transformers keeps the tables of the longest text so far. Each
        # sequence must get the tables for its length.
        if self.plan.border is not None:
            forget_lengths(self.model)
        if not self.plan.is_packed:
            assert len(micro.layout.rows) == 1, (
                "sequences that cannot be packed run one by one"
            )
            return {"input_ids": micro.token_ids_N[None]}
        if self.plan.mixers:
            self._rows.use(
                _calls_of_rows(micro.layout, micro.token_ids_N.device),
                micro.layout.num_tokens,
            )
        return {
            "input_ids": micro.token_ids_N[None],
            "position_ids": micro.position_N[None],
            "packed_layout": number_of(micro.layout),
            "packed_position_N": micro.position_N,
        }

    def states(self, micro: MicroBatch) -> Tensor:
        """Return the last hidden states [N, D]."""
        output = backbone_of(self.model)(**self.inputs(micro), use_cache=False)
        states_ND: Tensor = output.last_hidden_state[0]
        return states_ND

    def close(self) -> None:
        """Give the model's mixers their own forward functions back."""
        self._rows.close()

    def _scores(self, micro: MicroBatch, temperature: float) -> Scores:
        """Return the scores of the U pairs."""
        supports = micro.supports
        num_plain = len(micro.target_U) if supports is None else supports.num_plain
        target_P = micro.target_U[:num_plain]
        parts = list[Scores]()
        if self.plan.has_plain_head:
            hidden_TD = self.states(micro)
            chosen_UD = hidden_TD.index_select(0, micro.predict_U)
            head = HeadWeights.of(
                self.model.get_output_embeddings(), chosen_UD, micro.predict_U
            )
            if num_plain:
                use = HeadUse(
                    temperature,
                    micro.allowed_P,
                    micro.distilled,
                    self.is_compiled,
                )
                plain = head.rows(slice(num_plain))
                parts.append(head_scores(plain, target_P, use))
            if supports is not None:
                cut = head.rows(slice(num_plain, None))
                value_E = _SupportLogits.apply(*cut, supports, temperature)  # type: ignore[no-untyped-call]
        else:
            output = self.model(**self.inputs(micro), use_cache=False)
            logits_UV = output.logits[0, micro.predict_U].float() / temperature
            if num_plain:
                parts.append(
                    _whole_scores(
                        logits_UV[:num_plain],
                        target_P,
                        micro.allowed_P,
                        micro.distilled,
                    )
                )
            if supports is not None:
                of_supports_RV = logits_UV[num_plain:]
                value_E = of_supports_RV[supports.row_E, supports.id_E]
        if supports is not None:
            parts.append(Scores(*supports.scores(value_E)))
        return _joined(parts)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass.

        transformers checkpoints only in training mode, which turns on dropout, layer
        drop and router jitter. All modules stay in eval mode instead: nothing in a
        layer is random.
        """
        blocks = [
            layer
            for layer in self.model.modules()
            if isinstance(layer, GradientCheckpointingLayer)
        ]
        for layer in blocks or layers_of(self.model):
            recomputed: Any = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
            layer.forward = recomputed


def _whole_scores(
    logits_PV: Tensor,
    target_P: Tensor,
    allowed_P: AllowedRows | None,
    entries: Entries | None,
) -> Scores:
    if allowed_P is not None:
        logits_PV = logits_PV.clone()
        allowed_P.mask(logits_PV, slice(0, logits_PV.shape[1]))
    logprob_PV = torch.log_softmax(logits_PV, dim=-1)
    with torch.no_grad():
        entropy_P = torch.special.entr(logprob_PV.exp()).sum(dim=-1)
    logprob_P = logprob_PV.gather(-1, target_P[:, None])[:, 0]
    entry_E = None if entries is None else logprob_PV[entries.row_E, entries.id_E]
    return Scores(logprob_P, entropy_P, logprob_PV.detach().amax(dim=-1), entry_E)


def _joined(parts: list[Scores]) -> Scores:
    if len(parts) == 1:
        return parts[0]
    logprob_U, entropy_U, highest_U = map(
        torch.cat, zip(*(part[:3] for part in parts), strict=True)
    )
    # Entries are of pairs without supports, which come first.
    return Scores(logprob_U, entropy_U, highest_U, parts[0].entry_E)


@lru_cache(maxsize=16)
def _calls_of_rows(layout: Layout, device: torch.device) -> list[RowCall]:
    return row_calls([places_of(runs) for runs in layout.rows], device)
