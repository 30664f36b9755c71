"""The overview: whether all is well, in five figures and a row for each model; charts below."""

import time
from collections.abc import Callable, Mapping, Sequence

from fastapi import APIRouter, Request, Response

from app.console.charts import Chart, chart
from app.console.devices import MemoryReader, device_memory, engine_memory
from app.console.events import EventLog
from app.console.first_steps import FirstSteps
from app.console.fleet_view import FleetViews
from app.console.history import INTERVAL_S, SPAN_S, History, Reading, Sample, last_hour
from app.console.language import gettext
from app.console.live import LiveForAll, Regions, Render
from app.console.minutes import MINUTE_S, samples_of_minutes, step_of
from app.console.models_table import ModelTable
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE
from app.database import DatabaseError
from app.usage import LoadMinutes

# A reading may come late; two that are missing are a gap.
GAP_S = 2.5 * INTERVAL_S
# Span of the charts of a shorter time, of the readings in memory.
SHORT_HOURS = "0.25"
# Figures above the charts.
FIGURES = 5
# Spans of the charts of stored minutes, in hours.
STORED_HOURS = ("6", "24", "168")


class Overview:
    """What the overview shows, as template contexts."""

    def __init__(
        self,
        views: FleetViews,
        table: ModelTable,
        history: History,
        memory: MemoryReader,
        events: EventLog,
    ) -> None:
        self._views = views
        self._table = table
        self._history = history
        self._memory = memory
        self.events = events
        # The newest charts and lines of figures, and the time of their last reading.
        self._drawn: tuple[float | None, Mapping[str, Chart], Mapping[str, Chart]] = (None, {}, {})

    def parts(self) -> dict[str, dict[str, object]]:
        """Return the values of each region's macro, by the region's name."""
        lines = self._table.lines()
        engines = [engine for line in lines for engine in line.engines]
        machine = self._memory.newest()
        return {
            "attention": {
                "engines": engines,
                "models": [line.view.row for line in lines],
                "unused": len(self._views.unused()),
            },
            "models": {
                "lines": lines,
                "gateways": self._views.gateways(),
                "failed": False,  # they have a notice each
            },
            "memory": {
                "engines": engine_memory(engines, machine),
                "devices": device_memory(machine),
                "host_free_gib": machine.host_free_gib,
            },
        }

    def readings(self) -> Sequence[Reading]:
        """Return the readings of the last hour."""
        return self._history.readings()

    def last_hour(self, readings: Sequence[Reading]) -> list[Sample]:
        """Return what happened in the last hour, also before the start of the gateway."""
        return last_hour(readings, self._history.earlier)

    def begins_before(self, readings: Sequence[Reading], span_s: float) -> bool:
        """Return whether the last seconds include some from before the start of the gateway."""
        earlier = self._history.earlier
        return bool(earlier and readings) and earlier[-1].at > readings[-1].at - span_s

    def charts(
        self, readings: Sequence[Reading]
    ) -> tuple[Mapping[str, Chart], Mapping[str, Chart]]:
        """Return the charts of the last hour, and the lines of its figures.

        Any thread may call it.
        """
        drawn_for, charts, sparks = self._drawn
        at = readings[-1].at if readings else None
        if not charts or at != drawn_for:  # every ten seconds
            samples = self.last_hour(readings)
            charts, sparks = charts_of(samples, epoch=_epoch()), sparks_of(samples)
            self._drawn = at, charts, sparks
        return charts, sparks


def charts_of(
    samples: Sequence[Sample],
    end: float | None = None,
    span_s: float = SPAN_S,
    gap_s: float = GAP_S,
    epoch: float = 0.0,
) -> dict[str, Chart]:
    """Return the charts of the time before `end`, by name; None: before the last sample.

    The times of samples, plus `epoch`, are seconds since 1970.
    """
    if end is None:
        end = samples[-1].at if samples else 0.0
    begin = end - span_s

    def draw(*reads: Callable[[Sample], float | None], whole: bool = False) -> Chart:
        series = [[(sample.at, read(sample)) for sample in samples] for read in reads]
        return chart(series, begin, end, gap_s, epoch=epoch, whole=whole)

    return {
        "tokens": draw(lambda sample: sample.tokens_per_s),
        "requests": draw(
            lambda sample: sample.in_flight, lambda sample: sample.waiting, whole=True
        ),
        "ttft": draw(lambda sample: sample.ttft_p50, lambda sample: sample.ttft_p95),
        "errors": draw(lambda sample: sample.errors_per_min, lambda sample: sample.refused_per_min),
    }


