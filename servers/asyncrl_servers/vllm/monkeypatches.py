"""Monkeypatches of vLLM: resumable grammars within our limits, its CPU engine, and the
bearer check.

vLLM imports it in the engine's process, as a reasoning-parser plugin and for
CpuExecutor.
"""

from __future__ import annotations

import copy
import dataclasses
import hmac
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    serialize_guidance_grammar,
)

from asyncrl.base.errors import ErrorBody
from asyncrl.base.signals import end_by_sigterm
from asyncrl.messages.token_grammars import compile_grammar


def patch_grammars() -> None:
    """Advance a grammar by the prompt's last `num_resumed` ids (`extra_args`); vLLM
    0.32 begins after the prompt. Compile within asyncrl/messages/token_grammars.py; in
    vLLM 0.32 a schema may take half a gigabyte.
    """
    create = StructuredOutputManager._create_grammar

    def create_and_resume(manager: Any, request: Any) -> object:
        grammar = create(manager, request)
        # Resumed tokens are part of the prompt for vLLM, but of the answer for the
        # grammar. From its start the grammar would ask for the beginning of the answer
        # again.
        if num_resumed := _num_resumed(request.sampling_params):
            resumed = list(request.prompt_token_ids[-num_resumed:])
            if not grammar.accept_tokens(request.request_id, resumed):
                raise ValueError(
                    f"request {request.request_id}: its resumed tokens break its grammar"
                )
        return grammar

    def compile_within(
        backend: Any, request_type: object, grammar_spec: str, *_: object, **__: object
    ) -> object:
        text = serialize_guidance_grammar(request_type, grammar_spec)
        return GuidanceGrammar(
            ll_matcher=compile_grammar(backend.ll_tokenizer, text),
            ll_tokenizer=backend.ll_tokenizer,
            vocab_size=backend.vocab_size,
        )

    StructuredOutputManager._create_grammar = create_and_resume
    GuidanceBackend.compile_grammar = compile_within


def patch_worker() -> None:
    patch_compiled()
    patch_waits()
    patch_routing()
    patch_router()
    patch_rotary()
    patch_supports()
    patch_adapter_products()
    patch_adapted_experts()


def patch_waits() -> None:
    """Sleep 20 us between polls of the shared memory between engine and workers.

    vLLM spins there with sched_yield, on two cores. On Linux 6.18 with two cores other
    processes starved for up to 9 s; with this patch 5 ms, at the same tokens per
    second.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = lambda: time.sleep(2e-5)


def patch_compiled() -> None:
    """Count ranks and draw tokens without torch.compile.

    vLLM compiles both even with --enforce-eager, which takes 9 s on CPU and crashes
    without a C++ compiler.
    """
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    patched = (
        (sampler, "batched_count_greater_than"),
        (topk_topp_sampler, "compiled_random_sample"),
    )
    for module, name in patched:
        compiled = getattr(module, name)
        setattr(module, name, getattr(compiled, "_torchdynamo_orig_callable", compiled))


def patch_router() -> None:
    """Let routers without groups use their correction bias, their scoring and their
    scale.

    vLLM 0.32's CPU router does so only with groups, and else takes the highest logits.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    begin = CPURouter.__init__

    def begin_with_a_group(router: Any, *args: object, **named: object) -> None:
        begin(router, *args, **named)
        is_plain = (
            router.scoring_func == "softmax"
            and router.e_score_correction_bias is None
            and router.routed_scaling_factor == 1
        )
        has_own_way = (
            router.use_grouped_topk
            or router.custom_routing_function is not None
            or router.scoring_func == "sqrtsoftplus"
        )
        if not is_plain and not has_own_way:
            router.use_grouped_topk = True
            router.num_expert_group = router.topk_group = 1

    CPURouter.__init__ = begin_with_a_group


def patch_rotary() -> None:
    """Rotate all heads of [tokens, heads, size]; vLLM 0.32's CPU kernel rotates the
    first.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu

    def rotate_all(
        layer: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        flat_query = query.reshape(len(query), -1)
        flat_key = None if key is None else key.reshape(len(key), -1)
        rotated, rotated_key = rotate(layer, positions, flat_query, flat_key)
        if rotated_key is not None and key is not None:
            rotated_key = rotated_key.view_as(key)
        return rotated.view_as(query), rotated_key

    RotaryEmbedding.forward_cpu = rotate_all


def patch_runner_checks() -> None:
    """Accept --enable-return-routed-experts and --return-sampling-mask without model
    runner V2.
    """
    from vllm.config import VllmConfig

    VllmConfig._verify_aux_output_compatibility = lambda config: None
    VllmConfig._verify_sampling_replay_config = lambda config: None


def patch_support_check() -> None:
    """Accept calls without top_k and greedy ones beside --return-sampling-mask.

    vLLM refuses them to bound the size of its answers. Evaluations are greedy, and
    top_p alone is a usual setting.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    begin = InputProcessor.__init__

    def begin_without_check(processor: Any, *args: object, **named: object) -> None:
        begin(processor, *args, **named)
        # It only reads this setting to refuse calls. The engine has its own.
        processor.model_config = copy.copy(processor.model_config)
        processor.model_config.return_sampling_mask = False

    InputProcessor.__init__ = begin_without_check


