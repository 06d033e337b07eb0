"""Why an attempt of a rollout failed: a closed list of kinds, and the classifier of
foreign errors.
"""

from __future__ import annotations

import errno
import re
import ssl
from collections.abc import Iterator
from enum import StrEnum
from socket import gaierror


class FailureKind(StrEnum):
    """The maker of a failure names its kind. What no kind fits is AGENT_CRASH."""

    RUNTIME_START = "runtime_start"
    IMAGE_MISSING = "image_missing"
    DISK_FULL = "disk_full"
    REWARD_CRASH = "reward_crash"
    REWARD_TIMEOUT = "reward_timeout"
    AGENT_CRASH = "agent_crash"
    AGENT_TIMEOUT = "agent_timeout"
    ENVIRONMENT = "environment"
    ENDPOINT_LOST = "endpoint_lost"
    HOST_LOST = "host_lost"
    QUOTA = "quota"
    CORRUPT_RESULT = "corrupt_result"
    CLOCK_SKEW = "clock_skew"
    NO_CALL = "no_call"
    # Not of the infrastructure, or not for certain.
    CRASH_AFTER_ANSWER = "crash_after_answer"
    TIMEOUT_AFTER_ANSWER = "timeout_after_answer"
    LIMIT = "limit"
    PROMPT = "prompt"
    REFUSED = "refused"
    REWARD_MISSING = "reward_missing"

    @property
    def is_infrastructure(self) -> bool:
        return self not in _OTHERS

    @property
    def after_answer(self) -> FailureKind:
        """Return the kind if the policy has sampled a token in the attempt: its text
        may have made an agent fail.
        """
        return _AFTER_ANSWER.get(self, self)

    @property
    def may_be_policys(self) -> bool:
        return self in _AFTER_ANSWER or not self.is_infrastructure


_AFTER_ANSWER = {
    FailureKind.AGENT_CRASH: FailureKind.CRASH_AFTER_ANSWER,
    FailureKind.AGENT_TIMEOUT: FailureKind.TIMEOUT_AFTER_ANSWER,
}
_OTHERS = frozenset(
    (
        FailureKind.CRASH_AFTER_ANSWER,
        FailureKind.TIMEOUT_AFTER_ANSWER,
        FailureKind.LIMIT,
        FailureKind.PROMPT,
        FailureKind.REFUSED,
        FailureKind.REWARD_MISSING,
    )
)
_LOG = "read the traceback in the worker's log"
WAYS_OUT = {
    FailureKind.RUNTIME_START: "start the container runtime on the workers' hosts, and try it by hand.",
    FailureKind.IMAGE_MISSING: "build or pull the image on the workers' hosts, or correct its name.",
    FailureKind.DISK_FULL: "free space where the worker runs (TMPDIR, container images), or move TMPDIR.",
    FailureKind.REWARD_CRASH: "correct the reward function: it must take any text of the policy.",
    FailureKind.REWARD_TIMEOUT: "make the reward faster, or raise its limit (task.reward_timeout_s).",
    FailureKind.AGENT_CRASH: f"{_LOG}, and correct the agent or what it needs.",
    FailureKind.AGENT_TIMEOUT: "see why the agent makes no call in time, or raise rollout.timeout_s.",
    FailureKind.ENVIRONMENT: "read the log of the environment, and correct or restart it.",
    FailureKind.ENDPOINT_LOST: "check the network from workers to gateway.public_url and other services.",
    FailureKind.HOST_LOST: "read the log of the lost worker; memory is the usual cause.",
    FailureKind.QUOTA: "raise the quota of that account, or lower generator.concurrency.",
    FailureKind.CORRUPT_RESULT: "correct what returns it: finite numbers, for completions that exist.",
    FailureKind.CLOCK_SKEW: "set the clocks of the workers' hosts (NTP).",
    FailureKind.NO_CALL: "turn off caches of answers (litellm.cache, LangChain's set_llm_cache, "
    "dspy.configure_cache), and let the agent call the model at its session's address, with its key.",
    FailureKind.CRASH_AFTER_ANSWER: f"{_LOG}; if the policy is the cause, return a reward.",
    FailureKind.TIMEOUT_AFTER_ANSWER: "raise rollout.timeout_s, or limit the agent's tools and turns.",
    FailureKind.LIMIT: "raise that limit, or let the agent end at its error.",
    FailureKind.PROMPT: "correct the prompt, or leave it out of the task.",
    FailureKind.REFUSED: "correct what the engine's answer names.",
    FailureKind.REWARD_MISSING: "post rewards sooner, or raise generator.outcome_timeout_s.",
}

