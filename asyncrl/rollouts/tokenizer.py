"""The tokenizer of a Hugging Face model, for prompts and completions. Does not import torch."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from asyncrl.errors import ConfigError

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that stands for one byte, where a vocabulary has no other for a character (byte fallback)."""

ARGUMENTS_ARE_STRING = re.compile(r"arguments\s+is\s+string")
"""In a template that writes the arguments of a tool call as they are if they are text (Qwen3)."""

LARGEST_CHARACTER_BYTES = 4
"""The least that max_token_bytes is: one unknown token may stand for any character."""


class HFChatTokenizer:
    """A ChatTokenizer and ChatRenderer over a Hugging Face folder or hub id.

    It loads tokenizer.json by itself, because AutoTokenizer imports torch; only a model without that file
    takes the way over AutoTokenizer. encode and decode may run in several threads at once, and render beside
    them.
    """

    template: str
    """The Jinja text that renders chats; where the model has several, the one for chats with tools."""
    vocab_size: int
    """Ids that the model knows (config.json); it may be more than the vocabulary has."""
    end_ids: frozenset[int]
    """Tokens that end a turn: what generation_config.json, config.json and the tokenizer name, as the engines
    do.
    """
    text_ids: frozenset[int]
    """Tokens of the vocabulary that are text: all but the special ones."""
    byte_ids: frozenset[int]
    """Tokens whose text depends on the whole run of such tokens that they stand in (byte fallback). Mostly
    empty.
    """
    max_token_bytes: int
    """No token is longer, so that a text has at least its UTF-8 bytes / max_token_bytes tokens. Not where a
    tokenizer throws text away: runs of white space beside an added token, or of unknown words."""

    def __init__(self, model_path: str | Path, *, chat_template: str | Path | None = None) -> None:
        """Load it. `chat_template`: a Jinja file that replaces the tokenizer's own.

        Raises ConfigError if the tokenizer or the file cannot be read, or if there is no chat template.
        """
        self.model_path = str(model_path)
        self._tokenizer = _load(self.model_path)
        if chat_template is not None:
            self._tokenizer.chat_template = read_template(Path(chat_template))
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {self.model_path} has no chat template",
                rule="prompts are chats, and the template says how the model reads one",
                way_out="set model.chat_template to a Jinja file, or choose an instruct model.",
            )
        self.template = _template_text(self._tokenizer.chat_template)
        if chat_template is None:
            _compile(self.template, f"the chat template of {self.model_path}")
        self._slow = threading.Lock()
        """For a tokenizer in Python alone: it is not documented what its calls change."""
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # as a call of the tokenizer would set it
            self._backend.no_truncation()
            self._backend.no_padding()
        cleans = getattr(self._tokenizer, "clean_up_tokenization_spaces", False)
        self._decoder = (
            self._tokenizer if self._backend is None or cleans else self._backend
        )  # the same text, 4 times as fast
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        model = _read_json(self.model_path, "config.json")
        generation = _read_json(self.model_path, "generation_config.json")
        self.vocab_size = model.get("vocab_size") or 1 + max(vocabulary.values())
        self.end_ids = _end_ids(
            generation.get("eos_token_id"), model.get("eos_token_id"), self._tokenizer.eos_token_id
        )
        self.text_ids = frozenset(vocabulary.values()) - _special_ids(self._tokenizer)
        self.byte_ids = _byte_ids(vocabulary, self._backend)
        self.max_token_bytes = max(
            LARGEST_CHARACTER_BYTES, max(len(token.encode(errors="replace")) for token in vocabulary)
        )

    def __repr__(self) -> str:
        return f"<HFChatTokenizer {self.model_path}, {len(self._tokenizer)} tokens>"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The chat as text. Raises ValueError, with what the template says, if the template refuses it.

        The arguments of tool calls may be objects or JSON texts. They reach the template as objects, for most
        would quote a text once more; one that asks whether they `is string` gets them as they are, and one
        that fails on objects gets texts.
        """
        chat = [dict(message) for message in messages]
        options = {
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            takes_both = ARGUMENTS_ARE_STRING.search(self.template)
            return self._apply_template(chat if takes_both else _with_arguments(chat, _as_object), options)
        except ValueError as refusal:
            if not any(message.get("tool_calls") for message in chat):
                raise
            try:
                return self._apply_template(_with_arguments(chat, _as_text), options)
            except ValueError:
                raise refusal from None

    def _apply_template(self, chat: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(chat, tokenize=False, **options)
        except (
            TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ValueError(
                f"the chat template refuses these messages: {error}"
            ) from error  # sandboxed, but it may do anything
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids. Special tokens are known by their text; none is added, since the template writes them
        all.

        Raises ValueError for text that is no Unicode: lone surrogates, which a JSON escape can smuggle in.
        """
        try:
            if (
                self._backend is not None
            ):  # the ids of the transformers call, without its BatchEncoding and offsets
                return tuple(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            with self._slow:
                return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        except TypeError as error:
            raise ValueError(_not_unicode(text)) from error

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of the chat, with the prompt for the next assistant turn."""
        return self.encode(self.render(messages))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, without the special tokens by default."""
        with (
            contextlib.nullcontext() if self._backend is not None else self._slow
        ):  # the backend's calls change nothing in it
            text: str = self._decoder.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def _load(model_path: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        try:
            return PreTrainedTokenizerFast.from_pretrained(model_path)
        except (OSError, ValueError):  # no tokenizer.json: a format that only the model's own class can read
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot load a tokenizer from {model_path}: {error}",
            way_out="set model.path to a Hugging Face folder or hub id of a causal language model with its "
            "tokenizer.",
        ) from error


def read_template(path: Path) -> str:
    """The text of model.chat_template. Raises ConfigError if it cannot be read, or is no template."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read model.chat_template={path}: {error}", way_out="give the path of a Jinja file."
        ) from error
    _compile(text, f"model.chat_template={path}")
    return text


def _compile(template: str, name: str) -> None:
    """As apply_chat_template does, which keeps what it has compiled; it alone knows all tags of chat
    templates.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"{name} line {error.lineno}: {error.message}",
            rule="it must be a Jinja template",
            way_out="correct that line, or set model.chat_template to another file.",
        ) from error


