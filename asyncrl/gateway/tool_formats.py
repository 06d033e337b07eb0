"""Which tool-call format a model has: by name, or from its chat template. Knows no answers."""

from __future__ import annotations

from asyncrl.errors import ConfigError
from asyncrl.gateway.tool_format import ParsedAnswer, ToolCall, ToolFormat
from asyncrl.gateway.tool_format_hermes import OPEN, HermesFormat
from asyncrl.gateway.tool_format_llama import PYTHON_TAG, LlamaFormat
from asyncrl.gateway.tool_format_user import UserFormat

__all__ = ["NoFormat", "ParsedAnswer", "ToolCall", "ToolFormat", "find_tool_format"]

OTHER_FORMATS = ("<function=", "<arg_key>", "<TOOLCALL>", "functools[", "<tool_calls>")
"""In templates of models that write neither: Qwen 3 Coder and Functionary, GLM, Nemotron, Firefunction, MiniMax. Some have
<tool_call> or <|python_tag|> as well."""


class NoFormat:
    """Text is text."""

    name = "none"
    opens: tuple[str, ...] = ()

    def parse(self, text: str) -> ParsedAnswer:
        """The text."""
        return ParsedAnswer(text)

    def hold_from(self, text: str, start: int = 0) -> int:
        """Nowhere."""
        return len(text)

    def prefill_required(self) -> None:
        """There are no calls."""

    def prefill_named(self, name: str) -> None:
        """There are no calls."""


def find_tool_format(name: str, template: str) -> ToolFormat:
    """The format of gateway.tool_format=`name`; auto: what the chat template shows the model, or none. Raises ConfigError."""
    if name == "auto":
        name = _name_from(template)
    if name == "hermes":
        return HermesFormat(writes_lists=f"{OPEN}[" in template)
    if name == "llama":
        return LlamaFormat()
    if name == "none":
        return NoFormat()
    if ":" in name:
        return UserFormat(name)
    raise ConfigError(
        f"gateway.tool_format={name} is not known",
        way_out="set it to auto, hermes, llama, none, or module:function of a parser of your own.",
    )


def _name_from(template: str) -> str:
    if any(marker in template for marker in OTHER_FORMATS):
        return "none"
    if OPEN in template:
        return "hermes"
    if '"parameters"' in template and (PYTHON_TAG in template or "ipython" in template):
        return "llama"
    return "none"
