"""Which form is served where; and what is said in all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.agents.endpoint.answers import ApiError
from asyncrl.agents.endpoint.forms.anthropic import MessagesForm
from asyncrl.agents.endpoint.forms.anthropic_written import anthropic_error
from asyncrl.agents.endpoint.forms.chat import ChatForm, Form, TextForm
from asyncrl.agents.endpoint.forms.responses import ResponsesForm

ROUTES = "There are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /v1/models."


def forms_by_path(template: str) -> dict[str, Form]:
    """By the path behind /v1/. `template`: of the model's chats."""
    return {
        "chat/completions": ChatForm(),
        "completions": TextForm(),
        "responses": ResponsesForm(),
        "messages": MessagesForm(can_turn_off="enable_thinking" in template),
    }


def error_body(error: ApiError, path: str, headers: Mapping[str, str]) -> bytes:
    """In the form of the client that called `path`."""
    is_anthropics = "/v1/messages" in path or "anthropic-version" in headers
    return anthropic_error(error) if is_anthropics else error.body()


def model_body(model: str, name: str | None) -> dict[str, Any]:
    """The one model, or for None the list of it, as both OpenAI's clients and Anthropic's read it. Raises
    ApiError for another name.
    """
    if name not in (None, model):
        raise ApiError(404, f"There is one model here, {model}.", code="model_not_found", param="model")
    told = {"id": model, "object": "model", "created": 0, "owned_by": "asyncrl"}
    told |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    if name is not None:
        return told
    return {"object": "list", "data": [told], "has_more": False, "first_id": model, "last_id": model}
