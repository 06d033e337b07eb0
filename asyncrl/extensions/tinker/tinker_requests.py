"""Requests of clients as the package tinker defines them, and their refusals."""

from __future__ import annotations

import json
import re
import time
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from asyncrl.extensions.tinker.ledger import Ledger, SavedWeights

Form = TypeVar("Form", bound=BaseModel)
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 86400


class UserError(Exception):
    """The client's fault. `status`: of an answer at once; a training request has the
    sentence in its future.
    """

    def __init__(self, text: str, status: int = 400) -> None:
        self.status = status
        super().__init__(text)


def read_object(body: bytes) -> dict[str, Any]:
    """Read an object of JSON. Raises UserError."""
    try:
        values = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError("the body is not an object")
    return values


def read(form: type[Form], body: bytes) -> Form:
    """Read a request of JSON; unknown fields are ignored. Raises UserError."""
    values = read_object(body)
    while True:
        try:
            return form.model_validate(values)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            extra = [one["loc"] for one in problems if one["type"] == "extra_forbidden"]
            if not extra:
                place = ".".join(map(str, problems[0]["loc"]))
                text = f"{form.__name__}: {place}: {problems[0]['msg']}"
                raise UserError(text, 422) from None
            for unknown in extra:
                _remove(values, unknown)


def _remove(values: Any, place: tuple[int | str, ...]) -> None:
    """Remove a field that the types do not know. A union's place has names of types."""
    *path, last = place
    for step in path:
        if isinstance(values, dict) and step not in values:
            continue
        values = values[step]
    values.pop(last, None)


def check_name(name: str | None) -> None:
    if name is not None and not NAME.fullmatch(name):
        raise UserError(
            f"the checkpoint name {name!r} is not 1 to 128 letters, digits, dots, dashes and underscores"
        )


def check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise UserError(
            f"ttl_seconds={ttl_seconds} is outside of {MIN_TTL_S} to {MAX_TTL_S}"
        )


async def checkpoint_of(ledger: Ledger, path: str, owner: str) -> SavedWeights:
    """Return the checkpoint at a tinker:// path. Raises UserError."""
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3:
        raise UserError(f"{path!r} is not tinker://RUN/KIND/NAME")
    model_id, kind, name = parts
    found = await ledger.first(SavedWeights, model_id=model_id, kind=kind, name=name)
    is_over = found is not None and found.expires_s and found.expires_s < time.time()
    if found is None or is_over:
        others = await ledger.find(SavedWeights, model_id=model_id, name=name)
        hint = next(
            (f"; there is {one.path}" for one in others if one.owner == owner), ""
        )
        raise UserError(f"there is no checkpoint {path}{hint}", 404)
    if found.owner != owner and not found.public:
        raise UserError(f"{path} belongs to another key", 403)
    return found
