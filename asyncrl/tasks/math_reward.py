"""The `math` reward: is the completion's final answer the reference answer, as mathematics? (math-verify decides.)

https://github.com/huggingface/Math-Verify. Its own time limits are signals, which work in the main thread alone, so they are
off and the scorer's limit counts. A model may write 9^(9^9), whose evaluation would hold the interpreter for hours: that is
why `math` runs in processes unless task.reward_pool says otherwise.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from asyncrl.types import Prompt

DELIMITERS = ("$", "\\boxed", "\\[", "\\(")


def math_reward(prompt: Prompt, completion: str, answer: Any) -> float:
    """1.0 if the completion's answer equals `answer` (a number, expression or LaTeX), else 0.0.

    Raises ValueError if `answer` itself is missing or no mathematics: no completion could be scored fairly.
    """
    from math_verify import parse, verify

    gold = _gold(str(answer)) if answer is not None else ()
    if not gold:
        raise ValueError(f"the reference answer {answer!r} is not mathematics that math-verify can read; correct that row")
    return float(verify(list(gold), parse(completion, parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    """The reference answer, parsed: what stands after ####, if that is there (as in GSM8K), else all of it.

    Bare LaTeX is put into dollars, without which math-verify sees the first number in it alone; a sentence is not.
    """
    from math_verify import parse

    # Warns once that the time limits are off; they are off on purpose (see above).
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = answer.rpartition("####")[2].strip()
    is_sentence = "\\" not in answer and re.search(r"\b[A-Za-z]{2,}\b", answer) is not None
    readings = [answer, f"${answer}$"] if is_sentence else [f"${answer}$", answer]
    for text in [answer] if any(mark in answer for mark in DELIMITERS) else readings:
        found = parse(text, parsing_timeout=None)
        if any(not isinstance(reading, str) for reading in found):  # a text is what math-verify gives back unparsed
            return tuple(found)
    return ()
