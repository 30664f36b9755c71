"""What operators and load balancers ask: is the process alive, does it serve, how much."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from app.admission.admission import Admission
from app.routing.catalogue import Catalogue
from app.telemetry.metrics import Metrics


def ops_router(catalogue: Catalogue, admission: Admission, metrics: Metrics) -> APIRouter:
    """Return /health, /ready and /metrics."""
    router = APIRouter(tags=["operations"])

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The process lives. Says nothing of engines: a restart would not mend them."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> Response:
        """Whether requests can be served: 503 while draining, or with no engine up or on demand."""
        if admission.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not catalogue.ready:
            return JSONResponse({"status": "no engine is up"}, 503)
        return JSONResponse({"status": "ready"})

    @router.get("/metrics")
    async def exposition() -> Response:
        """Prometheus series of this process."""
        body, content_type = metrics.exposition()
        return Response(body, headers={"content-type": content_type})

    return router
