"""The charts of the overview: what they draw, and how often they are made."""

from app.console import overview
from app.console.charts import HEIGHT, WIDTH
from app.console.devices import MemoryReader
from app.console.events import EventLog
from app.console.fleet_view import FleetViews
from app.console.history import INTERVAL_S, SPAN_S, History, Load, Sample
from app.console.model_activity import ModelActivity
from app.console.models_table import ModelTable
from app.console.overview import Overview, charts_of, sparks_of
from app.routing import Catalogue
from app.settings import Settings
from app.telemetry.metrics import Metrics


def sample(at: float, ttft: float | None = 0.5) -> Sample:
    return Sample(at, 10.0, 2, 1, ttft, ttft, 3.0, 4.0)


def test_without_samples_the_charts_are_empty() -> None:
    for chart in charts_of([]).values():
        assert [line.path for line in chart.lines] == [""] * len(chart.lines)
        assert chart.top > 0


def test_the_newest_sample_is_at_the_right_and_an_hour_ago_at_the_left() -> None:
    charts = charts_of(
        [sample(1000.0 + n * INTERVAL_S) for n in range(int(SPAN_S / INTERVAL_S) + 1)]
    )
    (tokens,) = charts["tokens"].lines
    places = tokens.path.removeprefix("M").split()
    assert places[0].startswith("0.0,")
    assert places[-1].startswith(f"{WIDTH:.1f},")
    assert tokens.last == tokens.highest == 10.0
    assert all(0 <= float(place.split(",")[1]) <= HEIGHT for place in places)


def test_each_chart_has_its_lines() -> None:
    charts = charts_of([sample(0.0), sample(10.0)])
    last = {name: [line.last for line in chart.lines] for name, chart in charts.items()}
    assert last == {
        "tokens": [10.0], "requests": [2, 1], "ttft": [0.5, 0.5], "errors": [3.0, 4.0],
    }  # fmt: skip


def test_a_time_without_requests_is_a_gap() -> None:
    charts = charts_of([sample(0.0), sample(10.0), sample(20.0, None), sample(30.0), sample(40.0)])
    assert charts["ttft"].lines[0].path.count("M") == 2
    assert charts["tokens"].lines[0].path.count("M") == 1


def test_a_gateway_that_stood_still_leaves_a_gap() -> None:
    charts = charts_of([sample(0.0), sample(10.0), sample(10.0 + 2 * overview.GAP_S)])
    assert charts["tokens"].lines[0].path.count("M") == 2


def test_the_line_of_a_figure_is_as_wide_as_the_time_that_is_known() -> None:
    assert sparks_of([])["tokens"].lines[0].path == ""
    (tokens,) = sparks_of([sample(0.0), sample(10.0), sample(20.0)])["tokens"].lines
    assert tokens.path.startswith("M0.0,")
    assert f" {WIDTH:.1f}," in tokens.path


def test_charts_are_made_once_for_each_reading() -> None:
    now = [1000.0]
    history = History(Metrics(), lambda: Load(0, 0), lambda: now[0])
    views = FleetViews(
        catalogue=Catalogue([]),
        model_rows=list,
        settings=Settings,
        unused=list,
        gateways=lambda: None,
    )
    events = EventLog(Catalogue([]))
    table = ModelTable(views, lambda _: ModelActivity())
    page = Overview(views, table, history, MemoryReader(list), events)
    history.read()
    first, _ = page.charts(page.readings())
    assert page.charts(page.readings())[0] is first
    now[0] += INTERVAL_S
    history.read()
    assert page.charts(page.readings())[0] is not first
