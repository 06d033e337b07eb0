"""A tool-call format of the user's own: one function. Knows nothing of how it reads."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import RolloutFailure
from asyncrl.gateway.tool_format import ParsedAnswer, ToolCall
from asyncrl.gateway.tool_format_json import MalformedCall, make_call
from asyncrl.loading import load_function

USAGE = "parse(text) -> [(name, arguments), ...] or None"


class UserFormat:
    """`parse(text)`: the calls in a whole answer, as (name, arguments) with arguments a dict or a JSON text; None if it has none.

    A ValueError (json.loads raises one) says that a call is malformed, and the answer stays text. With calls there is no content.
    An answer is streamed in one piece, for only the whole of it tells.
    """

    opens: tuple[str, ...] = ()

    def __init__(self, spec: str) -> None:
        """Raises ConfigError if there is no such function, or it does not take one text."""
        self.name = spec
        self._function: Callable[[str], Any] = load_function(spec, "gateway.tool_format", usage=USAGE, arguments=("",))

    def parse(self, text: str) -> ParsedAnswer:
        """Calls or content. Raises RolloutFailure if the function returns or raises something else."""
        try:
            found = self._function(text)
            if not found:
                return ParsedAnswer(text)
            return ParsedAnswer(None, tuple(self._call(entry) for entry in self._entries(found)))
        except (ValueError, RecursionError):
            return ParsedAnswer(text)
        except RolloutFailure:
            raise
        except Exception as error:  # the user's code: its mistake is data, like a reward function's
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name} line {frame.lineno}"
            raise self._misused(f"raised {type(error).__name__}: {error} ({place})") from error

    def hold_from(self, text: str, start: int = 0) -> int:
        """All of it."""
        return 0

    def prefill_required(self) -> None:
        """It is not known how a call begins."""

    def prefill_named(self, name: str) -> None:
        """It is not known how a call begins."""

    def _entries(self, found: Any) -> list[Any] | tuple[Any, ...]:
        if not isinstance(found, list | tuple):
            raise self._misused(f"returned {found!r:.200}")
        return found

    def _call(self, entry: Any) -> ToolCall:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise self._misused(f"returned {entry!r:.200}")
        name, arguments = entry
        if isinstance(arguments, Mapping):
            try:
                return make_call(name, json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False))
            except TypeError as error:
                raise MalformedCall(str(error)) from None
        if not isinstance(arguments, str):
            raise MalformedCall("the arguments are no object")
        return make_call(name, arguments)

    def _misused(self, what: str) -> RolloutFailure:
        return RolloutFailure(
            f"gateway.tool_format={self.name} {what}",
            rule=f"it is called as {USAGE}, and a ValueError says that a call is malformed",
            way_out="return a list of pairs, each a name and a dict of arguments, or None.",
        )
