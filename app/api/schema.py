"""/admin/openapi.json: FastAPI's document and the data plane's, merged once."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import cache

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from app.api.admin_auth import RequireRight, Right
from app.api.data_plane_schema import dataplane_paths
from app.api.error_responses import (
    ADMIN,
    REQUEST_ID,
    JsonObject,
    error_responses,
    error_schemas,
    header_components,
)
from app.auth import Authenticator

VERSION = "0.1.0"  # of the document
# An extension of OpenAPI: the right that the caller's role must have.
RIGHT = "x-right"
_KEYS = {
    "admin": "A key of any role but client.",
    "client": "A client key.",
    "metrics": "The metrics key, if one is configured.",
}
_DESCRIPTION = (
    "OPTIONS on any path is answered with 204 and `Allow`; HEAD on any GET route of the gateway's "
    "own, with the headers of GET."
)
_OPEN = frozenset({"/health", "/ready"})
_METRICS = frozenset({"/metrics", "/metrics/engines"})
# FastAPI documents its own 422 for validation errors; the gateway answers 400.
_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")


def schema_router(authenticator: Authenticator, root_path: str) -> APIRouter:
    """Return /admin/openapi.json; `root_path` stands before the paths that clients know."""
    router = APIRouter(prefix="/admin", tags=["operations"])
    reading = Depends(RequireRight(authenticator, Right.SCHEMA_READ, scoped=True))

    @cache
    def encoded(app: FastAPI) -> bytes:
        return json.dumps(document(app.routes, root_path), separators=(",", ":")).encode()

    @router.get("/openapi.json", dependencies=[reading], responses=error_responses(*ADMIN))
    async def openapi(request: Request) -> Response:
        """This document."""
        # Building it takes 0.3 s; a thread keeps the event loop free.
        body = await asyncio.to_thread(encoded, request.app)
        return Response(body, media_type="application/json")

    return router


def document(routes: Sequence[BaseRoute], root_path: str = "") -> JsonObject:
    """Return the OpenAPI document of an application's routes, data plane included."""
    whole: JsonObject = get_openapi(
        title="vllm-gateway",
        version=VERSION,
        description=_DESCRIPTION,
        routes=routes,
        servers=[{"url": root_path}] if root_path else None,
    )
    whole["paths"] |= dataplane_paths()
    components = whole["components"]
    components["schemas"] |= error_schemas()
    for name in _UNUSED_SCHEMAS:
        components["schemas"].pop(name, None)
    components["headers"] = dict(header_components())
    components["securitySchemes"] = dict(_security_schemes())
    shared = _SharedResponses()
    rights = dict(_rights(routes))
    for path, method, operation in _operations(whole):
        operation["security"] = _security(path)
        if right := rights.get((path, method)):
            operation[RIGHT] = right
        responses = operation["responses"]
        responses.pop("422", None)
        for status, response in responses.items():
            request_id = {REQUEST_ID: {"$ref": f"#/components/headers/{REQUEST_ID}"}}
            response["headers"] = request_id | response.get("headers", {})
            if not status.startswith("2"):
                responses[status] = shared.reference(status, response)
    components["responses"] = shared.components
    return whole


class _SharedResponses:
    """Response components: each distinct error response once; inline they triple the size."""

    def __init__(self) -> None:
        self.components: dict[str, JsonObject] = {}
        self._names: dict[str, str] = {}  # by the response as JSON

    def reference(self, status: str, response: JsonObject) -> JsonObject:
        """Return a reference to the component of a response; add the component if it is new."""
        text = json.dumps(response, sort_keys=True)
        if text not in self._names:
            count = sum(name.split(".")[0] == status for name in self.components)
            self._names[text] = f"{status}.{count + 1}"
            self.components[self._names[text]] = response
        return {"$ref": f"#/components/responses/{self._names[text]}"}


def _operations(whole: JsonObject) -> Iterator[tuple[str, str, JsonObject]]:
    for path, methods in whole["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _rights(routes: Sequence[BaseRoute]) -> Iterator[tuple[tuple[str, str], Right]]:
    """Yield the right that each route under /admin asks for, by path and method."""
    for route in routes:
        if isinstance(route, APIRoute):
            for right in _guards(route.dependant):
                for method in route.methods:
                    yield (route.path_format, method.lower()), right


def _guards(dependant: Dependant) -> Iterator[Right]:
    if isinstance(dependant.call, RequireRight):
        yield dependant.call.right
    for inner in dependant.dependencies:
        yield from _guards(inner)


def _security(path: str) -> list[JsonObject]:
    """Return the security requirements of a path: `presented_key` accepts both headers."""
    if path in _OPEN:
        return []
    if path in _METRICS:
        return [{}, *_bearer_or_header("metrics")]
    return _bearer_or_header("admin" if path.startswith("/admin/") else "client")


def _bearer_or_header(whose: str) -> list[JsonObject]:
    return [{whose: []}, {f"{whose}_x_api_key": []}]


def _security_schemes() -> Iterator[tuple[str, JsonObject]]:
    for whose, text in _KEYS.items():
        yield whose, {"type": "http", "scheme": "bearer", "description": text}
        header = {"type": "apiKey", "in": "header", "name": "x-api-key", "description": text}
        yield f"{whose}_x_api_key", header
