"""/admin/openapi.json: what every route takes and answers, for whoever may see it."""

import asyncio
import json
from collections.abc import Iterator
from functools import cache

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from app.api.access import Right, guard
from app.api.dataplane_schema import dataplane_paths
from app.api.error_responses import (
    ADMIN,
    REQUEST_ID,
    JsonObject,
    error_responses,
    error_schemas,
    header_components,
)
from app.auth.keys import Authenticator

_KEYS = {
    "admin": "A key that is for /admin.",
    "client": "A client's key.",
    "metrics": "The key to the metrics, where the configuration has one.",
}
_OPEN = frozenset({"/health", "/ready"})
_METRICS = frozenset({"/metrics", "/metrics/engines"})
# What FastAPI says of its own answer to what is not valid; ours is a 400.
_NOT_OURS = ("HTTPValidationError", "ValidationError")


def schema_router(authenticator: Authenticator) -> APIRouter:
    """Return /admin/openapi.json."""
    router = APIRouter(prefix="/admin", tags=["operations"])
    reading = Depends(guard(authenticator, Right.SCHEMA_READ))

    @cache
    def encoded(app: FastAPI) -> bytes:
        return json.dumps(document(app), separators=(",", ":")).encode()

    @router.get("/openapi.json", dependencies=[reading], responses=error_responses(*ADMIN))
    async def openapi(request: Request) -> Response:
        """This document."""
        # It is made once, in the time of a few hundred chunks: other requests go on meanwhile.
        body = await asyncio.to_thread(encoded, request.app)
        return Response(body, media_type="application/json")

    return router


def document(app: FastAPI) -> JsonObject:
    """Return the OpenAPI document of an application's routes and of the data plane."""
    whole: JsonObject = get_openapi(title=app.title, version=app.version, routes=app.routes)
    whole["paths"] |= dataplane_paths()
    components = whole["components"]
    components["schemas"] |= error_schemas()
    for name in _NOT_OURS:
        components["schemas"].pop(name, None)
    components["headers"] = dict(header_components())
    components["securitySchemes"] = dict(_security_schemes())
    shared = _Shared()
    for path, operation in _operations(whole):
        operation["security"] = _security(path)
        responses = operation["responses"]
        responses.pop("422", None)
        for status, response in responses.items():
            known = {REQUEST_ID: {"$ref": f"#/components/headers/{REQUEST_ID}"}}
            response["headers"] = known | response.get("headers", {})
            if not status.startswith("2"):
                responses[status] = shared.reference(status, response)
    components["responses"] = shared.found
    return whole


class _Shared:
    """Responses that many operations have, each told once: they are nine tenths of the text."""

    def __init__(self) -> None:
        self.found: dict[str, JsonObject] = {}
        self._names: dict[str, str] = {}

    def reference(self, status: str, response: JsonObject) -> JsonObject:
        """Return what stands for a response."""
        text = json.dumps(response, sort_keys=True)
        if text not in self._names:
            count = sum(name.split(".")[0] == status for name in self.found)
            self._names[text] = f"{status}.{count + 1}"
            self.found[self._names[text]] = response
        return {"$ref": f"#/components/responses/{self._names[text]}"}


def _operations(whole: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    for path, methods in whole["paths"].items():
        for operation in methods.values():
            yield path, operation


def _security(path: str) -> list[JsonObject]:
    """Return the keys of which a path asks for one, as `presented_key` reads them."""
    if path in _OPEN:
        return []
    if path in _METRICS:
        return [{}, *_either("metrics")]
    return _either("admin" if path.startswith("/admin/") else "client")


def _either(whose: str) -> list[JsonObject]:
    return [{whose: []}, {f"{whose}_x_api_key": []}]


def _security_schemes() -> Iterator[tuple[str, JsonObject]]:
    for whose, text in _KEYS.items():
        yield whose, {"type": "http", "scheme": "bearer", "description": text}
        header = {"type": "apiKey", "in": "header", "name": "x-api-key", "description": text}
        yield f"{whose}_x_api_key", header
