"""Read demonstrations, and find the tokens of their answers.

Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from asyncrl.base.errors import ConfigError
from asyncrl.base.user_code import message_of
from asyncrl.config import RowsConfig
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Trajectory
from asyncrl.messages.tokens import Tokens, spans_of
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.sources import read_dataset, read_files

Chat = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Spans = list[tuple[int, int]]
"""[start, end) in characters or tokens."""
FORM = "a row has `messages`, or `prompt` and `completion`: texts, or lists of messages"
EXACT = (
    "the loss is on exactly the tokens of an answer: in {% generation %} of the template, or after the "
    "prompt that the model would be given"
)


class _DemonstrationMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[dict[str, object]] | None = None
    weight: Literal[1] | None = Field(default=None, exclude=True)
    """OpenAI's 0 leaves a message out of the loss, which is not supported."""


_CHAT = TypeAdapter(list[_DemonstrationMessage])


class InexactError(ValueError):
    """The borders of an answer are not borders of tokens, or unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Demonstrations:
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
            ends = tokenizer.decode(
                sorted(tokenizer.end_ids), skip_special_tokens=False
            )
            yield (
                f"the last answers of {self.num_endless} rows end with no token at which generation stops "
                f"({ends}): set eos_token_id in the model's generation_config.json to "
                "the token that the template writes after an answer"
            )
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


def read_demonstrations(
    data: RowsConfig,
    tokenizer: HFChatTokenizer,
    positions: int | None,
    key: Literal["files", "eval_files"] = "files",
) -> Demonstrations:
    """Read the `files` or the `dataset` of a section, or data.eval_files.
    `positions`: of the model. Raises ConfigError.
    """
    section = data.section
    paths = getattr(data, key)
    source = f"{section}.{key}={paths}"
    if paths is None:
        source = f"{section}.dataset={data.dataset}"
        assert data.dataset is not None
        rows, place_of = read_dataset(data.dataset, data.split, data.args, section)
    else:
        args = data.args if key == "files" else {}
        rows, place_of = read_files(paths, args, f"{section}.{key}")
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
                    rule=f"a row is never cut; the limit is {section}.max_tokens, or the model's positions",
                    way_out=f"shorten the row, raise {section}.max_tokens, or set {section}.overlong=skip.",
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
            way_out=f"give other files, or raise {section}.max_tokens.",
        )
    num_endless = sum(int(row.ids[-1]) not in tokenizer.end_ids for row in found)
    return Demonstrations(tuple(found), num_skipped, num_endless)


def demonstration_of(
    row: Mapping[str, Any], place: str, tokenizer: HFChatTokenizer
) -> Tokens:
    """Return the tokens of a row, up to the end of its last answer. Raises ConfigError,
    which names `place`.
    """
    chat, num_given = _chat_of(row, place)
    answers = [
        number
        for number, message in enumerate(chat)
        if message["role"] == "assistant" and number >= num_given
    ]
    if not answers:
        raise ConfigError(
            f"{place} has no assistant message",
            rule="the assistant's messages are learned, except in a `prompt`",
            way_out="add one, or remove the row.",
        )
    try:
        return _tokens(chat, answers, row.get("tools") or None, tokenizer)
    except InexactError as error:
        raise ConfigError(
            f"{place}: {error}",
            rule=EXACT,
            way_out="set model.chat_template to a template with {% generation %} around each answer, or give "
            "each answer its own row, as `prompt` and `completion`.",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{place}: {error}",
            way_out="correct the row, or set model.chat_template to another template.",
        ) from error


def _chat_of(row: Mapping[str, object], place: str) -> tuple[Chat, int]:
    """Return the messages, and how many of them are the prompt's."""
    # A parquet file has every column in every row, empty ones as null.
    given = {name for name, value in row.items() if value is not None}
    if "messages" in given and not given & {"prompt", "completion"}:
        return _messages(row["messages"], None, f"{place}, messages"), 0
    if {"prompt", "completion"} <= given and "messages" not in given:
        prompt = _messages(row["prompt"], "user", f"{place}, prompt")
        completion = _messages(row["completion"], "assistant", f"{place}, completion")
        return [*prompt, *completion], len(prompt)
    raise ConfigError(
        f"{place} has the columns {', '.join(map(str, row)) or 'none'}",
        rule=FORM,
        way_out="rename its columns.",
    )


