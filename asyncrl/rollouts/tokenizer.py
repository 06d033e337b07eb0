"""Tokenizer of a Hugging Face model. Does not import torch."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from asyncrl.base.errors import ConfigError

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

ARGUMENTS_ARE_STRING = re.compile(r"arguments\s+is\s+string")
"""Found in templates that write textual tool-call arguments verbatim (Qwen3)."""


PROBE = "answer to the question"
PROBES: Sequence[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"content": PROBE}, {"role": "user", "content": "question"}),
    (
        {
            "content": "",
            "tool_calls": [
                {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": PROBE}}}
            ],
        },
        {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "result"},
    ),
]
"""(an answer, the next message)."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class HFChatTokenizer:
    """ChatTokenizer of a model's folder. Thread-safe.

    AutoTokenizer would import torch.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`chat_template`: Jinja file; `chat_template_kwargs`: default template variables. Raises
        ConfigError.
        """
        self.model_path = str(model_path)
        self._tokenizer = tokenizer = _load(self.model_path)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special) | frozenset(tokenizer.all_special_ids)
        self.text_ids = frozenset(vocabulary.values()) - self.special_ids
        if chat_template is not None:
            tokenizer.chat_template = read_template(Path(chat_template))
        template = tokenizer.chat_template
        if not template:
            way_out = "set model.chat_template to a Jinja file, or choose an instruct model."
            raise ConfigError(f"the tokenizer of {self.model_path} has no chat template", way_out=way_out)
        if not isinstance(template, str):
            template = template.get("tool_use") or template.get("default") or next(iter(template.values()))
        self.template: str = template
        self._settings = dict(chat_template_kwargs or {})
        environment = _compile(template, f"the chat template of {self.model_path}").environment
        known = find_undeclared_variables(environment.parse(template))
        self._variables = known.difference(environment.globals, RESERVED, tokenizer.special_tokens_map)
        if unknown := sorted(set(self._settings) - self._variables):
            what = f"the chat template of {self.model_path} does not read {', '.join(unknown)}"
            known_names = ", ".join(sorted(self._variables)) or "nothing here"
            way_out = f"model.chat_template_kwargs may set {known_names}."
            raise ConfigError(what, way_out=way_out)
        self._has_developer = "developer" in template
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._decoder = tokenizer if cleans else self._backend  # the same text, 4 times as fast
        decoder = self._backend.decoder
        model = _read_json(self.model_path, "config.json")
        generation = _read_json(self.model_path, "generation_config.json")
        self.vocab_size: int = model.get("vocab_size") or 1 + max(vocabulary.values())
        ends = (generation.get("eos_token_id"), model.get("eos_token_id"), tokenizer.eos_token_id)
        several = [end if isinstance(end, list) else [end] for end in ends if end is not None]
        self.end_ids = frozenset(chain.from_iterable(several))
        byte_tokens = filter(BYTE_TOKEN.fullmatch, vocabulary) if "ByteFallback" in repr(decoder) else ()
        self.byte_ids = frozenset(vocabulary[token] for token in byte_tokens)
        """Byte-fallback tokens, whose text depends on their neighbors."""
        self.closings = frozenset(self._closing(*probe) for probe in PROBES) - {""}

    @property
    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        is_open: bool = True,
    ) -> str:
        """Raises ValueError if the template refuses the chat.

        `settings` override the run's template variables. Developer becomes system if the template does not
        know the role. Templates get tool-call arguments as objects, since most would quote a text again;
        templates with `is string` or that fail on objects get texts.
        """
        known = {**self._settings, **(settings or {})}
        options = {name: value for name, value in known.items() if name in self._variables}
        options |= {"tools": [dict(tool) for tool in tools] if tools else None}
        options |= {"add_generation_prompt": is_open}
        chat = [dict(message) for message in messages]
        for message in chat:
            if message.get("role") == "developer" and not self._has_developer:
                message["role"] = "system"
        if ARGUMENTS_ARE_STRING.search(self.template) or not any(one.get("tool_calls") for one in chat):
            return self._apply_template(chat, options)
        try:
            return self._apply_template(_with_arguments(chat, _as_object), options)
        except ValueError as refusal:
            with contextlib.suppress(ValueError):
                return self._apply_template(_with_arguments(chat, _as_text), options)
            raise refusal

    def _apply_template(self, chat: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(chat, tokenize=False, **options))
        except Exception as error:  # it may raise anything
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode(self, text: str, *, after: str = "", adds_special: bool = False) -> tuple[int, ...]:
        """Encode a text that follows the text `after`. Raises ValueError for lone surrogates.

        The ids depend on `after`: a special token may take the white space that follows it, and sentencepiece
        puts a space before the first word of a text.
        """
        before = self._ids(after) if after else ()
        ids = self._ids(after + text, adds_special)
        if ids[: len(before)] == before:
            return ids[len(before) :]
        return self._ids(text)  # a token spans both texts, and the ids of the first stay

    def _ids(self, text: str, adds_special: bool = False) -> tuple[int, ...]:
        try:
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=adds_special)
        except TypeError as error:
            raise ValueError("the text is no Unicode: it has a lone surrogate") from error
        return tuple(encoded.ids)

    def _closing(self, answer: Mapping[str, Any], then: Mapping[str, Any]) -> str:
        """Return the special token after an answer, which the template also writes after the last one.

        A token that only begins the next message, as in GLM 4, does not count.
        """
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", **answer}]
        try:
            last = self.render(chat, is_open=False).rpartition(PROBE)[2]
            inner = self.render([*chat, then]).rpartition(PROBE)[2]
        except ValueError:
            return ""
        written, then_written = (
            [
                self.decode([token], skip_special_tokens=False)
                for token in self._ids(text)
                if token in self.special_ids
            ]
            for text in (last, inner)
        )
        # gpt-oss ends only the last answer with <|return|>
        candidates = [*reversed(written), *then_written[:1]] if written else []
        return next((token for token in candidates if token in then_written), "")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return self.encode(self.render(messages))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens and len(token_ids) == 1 and token_ids[0] in self.special_ids:
            return str(self._backend.id_to_token(token_ids[0]))  # sentencepiece decodes its marks of spaces
        return str(self._decoder.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _load(model_path: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(model_path)
    except (OSError, ValueError, KeyError) as error:
        way_out = "set model.path to a Hugging Face language model with a tokenizer.json."
        raise ConfigError(f"cannot load a tokenizer from {model_path}: {error}", way_out=way_out) from error


def read_template(path: Path) -> str:
    """Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read model.chat_template={path}: {error}"
        raise ConfigError(what, way_out="give the path of a Jinja file.") from error
    _compile(text, f"model.chat_template={path}")
    return text


def _compile(template: str, name: str) -> Template:
    """Compile like apply_chat_template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        compiled: Template = _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        way_out = "correct that line, or set model.chat_template to another Jinja file."
        raise ConfigError(f"{name} line {error.lineno}: {error.message}", way_out=way_out) from error
    return compiled


def _with_arguments(chat: list[dict[str, Any]], convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
    chat = copy.deepcopy(chat)
    for message in chat:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = convert(call["function"]["arguments"])
    return chat


def _as_object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def read_vocabulary(folder: Path) -> dict[str, int]:
    return dict(_load(str(folder)).get_vocab())


def _read_json(model_path: str, name: str) -> dict[str, Any]:
    path = Path(model_path) / name
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content