def _with_arguments(chat: list[dict[str, Any]], convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """The chat with the arguments of its tool calls converted; `chat` itself is left alone."""
    return [_converted(message, convert) if message.get("tool_calls") else message for message in chat]


def _converted(message: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": convert(function["arguments"])}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _template_text(template: str | Mapping[str, str]) -> str:
    if isinstance(template, str):
        return template
    return template.get("tool_use") or template.get("default") or next(iter(template.values()))


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {
        token_id for token_id, token in added.items() if token.special
    }


def _byte_ids(vocabulary: Mapping[str, int], backend: Any | None) -> frozenset[int]:
    if backend is not None and "ByteFallback" not in repr(backend.decoder):
        return frozenset()
    return frozenset(token_id for token, token_id in vocabulary.items() if BYTE_TOKEN.fullmatch(token))


def _end_ids(*named: int | list[int] | None) -> frozenset[int]:
    """Every end-of-sequence id that is named anywhere: the engine servers end a completion at the same
    ones.
    """
    found: set[int] = set()
    for value in named:
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return frozenset(found)


def _read_json(model_path: str, name: str) -> dict[str, Any]:
    """What the file says, {} if the model has none."""
    from transformers.utils import cached_file

    try:
        file = cached_file(model_path, name)
        content: dict[str, Any] = (
            json.loads(Path(file).read_text(encoding="utf-8")) if file is not None else {}
        )
    except OSError:
        return {}
    except ValueError as error:
        raise ConfigError(
            f"cannot read {name} of {model_path}: {error}", way_out="restore the file, or remove it."
        ) from error
    return content


def _not_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the text is no Unicode: character {error.start} is the lone surrogate {text[error.start]!r}"
    return "the text cannot be encoded"
