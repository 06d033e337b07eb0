"""Section `task.reward.judge`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from asyncrl.config.fields import (
    EngineWith,
    FrozenConfig,
    NotWith,
    OnlyWith,
    ScoredReward,
)

PLACES = re.compile(r"\{(prompt|answer|completion|first|second)\}")
"""Places of a judge's prompt that a request fills in."""
NEEDED = {
    "score": ("completion",),
    "compare": ("first", "second"),
}
"""Places that each mode needs."""
# Only there is a letter or a number surely the verdict: "7 out of 10" is no 10, and
# "B is better than A" is no A. An answer without a match is repeated.
_BEGIN = r"(?:\A|\n|(?<!\d):|\[\[)[\s*_`\"'(\[]*"
_END = r"[\s*_`\"')\].!]*\Z"
PATTERNS = {
    "score": rf"{_BEGIN}(-?\d+(?:\.\d+)?){_END}",
    "compare": rf"{_BEGIN}(A|B|tie){_END}",
}
"""Default patterns: the end of the answer, so that the judge may reason first. A grade
or a letter has its own line, follows a colon, or is in [[ ]].
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
    """Text of the request, with {prompt}, {answer} and the places of its mode."""
    mode: Literal["score", "compare"] = "score"
    """score: a grade of {completion}. compare: A, B or tie for each pair of a group,
    {first} and {second}.
    """
    parse: str | None = None
    """Regular expression whose group 1 is the grade, or A, B or tie; or whose named
    groups are grades, each a part of the reward (none = the end of the answer;
    docs/rewards.md).
    """
    best: Annotated[PositiveFloat, OnlyWith("mode", ("score",))] = 1.0
    """Highest grade of `score`: the reward is grade / best, from 0 to 1."""
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
        return re.compile(self.parse or PATTERNS[self.mode], re.IGNORECASE)

    def conflicts(self) -> Iterator[str]:
        found = set(PLACES.findall(self.prompt))
        places = ", ".join(f"{{{name}}}" for name in NEEDED[self.mode])
        if not found.issuperset(NEEDED[self.mode]):
            yield f".prompt lacks {places}, which .mode={self.mode} fills in; add it"
        others = found - {"prompt", "answer", *NEEDED[self.mode]}
        if others:
            name = min(others)
            yield f".prompt has {{{name}}}, and .mode={self.mode} fills in {places}; write one of them"
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
    """Model that scores one completion, or compares two."""

    @property
    def called(self) -> str:
        return self.judge.model
