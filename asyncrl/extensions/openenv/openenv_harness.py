"""Harness `openenv`: an environment server of
https://github.com/meta-pytorch/OpenEnv.

openenv-core 0.3 and openenv 0.10, its next name: a server has one environment per
WebSocket, with reset, step and close, and describes actions and observations at GET /schema.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

from pydantic import ValidationError

from asyncrl.agents.harness import AnyTask, Session
from asyncrl.base.errors import (
    ConfigError,
    OutcomeUnusable,
    RolloutFailure,
    first_fault,
    needing,
)
from asyncrl.base.failures import FailureKind, kind_of_error
from asyncrl.config import GeneratorConfig, RunConfig
from asyncrl.extensions.openenv.settings import ADDRESS, OpenEnvArgs
from asyncrl.messages.json_values import fits
from asyncrl.messages.records import Outcome

RESET = "reset"
"""Key in a prompt's info of arguments of the environment's reset."""
RETRY_S = 1.0
"""Pause before another try to connect."""
UNREAD = (OSError, ValueError, LookupError)
"""A server that is down, or that answers other things than a schema."""
AT_A_LIMIT = ("context_length_exceeded", "rate_limit_exceeded")
"""The endpoint's codes for limits of a conversation."""
FULL = "CAPACITY_REACHED"
"""The server's code for: no free place."""
SCALARS = ("", 0, False)
"""One answer can be a value of a field whose types allow one of these."""
BROKEN = ("timeout", "transport_error")
"""Kinds of errors of an MCP tool that are not answers of the tool."""
ALWAYS_THERE = frozenset(("done", "reward", "metadata"))
"""Fields of every observation; the metadata is not for the model."""


def check_servers(config: RunConfig, tasks: object) -> Iterator[str]:
    """Yield how the actions of each server look. Blocks. Raises ConfigError."""
    for harness in config.harnesses:
        if ADDRESS.of(harness):
            yield OpenEnvHarness(harness).check_server()


class Shape(NamedTuple):
    """`action`: the field of the answer; None: the actions are calls of tools. `schema`:
    the JSON schema of an action.
    """

    action: str | None
    schema: Mapping[str, Any]

    def action_of(self, text: str) -> dict[str, Any] | None:
        """Return the action of an answer, None if it breaks the schema.

        Example: the field `column` is an integer from 0 to 6.

            "3"      {"column": 3}
            "three"  None
            "9"      None
        """
        from jsonschema import Draft202012Validator as Validator

        values: list[Any] = [text, text.strip()]
        with suppress(ValueError, RecursionError):
            values.append(json.loads(text))
        actions = [{str(self.action): value} for value in values]
        validator = Validator(self.schema, format_checker=Validator.FORMAT_CHECKER)
        return next(filter(validator.is_valid, actions), None)


class Step(NamedTuple):
    """`reward` is None where the environment gave none. `shown`: messages for the model."""

    reward: float | None
    is_done: bool
    shown: list[dict[str, str]]