MAX_TEXT = 2000
"""Characters of a message that are searched: a user's may have megabytes."""
_NOT_YET_VALID = 9
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID."""
_STATUS = (
    r"(?:\bstatus(?:[ _]?code)?|\bcode|returned error|HTTP(?:/[\d.]+| Error)?)\W{1,3}"
)
_LOST = r"""
Connection ?(?:refused|reset|aborted|error\b|timed out|closed (?:before|by|unexp))
attempts? failed|(?:tcp|upstream) connect error|dns (?:error|lookup failed)|failed to lookup address
(?:Could(?:n't| not)|Unable to|Failed to|Can(?:'t|not)) (?:connect|establish a (?:new )?connection)
resolve (?:host|proxy|')|name resolution|name or service not known|name does not resolve|no such host
nodename nor servname|UnknownHost|server misbehaving
Server (?:disconnected|closed the connection)|Empty reply|other side closed|socket hang up|fetch failed
(?:Remote end|peer) closed connection|incomplete chunked read|IncompleteRead\(|no close frame received
not receive a valid HTTP|(?:Network|host) (?:is )?unreachable|no route to host|actively refused|": EOF$
\bE(?:CONN(?:REFUSED|RESET|ABORTED)|NOTFOUND|AI_AGAIN|TIMEDOUT|HOSTUNREACH|NETUNREACH)|\bUND_ERR_
(?:Request|Read|Connect|Operation|Socket) timed out|\((?:connect|read) timeout=|i/o timeout|Client\.Timeout
(?:Connect|Connection|Read|Request|Socket|Server|Http|Open|API)Timeout(?:Error|Exception)?\b
TLS handshake timeout|(?:read|write|handshake) operation timed out|(?:TimeoutError:|urlopen error) timed out
StatusCode\.(?:UNAVAILABLE|DEADLINE_EXCEEDED)|UNEXPECTED_EOF_WHILE_READING|error sending request for url
\bcurl: \((?:5|6|7|16|18|28|35|52|55|56|92|95)\)
\b5\d\d (?:Server Error|Internal Server|Service Unavail|Bad Gateway|Gateway Time)|\b5\d\d, message=
"""
"""A line a group of words: of Python's HTTP clients, Node, Go, Rust, Java, gRPC and curl."""
_LIMIT = re.compile(r"gateway\.max_\w+=|context_length_exceeded")
"""In the endpoint's own refusals, which the policy has caused."""
# The words of programs that report only text. The first match counts: a missing image is
# also an error of the runtime.
_WORDS = {
    FailureKind.CLOCK_SKEW: r"certificate is not yet valid|RequestTimeTooSkewed|clock skew",
    FailureKind.DISK_FULL: r"No space left on device|Disk quota exceeded",
    FailureKind.QUOTA: rf"insufficient_quota|Rate ?Limit ?Error|Too Many Requests|{_STATUS}429\b"
    r"|RESOURCE_EXHAUSTED|\bThrottling|\b429(?: Client Error|, message=)",
    FailureKind.IMAGE_MISSING: r"No such image|manifest unknown|pull access denied"
    "|ImageNotFound|ErrImagePull",
    FailureKind.RUNTIME_START: r"Cannot connect to the Docker daemon|OCI runtime"
    "|docker: Error response|^bwrap: ",
    FailureKind.ENDPOINT_LOST: "|".join(_LOST.split("\n")[1:-1])
    + rf"|{_STATUS}5\d\d\b",
}
_PATTERNS = {
    kind: re.compile(words, re.IGNORECASE | re.MULTILINE)
    for kind, words in _WORDS.items()
}


def kind_of_text(text: str, default: FailureKind) -> FailureKind:
    """Return the kind that the words of a program or library say."""
    # First: after a limit the policy's own text must not name another kind, whose
    # retry would replace a truncated rollout.
    if _LIMIT.search(text):
        return FailureKind.LIMIT
    found = (kind for kind, words in _PATTERNS.items() if words.search(text))
    return next(found, default)


def kind_of_error(error: BaseException, default: FailureKind) -> FailureKind:
    """Return the kind of a foreign error: by type, errno and HTTP status of it and its
    causes, else by their words.
    """
    errors = [*_with_causes(error)]
    said = "\n".join(f"{type(each).__name__}: {_text_of(each)}" for each in errors)
    by_words = kind_of_text(said, default)
    by_type = (kind for each in errors if (kind := _kind_of_type(each)))
    found = next(by_type, by_words)
    # The endpoint refuses calls above a limit with 429, too.
    is_limit = found is FailureKind.QUOTA and by_words is FailureKind.LIMIT
    return by_words if is_limit else found


def _kind_of_type(error: BaseException) -> FailureKind | None:
    # aiohttp's error is of this class, too, but without the code.
    if isinstance(error, ssl.SSLCertVerificationError):
        is_skewed = getattr(error, "verify_code", None) == _NOT_YET_VALID
        return FailureKind.CLOCK_SKEW if is_skewed else None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FailureKind.DISK_FULL
    # A broken pipe is of a program of the agent, such as a shell that the policy left.
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, ConnectionError | gaierror):
        return FailureKind.ENDPOINT_LOST
    status = _status_of(error)
    if status == 429:
        return FailureKind.QUOTA
    if status >= 500:
        return FailureKind.ENDPOINT_LOST
    return None


def _status_of(error: BaseException) -> int:
    """Return the HTTP status of an error of openai, anthropic, httpx, requests, aiohttp
    or urllib, or 0.
    """
    try:
        response = getattr(error, "response", error)
        status = getattr(response, "status_code", None)
        return int(getattr(error, "status", 0) if status is None else status)
    except Exception:  # attributes of a user's class may be anything
        return 0


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None or error.__suppress_context__:
            error = error.__cause__
        else:
            error = error.__context__


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT]
    except BaseException:  # a user's __str__ may raise anything
        return ""
