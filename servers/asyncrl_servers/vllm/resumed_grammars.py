"""Resumable grammars in vLLM's engine, within our limits; loaded as a reasoning-parser plugin."""

from __future__ import annotations

from typing import Any

from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    serialize_guidance_grammar,
)

from asyncrl.messages.token_grammars import compile_grammar


def patch_resumed() -> None:
    """Advance a grammar by the prompt's last `num_resumed` ids (`extra_args`). vLLM 0.32 begins after the
    prompt.
    """
    create = StructuredOutputManager._create_grammar

    def create_and_resume(manager: Any, request: Any) -> Any:
        grammar, given = create(manager, request), request.sampling_params.extra_args or {}
        if num_resumed := given.get("num_resumed", 0):
            resumed = list(request.prompt_token_ids[-num_resumed:])
            if not grammar.accept_tokens(request.request_id, resumed):
                raise ValueError(
                    f"request {request.request_id} does not follow its grammar in its resumed tokens"
                )
        return grammar

    StructuredOutputManager._create_grammar = create_and_resume


def patch_limits() -> None:
    """Compile within asyncrl/messages/token_grammars.py. In vLLM 0.32 a schema may take half a gigabyte."""

    def compile_within(backend: Any, request_type: Any, grammar_spec: str, *_: Any, **__: Any) -> Any:
        text = serialize_guidance_grammar(request_type, grammar_spec)
        return GuidanceGrammar(
            ll_matcher=compile_grammar(backend.ll_tokenizer, text),
            ll_tokenizer=backend.ll_tokenizer,
            vocab_size=backend.vocab_size,
        )

    GuidanceBackend.compile_grammar = compile_within


patch_resumed()
patch_limits()
