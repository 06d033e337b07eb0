"""Grammars over tokens, by llguidance (https://github.com/guidance-ai/llguidance).

A grammar is Lark text, with JSON schemas in it (`start: %json {...}`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.messages.grammar_checks import GrammarError, check_size, grammar_limits, llguidance, raise_for

_NUM_KEPT = 64


def compile_grammar(tokens: Any, text: str) -> Any:
    """Raises GrammarError."""
    check_size(text)
    compiled = llguidance().LLMatcher(tokens, text, log_level=0, limits=grammar_limits())
    compiled.compute_bitmask()  # detects unsatisfiable and too costly grammars
    raise_for(compiled.get_error())
    return compiled


class TokenGrammars:
    """Grammars of one tokenizer; the most recent are kept. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`vocab_size`: number of logits. Raises GrammarError. Takes a second for a large vocabulary."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise GrammarError("the model's tokenizer is no fast one (tokenizer.json), which grammars need")
        if tokenizer.eos_token_id is None:
            raise GrammarError("the model's tokenizer has no end-of-sequence token, which grammars need")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        self._vocab_size = vocab_size
        self._eos_id: int = tokenizer.eos_token_id
        num_ids = max(vocab_size, len(tokenizer))
        try:
            tokens = llguidance().LLTokenizer(backend.to_str(), n_vocab=num_ids, eos_token=self._eos_id)
        except ValueError as error:
            raise GrammarError(f"llguidance does not know this kind of tokenizer: {error}") from None
        self._compiled = lru_cache(_NUM_KEPT)(partial(compile_grammar, tokens))

    def begin(self, text: str, token_ids: Sequence[int] = ()) -> TokenMatcher:
        """Return a matcher that has consumed `token_ids`. Raises GrammarError."""
        matcher = TokenMatcher(self._compiled(text).deep_copy(), self._vocab_size, self._eos_id)
        for token_id in token_ids:
            matcher.take(token_id)
        return matcher


class TokenMatcher:
    """Call allowed() before each token, take() after it."""

    def __init__(self, matcher: Any, vocab_size: int, eos_id: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_id = eos_id

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return the allowed next tokens, bool [V]; at least one."""
        bits = np.frombuffer(self.allowed_bits(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def allowed_bits(self) -> bytes:
        """Return allowed() as bits, lowest of a byte first, zero-padded."""
        bits: bytes = self._matcher.compute_bitmask()
        raise_for(self._matcher.get_error())
        return bits

    def take(self, token_id: int) -> None:
        if not (self._matcher.is_stopped() and token_id == self._eos_id):
            self._matcher.consume_token(token_id)
            raise_for(self._matcher.get_error())
