"""The tokenizer of a Hugging Face model, for prompts and completions. Does not import torch."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from asyncrl.errors import ConfigError
from asyncrl.messages.work import Rendered
from asyncrl.rollouts.chat_template import Checkpoint, NotFollowed, ResumableTemplate

log = logging.getLogger(__name__)

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that stands for one byte, where a vocabulary has no other for a character (byte fallback)."""

ARGUMENTS_ARE_STRING = re.compile(r"arguments\s+is\s+string")
"""In a template that writes the arguments of a tool call as they are if they are text (Qwen3)."""


PREPARED = "{{ {'messages': messages, 'tools': tools}|tojson }}"
"""A template that shows what transformers makes of messages and tools before any template sees them."""

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables that no one sets but a rendering itself."""

CHECKED_MESSAGES = 32
"""A rendering that went on is compared with a whole one if the chat has at most so many messages, and ..."""


def _is_checked(number: int) -> bool:
    """... after 1, 2, 4, 8 and so on of them."""
    return number & (number - 1) == 0


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """From where a rendering can go on: messages and tools as the template has seen them."""

    messages: list[Any]
    tools: Any
    checkpoint: Checkpoint


class HFChatTokenizer:
    """A ChatRenderer over a model's folder.

    It loads tokenizer.json by itself, because AutoTokenizer imports torch; only a model without that file
    takes the way over AutoTokenizer, which converts it. Every method may run in several threads at once.
    """

    template: str
    """The Jinja text that renders chats; where the model has several, the one for chats with tools."""
    response_template: dict[str, Any] | None
    """How transformers reads an answer, where the tokenizer says it."""
    vocab_size: int
    """Ids that the model knows (config.json); it may be more than the vocabulary has."""
    end_ids: frozenset[int]
    """Tokens that end a turn: what generation_config.json, config.json and the tokenizer name, as the engines
    do.
    """
    text_ids: frozenset[int]
    """Tokens of the vocabulary that are text: all but the special ones."""
    special_ids: frozenset[int]
    """Special tokens of the vocabulary."""
    byte_ids: frozenset[int]
    """Tokens whose text depends on the whole run of such tokens that they stand in (byte fallback). Mostly
    empty.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Load it. `chat_template`: a Jinja file that replaces the tokenizer's own; `chat_template_kwargs`:
        variables of the template, in each rendering that does not set them otherwise.

        Raises ConfigError if the tokenizer or the file cannot be read, if there is no chat template, or if it
        does not read one of those variables.
        """
        self.model_path = str(model_path)
        self._tokenizer = tokenizer = _load(self.model_path)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special) | frozenset(tokenizer.all_special_ids)
        self.text_ids = frozenset(vocabulary.values()) - self.special_ids
        if not self.text_ids:  # transformers makes an empty one where there are no files of a tokenizer
            what = f"{self.model_path} has no tokenizer: its vocabulary is empty"
            way_out = "copy tokenizer.json and tokenizer_config.json of the model into that folder."
            raise ConfigError(what, rule="prompts are encoded by the model's own tokenizer", way_out=way_out)
        if chat_template is not None:
            tokenizer.chat_template = read_template(Path(chat_template))
        template = tokenizer.chat_template
        if not template:
            way_out = "set model.chat_template to a Jinja file, or choose an instruct model."
            raise ConfigError(f"the tokenizer of {self.model_path} has no chat template", way_out=way_out)
        if not isinstance(template, str):
            template = template.get("tool_use") or template.get("default") or next(iter(template.values()))
        self.template, self.response_template = template, getattr(tokenizer, "response_template", None)
        compiled = _compile(template, f"the chat template of {self.model_path}")
        self._resumable, self._num_unchecked = _resumable(compiled, template), itertools.count(1)
        self._settings = dict(chat_template_kwargs or {})
        known = template_variables(compiled, template)
        self._variables = known.difference(RESERVED, tokenizer.special_tokens_map)
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
        model = _read_json(self.model_path, "config.json")
        generation = _read_json(self.model_path, "generation_config.json")
        self.vocab_size = model.get("vocab_size") or 1 + max(vocabulary.values())
        ends = (generation.get("eos_token_id"), model.get("eos_token_id"), tokenizer.eos_token_id)
        several = [end if isinstance(end, list) else [end] for end in ends if end is not None]
        self.end_ids = frozenset(end for ends in several for end in ends)
        falls_back = "ByteFallback" in repr(self._backend.decoder)
        self.byte_ids = frozenset(
            token_id for token, token_id in vocabulary.items() if falls_back and BYTE_TOKEN.fullmatch(token)
        )

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by token, the special ones included."""
        return dict(self._tokenizer.get_vocab())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as text, up to the assistant's next turn. Raises ValueError, with what the template says,
        if the template refuses it.

        `settings` are variables of the template, which go before the run's own; those that it does not read
        change nothing. A developer is the system, where the template knows no developer.

        The arguments of tool calls may be objects or JSON texts. They reach the template as objects, for most
        would quote a text once more; one that asks whether they `is string` gets them as they are, and one
        that fails on objects gets texts.
        """
        options = {"tools": [dict(tool) for tool in tools] if tools else None, "add_generation_prompt": True}
        options |= self._all_settings(settings)
        chat = self._with_roles(messages)
        if ARGUMENTS_ARE_STRING.search(self.template) or not any(one.get("tool_calls") for one in chat):
            return self._apply_template(chat, options)
        try:
            return self._apply_template(_with_arguments(chat, _as_object), options)
        except ValueError as refusal:
            try:
                return self._apply_template(_with_arguments(chat, _as_text), options)
            except ValueError:
                raise refusal from None

    def render_on(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        after: Rendered | None = None,
    ) -> Rendered:
        """The text of render(), after what `after` has of it: the Rendered of the first of these messages
        with the same tools and settings. Raises as render() does.

        Only what the new messages change is rendered (chat_template.py says why that is exact). Should
        a check find another text all the same, this template is rendered as a whole from then on.
        """
        if self._resumable is None:
            return Rendered(self.render(messages, tools=tools, settings=settings))
        try:
            found = self._render_on(self._resumable, messages, tools, settings, after)
        except RecursionError:
            raise
        except Exception:  # what the template does is not followed, or it refuses: render() says why
            return Rendered(self.render(messages, tools=tools, settings=settings))
        if len(messages) <= CHECKED_MESSAGES and _is_checked(next(self._num_unchecked)):
            whole = Rendered(self.render(messages, tools=tools, settings=settings))
            if not _are_equal(whole, found):
                log.error("the chat template is rendered as a whole from now on: it was continued wrongly")
                self._resumable = None
                return whole
        return found

    def _render_on(
        self, resumable: ResumableTemplate, messages: Any, tools: Any, settings: Any, after: Rendered | None
    ) -> Rendered:
        state: _State | None = after.state if after else None
        known = state.messages if state else []
        new = self._with_roles(messages[len(known) :])
        if not ARGUMENTS_ARE_STRING.search(self.template):
            new = _with_arguments(new, _as_object)
        prepared: dict[str, Any] = json.loads(
            self._tokenizer.apply_chat_template(
                new, chat_template=PREPARED, tools=None if state else tools or None, tokenize=False
            )
        )
        chat, given = [*known, *prepared["messages"]], state.tools if state else prepared["tools"]
        variables = {**self._tokenizer.special_tokens_map, "tools": given, "documents": None}
        variables |= {"add_generation_prompt": True, **self._all_settings(settings)}
        text, num_before, checkpoint = resumable.render(chat, variables, state.checkpoint if state else None)
        next_state = _State(chat, given, checkpoint) if checkpoint else None
        if not num_before:
            return Rendered(text, state=next_state)
        before = after.hash_of(num_before) if after else None
        assert before is not None, "a checkpoint lies in the text of its own rendering"
        return Rendered(text, num_before, before, next_state)

    def _all_settings(self, settings: Mapping[str, Any] | None) -> dict[str, Any]:
        """The run's and the call's, those that the template reads."""
        found = {**self._settings, **(settings or {})}
        return {name: value for name, value in found.items() if name in self._variables}

    def _with_roles(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with roles that the template knows."""
        chat = [dict(message) for message in messages]
        for message in chat:
            if message.get("role") == "developer" and not self._has_developer:
                message["role"] = "system"
        return chat

    def _apply_template(self, chat: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(chat, tokenize=False, **options))
        except Exception as error:  # sandboxed, but it may raise anything
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids. Special tokens are known by their text; none is added, since the template writes them
        all.

        Raises ValueError for text that is no Unicode: lone surrogates, which a JSON escape can smuggle in.
        """
        try:  # the ids of the transformers call, without its BatchEncoding and offsets
            return tuple(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except TypeError as error:
            raise ValueError("the text is no Unicode: it has a lone surrogate") from error

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of the chat, with the prompt for the next assistant turn."""
        return self.encode(self.render(messages))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, without the special tokens by default."""
        return str(self._decoder.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _load(model_path: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        try:
            return PreTrainedTokenizerFast.from_pretrained(model_path)
        except (OSError, ValueError):  # no tokenizer.json: a format that only the model's own class can read
            from transformers import AutoTokenizer

            found = AutoTokenizer.from_pretrained(model_path)
            if not hasattr(found, "backend_tokenizer"):
                raise ValueError("it cannot be converted to a tokenizer.json") from None
            return found
    except (OSError, ValueError, KeyError) as error:
        way_out = "set model.path to a Hugging Face causal language model with its tokenizer."
        raise ConfigError(f"cannot load a tokenizer from {model_path}: {error}", way_out=way_out) from error


def read_template(path: Path) -> str:
    """The text of model.chat_template. Raises ConfigError if it cannot be read, or is no template."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read model.chat_template={path}: {error}"
        raise ConfigError(what, way_out="give the path of a Jinja file.") from error
    _compile(text, f"model.chat_template={path}")
    return text


