"""Tokenizer of a Hugging Face model. Does not import torch."""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from asyncrl.base.errors import ConfigError
from asyncrl.messages.json_values import as_object
from asyncrl.messages.worker_api import CONTEXT_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

PROBE = "answer to the question"
PROBES: Sequence[tuple[dict[str, object], dict[str, object]]] = [
    ({"content": PROBE}, {"role": "user", "content": "question"}),
    (
        {
            "content": "",
            "tool_calls": [
                {
                    "id": "call00000",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"x": PROBE}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "result"},
    ),
]
"""(an answer, the next message)."""
SHAPES = (
    "system system user",
    "user system",
    "system user system user",
    "system user assistant system user",
)
"""Roles of chats that a template must write whole, or its system messages are merged.
"""
SYSTEM = ("system", "developer")
CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Form of a call's id in the templates that refuse others (Mistral)."""

GIVEN, WRITTEN = (f"asyncrl{secrets.token_hex(16)}" for _ in range(2))
"""Marks of the name of a special token: before one in a given text, behind one that the
template wrote. Not guessable; ASCII, since templates escape other characters.
"""
SHORT = 32
"""Characters of a text whose ids are remembered: each call encodes the names of special
tokens again.
"""
RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)


class HFChatTokenizer:
    """ChatTokenizer of a model's folder. Thread-safe.

    AutoTokenizer would import torch.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        now: datetime.date | None = None,
        parse_special_tokens: bool = True,
    ) -> None:
        """Load the tokenizer. Raises ConfigError.

        `chat_template`: Jinja file; `chat_template_kwargs`: default template variables.
        `now`: the date that templates write (None: today). Without
        `parse_special_tokens`, the name of a special token in a message or tool is
        encoded as any other text, answers aside.
        """
        self.model_path = str(model_path)
        self._tokenizer = tokenizer = _load(self.model_path)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        special = {
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self.special_ids = frozenset(special.union(tokenizer.all_special_ids))
        self.text_ids = frozenset(vocabulary.values()) - self.special_ids
        if chat_template is not None:
            tokenizer.chat_template = read_template(Path(chat_template))
        template = tokenizer.chat_template
        if not template:
            raise ConfigError(
                f"the tokenizer of {self.model_path} has no chat template",
                way_out="set model.chat_template to a Jinja file, or choose an instruct model.",
            )
        if not isinstance(template, str):
            template = (
                template.get("tool_use")
                or template.get("default")
                or next(iter(template.values()))
            )
        self.template: str = template
        self._settings = dict(chat_template_kwargs or {})
        environment = _compile(
            template, f"the chat template of {self.model_path}"
        ).environment
        known = frozenset(find_undeclared_variables(environment.parse(template)))
        self.variables = known.difference(
            environment.globals, RESERVED, tokenizer.special_tokens_map
        )
        if unknown := sorted(set(self._settings) - self.variables):
            what = f"the chat template of {self.model_path} does not read {', '.join(unknown)}"
            known_names = ", ".join(sorted(self.variables)) or "nothing here"
            raise ConfigError(
                what, way_out=f"model.chat_template_kwargs may set {known_names}."
            )
        today = now or datetime.date.today()
        self._constants = {
            **tokenizer.special_tokens_map,
            "documents": None,
            "strftime_now": today.strftime,
        }
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may truncate or pad. Prompts are never cut.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._plain = (
            None if parse_special_tokens else PlainText(self._backend, template)
        )
        self._short_ids = lru_cache(1024)(self._encoded)
        self._short_texts = lru_cache(4096)(self._decoded)
        self._writes_system = cache(self._finds_system)
        # True for SmolVLM, Idefics 3, LLaVA
        # The last False stays if neither form works.
        for self._wants_parts in (False, True, False):
            if self._writes("user"):
                break
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        # the same text, 4 times as fast
        self._decoder = tokenizer if cleans else self._backend
        model = _read_json(self.model_path, "config.json")
        generation = _read_json(self.model_path, "generation_config.json")
        self.vocab_size: int = model.get("vocab_size") or 1 + max(vocabulary.values())
        # Each file may name only some of the tokens that end a turn.
        ends = (
            generation.get("eos_token_id"),
            model.get("eos_token_id"),
            tokenizer.eos_token_id,
        )
        several = [
            end if isinstance(end, list) else [end] for end in ends if end is not None
        ]
        self.end_ids = frozenset(chain.from_iterable(several))
        has_bytes = "ByteFallback" in repr(self._backend.decoder)
        byte_tokens = filter(BYTE_TOKEN.fullmatch, vocabulary if has_bytes else ())
        self.byte_ids = frozenset(vocabulary[token] for token in byte_tokens)
        """Byte-fallback tokens, whose text depends on their neighbors."""
        self.closing, _ = self._closing(*PROBES[0])
        _, self.call_closing = self._closing(*PROBES[1])

    @property
    def unknown_id(self) -> int | None:
        """Return the token of characters that the vocabulary lacks, if it has one."""
        unknown: int | None = self._tokenizer.unk_token_id
        # Of byte-level tokenizers it is the end of a text, and stands for no character.
        return None if unknown in self.end_ids else unknown

    @property
    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, object] | None = None,
        is_open: bool = True,
        spans: list[tuple[int, int]] | None = None,
    ) -> str:
        """Return the template's text, repaired as servers do. Raises ValueError if it
        refuses the chat. `spans` gets [start, end) of its {% generation %} blocks, in
        characters.

        `settings` override the run's template variables. Developer becomes system if
        the template does not know the role. Then, or if the template refuses or omits
        system messages that are not the first message, they are merged into the first,
        like in vLLM.

        Templates get tool-call arguments as objects, since most would quote a text
        again; templates that fail on objects get texts. If the template refuses the
        calls' ids, all others than nine alphanumerics are replaced (Mistral). If it
        refuses tools without a description or properties, these are empty (gpt-oss,
        Seed-OSS), and results without an id get that of their call (Gemma 4).
        """
        options = self._options(settings)
        options["add_generation_prompt"] = is_open
        chat = [self._tidied(message) for message in messages]
        roles = [message["role"] for message in messages if message["role"] in SYSTEM]
        is_late = any(message["role"] in SYSTEM for message in chat[1:])
        if is_late and not all(map(self._writes_system, roles)):
            chat = _merged(chat)
        if self._plain is not None:
            chat = [
                each if each["role"] == "assistant" else self._plain.marked(each)
                for each in chat
            ]
        given = [dict(tool) for tool in tools or ()]
        shown = given if self._plain is None else self._plain.marked(given)
        options["tools"] = shown or None
        for arguments_of, id_of in FORMS:
            form = [_with_calls(message, arguments_of, id_of) for message in chat]
            try:
                return self._apply_template(form, options, spans)
            except ValueError as error:
                refusal = error
        whole = [_whole_tool(tool) for tool in given]
        paired = _with_result_ids(messages)
        if whole != given or paired != messages:
            return self.render(
                paired, tools=whole, settings=settings, is_open=is_open, spans=spans
            )
        raise refusal

    @property
    def has_generation_blocks(self) -> bool:
        """Return whether the template marks what the assistant generates."""
        return GENERATION.search(self.template) is not None

    def _options(
        self, settings: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        known = {**self._settings, **(settings or {})}
        options = {
            name: value for name, value in known.items() if name in self.variables
        }
        return {
            **self._constants,
            **options,
            "tools": None,
            "add_generation_prompt": True,
        }

    def _tidied(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with a content and a role that the template knows."""
        tidied = {name: value for name, value in message.items() if value is not None}
        tidied["role"] = self._roles.get(message["role"], message["role"])
        tidied.setdefault("content", "")
        thought = tidied.get("reasoning_content")
        # the names under which templates read a thought (gpt-oss, Gemma 4)
        return (
            tidied
            if thought is None
            else {"thinking": thought, "reasoning": thought, **tidied}
        )

    def _apply_template(
        self,
        chat: list[dict[str, Any]],
        options: Mapping[str, object],
        spans: list[tuple[int, int]] | None = None,
    ) -> str:
        if self._wants_parts:
            chat = [
                {**each, "content": [{"type": "text", "text": each["content"]}]}
                for each in chat
            ]
        try:
            text = self._tokenizer.get_chat_template(None, options["tools"])
            template = _compile(text, "the chat template")
            if spans is None:
                return template.render(messages=chat, **options)
            spans.clear()  # of a form that the template refused
            blocks = list[str]()
            # Of transformers; it counts the characters in `blocks`, so each block must
            # be added before the next one is written.
            with template.environment.activate_tracker(blocks, spans):  # type: ignore[attr-defined]
                for block in template.generate(messages=chat, **options):
                    blocks.append(block)
            return "".join(blocks)
        except Exception as error:  # it may raise anything
            raise ValueError(
                f"the chat template refuses these messages: {error}"
            ) from error

    @cached_property
    def _roles(self) -> Mapping[str, str]:
        # DeepSeek's and Cohere's templates name the role in texts, and omit its messages.
        knows_developer = "developer" in self.template and self._writes(
            "developer user"
        )
        return {} if knows_developer else {"developer": "system"}

    def _writes(self, shape: str) -> bool:
        """Return whether the template writes every message of a chat of these roles."""
        chat = [
            {"role": role, "content": f"{PROBE} {at}."}
            for at, role in enumerate(shape.split())
        ]
        try:
            text = self._apply_template(chat, self._options())
        except ValueError:
            return False
        return all(message["content"] in text for message in chat)

    def _finds_system(self, role: str) -> bool:
        """Return whether the template writes messages of the role, system or developer,
        anywhere.
        """
        return role not in self._roles and all(
            self._writes(shape.replace("system", role)) for shape in SHAPES
        )

    def encode(
        self, text: str, *, after: str = "", adds_special: bool = False
    ) -> tuple[int, ...]:
        """Encode a text that follows the text `after`. Raises ValueError for lone
        surrogates.

        The ids depend on `after`: a special token may take the white space that follows
        it, and sentencepiece puts a space before the first word of a text.
        """
        before = self._ids(after) if after else ()
        ids = self._ids(after + text, adds_special)
        if ids[: len(before)] == before:
            return ids[len(before) :]
        # a token spans both texts, and the ids of the first stay
        return self._ids(text)

    def _ids(self, text: str, adds_special: bool = False) -> tuple[int, ...]:
        encode = self._encoded if len(text) > SHORT else self._short_ids
        return encode(text, adds_special)

    def _encoded(self, text: str, adds_special: bool) -> tuple[int, ...]:
        backend = self._backend
        if self._plain is not None:
            backend = self._plain.backend
            text = self._plain.renamed(text)
        try:
            (encoded,) = backend.encode_batch_fast(
                [text], add_special_tokens=adds_special
            )
        except TypeError as error:
            raise ValueError(
                "the text is not valid Unicode: it has a lone surrogate"
            ) from error
        return tuple(encoded.ids)

    def _closing(
        self, answer: Mapping[str, object], then: Mapping[str, object]
    ) -> tuple[str, str]:
        """Return the text from PROBE through the last special token of an answer, and
        that token.

        Only text that the template also writes at the end of a chat counts. GLM 4
        writes none there, so the role token that follows is not an end.

        Example of ChatML: at the end of a chat, `<|im_end|>` and a line end follow the
        answer; inside one, the same and `<|im_start|>user`. Both begin with
        `<|im_end|>`, which is the result, twice.
        """
        last, inner = self._behind(answer, then)
        if not self._special(last):
            return "", ""
        shared = os.path.commonprefix([last, inner])
        tokens = self._special(shared)
        if not tokens:  # gpt-oss ends only the last answer of a chat with <|return|>
            tokens = self._special(inner)[:1]
            shared = "".join(inner.partition(tokens[0])[:2]) if tokens else ""
        # some templates begin the next answer whether or not they are asked to (Command
        # A)
        ends = [
            token
            for token in tokens
            if self._backend.token_to_id(token) in self.end_ids
        ]
        # a mark with text behind it, such as that of an argument, ends no answer
        if not ends and tokens and not shared.rpartition(tokens[-1])[2].strip():
            ends = tokens[-1:]
        if not ends:
            return "", ""
        return shared[: shared.find(ends[0]) + len(ends[0])], ends[0]

    def _behind(
        self, answer: Mapping[str, object], then: Mapping[str, object]
    ) -> tuple[str, str]:
        """Return the text behind PROBE in an answer that ends a chat, and if a message
        follows. Empty: the template refuses the chat, or leaves out PROBE.
        """
        chat: list[Mapping[str, object]] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", **answer},
        ]
        try:
            last = self.render(chat, is_open=False).rpartition(PROBE)
            inner = self.render([*chat, then]).rpartition(PROBE)
        except ValueError:
            return "", ""
        return (last[2], inner[2]) if last[1] else ("", "")

    @cached_property
    def next_ends(self) -> list[str]:
        """Return the end tokens that begin the message after an answer, if the answer
        ends a chat without an end token: GLM's `<|user|>` after a text, and its
        `<|observation|>` after a call. Empty: none.
        """
        found = list[str]()
        for answer, then in PROBES:
            last, inner = self._behind(answer, then)
            token = "".join(self._special(inner.removeprefix(last))[:1])
            is_end = self._backend.token_to_id(token) in self.end_ids
            is_next = inner.startswith(last + token)
            found.append(token if is_end and is_next else "")
        return found

    @cached_property
    def no_end(self) -> str:
        ends = self.decode(sorted(self.end_ids), skip_special_tokens=False)
        return (
            f"no token at which generation stops ({ends}): set eos_token_id in the model's "
            "generation_config.json to the token that the template writes after an answer"
        )

    @property
    def ends_answers(self) -> bool:
        """Return whether generation stops at a token that ends an answer in the template.
        A template that refuses a plain chat counts as such.
        """
        last, inner = self._behind(*PROBES[0])
        ending = self._ids(last + self.next_ends[0])
        return not inner or not self.end_ids.isdisjoint(ending)

    def changed_answer(self, thinking: tuple[str, str]) -> tuple[str, str] | None:
        """Return an answer as it is sampled, and as the template writes it once the user
        has continued; None if both are equal. `thinking`: the marks around a thought.

        Example of Qwen3: "<think> Because of it. </think> It is four." becomes "It is
        four."
        """
        said = "It is four."
        begin, end = thinking
        answer = f"{begin}\nBecause of it.\n{end}\n\n{said}"
        chat = [
            {"role": "user", "content": "What is it?"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Why so?"},
        ]
        try:
            prompt = self.render(chat[:1])
            later = self.render(chat)
        except ValueError:
            return None  # it has no such conversations
        if prompt.rstrip().endswith(begin):
            answer = answer.removeprefix(begin)
        sampled = prompt + answer
        if "".join(later.split()).startswith("".join(sampled.split())):
            return None
        start = len(os.path.commonprefix([sampled, later]))
        return sampled[start:], later[start:].partition(said)[0] + said

    def find_end(self, text: str) -> str:
        """Return the tokens that end a turn among those of an answer's text."""
        ends = self.end_ids.union(self._ids(self.closing)) & self.special_ids
        found = [token for token in self._ids(text) if token in ends]
        return self.decode(found, skip_special_tokens=False)

    def _special(self, text: str) -> list[str]:
        return [
            str(self._backend.id_to_token(token))
            for token in self._ids(text)
            if token in self.special_ids
        ]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return self.encode(self.render(messages))

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        # A call decodes its last tokens several times, as the context of others.
        is_short = len(token_ids) <= CONTEXT_TOKENS
        decode = self._short_texts if is_short else self._decoded
        return decode(tuple(token_ids), skip_special_tokens)

    def _decoded(self, token_ids: tuple[int, ...], skips_special: bool) -> str:
        if (
            not skips_special
            and len(token_ids) == 1
            and token_ids[0] in self.special_ids
        ):
            # sentencepiece decodes its marks of spaces
            return str(self._backend.id_to_token(token_ids[0]))
        return str(self._decoder.decode(token_ids, skip_special_tokens=skips_special))


def _load(model_path: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(model_path)
    except Exception as error:  # it may raise anything for broken files
        raise ConfigError(
            f"cannot load a tokenizer from {model_path}: {error}",
            way_out="set model.path to a Hugging Face language model with a tokenizer.json.",
        ) from error


def read_template(path: Path) -> str:
    """Return the text of model.chat_template, which compiles. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read model.chat_template={path}: {error}",
            way_out="give the path of a Jinja file.",
        ) from error
    _compile(text, f"model.chat_template={path}")
    return text


@lru_cache(16)
def _compile(template: str, name: str) -> Template:
    """Compile like apply_chat_template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        compiled: Template = _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"{name} line {error.lineno}: {error.message}",
            way_out="correct that line, or set model.chat_template to another Jinja file.",
        ) from error
    # a ChainMap, which is slow to iterate at each render
    compiled.globals = dict(compiled.globals)
    return compiled


def _merged(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge all system messages into the first message, joined like in vLLM."""
    texts = [message["content"] for message in chat if message["role"] in SYSTEM]
    system = {"role": "system", "content": "".join(texts)}
    return [system, *(message for message in chat if message["role"] not in SYSTEM)]


def _with_calls(
    message: dict[str, Any],
    arguments_of: Callable[[object], object],
    id_of: Callable[[str], str],
) -> dict[str, Any]:
    changed = dict(message)
    if "tool_call_id" in message or message["role"] == "tool":
        changed["tool_call_id"] = id_of(message.get("tool_call_id", ""))
    if message.get("tool_calls"):
        changed["tool_calls"] = calls = []
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = arguments_of(function.get("arguments"))
            call_id = id_of(call.get("id", ""))
            calls.append(
                {
                    **call,
                    "id": call_id,
                    "type": "function",
                    "function": {**function, "arguments": arguments},
                }
            )
    return changed


def _with_result_ids(
    messages: Sequence[Mapping[str, Any]],
) -> Sequence[Mapping[str, Any]]:
    """Give results without an id that of the first call that has no result."""
    waiting: list[str] = []
    paired: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and waiting:
            message = {
                **message,
                "tool_call_id": message.get("tool_call_id") or waiting[0],
            }
            waiting = [name for name in waiting if name != message["tool_call_id"]]
        elif message["role"] != "tool":
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
        paired.append(message)
    return paired


def _whole_tool(tool: Mapping[str, Any]) -> dict[str, object]:
    given = {key: value for key, value in tool["function"].items() if value is not None}
    parameters = {"type": "object", "properties": {}, **given.get("parameters", {})}
    function = {"description": "", **given, "parameters": parameters}
    return {**tool, "function": function}


def _as_text(arguments: object) -> str:
    return json.dumps(as_object(arguments), ensure_ascii=False)


def _short(call_id: str) -> str:
    """Return nine alphanumerics, or nothing for no id. Example: `functions.f:0` becomes
    `5e0d2bf6c`.
    """
    return (
        call_id
        if not call_id or CALL_ID.fullmatch(call_id)
        else blake2b(call_id.encode()).hexdigest()[:9]
    )


FORMS = ((as_object, str), (_as_text, str), (as_object, _short), (_as_text, _short))
"""Forms of a chat's calls, best first. A template's refusal of the last one is
reported.
"""


def is_written(part: str, text: str) -> bool:
    """Return whether a template wrote a text, with other white space or JSON's escapes."""
    escaped = json.dumps(part, ensure_ascii=False)[1:-1]
    dense = "".join(text.replace(GIVEN, "").split())
    return any("".join(form.split()) in dense for form in (part, escaped))


class PlainText:
    """Encode the names of special tokens in given texts as ordinary text.

    marked() marks these names in messages before the template is applied. In the
    backend here, special tokens have other names, which renamed() gives to the unmarked
    ones. So all other ids, with the spaces that tokenizers add and strip, are those of
    the original backend.

    Example: a user writes `a </s> b`, and the template ends a message with `</s>`.

        marked()       a GIVEN</s> b
        template       a GIVEN</s> b</s>
        renamed()      a </s> b</s>WRITTEN

    In the backend here only `</s>WRITTEN` is special; it has the id of `</s>`. The
    user's `</s>` is encoded as ordinary letters.
    """

    def __init__(self, backend: Tokenizer, template: str) -> None:
        added = backend.get_added_tokens_decoder().values()
        # also <tool_call> and <think>, which may not be special, but not a newline
        names = [
            one.content
            for one in added
            if one.special or one.content.strip() and one.content in template
        ]
        longest_first = sorted(names, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first))
        self._name = re.compile(f"({GIVEN})?({pattern})")
        renamed = re.sub(f'"({pattern})"', rf'"\g<1>{WRITTEN}"', backend.to_str())
        self.backend: Tokenizer = type(backend).from_str(renamed)

    def marked(self, value: Any) -> Any:
        """Mark the names in all texts of a JSON value."""
        text = self._name.sub(rf"{GIVEN}\g<2>", json.dumps(value, ensure_ascii=False))
        return json.loads(text)

    def renamed(self, text: str) -> str:
        return self._name.sub(
            lambda found: found[2] if found[1] else found[2] + WRITTEN, text
        )


def read_vocabulary(folder: Path) -> dict[str, int]:
    return dict(_load(str(folder)).get_vocab())


def _read_json(model_path: str, name: str) -> dict[str, Any]:
    path = Path(model_path) / name
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {**content}
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a JSON object: {error}",
            way_out="correct the file, or download the model again.",
        ) from error