def patch_supports() -> None:
    """Return each token's support from the CPU runner, for calls with a cut.

    vLLM 0.32 reports it from model runner V2, which needs Triton. Remove it once V2
    runs on CPU.
    """
    from vllm.v1.outputs import SamplingMaskLists
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    draw = Sampler.sample
    sample = Runner.sample_tokens

    def draw_and_keep(sampler: Any, *args: object, **named: object) -> object:
        sampled, logprobs = draw(sampler, *args, **named)
        # Log of 0 for all tokens that min_p, top_k, top_p or the grammar exclude.
        sampler.asyncrl_logprobs = logprobs
        return sampled, logprobs

    def sample_and_tell(runner: Any, *args: object, **named: object) -> object:
        is_wanted = runner.model_config.return_sampling_mask
        if runner.execute_model_state is None or not is_wanted:
            return sample(runner, *args, **named)
        batch = runner.input_batch
        cuts = [
            _is_cut(runner.requests[one]) for one in batch.req_ids[: batch.num_reqs]
        ]
        output = sample(runner, *args, **named)
        kept = runner.sampler.asyncrl_logprobs
        none = np.zeros(0, np.int32)
        supports = [
            np.flatnonzero(kept[row].numpy() > -np.inf).astype(np.int32)
            if is_cut
            else none
            for row, is_cut in enumerate(cuts)
        ]
        ends = np.cumsum([0, *map(len, supports)])
        output.sampling_masks = SamplingMaskLists(
            np.concatenate([none, *supports]), ends
        )
        return output

    Sampler.sample = draw_and_keep
    Runner.sample_tokens = sample_and_tell


def _is_cut(request: Any) -> bool:
    """Whether a request of vLLM draws from a part of the vocabulary."""
    given = request.sampling_params
    is_full = given.top_p == 1 and given.top_k <= 0 and given.min_p == 0
    return given.temperature > 0 and not is_full


def patch_gemma3n() -> None:
    """Give Gemma 3n's text model its per-layer embeddings, which vLLM 0.32 looks up only
    for the model with images.
    """
    from vllm.model_executor.models.gemma3n import Gemma3nForCausalLM

    forward = Gemma3nForCausalLM.forward

    def forward_with_layers(
        model: Any, input_ids: torch.Tensor | None, *args: object, **named: object
    ) -> object:
        if named.get("per_layer_inputs") is None and input_ids is not None:
            looked_up = model.model.get_per_layer_input_embeddings(input_ids)
            sizes = (model.config.num_hidden_layers, -1)
            named["per_layer_inputs"] = looked_up.unflatten(-1, sizes)
        return forward(model, input_ids, *args, **named)

    Gemma3nForCausalLM.forward = forward_with_layers