def _compile(template: str, name: str) -> Template:
    """As apply_chat_template does, which keeps what it has compiled; it alone knows all tags of chat
    templates.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        compiled: Template = _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        way_out = "correct that line, or set model.chat_template to another Jinja file."
        raise ConfigError(f"{name} line {error.lineno}: {error.message}", way_out=way_out) from error
    return compiled


def template_variables(compiled: Template, template: str) -> frozenset[str]:
    """Names that the template reads and does not set: what it may be given."""
    environment = compiled.environment
    return frozenset(find_undeclared_variables(environment.parse(template)) - set(environment.globals))


def _resumable(compiled: Template, template: str) -> ResumableTemplate | None:
    """None for a template whose loop over the messages cannot be followed."""
    try:
        return ResumableTemplate(compiled.environment, template)
    except NotFollowed:
        return None


def _are_equal(whole: Rendered, part: Rendered) -> bool:
    """Whether they are of one text."""
    first = whole.hash_of(part.num_before)
    is_same = first is not None and first.digest() == part.before.digest()
    return is_same and whole.text[part.num_before :] == part.text


def _with_arguments(chat: list[dict[str, Any]], convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """The chat with the arguments of its tool calls converted; `chat` itself is left alone."""
    converted = []
    for message in chat:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            calls.append({**call, "function": {**function, "arguments": convert(function["arguments"])}})
        converted.append({**message, "tool_calls": calls} if calls else message)
    return converted


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Of a model that need not have a chat template. Raises ConfigError."""
    return dict(_load(str(folder)).get_vocab())


def _read_json(model_path: str, name: str) -> dict[str, Any]:
    """What the file says, {} if the model has none."""
    try:
        content: dict[str, Any] = json.loads((Path(model_path) / name).read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise ConfigError(f"cannot read {name} of {model_path}: {error}", way_out="restore it.") from error
    return content
