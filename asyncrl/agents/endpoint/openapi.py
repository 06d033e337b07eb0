"""OpenAPI's description of the gateway's routes, and the page that shows it without
internet.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from importlib.util import find_spec
from typing import Any

import yaml
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from asyncrl.agents.endpoint.anthropic_dialect import MessagesRequest
from asyncrl.agents.endpoint.openai_dialects import ResponsesRequest
from asyncrl.agents.endpoint.requests import ChatRequest, TextRequest
from asyncrl.messages.records import Outcome

_BODIES = (ChatRequest, TextRequest, ResponsesRequest, MessagesRequest, Outcome)


@cache
def schema() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("openapi.yaml").read_text("utf-8")
    routes: dict[str, Any] = yaml.safe_load(text)
    bodies: Any = [(body, "validation", TypeAdapter(body)) for body in _BODIES]
    _, types = TypeAdapter.json_schemas(
        bodies, ref_template="#/components/schemas/{model}"
    )
    routes["components"]["schemas"] |= types["$defs"]
    return routes


async def _schema(request: Request) -> Response:
    return JSONResponse(schema())


async def _page(request: Request) -> Response:
    # relative addresses also work behind a proxy; a validator would be a service on the
    # internet
    return get_swagger_ui_html(
        title="asyncrl gateway",
        openapi_url="openapi.json",
        swagger_js_url="docs/files/swagger-ui-bundle.js",
        swagger_css_url="docs/files/swagger-ui.css",
        swagger_favicon_url="docs/files/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},
    )


ROUTES: tuple[BaseRoute, ...] = (Route("/openapi.json", _schema), Route("/docs", _page))
# machines without an index may lack it; then /docs is blank
if find_spec("fastapi_swagger") is not None:
    ROUTES += (
        Mount("/docs/files", StaticFiles(packages=[("fastapi_swagger", "resources")])),
    )
