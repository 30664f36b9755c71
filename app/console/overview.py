"""The overview: what runs, what loads, what failed and why, and the last hour as charts."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request, Response

from app.console.charts import Chart, chart
from app.console.devices import MemoryReader, device_memory, engine_memory
from app.console.fleet_view import FleetViews
from app.console.history import INTERVAL_S, SPAN_S, History, Sample
from app.console.live import LivePage, Regions
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE

# A reading may come late; two that are missing are a gap.
GAP_S = 2.5 * INTERVAL_S


class Overview:
    """What the overview shows, as template contexts."""

    def __init__(self, views: FleetViews, history: History, memory: MemoryReader) -> None:
        self._views = views
        self._history = history
        self._memory = memory

    def parts(self) -> dict[str, dict[str, object]]:
        """Return the values of each region's macro, by the region's name."""
        models, engines = self._views.model_rows(), self._views.engines()
        machine = self._memory.newest()
        return {
            "attention": {"engines": engines},
            "models": {"models": models},
            "engines": {"engines": engines},
            "memory": {
                "engines": engine_memory(engines, machine),
                "devices": device_memory(machine),
                "host_free_gib": machine.host_free_gib,
            },
        }

    def samples(self) -> list[Sample]:
        """Return the samples of the last hour."""
        return self._history.samples()

    @property
    def history_at(self) -> float | None:
        """The time of the newest sample."""
        return self._history.last_at


def charts_of(samples: Sequence[Sample]) -> dict[str, Chart]:
    """Return the charts of the last hour, by name."""
    end = samples[-1].at if samples else 0.0

    def draw(*reads: Callable[[Sample], float | None]) -> Chart:
        series = [[(sample.at, read(sample)) for sample in samples] for read in reads]
        return chart(series, end - SPAN_S, end, GAP_S)

    return {
        "tokens": draw(lambda sample: sample.tokens_per_s),
        "requests": draw(lambda sample: sample.in_flight, lambda sample: sample.waiting),
        "ttft": draw(lambda sample: sample.ttft_p50, lambda sample: sample.ttft_p95),
        "errors": draw(lambda sample: sample.errors_per_min, lambda sample: sample.refused_per_min),
    }


def overview_router(renderer: Renderer, overview: Overview) -> APIRouter:
    """Return the route of the overview."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)

    @router.get("/overview")
    async def show(request: Request) -> Response:
        return renderer.page(
            visitor_of(request),
            "overview.html",
            parts_of=overview.parts(),
            charts=charts_of(overview.samples()),
        )

    return router


def live_overview(renderer: Renderer, overview: Overview) -> LivePage:
    """Return the live regions of the overview."""
    names = ("attention", "models", "engines", "memory")
    macros = {name: renderer.macro("overview_regions.html", name) for name in names}
    charts = renderer.macro("overview_regions.html", "charts")
    drawn_at: float | None = None
    drawn = ""

    def render() -> Regions:
        nonlocal drawn_at, drawn
        regions = {name: macros[name](**values) for name, values in overview.parts().items()}
        if not drawn or overview.history_at != drawn_at:  # every ten seconds
            drawn_at, drawn = overview.history_at, charts(charts_of(overview.samples()))
        return {**regions, "charts": drawn}

    return LivePage(render)
