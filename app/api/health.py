"""Liveness, readiness and metrics, for load balancers and Prometheus."""

import hmac

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from app.admission import Admission
from app.api.error_responses import JsonObject, error_responses, reference
from app.api.kept_page import KeptPage
from app.auth import Authenticator, presented_key
from app.errors import InvalidApiKey, TooManyConnections
from app.fleet import EnginesPage
from app.relay import Forecasts
from app.settings import digest
from app.telemetry.metrics import TEXT_FORMAT, Metrics

_STATUS: JsonObject = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}},
}
_NOT_READY: JsonObject = {
    "description": "Draining, no engine up, or `too_many_connections`.",
    "content": {
        "application/json": {"schema": {"anyOf": [_STATUS, reference(TooManyConnections)]}}
    },
}


def ops_router(
    forecasts: Forecasts, admission: Admission, authenticator: Authenticator
) -> APIRouter:
    """Return /health and /ready, which need no key."""
    router = APIRouter(tags=["operations"])

    @router.get("/health", responses=error_responses())
    async def health() -> dict[str, str]:
        """Liveness of the process. Engines do not count: a restart would not repair them."""
        return {"status": "ok"}

    @router.get(
        "/ready",
        responses={
            **error_responses(),
            200: {"content": {"application/json": {"schema": _STATUS}}},
            503: _NOT_READY,
        },
    )
    async def ready() -> Response:
        """Readiness: 503 while draining, or if no model is up or can load.

        Also until the database is reached for the first time, without which no key can be checked.
        """
        if admission.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not forecasts.any_serves():
            return JSONResponse({"status": "no engine is up"}, 503)
        if not authenticator.may_admit:
            return JSONResponse({"status": "the database of keys was not reached yet"}, 503)
        return JSONResponse({"status": "ready"})

    return router


def metrics_router(metrics: Metrics, engines: EnginesPage, key: bytes | None) -> APIRouter:
    """Return the metrics routes; they require the key of the digest `key`, unless it is None."""

    async def require_key(request: Request) -> None:
        if key is None:
            return
        try:
            if not hmac.compare_digest(digest(presented_key(request.scope["headers"])), key):
                raise InvalidApiKey("this is not the key to the metrics")  # noqa: TRY301
        except InvalidApiKey as error:
            metrics.auth_failures.add((error.reason,))
            raise

    page = KeptPage(metrics.exposition)
    router = APIRouter(
        tags=["operations"],
        dependencies=[Depends(require_key)],
        default_response_class=PlainTextResponse,
        responses=error_responses(InvalidApiKey),
    )

    @router.get("/metrics")
    async def exposition() -> Response:
        """Prometheus series of this process."""
        return Response(page.read(), headers={"content-type": TEXT_FORMAT})

    @router.get("/metrics/engines")
    async def engines_page() -> Response:
        """Prometheus series of the engines, each with the label gateway_engine."""
        body = await engines.exposition()
        return Response(body, headers={"content-type": TEXT_FORMAT})

    return router
