"""The overview: whether all is well, in five figures and a row for each model; charts below."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from fastapi import APIRouter, Request, Response

from app.console.charts import Chart, chart
from app.console.devices import MemoryReader, device_memory, engine_memory
from app.console.events import EventLog
from app.console.first_steps import FirstSteps
from app.console.fleet_view import EngineView, FleetViews
from app.console.history import INTERVAL_S, SPAN_S, History, Reading, Sample, last_hour
from app.console.language import gettext
from app.console.live import LiveForAll, Regions, Render
from app.console.minutes import MINUTE_S, samples_of_minutes, step_of
from app.console.model_activity import ModelActivity
from app.console.rendering import Renderer
from app.console.router import visitor_of
from app.console.visitor import CONSOLE
from app.database import DatabaseError
from app.usage import LoadMinute, LoadMinutes

# A reading may come late; two that are missing are a gap.
GAP_S = 2.5 * INTERVAL_S
# Span of the charts of a shorter time, of the readings in memory.
SHORT_HOURS = "0.25"
# Spans of the charts of stored minutes, in hours.
STORED_HOURS = ("6", "24", "168")


class Overview:
    """What the overview shows, as template contexts."""

    def __init__(
        self,
        views: FleetViews,
        history: History,
        memory: MemoryReader,
        events: EventLog,
        activity_of: Callable[[str], ModelActivity],
    ) -> None:
        self._views = views
        self._history = history
        self._memory = memory
        self.events = events
        self._activity_of = activity_of
        # The newest charts, and the time of their last reading.
        self._drawn: tuple[float | None, Mapping[str, Chart]] = (None, {})

    def parts(self) -> dict[str, dict[str, object]]:
        """Return the values of each region's macro, by the region's name."""
        models, engines = self._views.model_rows(), self._views.engines()
        machine = self._memory.newest()
        by_model: dict[str, list[EngineView]] = defaultdict(list)
        for engine in engines:
            by_model[engine.row.model].append(engine)
        return {
            "attention": {
                "engines": engines,
                "models": models,
                "unused": len(self._views.unused()),
            },
            "models": {
                "models": [
                    (row, by_model[row.name], self._activity_of(row.name)) for row in models
                ],
                "gateways": self._views.gateways(),
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

    def charts(self, readings: Sequence[Reading]) -> Mapping[str, Chart]:
        """Return the charts of the last hour. Any thread may call it."""
        drawn_for, charts = self._drawn
        at = readings[-1].at if readings else None
        if not charts or at != drawn_for:  # every ten seconds
            charts = charts_of(last_hour(readings), epoch=_epoch())
            self._drawn = at, charts
        return charts


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
            charts = last = overview.charts(readings)
            if stored is not None:
                charts = stored_charts(stored, now, span_h * 3600)
            elif span_h < 1:
                charts = charts_of(last_hour(readings), span_s=span_h * 3600, epoch=_epoch())
            return renderer.page(
                visitor_of(request),
                "overview.html",
                parts_of=parts,
                figures=last,
                charts=charts,
                events=overview.events.since(now - span_h * 3600),
                hours=span_h,
                choices=(SHORT_HOURS, "1", *STORED_HOURS),
                fault=fault,
                steps=steps,
            )

        return await renderer.in_thread(render)

    return router


def stored_charts(minutes: Sequence[LoadMinute], end: float, span_s: float) -> Mapping[str, Chart]:
    """Return the charts of stored minutes before `end`."""
    step = step_of(span_s)
    gap_s = 1.5 * step * MINUTE_S
    return charts_of(samples_of_minutes(minutes, step), end, span_s, gap_s)


def live_overview(renderer: Renderer, overview: Overview) -> LiveForAll:
    """Return the live regions of the overview."""
    names = ("attention", "models", "memory")
    macros = {name: renderer.macro("overview_regions.html", name) for name in names}
    charts = renderer.macro("overview_regions.html", "charts")
    figures = renderer.macro("overview_regions.html", "figures")

    def collect() -> Render:
        parts, readings = overview.parts(), overview.readings()
        events = overview.events.since(time.time() - SPAN_S)

        def render() -> Regions:
            regions = {name: macros[name](**values) for name, values in parts.items()}
            last = overview.charts(readings)
            return {**regions, "figures": figures(last), "charts": charts(last, events)}

        return render

    return LiveForAll(collect)


def _epoch() -> float:
    """Return the wall time at which the clock of the readings was zero."""
    return time.time() - time.monotonic()