def patch_reload() -> None:
    """Load into the first memory of a parameter if something else still uses it.

    vLLM 0.32's reload loads into new memory. Mamba2 computes with a view of its
    convolution's first memory. CPUs with bfloat16 instructions pack the convolution
    elsewhere, so the view kept the weights of the start.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.model_loader.reload import layerwise

    materialize = layerwise.materialize_layer

    def record_memory(model: nn.Module) -> None:
        for parameter in model.parameters():
            if is_lazy(parameter) or parameter.is_meta or parameter.storage_offset():
                continue
            # The reload copies attributes to the parameters that it makes.
            parameter.asyncrl_first = StorageWeakRef(parameter.untyped_storage())  # type: ignore[attr-defined,no-untyped-call]
        layerwise.record_metadata_for_reloading(model)

    def materialize_there(layer: nn.Module, info: Any) -> None:
        materialize(layer, info)
        packed, _ = info.kernel_tensors or ({}, {})
        for name in packed:
            parameter: Any = layer._parameters.get(name)
            if known := getattr(parameter, "asyncrl_first", None):
                memory = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
                if memory and memory.data_ptr() != packed[name].data_ptr():
                    parameter.set_(memory, 0, parameter.shape, parameter.stride())

    utils.record_metadata_for_reloading = record_memory
    layerwise.materialize_layer = materialize_there


def patch_adapters() -> None:
    """Load an adapter only by /v1/load_lora_adapter.

    vLLM 0.32 keeps `load_inplace` in each request and so reads the request's folder
    before each step. A request that a push keeps would bring its old adapter back.
    """
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    apply = LRUCacheWorkerLoRAManager._apply_adapters

    def apply_loaded(manager: object, requests: set[Any]) -> None:
        for request in requests:
            request.load_inplace = False
        apply(manager, requests)

    LRUCacheWorkerLoRAManager._apply_adapters = apply_loaded


def patch_adapter_products() -> None:
    """Compute two matrix products per adapter on CPU.

    vLLM 0.32 copies the adapter for each row, in float32: 64 prompts of SmolLM2-135M
    held up all sampling for over a minute. And it takes -1, the index of rows without
    an adapter, for the last adapter.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    def add_lora_linear(
        wrapper: Any,
        output: torch.Tensor,
        inputs_RD: torch.Tensor,
        lora_a: Sequence[torch.Tensor],
        lora_b: Sequence[torch.Tensor],
        scale: float,
        widths: Sequence[int],
        **more: Any,
    ) -> None:
        indices_R = more.get("indices", wrapper.token_lora_indices)
        parts = torch.split(output, [*widths], dim=1)
        for index in set(indices_R.tolist()) - {-1}:
            for part_RV, down, up in zip(parts, lora_a, lora_b, strict=True):
                narrow = scale * (inputs_RD.float() @ down[index, 0].float().T)
                narrow[indices_R != index] = 0.0
                added = narrow @ up[index, 0].float().T
                # Logits are padded.
                part_RV[:, : added.shape[1]] += added.to(part_RV.dtype)

    def add_lora_logits(
        wrapper: Any,
        logits_RV: torch.Tensor,
        states_RD: torch.Tensor,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scale: float,
        **_: object,
    ) -> None:
        indices_R = wrapper.sampler_indices
        # vLLM expects a row per request here, and dies of a prompt that wants a logprob
        # for each of its tokens. Those are a view of the states of the step's tokens.
        if states_RD.untyped_storage().nbytes() > states_RD.nbytes:
            first = states_RD.storage_offset() // states_RD.shape[1]
            indices_R = wrapper.token_lora_indices[first : first + len(states_RD)]
        shapes = (lora_a,), (lora_b,), scale, logits_RV.shape[1:]
        add_lora_linear(wrapper, logits_RV, states_RD, *shapes, indices=indices_R)

    PunicaWrapperCPU.add_lora_linear = add_lora_linear
    PunicaWrapperCPU.add_lora_logits = add_lora_logits


def patch_adapted_experts() -> None:
    """Compute experts without adapters also beside layers that have some.

    vLLM 0.32 takes a kernel for adapted experts as soon as adapters are enabled, and
    this kernel needs Triton. asyncrl has no adapters of experts.
    """
    from vllm.lora.layers import fused_moe as adapted
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    select = unquantized_fused_moe_method.select_unquantized_moe_backend

    def select_plain(moe_config: Any) -> object:
        return select(dataclasses.replace(moe_config, is_lora_enabled=False))

    unquantized_fused_moe_method.select_unquantized_moe_backend = select_plain
    for layer in (adapted.FusedMoEWithLoRA, adapted.FusedMoE3DWithLoRA):
        layer.can_replace_layer = lambda **_: False


def patch_penalties() -> None:
    """Let presence and frequency penalties count the prompt's last `num_resumed` ids
    (`extra_args`) as sampled ones; vLLM begins after the prompt.
    """
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    add = InputBatch.add_request
    make = InputBatch._make_sampling_metadata
    penalize = Sampler.apply_penalties
    resumed_of = dict[str, list[int]]()

    def add_and_keep(batch: object, request: Any) -> object:
        if num_resumed := _num_resumed(request.sampling_params):
            resumed_of[request.req_id] = request.prompt_token_ids[-num_resumed:]
        return add(batch, request)

    def make_and_tell(batch: Any) -> object:
        metadata = make(batch)
        ids = batch.req_ids
        metadata.asyncrl_resumed = [resumed_of.get(each, []) for each in ids]
        for ended in resumed_of.keys() - {*ids}:
            del resumed_of[ended]
        return metadata

    def penalize_all(
        logits: torch.Tensor, metadata: object, output_token_ids: list[list[int]]
    ) -> object:
        resumed = getattr(metadata, "asyncrl_resumed", ())
        if any(resumed) and output_token_ids:
            output_token_ids = [
                [*begun, *(ids or ())]
                for begun, ids in zip(resumed, output_token_ids, strict=True)
            ]
        return penalize(logits, metadata, output_token_ids)

    InputBatch.add_request = add_and_keep
    InputBatch._make_sampling_metadata = make_and_tell
    Sampler.apply_penalties = staticmethod(penalize_all)


