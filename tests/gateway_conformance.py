"""Checks a server as clients of OpenAI's and Anthropic's endpoints use it:

    python -m gateway_conformance http://127.0.0.1:8700 KEY

It is any server with /v1/chat/completions, /v1/completions, /v1/responses or /v1/messages: a gateway of
asyncrl (`asyncrl serve gateway` prints its address and a key), vLLM, or a proxy before them. The calls are
short, and it does not matter what the model answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence

import aiohttp
from conformance_checks import CHAT, CHECKS, HI
from conformance_client import CheckedServer, NotOfferedError, NotOkError, said_by, shortly

_EPILOG = """Each line of the table is one check:
  ok            the server does it
  not ok        it does not, and says nothing of it: clients would go wrong
  not offered   it refuses with a clear error, or has no such endpoint

Exit status: 0 if nothing is not ok and something is ok, else 1. Keys of a gateway count calls: the checks
need some 40 of gateway.max_calls. Their prompts have up to 1,600 characters, their answers up to 128 tokens.
"""

Result = tuple[str, str, str]
"""(check, ok | not ok | not offered, why)."""


class NotCheckedError(Exception):
    """No check says anything of this server: it is not there, or lets us do nothing."""


async def check_server(
    url: str, key: str, *, model: str | None = None, timeout_s: float = 120.0
) -> list[Result]:
    """The result of every check, in order. `model`: None takes the first that the server lists. `timeout_s`
    is for each call. Raises NotCheckedError.
    """
    results: list[Result] = []
    limit = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=limit) as http:
        server = CheckedServer(http, url, key, model or "")
        first = await _first_model(server)
        server.model = model or first
        await _try(server)
        for name, check in CHECKS.items():
            try:
                await check(server)
                results.append((name, "ok", ""))
            except NotOfferedError as reason:
                results.append((name, "not offered", str(reason)))
            except (NotOkError, aiohttp.ClientError, TimeoutError) as error:
                results.append((name, "not ok", str(error) or f"no answer within {timeout_s} s"))
            except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
                what = f"the answer has another shape: {type(error).__name__}: {shortly(str(error))}"
                results.append((name, "not ok", what))
    return results


async def _first_model(server: CheckedServer) -> str:
    try:
        status, answer = await server.call("GET", "/v1/models")
        if status in (401, 403):
            raise NotCheckedError(f"{server.url} does not take this key: {said_by(answer)}")
        return str(answer["data"][0]["id"])
    except aiohttp.ClientConnectionError as error:
        raise NotCheckedError(f"there is no server at {server.url}: {error}") from None
    except aiohttp.InvalidURL:
        raise NotCheckedError(f"{server.url} is no address; it is like http://127.0.0.1:8700") from None
    except (NotOkError, aiohttp.ClientError, TimeoutError, KeyError, IndexError, TypeError):
        return "policy"


async def _try(server: CheckedServer) -> None:
    """One short chat: whatever comes of it is for the checks to say, but that it is too long."""
    with contextlib.suppress(NotOkError, aiohttp.ClientError, TimeoutError):
        _, answer = await server.call("POST", CHAT, {"model": server.model, "messages": HI, "max_tokens": 1})
        error = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
            why = f"{server.url} has no room for {HI[0]['content']!r}: {error.get('message')}"
            raise NotCheckedError(f"{why} The checks have prompts of up to 1,600 characters.")


def table(results: Sequence[Result]) -> str:
    """One line a check, and the numbers."""
    width = max(len(name) for name, _, _ in results)
    lines = [f"{name:<{width}}  {how}{': ' if why else ''}{why}" for name, how, why in results]
    counts = {how: sum(each == how for _, each, _ in results) for how in ("ok", "not ok", "not offered")}
    return "\n".join([*lines, "", ", ".join(f"{count} {how}" for how, count in counts.items())])


def is_fine(results: Sequence[Result]) -> bool:
    """Something is ok, and nothing is not."""
    found = {how for _, how, _ in results}
    return "ok" in found and "not ok" not in found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway_conformance",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="address of the server, with or without /v1")
    parser.add_argument("key", help="what clients show as their API key")
    parser.add_argument("--model", help="name of the model in calls (default: the first of /v1/models)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for each call (default 120)"
    )
    given = parser.parse_args(arguments)
    try:
        results = asyncio.run(check_server(given.url, given.key, model=given.model, timeout_s=given.timeout))
    except NotCheckedError as reason:
        print(f"nothing was checked: {reason}", file=sys.stderr)
        return 1
    print(table(results))
    return 0 if is_fine(results) else 1


if __name__ == "__main__":
    sys.exit(main())
