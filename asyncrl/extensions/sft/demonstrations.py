"""Read demonstrations, and find the tokens of their answers.

Imports no torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import numpy as np
import xxhash
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict

from asyncrl.base.errors import ConfigError
from asyncrl.base.progress import told_if_long
from asyncrl.base.user_code import message_of
from asyncrl.extensions.sft.sft_config import DataConfig
from asyncrl.messages.json_values import without_nulls
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Trajectory
from asyncrl.messages.tokens import Tokens, spans_of
from asyncrl.rollouts.tokenizer import HFChatTokenizer, is_written
from asyncrl.tasks.sources import read_dataset, read_files

Chat = list[dict[str, Any]]
Spans = list[tuple[int, int]]
"""[start, end) in characters or tokens."""
FORM = "a row has `messages`, or `prompt` and `completion`: texts, or lists of messages"
EXACT = (
    "the loss is on exactly the tokens of an answer: in {% generation %} of the template, or after the "
    "prompt that the model would be given"
)
MARKS = "train train_on_turn trainable training loss loss_mask weight".split()
"""Marks of other trainers: false keeps a message out of the loss."""
UNREAD_COLUMNS = (
    "system history functions documents objects image images video videos audio audios "
    "chat_template_kwargs enable_thinking input_ids labels ignore mask masked masks train_mask "
    "completion_mask assistant_masks loss_scale loss_weight"
).split()
"""Columns that change what other trainers learn from the same messages."""
EMPTY: tuple[object, ...] = (None, "", [], {})
RATINGS = ("label", "kto_tag")
"""Columns of preference data. False: an answer that must not be learned."""
OWN_ROWS = "give each answer its own row, as `prompt` and `completion`. Or "
OTHER_TEMPLATE = (
    "set model.chat_template to a copy of the template whose generation prompt ends with a special token "
    "that begins every answer, or which has {% generation %} around each answer (TRL has such copies: "
    "trl/chat_templates/*_training.jinja)."
)


def _decoded(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


class _Function(TypedDict):
    name: str
    arguments: NotRequired[Annotated[dict[str, object], BeforeValidator(_decoded)]]


class _Call(TypedDict):
    id: NotRequired[str]
    type: NotRequired[str]
    function: _Function
    index: NotRequired[int]


class _RowMessage(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[_Call]]
    tool_call_id: NotRequired[str]
    annotations: NotRequired[object]
    id: NotRequired[object]
    timestamp: NotRequired[object]
    type: NotRequired[object]
    train: NotRequired[bool]
    train_on_turn: NotRequired[bool]
    trainable: NotRequired[bool]
    training: NotRequired[bool]
    loss: NotRequired[bool]
    loss_mask: NotRequired[bool]
    weight: NotRequired[bool]


def _check(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its thought under the name that the tokenizer reads."""
    is_marked = any(message.get(name) for name in MARKS)
    text = message.get("content")
    has_calls = bool(message.get("tool_calls"))
    is_answer = message["role"] == "assistant"
    if is_answer and not has_calls and not (text or "").strip():
        raise ValueError("an answer has a text or `tool_calls`")
    if not is_answer and (text is None or has_calls or is_marked):
        raise ValueError(
            "only an answer has no text, `tool_calls`, or a mark to learn it"
        )
    thought = message.get("reasoning") or message.get("thinking")
    return {"reasoning_content": thought, **message} if thought else message


_CHAT: TypeAdapter[Any] = TypeAdapter(
    list[Annotated[_RowMessage, AfterValidator(_check)]],
    config=ConfigDict(extra="forbid"),
)


class InexactError(ValueError):
    """The borders of an answer are not borders of tokens, or unknown."""


class Demonstrations(NamedTuple):
    """Rows as tokens. The tokens of answers count as sampled, under version 0."""

    rows: tuple[Tokens, ...]
    num_skipped: int = 0
    num_endless: int = 0
    """Rows whose last answer ends with no token at which an engine stops."""

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))

    @property
    def summary(self) -> str:
        num_learned = sum(row.num_sampled for row in self.rows)
        return (
            f"{len(self.rows)} rows, {num_learned} tokens of answers, at most {self.longest} tokens a row, "
            f"{self.num_skipped} skipped"
        )

    def warnings(self, tokenizer: HFChatTokenizer) -> Iterator[str]:
        if self.num_endless:
            yield f"the last answers of {self.num_endless} rows end with {tokenizer.no_end}"
        if self.num_skipped:
            yield f"{self.num_skipped} rows are too long, and are skipped"

    @property
    def digest(self) -> str:
        """Of all ids and answers, in order. It changes with the template, too."""
        digest = xxhash.xxh3_128()
        for row in self.rows:
            digest.update(row.ids.tobytes())
            digest.update(row.is_sampled.tobytes())
        return f"xxh3:{digest.hexdigest()}"