def patch_device_penalties() -> None:
    """Do the same in model runner V2, which needs CUDA. Not run yet."""
    from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

    add = PenaltiesState.add_request
    write = PenaltiesState.apply_staged_writes

    def add_and_keep(state: Any, req_idx: int, sampling_params: object) -> object:
        if not hasattr(state, "asyncrl_resumed"):
            state.asyncrl_resumed = torch.zeros_like(state.req_states.prompt_len.gpu)
        state.asyncrl_resumed[req_idx] = _num_resumed(sampling_params)
        return add(state, req_idx, sampling_params)

    def write_all(state: Any) -> None:
        states = state.req_states
        if state._new_penalties_reqs:
            # It counts the tokens behind the prompt as sampled ones.
            num_prompt = states.prompt_len.gpu - state.asyncrl_resumed
            state.req_states = SimpleNamespace(
                prefill_len=states.prefill_len,
                all_token_ids=states.all_token_ids,
                prompt_len=SimpleNamespace(gpu=num_prompt),
            )
        try:
            write(state)
        finally:
            state.req_states = states

    PenaltiesState.add_request = add_and_keep
    PenaltiesState.apply_staged_writes = write_all


def _num_resumed(sampling_params: object) -> int:
    given = getattr(sampling_params, "extra_args", None) or {}
    num_resumed: int = given.get("num_resumed", 0)
    return num_resumed


def patch_routing() -> None:
    """Return each token's experts from the CPU runner.

    vLLM 0.32 requires model runner V2, which needs Triton. Remove it once V2 runs on
    CPU.
    """
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    initialize = Runner.initialize_kv_cache
    execute = Runner.execute_model
    sample = Runner.sample_tokens

    def initialize_and_listen(
        runner: Any, kv_cache_config: object, *args: object, **named: object
    ) -> None:
        initialize(runner, kv_cache_config, *args, **named)
        if runner.vllm_config.aux_output_config.enabled:
            runner.asyncrl_routing = get_aux_output_connector(
                runner.model, runner.vllm_config, runner.kv_cache_config
            )

    def begin_and_execute(
        runner: Any, scheduled: Any, *args: object, **named: object
    ) -> object:
        if hasattr(runner, "asyncrl_routing"):
            runner.asyncrl_routing.begin_step(scheduled.aux_output_connector_metadata)
        return execute(runner, scheduled, *args, **named)

    def sample_and_tell(runner: Any, *args: object, **named: object) -> object:
        if runner.execute_model_state is None or not hasattr(runner, "asyncrl_routing"):
            return sample(runner, *args, **named)
        batch = runner.input_batch
        num = batch.num_reqs
        seen = SimpleNamespace(
            req_ids=batch.req_ids[:num],
            query_start_loc_np=runner.query_start_loc.np,
            num_computed_tokens_np=batch.num_computed_tokens_cpu[:num].copy(),
        )
        pending = runner.asyncrl_routing.prepare_output(seen)
        # A prompt that is read in parts samples a token in each step; all but the last
        # are discarded.
        num_sampled = 1 - runner.discard_request_mask.np[:num].astype(np.int32)
        output = sample(runner, *args, **named)
        if pending is not None:
            pending.enqueue_cpu_copy(num_sampled, np.zeros(num, np.int32))
            output.aux_output_connector_output = pending.process_output()
        return output

    Runner.initialize_kv_cache = initialize_and_listen
    Runner.execute_model = begin_and_execute
    Runner.sample_tokens = sample_and_tell


def patch_spawn(listener: socket.socket) -> None:
    """Fork the engine and workers from the API process.

    vLLM's CPU build spawns them; imports take 11 of a start's 21 s of CPU time. See
    arguments.can_fork.
    """
    import vllm.v1.worker.cpu_worker  # noqa: F401  (for forked processes)
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    def after_fork() -> None:
        listener.close()  # a dead server must refuse connections
        signal.set_wakeup_fd(-1)  # else signals to the engine wake the API's event loop
        end_by_sigterm()

    os.register_at_fork(after_in_child=after_fork)
    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


end_by_sigterm()
patch_grammars()
patch_support_check()
if current_platform.is_cpu():
    patch_waits()
    patch_runner_checks()


class CpuExecutor(MultiprocExecutor):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's worker-process executor, with patched waits."""


class BearerOnly:
    """Middleware that checks the bearer token on every route. vLLM's --api-key leaves
    /pause and /collective_rpc open, and shows in argv.
    """

    expected = b""
    """Required header; nothing passes while it is empty."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        may_pass = bool(self.expected) and hmac.compare_digest(given, self.expected)
        if scope["type"] == "lifespan" or may_pass:
            await self._app(scope, receive, send)
        else:
            rule = "internal servers answer only to the run that started them"
            body = ErrorBody(error="wrong or missing bearer token", rule=rule)
            await JSONResponse(body.model_dump(), status_code=401)(scope, receive, send)
