"""An engine, with what its sessions share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.agents.endpoint.capture import Capture
from asyncrl.agents.endpoint.grammars import GrammarChecks
from asyncrl.agents.endpoint.prefix_match import Frame, Roles
from asyncrl.agents.endpoint.requests import CallRules, RequestReader, text_joint
from asyncrl.agents.endpoint.session import GatewaySession
from asyncrl.agents.endpoint.sessions import Sessions
from asyncrl.agents.endpoint.tool_formats import ToolFormat
from asyncrl.base.errors import ComponentError
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.records import RUN_RULES, SessionRules
from asyncrl.messages.worker_api import ChatTokenizer

NUM_ENCODING = 4
"""Texts tokenized at once."""
SeedOf = Callable[[str, int, int, int], int]
"""Seed from (prompt_id, sample_index, attempt, key of the call)."""
OnBroken = Callable[[ComponentError], None]


@dataclass(eq=False, repr=False)
class EngineRoute:
    """SessionHost of one engine."""

    sessions: Sessions
    engine: EnginePool
    tokenizer: ChatTokenizer
    tool_format: ToolFormat
    rules: CallRules
    seed_of: SeedOf
    on_broken: OnBroken
    checks: GrammarChecks = field(default_factory=GrammarChecks)

    def __post_init__(self) -> None:
        self.counts = Counter[str]()
        """Calls by the names of the metrics. untrained: at another temperature than the
        run's, such as greedy ones.
        """
        self.frames: dict[Roles, Frame] = {}
        self.reader = RequestReader(
            self.rules, text_joint(self.tokenizer), self.tokenizer.variables
        )
        self.rendering = asyncio.Lock()
        self.encoding = asyncio.Semaphore(NUM_ENCODING)

    def open_nowait(
        self,
        rollout_id: str,
        *,
        prompt_id: str,
        sample_index: int,
        attempt: int,
        route_key: str,
        user_key: str | None = None,
        rules: SessionRules = RUN_RULES,
    ) -> GatewaySession:
        """Open a session; the caller ends it."""
        capture = Capture(
            self.tokenizer,
            self.tool_format.thinking,
            counts=self.counts,
            keeps_thoughts=self.sessions.limits.thoughts == "keep",
            frames=self.frames,
        )
        return GatewaySession(
            self.sessions,
            capture,
            rollout_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            attempt=attempt,
            route_key=route_key,
            user_key=user_key,
            rules=rules,
            route=self,
        )