@told_if_long("reading the demonstrations")
def read_demonstrations(
    data: DataConfig,
    tokenizer: HFChatTokenizer,
    positions: int | None,
    key: Literal["files", "eval_files"] = "files",
) -> Demonstrations:
    """Read data.files, data.dataset or data.eval_files.
    `positions`: of the model. Raises ConfigError.
    """
    paths = getattr(data, key)
    source = f"data.{key}={paths}"
    if paths is None:
        source = f"data.dataset={data.dataset}"
        assert data.dataset is not None
        rows, place_of = read_dataset(data.dataset, data.split, data.args, "data")
    else:
        args = data.args if key == "files" else {}
        rows, place_of = read_files(paths, args, f"data.{key}")
    limit = data.max_tokens or positions
    found = list[Tokens]()
    num_skipped = 0
    place = "the first row"
    try:
        for index, row in enumerate(rows):
            place = place_of(index)
            tokens = demonstration_of(row, place, tokenizer)
            if limit is None or len(tokens) <= limit:
                found.append(tokens)
            elif data.overlong == "skip":
                num_skipped += 1
            else:
                raise ConfigError(
                    f"{place} has {len(tokens)} tokens, and {limit} are allowed",
                    rule="a row is never cut; the limit is data.max_tokens, or the model's positions",
                    way_out="shorten the row, raise data.max_tokens, or set data.overlong=skip.",
                )
            # A dataset decodes the next row in the head of this loop.
            place = f"the row after {place}"
    except ConfigError:
        raise
    except Exception as error:  # of many kinds, as a dataset decodes its row
        raise ConfigError(
            f"{place} cannot be used: {message_of(error)}", way_out="correct it."
        ) from error
    if not found:
        skipped = f"; {num_skipped} are longer than {limit} tokens"
        raise ConfigError(
            f"{source} has no rows to train on{skipped if num_skipped else ''}",
            rule=FORM,
            way_out="give other files, or raise data.max_tokens.",
        )
    num_endless = sum(
        tokenizer.end_ids.isdisjoint(row.ids[row.spans[-1].start :].tolist())
        for row in found
    )
    return Demonstrations(tuple(found), num_skipped, num_endless)


class _Row(NamedTuple):
    """A chat whose messages with the numbers `answers` are learned."""

    chat: Chat
    answers: Sequence[int]
    tools: Sequence[Mapping[str, Any]]
    tokenizer: HFChatTokenizer
    written: Sequence[int]
    """Messages whose texts must not end a turn."""
    settings: Mapping[str, object] | None = None
    """Template variables besides those of the run."""

    def render(self, num: int | None = None, **options: Any) -> str:
        """Return the text of the first `num` messages."""
        chat = self.chat[:num]
        return self.tokenizer.render(
            chat, tools=self.tools, settings=self.settings, **options
        )


def demonstration_of(
    row: Mapping[str, Any], place: str, tokenizer: HFChatTokenizer
) -> Tokens:
    """Return the tokens of a row, up to the end of its last answer. Raises ConfigError,
    which names `place`.
    """
    _refuse_columns(row, place)
    chat, num_given = _chat_of(row, place)
    answers = [
        number
        for number, message in enumerate(chat)
        if message["role"] == "assistant"
        and number >= num_given
        and all(message.get(name, True) for name in MARKS)
    ]
    if not answers:
        raise ConfigError(
            f"{place} has no assistant message to learn",
            rule="assistant messages are learned, except in a `prompt` or with a mark like `train: false`",
            way_out="add one, or remove the row.",
        )
    tools = _tools_of(row.get("tools"), place)
    # A text may be a prompt as another trainer's template writes it.
    written = [*answers, 0] if isinstance(row.get("prompt"), str) else answers
    known = _Row(chat, answers, tools, tokenizer, written)
    try:
        return _tokens(known)
    except ValueError as error:
        is_inexact = isinstance(error, InexactError)
        raise ConfigError(
            f"{place}: {error}",
            rule=EXACT if is_inexact else "",
            way_out=_way_out(known, is_inexact=is_inexact),
        ) from error


def _refuse_columns(row: Mapping[str, object], place: str) -> None:
    """Raise ConfigError for a column that says that something else is learned."""
    for name, value in row.items():
        is_marked = name in MARKS and value not in (None, True)
        is_bad = name in RATINGS and value is False
        is_unread = name in UNREAD_COLUMNS and without_nulls(value) not in EMPTY
        if is_marked or is_unread or is_bad:
            raise ConfigError(
                f"{place} has the column {name}: {value!r:.160}",
                rule="columns besides the messages and `tools` cannot change the learned tokens",
                way_out="remove the column, or the row. A message may have the mark `train: false`; a system "
                "text is a message; settings of the template are in model.chat_template_kwargs.",
            )


