"""Check a grammar in a separate process, which it may crash: thousands of nested `$ref` overflow llguidance's
stack, and its message about conflicting patterns doubles with each pattern.

A check takes about 0.1 s, so callers keep the verdicts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import cache
from typing import Any

MAX_GRAMMAR_BYTES = 2**18
CHECK_CPU_S = 4
CHECK_TIMEOUT_S = 60.0
STACK_BYTES = 2**21
"""Smaller than the stack of any thread that compiles a grammar later."""
MEMORY_BYTES = 2**32
_ENVIRONMENT = ("PATH", "PWD", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_LONGEST_SHOWN = 300


class GrammarError(ValueError):
    pass


def llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        why = f"llguidance is not installed here (pip install 'llguidance>=1.7,<2'): {error}"
        raise GrammarError(why) from None


@cache
def grammar_limits() -> Any:
    """Return limits per grammar: about 20 ms to read its regular expressions, 20 ms per mask, and 2 kB per
    lexer state.
    """
    return llguidance().LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def check_size(text: str) -> None:
    if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")


def raise_for(error: str) -> None:
    if error:
        raise GrammarError(" ".join(error.removesuffix("<non-verbose/>").split())[:_LONGEST_SHOWN])


def check_grammar(text: str) -> None:
    """Raise GrammarError if no tokenizer can follow this grammar."""
    check_size(text)
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
        raise GrammarError(f"it could not be checked in {CHECK_TIMEOUT_S} s") from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise GrammarError(f"it could not be checked in {CHECK_CPU_S} s of CPU time")
    if done.returncode or not done.stdout:
        raise GrammarError("it is too deep, or needs too much memory")
    raise_for(json.loads(done.stdout))


# ---- in the process


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CHECK_CPU_S, CHECK_CPU_S))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    checking = threading.Thread(target=_check, args=(sys.stdin.read(),))
    checking.start()
    checking.join()


def _check(text: str) -> None:
    try:
        why = llguidance().LLMatcher.validate_grammar(text, None, limits=grammar_limits())
    except BaseException as error:  # llguidance's panic is no Exception
        why = f"llguidance fails with {type(error).__name__}: {error}"
    print(json.dumps(why))


if __name__ == "__main__":
    main()
