"""Grammars over tokens, by llguidance (https://github.com/guidance-ai/llguidance).

A grammar is its Lark text, with JSON schemas in it (`start: %json {...}`). Engines mask their logits with it,
and a trainer computes the same masks from the text and the tokens.
"""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_GRAMMAR_BYTES = 2**18
"""Longest text of a grammar."""
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of llguidance for one grammar: about 20 ms to read its regular expressions, 20 ms per mask, and 2 kB
per lexer state. A schema beyond them is refused, so that it can neither stop an engine nor fill its
memory."""
_NUM_KEPT = 64
_LONGEST_SHOWN = 300


class GrammarError(ValueError):
    """A grammar that is wrong, or needs more time or memory than the limits give it. The message says why."""


def check_grammar(text: str) -> None:
    """Raise GrammarError for a grammar that no tokenizer can follow. Takes at most a fraction of a second."""
    _check_size(text)
    _raise_for(_llguidance().LLMatcher.validate_grammar(text, None, limits=_limits()))


class TokenGrammars:
    """The grammars of one tokenizer, compiled once each; the ones used last are kept. From any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`tokenizer`: a fast tokenizer of transformers. `vocab_size`: number of the model's logits. Raises
        GrammarError if its tokens cannot be matched. Takes a second for a large vocabulary.
        """
        backend, self.eos_id = getattr(tokenizer, "backend_tokenizer", None), tokenizer.eos_token_id
        if backend is None or self.eos_id is None:
            lacks = "is no fast one (tokenizer.json)" if backend is None else "has no end-of-sequence token"
            raise GrammarError(f"the model's tokenizer {lacks}, so no grammar can be followed")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        num_ids = max(vocab_size, len(tokenizer))
        self._vocab_size, self._lock = vocab_size, threading.Lock()
        try:
            self._tokens = _llguidance().LLTokenizer(backend.to_str(), n_vocab=num_ids, eos_token=self.eos_id)
        except ValueError as error:
            raise GrammarError(
                f"llguidance does not know the kind of the model's tokenizer: {error}"
            ) from None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def begin(self, text: str, token_ids: Sequence[int] = ()) -> TokenMatcher:
        """A matcher that has taken `token_ids`, where an answer was interrupted. Raises GrammarError if the
        grammar cannot be followed, or not with these.
        """
        with self._lock:
            compiled = self._compiled.pop(text, None)
        compiled = compiled or compile_grammar(self._tokens, text)
        with self._lock:
            self._compiled[text] = compiled
            while len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
        matcher = TokenMatcher(compiled.deep_copy(), self._vocab_size, self.eos_id)
        for token_id in token_ids:
            matcher.take(token_id)
        return matcher


def compile_grammar(tokens: Any, text: str) -> Any:
    """An LLMatcher of llguidance over these tokens. Raises GrammarError."""
    _check_size(text)
    compiled = _llguidance().LLMatcher(tokens, text, log_level=0, limits=_limits())
    compiled.compute_bitmask()  # finds what nothing satisfies, and what branches too much
    _raise_for(compiled.get_error())
    return compiled


class TokenMatcher:
    """Matcher of one answer: call allowed() before each token, take() after it. A complete grammar allows the
    end-of-sequence token, and nothing after it.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_id: int) -> None:
        self._matcher, self._vocab_size, self._eos_id = matcher, vocab_size, eos_id

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Tokens that may come next, bool [V]; at least one. Raises GrammarError where a limit is reached."""
        bits = np.frombuffer(self.allowed_bits(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def allowed_bits(self) -> bytes:
        """The same as bits, the lowest of a byte first, filled up with zeros. Raises GrammarError."""
        bits: bytes = self._matcher.compute_bitmask()
        _raise_for(self._matcher.get_error())
        return bits

    def take(self, token_id: int) -> None:
        """Go on behind this token. Raises GrammarError if it was not allowed."""
        if not (self._matcher.is_stopped() and token_id == self._eos_id):
            self._matcher.consume_token(token_id)
            _raise_for(self._matcher.get_error())


def _check_size(text: str) -> None:
    if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it has {size} bytes; {MAX_GRAMMAR_BYTES} are the most")


def _raise_for(error: str) -> None:
    if error:
        raise GrammarError(" ".join(error.removesuffix("<non-verbose/>").split())[:_LONGEST_SHOWN])


@cache
def _limits() -> Any:
    return _llguidance().LLParserLimits(**_LIMITS)


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise GrammarError(
            f"llguidance is not installed here (pip install 'llguidance>=1.7,<2'): {error}"
        ) from None