def _way_out(row: _Row, *, is_inexact: bool) -> str:
    """Return the setting of the template that makes the row exact, which is tried, else
    what its author can change.
    """
    for name in sorted(row.tokenizer.variables):
        for value in (False, True) if "think" in name else ():
            with suppress(ValueError):
                _tokens(row._replace(settings={name: value}))
                return (
                    f"set model.chat_template_kwargs: {{{name}: {json.dumps(value)}}}."
                )
    if not is_inexact:
        return "correct the row, or set model.chat_template to another template."
    return OWN_ROWS * (len(row.answers) > 1) + OTHER_TEMPLATE


def _chat_of(row: Mapping[str, object], place: str) -> tuple[Chat, int]:
    """Return the messages, and how many of them are the prompt's."""
    forms = {"messages", "prompt", "completion"}
    # A parquet file has every column in every row, empty ones as null.
    given = {name for name in forms if row.get(name) is not None}
    if given == {"messages"}:
        return _messages(row["messages"], None, f"{place}, messages"), 0
    if given == {"prompt", "completion"}:
        prompt = _messages(row["prompt"], "user", f"{place}, prompt")
        completion = _messages(row["completion"], "assistant", f"{place}, completion")
        return [*prompt, *completion], len(prompt)
    raise ConfigError(
        f"{place} has the columns {', '.join(map(str, row)) or 'none'}",
        rule=FORM,
        way_out='convert it: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}.',
    )


def _messages(content: object, role: str | None, where: str) -> Chat:
    """Check messages; with a `role`, a text is a message."""
    chat = content
    if role is not None and isinstance(content, str):
        chat = [{"role": role, "content": content}]
    try:
        return list(_CHAT.validate_python(without_nulls(chat)))
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where} is not a list of chat messages: {at} {first['msg']}: {first['input']!r:.160}",
            rule=f"a message may have {', '.join(_RowMessage.__annotations__)}",
            way_out="correct the row. Marks of the loss are true or false, and arguments are an object.",
        ) from error


def _tools_of(given: object, place: str) -> Sequence[Mapping[str, Any]]:
    """Return tools, which may be JSON text. Raises ConfigError."""
    try:
        tools: Any = _decoded(without_nulls(given) or None) or []
        [tool["function"]["name"] for tool in tools]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{place}, tools is not a list of tools: {message_of(error)}: {given!r:.160}",
            rule='a tool is {"type": "function", "function": {"name": ...}}; the list may be JSON text',
            way_out="correct the row.",
        ) from error
    return list(tools)


def _tokens(row: _Row) -> Tokens:
    """Encode a chat, and mark the tokens of its answers. Raises InexactError,
    ValueError.
    """
    tokenizer = row.tokenizer
    is_marked = tokenizer.has_generation_blocks
    text, spans = _marked_spans(row) if is_marked else _prefix_spans(row)
    _refuse_omissions(row, text, spans)
    ids = tokenizer.encode(text)
    versions = np.full(len(ids), -1, np.int32)
    for start, end in spans:
        first = _num_tokens(text[:start], ids, tokenizer)
        last = _num_tokens(text[:end], ids, tokenizer)
        if not is_marked:
            last = _end_of_turn(ids, first, last, tokenizer)
        versions[first:last] = 0
    versions[:1] = -1  # nothing predicts the first token of a text
    trained = np.flatnonzero(versions == 0)
    if not len(trained):
        raise InexactError("the chat template writes no token for its answers")
    if any(ids[at] == tokenizer.unknown_id for at in trained):
        raise ValueError("an answer has a character that the tokenizer lacks")
    # What follows the last answer has no effect on the loss.
    length = int(trained[-1]) + 1
    return Tokens(np.array(ids[:length], np.int32), spans_of(versions[:length]))


def _marked_spans(row: _Row) -> tuple[str, Spans]:
    """Return the text of a chat, and the generation blocks of the answers. Blocks
    without text between them are one: Phi-3's end token may have its own.
    """
    spans: Spans = []
    text = row.render(is_open=False, spans=spans)
    said = [n for n, message in enumerate(row.chat) if message["role"] == "assistant"]
    blocks: Spans = []
    for start, end in spans:
        if blocks and blocks[-1][1] == start:
            start, _ = blocks.pop()
        blocks.append((start, end))
    if len(blocks) != len(said):
        raise InexactError(
            f"the chat template writes {len(blocks)} {{% generation %}} blocks for {len(said)} answers"
        )
    by_message = dict(zip(said, blocks, strict=True))
    return text, [by_message[number] for number in row.answers]