def _messages(content: object, role: str | None, where: str) -> Chat:
    """Check messages; with a `role`, a text is a message."""
    chat = content
    if role is not None and isinstance(content, str):
        chat = [{"role": role, "content": content}]
    try:
        messages = _CHAT.validate_python(chat)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where} is not a list of chat messages: {at} {first['msg']}: {content!r:.160}",
            rule="a message has a `role`, and a text as `content`",
            way_out="correct the row.",
        ) from error
    return [_without_nulls(message.model_dump()) for message in messages]


def _without_nulls(value: Any) -> Any:
    """Leave out keys without a value. Parquet files and datasets give every tool call
    the arguments of all others, as null.
    """
    if isinstance(value, dict):
        return {
            name: _without_nulls(one) for name, one in value.items() if one is not None
        }
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _tokens(
    chat: Chat, answers: Sequence[int], tools: Tools, tokenizer: HFChatTokenizer
) -> Tokens:
    """Encode a chat, and mark the tokens of the messages with these numbers. Raises
    InexactError, ValueError.
    """
    is_marked = tokenizer.has_generation_blocks
    find = _marked_spans if is_marked else _prefix_spans
    text, spans = find(chat, answers, tools, tokenizer)
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


def _marked_spans(
    chat: Chat, answers: Sequence[int], tools: Tools, tokenizer: HFChatTokenizer
) -> tuple[str, Spans]:
    """Return the text of a chat, and the generation blocks of the answers."""
    spans: Spans = []
    text = tokenizer.render(chat, tools=tools, is_open=False, spans=spans)
    said = [n for n, message in enumerate(chat) if message["role"] == "assistant"]
    if len(spans) != len(said):
        raise InexactError(
            f"the chat template writes {len(spans)} {{% generation %}} blocks for {len(said)} answers"
        )
    by_message = dict(zip(said, spans, strict=True))
    return text, [by_message[number] for number in answers]


def _prefix_spans(
    chat: Chat, answers: Sequence[int], tools: Tools, tokenizer: HFChatTokenizer
) -> tuple[str, Spans]:
    """Return the text of a chat, and the part of each answer: the text after the
    prompt that the model would be given.
    """
    text = tokenizer.render(chat, tools=tools, is_open=False)
    spans: Spans = []
    for number in answers:
        prompt = tokenizer.render(chat[:number], tools=tools)
        whole = tokenizer.render(chat[: number + 1], tools=tools, is_open=False)
        if not (whole.startswith(prompt) and text.startswith(whole)):
            raise InexactError(
                f"the chat template writes message {number + 1} of {len(chat)} in another way than after the "
                "prompt of its generation, and has no {% generation %} block"
            )
        spans.append((len(prompt), len(whole)))
    return text, spans


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
    """Return the end of the answer [first, last): its last end-of-turn token, or its
    last special token. The template writes what follows, such as a line end, and an
    engine never samples it.
    """
    for known in (tokenizer.end_ids, tokenizer.special_ids):
        ends = [at for at in range(first, last) if ids[at] in known]
        if ends:
            return ends[-1] + 1
    return last


# ---- the order of rows


@dataclass(frozen=True, slots=True, eq=False)
class DemonstrationFeed:
    """The batch of each version, a function of the seed only: a resume needs no state.

    Example: 5 rows, 2 a step. Versions 0, 1, 2 have 2, 2 and 1 rows of the first epoch.
    """

    rows: tuple[Tokens, ...]
    per_step: int
    seed: int
    is_shuffled: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.per_step)

    def batch(self, version: int) -> Batch:
        """Return the batch that makes `version` + 1."""
        epoch, step = divmod(version, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.rows), self.is_shuffled)
        chosen = order[step * self.per_step :][: self.per_step]
        first = version * self.per_step
        groups = [
            _group(first + position, f"{epoch}/{row}", self.rows[row], version)
            for position, row in enumerate(chosen)
        ]
        return Batch(version, tuple(groups), min_version=version)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num: int, is_shuffled: bool) -> Sequence[int]:
    order = [*range(num)]
    if is_shuffled:
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