class OpenEnvHarness:
    """Play one episode per rollout, each over its own connection.

    A text environment gets the text of each answer as an action. An environment of
    tools (MCP) offers them to the model, and its episode ends with an answer without
    calls. Rollouts of a group begin with the same seed.

    Waits: connect_s for a connection, step_s for each answer of the server.
    """

    def __init__(self, config: GeneratorConfig, *, is_worker: bool = False) -> None:
        self._url = (ADDRESS.of(config) or "").rstrip("/")
        self._said = f"generator.openenv={self._url}"
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{self._said} is not the address of a server",
                rule="a run does not start the servers of its environments",
                way_out="start the server, as docs/openenv.md shows, and write http://HOST:PORT.",
            )
        try:
            self._args = OpenEnvArgs.model_validate(config.args)
        except ValidationError as error:
            known = ", ".join(OpenEnvArgs.model_fields)
            raise ConfigError(
                f"generator.args does not fit generator.openenv: {first_fault(error)}",
                rule=f"its keys are {known}",
            ) from error
        with needing("openenv", self._said):
            from openenv.core import GenericEnvClient
        self._client_class: Any = GenericEnvClient
        self._found: Shape | None = None

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        messages: list[Any] = [dict(message) for message in task.messages]
        given: list[tuple[str, float | None]] = []
        states: dict[str, str] = {}
        is_done = False
        async with self._started(task) as (client, first):
            shape = await self._shape()
            options: dict[str, Any] = {}
            if shape.action is None:
                options["tools"] = await self._tools(client)
            state = self._text_of(first.observation)
            _add_text(messages, state)
            while not is_done and len(given) < self._args.max_turns:
                try:
                    answer = await session.client.chat.completions.create(
                        model=session.model, messages=messages, **options
                    )
                except Exception as error:
                    # The conversation has reached a limit: the rewards so far count. By
                    # its code, since only the session imports openai.
                    if not given or getattr(error, "code", None) not in AT_A_LIMIT:
                        raise
                    break
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if shape.action is None:
                    step = await self._call_tools(client, said.tool_calls or ())
                else:
                    action = shape.action_of(said.content or "")
                    # An answer that is no action ends the episode with the rewards so
                    # far: it is the policy's fault.
                    step = Step(None, True, [])
                    if action is not None:
                        step = await self._step_text(client, action)
                given.append((answer.id, step.reward))
                states[answer.id] = blake2b(state.encode(), digest_size=16).hexdigest()
                state = "\n".join(message["content"] for message in step.shown)
                messages += step.shown
                is_done = step.is_done
        metrics = {"turns": float(len(given)), "done": float(is_done)}
        outcome = self._outcome(given, metrics)
        return replace(outcome, turn_states=states)

    def _outcome(
        self, given: Sequence[tuple[str, float | None]], metrics: dict[str, float]
    ) -> Outcome:
        rewards = [reward for _, reward in given if reward is not None]
        # Often the model's fault: it has answered without calls, or ran out of turns. A
        # failure would hide such rollouts from training.
        if not rewards:
            return Outcome(self._args.without_reward, metrics)
        if self._args.rewards == "last":
            return Outcome(rewards[-1], metrics)
        if self._args.rewards == "sum":
            return Outcome(sum(rewards), metrics)
        turn_rewards = {name: reward or 0.0 for name, reward in given}
        return Outcome(metrics=metrics, turn_rewards=turn_rewards)

    # ---- the server

    @asynccontextmanager
    async def _started(self, task: AnyTask) -> AsyncIterator[tuple[Any, Any]]:
        """Connect and reset; yield the client and the first result."""
        # Not task.seed, which differs between the rollouts of a group: they are compared
        # with each other, so they begin alike. Not only the id, which training and an
        # evaluation have in common.
        told = json.dumps(
            [task.prompt_id, task.info, task.messages], sort_keys=True, default=str
        )
        digest = blake2b(told.encode(), digest_size=4).digest()
        start = {
            "seed": int.from_bytes(digest, "little") >> 1,
            **self._args.reset,
            **task.info.get(RESET, {}),
        }
        until_s = time.monotonic() + self._args.connect_s
        while True:
            client = self._client_class(
                self._url,
                connect_timeout_s=self._args.step_s,
                message_timeout_s=self._args.step_s,
            )
            try:
                try:
                    await client.connect()
                    first = await client.reset(**start)
                # The server is down, restarts, or has no free place. No token is
                # sampled yet, so waiting loses nothing.
                except Exception as error:
                    if not self._may_pass(error) or time.monotonic() >= until_s:
                        raise self._failure("reset", error) from error
                else:
                    yield client, first
                    return
            finally:
                await client.close()
            await asyncio.sleep(RETRY_S)

    def _may_pass(self, error: Exception) -> bool:
        is_refusal = isinstance(error, RuntimeError)
        return FULL in str(error) if is_refusal else not isinstance(error, TimeoutError)

    def _failure(self, what: str, error: Exception) -> RolloutFailure:
        why = f"{type(error).__name__}: {error!s:.300}".removesuffix(": ")
        if isinstance(error, TimeoutError):
            why = f"no answer in step_s={self._args.step_s:g} s"
        way_out = "read the server's log."
        if FULL in why:
            way_out = "raise max_concurrent_envs of its create_app(), or lower generator.concurrency."
        kind = kind_of_error(error, FailureKind.ENVIRONMENT)
        # A lost connection is a lost environment, and its limits are not the policy's.
        if kind in (FailureKind.ENDPOINT_LOST, FailureKind.LIMIT):
            kind = FailureKind.ENVIRONMENT
        return RolloutFailure(
            f"{self._said}: {what} failed: {why}",
            way_out=way_out,
            kind=kind,
        )

    async def _shape(self) -> Shape:
        """Return how actions look, read once. Raises ConfigError if no field fits."""
        if self._found is None:
            try:
                self._found = await asyncio.to_thread(self._read_shape)
            except UNREAD as error:
                raise self._failure("GET /schema", error) from error
        return self._found

    def check_server(self) -> str:
        """Read how actions look, and say it. Blocks. Raises ConfigError."""
        try:
            shape = self._read_shape()
        except UNREAD as error:
            raise ConfigError(
                f"{self._said} does not answer GET /schema: {error}",
                rule="the environment's server is up before the run starts",
                way_out="start it, or correct the address.",
            ) from error
        kind = f"texts, as {shape.action}" if shape.action else "calls of tools"
        return f"{self._said.removeprefix('generator.')} takes {kind}"

    def _read_shape(self) -> Shape:
        answer = _read_direct(f"{self._url}/schema", self._args.step_s)
        schema = json.loads(answer)["action"]
        return Shape(self._field_of(schema, schema["properties"]), schema)

    def _field_of(
        self, schema: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> str | None:
        """Return the field of the answer, None for calls of tools. Raises ConfigError."""
        chosen = self._args.action
        required = schema.get("required") or []
        if chosen is None and "tool_name" in fields:
            return None
        if chosen is None and len(required) == 1:
            (chosen,) = required
        others = [name for name in required if name != chosen]
        field = fields.get(chosen or "")
        is_scalar = any(fits(each, field, schema, by_kind=True) for each in SCALARS)
        if field is None or not is_scalar or others:
            raise ConfigError(
                f"{self._said}: actions have the fields {', '.join(fields)}, of which "
                f"{', '.join(required) or 'none'} must be given, and generator.args.action is {chosen}",
                rule="an answer fills one field, a text, number, boolean or choice, and no other may be "
                "required",
                way_out="set generator.args.action to such a field, or write an agent for "
                "generator.python.",
            )
        return chosen

    async def _answer(self, client: Any, action: Mapping[str, object]) -> Any:
        try:
            return await client.step(dict(action))
        # A lost connection has lost the environment's state: the rollout is retried.
        except Exception as error:
            raise self._failure("step", error) from error

    async def _step_text(self, client: Any, action: Mapping[str, object]) -> Step:
        result = await self._answer(client, action)
        shown: list[dict[str, str]] = []
        _add_text(shown, self._text_of(result.observation))
        return Step(self._reward_of(result), bool(result.done), shown)

    def _reward_of(self, result: Any) -> float | None:
        """Return a step's reward. Raises RolloutFailure if it is not a finite number, or
        if the last step has none.
        """
        reward = result.reward
        may_be_none = not result.done or "without_reward" in self._args.model_fields_set
        if reward is None and may_be_none:
            return None
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise OutcomeUnusable(
                f"{self._said}: the environment gave the reward {reward!r:.80}",
                rule="a reward is a finite number, or null before `done`; NaN and infinity arrive as null",
                way_out="correct the environment; generator.args.without_reward lets an "
                "episode end without a reward.",
            )
        return float(reward)

    async def _tools(self, client: Any) -> list[dict[str, object]]:
        listed = await self._answer(client, {"type": "list_tools"})
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or {"type": "object"},
                },
            }
            for tool in listed.observation["tools"]
        ]

    async def _call_tools(self, client: Any, calls: Sequence[Any]) -> Step:
        shown: list[dict[str, str]] = []
        rewards: list[float] = []
        is_done = not calls
        for call in calls:
            text = ""
            # After the end the environment takes no further step.
            if not is_done:
                text, reward, is_done = await self._call_tool(client, call.function)
                rewards += [] if reward is None else [reward]
            shown.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return Step(sum(rewards) if rewards else None, is_done, shown)

    async def _call_tool(
        self, client: Any, function: Any
    ) -> tuple[str, float | None, bool]:
        try:
            arguments = json.loads(function.arguments or "{}")
        except ValueError as error:
            # The model's own fault: it may correct it.
            return f"The arguments are not JSON: {error}", None, False
        if not isinstance(arguments, dict):
            return "The arguments must be a JSON object.", None, False
        action = {
            "type": "call_tool",
            "tool_name": function.name,
            "arguments": arguments,
        }
        result = await self._answer(client, action)
        seen = result.observation
        fault = seen.get("error")
        if isinstance(fault, dict) and fault.get("error_type") in BROKEN:
            raise self._failure("step", RuntimeError(str(fault.get("message"))))
        text = _tool_text(fault or seen.get("result"))
        return text, self._reward_of(result), bool(result.done)

    def _text_of(self, observation: Mapping[str, object]) -> str:
        chosen = self._args.observation
        if chosen is not None:
            if chosen not in observation:
                raise ConfigError(
                    f"{self._said}: an observation has the fields {', '.join(observation)}",
                    rule=f"generator.args.observation={chosen} is a field of it",
                )
            return _as_text(observation[chosen])
        seen = {
            name: value
            for name, value in observation.items()
            if name not in ALWAYS_THERE and value is not None
        }
        return _as_text(next(iter(seen.values())) if len(seen) == 1 else seen or "")


def _read_direct(url: str, timeout_s: float) -> bytes:
    """Return the answer of an environment's server, past any proxy. Raises OSError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=timeout_s) as answer:
        content: bytes = answer.read()
    return content


def _add_text(messages: list[Any], text: str) -> None:
    """Add what the environment says as the user's, to a user message that waits for an
    answer.
    """
    if not text:
        return
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"] = f"{messages[-1]['content']}\n\n{text}".lstrip()
    else:
        messages.append({"role": "user", "content": text})


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tool_text(result: object) -> str:
    """Return the texts of an MCP result, or JSON of any other."""
    parts = result.get("content") if isinstance(result, dict) else None
    if not isinstance(parts, list) or not parts:
        return _as_text(result)
    return "\n".join(
        part["text"] if part.get("type") == "text" else _as_text(part) for part in parts
    )