def _prefix_spans(row: _Row) -> tuple[str, Spans]:
    """Return the text of a chat, and the part of each answer: the text after the
    prompt that the model would be given.
    """
    text = row.render(is_open=False)
    spans: Spans = []
    for number in row.answers:
        prompt = row.render(number, is_open=True)
        whole = row.render(number + 1, is_open=False)
        if not (whole.startswith(prompt) and text.startswith(whole)):
            raise InexactError(
                f"the chat template writes message {number + 1} of {len(row.chat)} in another way than after "
                "the prompt of its generation, and has no {% generation %} block"
            )
        spans.append((len(prompt), len(whole)))
    has_calls = bool(row.chat[-1].get("tool_calls"))
    return text + row.tokenizer.next_ends[has_calls], spans


def _refuse_omissions(row: _Row, text: str, spans: Spans) -> None:
    """Raise ValueError if the template leaves out a part of the chat, or a text has the
    end of a turn. Templates may drop the texts of earlier answers' thoughts.
    """
    by_answer = dict(zip(row.answers, spans, strict=True))
    tools = {"role": "tools", "tool_calls": row.tools}
    for number, message in enumerate([*row.chat, tools]):
        name = f"message {number + 1} ({message['role']})"
        start, end = by_answer.get(number, (0, len(text)))
        parts = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if number in by_answer or message["role"] != "assistant":
            parts += [message.get("content", ""), message.get("reasoning_content", "")]
        for part in parts:
            # The generation prompt may open the thought.
            if not is_written(part, text[max(0, start - len(part)) : end]):
                raise ValueError(
                    f"the chat template leaves out {part!r:.160} of {name}"
                )
        said = json.dumps(message, ensure_ascii=False)
        if number in row.written and (stop := row.tokenizer.find_end(said)):
            raise ValueError(
                f"{name} has {stop} in its text, which the template writes"
            )


def _num_tokens(text: str, ids: Sequence[int], tokenizer: HFChatTokenizer) -> int:
    """Return the number of tokens of a beginning of the text with `ids`."""
    beginning = tokenizer.encode(text)
    if tuple(ids[: len(beginning)]) != beginning:
        raise InexactError(
            f"a token spans the border of an answer, after {text[-40:]!r}"
        )
    return len(beginning)


def _end_of_turn(
    ids: Sequence[int], first: int, last: int, tokenizer: HFChatTokenizer
) -> int:
    """Return the end of the answer [first, last): its first end token, which may be the
    token that follows it (GLM), else its last special token. The template writes white
    space behind it, and an engine never samples it.
    """
    for known, places in (
        (tokenizer.end_ids, range(first, min(last + 1, len(ids)))),
        (tokenizer.special_ids, reversed(range(first, last))),
    ):
        for at in places:
            if ids[at] in known and not tokenizer.decode(ids[at + 1 : last]).strip():
                return at + 1
    return last


# ---- the order of rows


class DemonstrationFeed(NamedTuple):
    """The batch of each version, a function of the seed only: a resume needs no state.

    Example: 5 rows, 2 a step. Versions 0, 1, 2 have 2, 2 and 1 rows of the first epoch.
    """

    rows: tuple[Tokens, ...]
    per_step: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.per_step)

    def batch(self, version: int) -> Batch:
        """Return the batch that makes `version` + 1."""
        epoch, step = divmod(version, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.rows))
        chosen = order[step * self.per_step :][: self.per_step]
        first = version * self.per_step
        groups = [
            _group(first + position, f"{epoch}/{row}", self.rows[row], version)
            for position, row in enumerate(chosen)
        ]
        return Batch(version, tuple(groups), min_version=version)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num: int) -> Sequence[int]:
    order = [*range(num)]
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def held_out_batches(
    rows: Sequence[Tokens], per_batch: int, version: int
) -> Iterator[Batch]:
    """Yield all rows in order, for weights of `version`."""
    for start in range(0, len(rows), per_batch):
        groups = [
            _group(number, f"eval/{number}", row, version)
            for number, row in enumerate(rows[start : start + per_batch], start)
        ]
        yield Batch(version, tuple(groups), min_version=version)


def _group(number: int, prompt_id: str, tokens: Tokens, version: int) -> Group:
    # Of the batch's version, so that the trainer's record counts no staleness.
    spans = tuple(span._replace(version=version) for span in tokens.spans)
    tokens = replace(tokens, spans=spans)
    trajectory = Trajectory(sample_index=0, tokens=tokens, reward=1.0)
    return Group(GroupId(number), Prompt(prompt_id, ()), (trajectory,))
