"""Section `task.reward.judge`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from asyncrl.config.fields import (
    EngineWith,
    FrozenConfig,
    NotWith,
    OnlyWith,
    ScoredReward,
)

PLACES = re.compile(r"\{(prompt|answer|completion)\}")
"""Places of a judge's prompt that a request fills in."""
# Only there is a number surely the verdict: "7 out of 10" is no 10. An answer without a
# match is repeated.
_BEGIN = r"(?:\A|\n|(?<!\d):|\[\[)[\s*_`\"'(\[]*"
_END = r"[\s*_`\"')\].!]*\Z"
GRADE = rf"{_BEGIN}(-?\d+(?:\.\d+)?){_END}"
"""Default pattern: the end of the answer, so that the judge may reason first. A grade
has its own line, follows a colon, or is in [[ ]].
"""


class JudgeConfig(FrozenConfig):
    """A model behind an OpenAI-compatible endpoint, whose answers are the rewards."""

    base_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL of the endpoint, with its /v1 (none = the run serves `model`)."""
    model: str
    """Model name in the requests; without base_url a Hugging Face folder or hub id, as for
    model.path.
    """
    engine: Annotated[str, EngineWith("has_model"), NotWith("base_url")] = "embedded"
    """Kind of engine that serves the model, without base_url."""
    max_length: Annotated[int, Field(ge=2), NotWith("base_url")] = 4096
    """Longest request and answer together, in tokens, without base_url."""
    prompt: str
    """Text of the request, with {completion}, and perhaps {prompt} and {answer}."""
    parse: str | None = None
    """Regular expression whose group 1 is the grade (none = the end of the answer;
    docs/rewards.md).
    """
    best: PositiveFloat = 1.0
    """Highest grade: the reward is grade / best, from 0 to 1."""
    key_variable: Annotated[str | None, OnlyWith("base_url")] = "OPENAI_API_KEY"
    """Environment variable with the key (none = the endpoint needs no key)."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest answer of the judge, in tokens."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Temperature of the judge's answers. Equal requests are sent once."""
    requests_per_minute: Annotated[PositiveInt | None, OnlyWith("base_url")] = None
    """Requests in any minute (none = no limit)."""
    tokens_per_minute: Annotated[PositiveInt | None, OnlyWith("base_url")] = None
    """Tokens of requests and answers in any minute (none = no limit)."""
    max_concurrent: int = Field(default=16, ge=1)
    """Requests in flight."""
    retries: int = Field(default=5, ge=0)
    """Further tries after a busy endpoint or an answer that `parse` does not match."""
    budget: Annotated[int, Field(ge=1)] | None = None
    """Tokens of requests and answers, from the start or resume of the run on; the run
    ends when they are spent (none = no limit).
    """

    @property
    def is_served(self) -> bool:
        """Return whether the run starts a server with the model."""
        return self.base_url is None

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.parse or GRADE, re.IGNORECASE)

    def conflicts(self) -> Iterator[str]:
        if "completion" not in PLACES.findall(self.prompt):
            yield ".prompt lacks {completion}, the text to grade; add it"
        try:
            groups = self.pattern.groups
        except re.error as error:
            yield f".parse={self.parse} is not a regular expression: {error}; correct it, or remove it"
            return
        if not groups:
            yield f".parse={self.parse} has no group in ( ); add it, or remove .parse"
        if self.is_served and self.max_tokens >= self.max_length:
            yield (
                f".max_tokens={self.max_tokens} leaves no token of .max_length={self.max_length} to the "
                "request; lower .max_tokens, or raise .max_length"
            )


class JudgedReward(ScoredReward):
    """A reward by a judge."""

    title: ClassVar = "the judge"

    judge: JudgeConfig
    """Model that grades a completion."""

    @property
    def called(self) -> str:
        return self.judge.model
