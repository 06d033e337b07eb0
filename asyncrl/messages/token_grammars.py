"""Grammars over tokens, by llguidance (https://github.com/guidance-ai/llguidance), and
their check.

A grammar is Lark text, with JSON schemas in it (`start: %json {...}`). It is checked in
a separate process, which it may crash: thousands of nested `$ref` overflow llguidance's
stack, and its message about conflicting patterns doubles with each pattern. A check
takes about 0.1 s, so callers keep the verdicts.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from copy import copy
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES = 2**18
CHECK_CPU_S = 4
CHECK_TIMEOUT_S = 60.0
STACK_BYTES = 2**21
"""Smaller than the stack of any thread that compiles a grammar later."""
MEMORY_BYTES = 2**32
_ENVIRONMENT = ("PATH", "PWD", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_LONGEST_SHOWN = 300
_NUM_KEPT = 64


class GrammarError(ValueError):
    pass


class UncheckedError(GrammarError):
    """The machine was too busy to check a grammar, which may be right."""


@cache
def grammar_limits() -> LLParserLimits:
    """Return limits per grammar: about 20 ms to read its regular expressions, 20 ms per
    mask, and 2 kB per lexer state.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _raise_for(error: str) -> None:
    if error:
        raise GrammarError(
            " ".join(error.removesuffix("<non-verbose/>").split())[:_LONGEST_SHOWN]
        )


def compile_grammar(tokens: LLTokenizer, text: str) -> LLMatcher:
    """Compile a grammar for one vocabulary, from which requests copy their matcher.
    Raises GrammarError.
    """
    from llguidance import LLMatcher

    compiled = LLMatcher(tokens, text, log_level=0, limits=grammar_limits())
    compiled.compute_bitmask()  # detects unsatisfiable and too costly grammars
    _raise_for(compiled.get_error())
    return compiled


class TokenGrammars:
    """Grammars of one tokenizer; the most recent are kept. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`vocab_size`: number of logits. Raises GrammarError. Takes a second for a
        large vocabulary.
        """
        from llguidance import LLTokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or tokenizer.eos_token_id is None:
            raise GrammarError(
                "grammars need a fast tokenizer (tokenizer.json) with an end-of-sequence token"
            )
        # llguidance encodes text of the grammar with this tokenizer, so it must not pad
        # or cut. A copy, because prompts are encoded with the original.
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        self._vocab_size = vocab_size
        self._eos_id: int = tokenizer.eos_token_id
        # Models pad their logits, and tokenizers add tokens beyond them. llguidance
        # needs the larger number; allowed() cuts its answer to the logits.
        num_ids = max(vocab_size, len(tokenizer))
        try:
            tokens = LLTokenizer(
                backend.to_str(), n_vocab=num_ids, eos_token=self._eos_id
            )
        except ValueError as error:
            raise GrammarError(
                f"llguidance does not know this kind of tokenizer: {error}"
            ) from None
        self._compiled = lru_cache(_NUM_KEPT)(partial(compile_grammar, tokens))

    def begin(self, text: str, token_ids: Sequence[int] = ()) -> TokenMatcher:
        """Return a matcher that has consumed `token_ids`. Raises GrammarError."""
        # A matcher has state, and the compiled one serves all requests of this grammar.
        matcher = TokenMatcher(
            self._compiled(text).deep_copy(), self._vocab_size, self._eos_id
        )
        for token_id in token_ids:
            matcher.take(token_id)
        return matcher


class TokenMatcher:
    """Call allowed() before each token, take() after it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_id: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_id = eos_id

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return the allowed next tokens, bool [V]; at least one."""
        import numpy as np  # not for the check

        bits = np.frombuffer(self.allowed_bits(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(
            np.bool_
        )

    def allowed_bits(self) -> bytes:
        """Return allowed() as bits, lowest of a byte first, zero-padded."""
        bits: bytes = self._matcher.compute_bitmask()
        _raise_for(self._matcher.get_error())
        return bits

    def take(self, token_id: int) -> None:
        # A complete grammar allows only the end token, and llguidance takes no token
        # after its end.
        if not (self._matcher.is_stopped() and token_id == self._eos_id):
            self._matcher.consume_token(token_id)
            _raise_for(self._matcher.get_error())


# ---- the check


def check_grammar(text: str) -> None:
    """Raise GrammarError if no tokenizer can follow this grammar, and UncheckedError if
    the check did not end.
    """
    if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")
    # Without the keys of the run's environment: the text comes from a client.
    known = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=text.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # no interrupt from the terminal
            env=known | {"OPENBLAS_NUM_THREADS": "1"},
            timeout=CHECK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        # The limit of CPU time ends what is too large. More than a minute for 4 s of
        # CPU time says nothing of the grammar.
        raise UncheckedError(
            f"it could not be checked in {CHECK_TIMEOUT_S} s"
        ) from None
    if done.returncode or not done.stdout:
        limit = f"{CHECK_CPU_S} s of CPU time and {MEMORY_BYTES >> 30} GiB"
        raise GrammarError(f"it is too deep, or could not be checked in {limit}")
    _raise_for(json.loads(done.stdout))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CHECK_CPU_S, CHECK_CPU_S))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    # A grammar so deep that it overflows this small stack crashes here, not later in a
    # thread of the gateway or an engine.
    checking = threading.Thread(target=_check, args=(sys.stdin.read(),))
    checking.start()
    checking.join()


def _check(text: str) -> None:
    from llguidance import LLMatcher

    try:
        why = LLMatcher.validate_grammar(text, None, limits=grammar_limits())
    except BaseException as error:  # llguidance's panic is no Exception
        why = f"llguidance fails with {type(error).__name__}: {error}"
    print(json.dumps(why))


if __name__ == "__main__":
    main()
