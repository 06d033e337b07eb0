"""What every engine server refuses in the same words, and how version spans are written. Knows messages
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.http import Refused
from asyncrl.messages.engine_calls import GenerateRequest, Span
from asyncrl.weights.tensor_files import RESEND


def check_request(request: GenerateRequest, max_length: int, vocab_size: int) -> None:
    """Raise Refused (400) for a request that can never run: too long, unknown token ids, more resumed ids
    than ids.
    """
    num_prompt = len(request.prompt_ids)
    if num_prompt + request.max_tokens > max_length:
        raise Refused(
            400,
            f"request {request.request_id} wants {num_prompt} prompt tokens + {request.max_tokens} new ones "
            f"= "
            f"{num_prompt + request.max_tokens}, a slot holds {max_length}",
            rule="prompt and completion must fit into a slot",
            way_out="shorten the prompt, lower max_tokens, or raise rollout.max_prompt_tokens or "
            "rollout.max_tokens.",
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        wrong = next(token for token in request.prompt_ids if not 0 <= token < vocab_size)
        raise Refused(
            400,
            f"request {request.request_id} has token id {wrong}",
            rule=f"the model knows ids 0..{vocab_size - 1}",
            way_out="encode the prompt with the model's own tokenizer.",
        )
    if request.num_resumed > num_prompt:
        raise Refused(
            400,
            f"request {request.request_id} has num_resumed={request.num_resumed} of {num_prompt} prompt ids",
            rule="resumed ids are the last ones of the prompt",
            way_out="count only the ids that an earlier segment sampled.",
        )


def refusal_of(error: BaseException) -> Refused:
    """The answer that tells of `error`: itself if it is a refusal, else a crash (500)."""
    return (
        error
        if isinstance(error, Refused)
        else Refused(500, f"{type(error).__name__}: {error}", way_out="see this server's log.")
    )


def here_already(request_id: str) -> Refused:
    """The refusal (409) of an id that is running or queued."""
    return Refused(
        409,
        f"request {request_id} is here already",
        rule="request ids are unique among running and queued requests",
        way_out="wait for its answer, or abort it.",
    )


def too_many_queued(max_queued: int) -> Refused:
    """The refusal (503) of one request more than may wait."""
    return Refused(
        503,
        f"{max_queued} requests are queued already",
        rule="max_queued bounds them",
        way_out="keep fewer rollouts in flight, or add engines.",
    )


def not_newer(version: int, serving: int) -> Refused:
    """The refusal (409) of a commit that would not bring a newer version."""
    return Refused(
        409,
        f"policy_version {version} cannot be committed over {serving}",
        rule="versions only grow, and the serving one is accepted again only with its own digest",
        way_out="commit a newer version.",
    )


def not_staged(version: int, digest: str, staged: tuple[int, str] | None) -> Refused:
    """The refusal (409) of a commit of something other than what was prepared."""
    lies = f"policy_version {staged[0]} with digest {staged[1]}" if staged else "nothing"
    return Refused(
        409,
        f"commit of policy_version {version} with digest {digest}, but staged is {lies}",
        rule="only prepared weights can be committed",
        way_out="prepare this version first.",
    )


def commit_waits_already(version: int) -> Refused:
    """The refusal (409) of a second commit while one waits for running requests."""
    return Refused(
        409,
        f"a commit of policy_version {version} waits for running requests already",
        rule="one swap at a time",
        way_out="wait for its answer.",
    )


def wrong_digest(version: int, path: str, loaded: str, announced: str) -> Refused:
    """The refusal (409) of weights that are not what was sent."""
    return Refused(
        409,
        f"weights of policy_version {version} in {path} have digest {loaded}, announced was {announced}",
        rule="a version is served only when what was loaded is what was sent",
        way_out=RESEND,
    )


def spans_of(marks: Sequence[tuple[int, int]], num_tokens: int) -> list[Span]:
    """Version spans that cover [0, num_tokens) once, in order. A mark is (first token, policy_version); empty
    spans are left out.
    """
    ends = [*(start for start, _ in marks[1:]), num_tokens][
        : len(marks)
    ]  # no mark at all: aborted before it ran
    return [
        Span(start=start, end=end, version=version)
        for (start, version), end in zip(marks, ends, strict=True)
        if start < end
    ]


# Random numbers that depend on (seed, position) alone, so that an interrupted request draws what it would
# have drawn. Knows numpy.


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_draws(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, absolute position), float64 with 53 random bits; depends on
    nothing else.
    """
    counter = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53