def sparks_of(samples: Sequence[Sample]) -> dict[str, Chart]:
    """Return lines without axes, as wide as the time of which there are samples."""
    span_s = samples[-1].at - samples[0].at if samples else 0.0
    return charts_of(samples, span_s=span_s, gap_s=span_s)


def overview_router(
    renderer: Renderer, overview: Overview, minutes: LoadMinutes, first_steps: FirstSteps
) -> APIRouter:
    """Return the route of the overview."""
    router = APIRouter(prefix=CONSOLE, include_in_schema=False)

    @router.get("/overview")
    async def show(request: Request, hours: str = "1") -> Response:
        steps = await first_steps.find()
        parts, readings = overview.parts(), overview.readings()
        span_h: float = int(hours) if hours in STORED_HOURS else 1
        if hours == SHORT_HOURS:
            span_h = float(SHORT_HOURS)
        fault, stored, now = "", None, time.time()
        if span_h > 1:
            try:
                stored = await minutes.read(now - span_h * 3600)
            except DatabaseError:
                span_h, fault = (
                    1,
                    gettext("The database cannot be read now: this is the last hour."),
                )

        def render() -> Response:
            charts, sparks = overview.charts(readings)
            last = charts
            if stored is not None:
                samples = samples_of_minutes(stored, step_of(span_h * 3600))
                charts, sparks = stored_charts(samples, now, span_h * 3600), sparks_of(samples)
            elif span_h < 1:
                found = overview.last_hour(readings)
                samples = [one for one in found if one.at > found[-1].at - span_h * 3600]
                charts = charts_of(samples, span_s=span_h * 3600, epoch=_epoch())
                sparks = sparks_of(samples)
            return renderer.page(
                visitor_of(request),
                "overview.html",
                parts_of=parts,
                figures=last,
                sparks=sparks,
                charts=charts,
                events=overview.events.since(now - span_h * 3600),
                hours=span_h,
                begins_before=overview.begins_before(readings, span_h * 3600),
                choices=(SHORT_HOURS, "1", *STORED_HOURS),
                fault=fault,
                steps=steps,
            )

        return await renderer.in_thread(render)

    return router


def stored_charts(samples: Sequence[Sample], end: float, span_s: float) -> Mapping[str, Chart]:
    """Return the charts of samples of stored minutes before `end`."""
    return charts_of(samples, end, span_s, 1.5 * step_of(span_s) * MINUTE_S)


def live_overview(renderer: Renderer, overview: Overview) -> LiveForAll:
    """Return the live regions of the overview."""
    macros = {
        "attention": renderer.macro("overview_regions.html", "attention"),
        "models": renderer.macro("models_table.html", "models"),
        "memory": renderer.macro("overview_regions.html", "memory"),
    }
    charts = renderer.macro("overview_regions.html", "charts")
    figure = renderer.macro("overview_regions.html", "figure")
    spark = renderer.macro("overview_regions.html", "spark")

    def collect() -> Render:
        parts, readings = overview.parts(), overview.readings()
        events = overview.events.since(time.time() - SPAN_S)

        def render() -> Regions:
            regions = {name: macros[name](**values) for name, values in parts.items()}
            last, sparks = overview.charts(readings)
            for place in range(FIGURES):
                regions[f"figure {place}"] = figure(place, last)
                regions[f"spark {place}"] = spark(place, sparks, last)
            return {**regions, "charts": charts(last, events)}

        return render

    return LiveForAll(collect)


def _epoch() -> float:
    """Return the wall time at which the clock of the readings was zero."""
    return time.time() - time.monotonic()
