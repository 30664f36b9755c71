"""The kinds of panels of the dashboards, all in one style."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    barchart,
    common,
    dashboard,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.builders import stat as stats
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)

from deploy.grafana.generate.queries import LEDGER_SOURCE, PROMETHEUS_SOURCE, Query, Sql

# Columns of the grid's 24.
SMALL, THIRD, HALF, WIDE = 4, 8, 12, 24

# By regular expression of a legend; others get the palette's colors.
PERCENTILES = {"^p50": "green", "^p95": "orange", "^p99": "red"}
STATUSES = {"^2": "green", "^4": "orange", "^499": "blue", "^429": "yellow", "^5": "red"}

Steps = Sequence[tuple[float, str]]
P = TypeVar(
    "P",
    barchart.Panel,
    statetimeline.Panel,
    stats.Panel,
    tables.Panel,
    timeseries.Panel,
)


def graph(
    title: str,
    about: str,
    unit: str,
    *queries: Query,
    width: int = THIRD,
    stacked: bool = False,
    colors: Mapping[str, str] | None = None,
    most: float | None = None,
    steps: Steps = (),
) -> timeseries.Panel:
    """Return lines over time. `most`: end of the axis; `steps`: thresholds and their colors."""
    panel = _placed(timeseries.Panel(), title, about, queries, width, 8).unit(unit).min(0)
    panel.line_width(1).fill_opacity(30 if stacked else 8).show_points(VisibilityMode.NEVER)
    panel.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.TABLE)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
    )
    panel.tooltip(
        common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if most is not None:
        panel.max(most)
    if steps:
        panel.thresholds(_thresholds(steps))
        panel.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED)
        )
    for legend, color in (colors or {}).items():
        panel.override_by_regexp(legend, [_fixed(color)])
    return panel


def stat(
    title: str,
    about: str,
    unit: str,
    query: Query,
    *,
    width: int = SMALL,
    steps: Steps = (),
    good: str = "green",
) -> stats.Panel:
    """Return the latest value with its history in the background."""
    panel = _placed(stats.Panel(), title, about, [query], width, 4).unit(unit)
    panel.thresholds(_thresholds(steps, good)).color_mode(BigValueColorMode.VALUE)
    panel.graph_mode(BigValueGraphMode.AREA)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return panel


def table(
    title: str,
    about: str,
    *queries: Query,
    width: int = WIDE,
    units: Mapping[str, str],
    transformations: Sequence[DataTransformerConfig] = (),
    bars: Sequence[str] = (),
) -> tables.Panel:
    """Return rows. `units` are by column; the columns of `bars` are shares, drawn as bars."""
    panel = _placed(tables.Panel(), title, about, queries, width, 8).unit("short")
    panel.transformations(list(transformations)).no_value("-").show_header(True)
    for column, unit in units.items():
        panel.override_by_name(column, [DynamicConfigValue("unit", unit)])
    for column in bars:
        properties = [
            DynamicConfigValue("custom.cellOptions", {"type": "gauge", "mode": "basic"}),
            DynamicConfigValue("max", 1),
            DynamicConfigValue("thresholds", _thresholds([(0.9, "orange"), (1, "red")]).build()),
        ]
        panel.override_by_name(column, properties)
    return panel


def states(
    title: str, about: str, query: Query, shown: Mapping[int, tuple[str, str]], width: int = WIDE
) -> statetimeline.Panel:
    """Return a band for each series; `shown` has text and color of each value."""
    panel = _placed(statetimeline.Panel(), title, about, [query], width, 8).unit("none")
    texts = {
        str(value): ValueMappingResult(text=text, color=color, index=value)
        for value, (text, color) in shown.items()
    }
    panel.mappings([ValueMap(texts)]).show_value(VisibilityMode.AUTO).merge_values(True)
    panel.fill_opacity(80).line_width(0).row_height(0.8)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
    return panel.legend(legend.placement(LegendPlacement.BOTTOM).show_legend(True))


def bars(
    title: str,
    about: str,
    unit: str,
    query: Query,
    *,
    x: str,
    width: int = HALF,
    stacked: bool = False,
    across: bool = False,
    transformations: Sequence[DataTransformerConfig] = (),
) -> barchart.Panel:
    """Return a bar for each row, labelled with column `x`; `across`: horizontal bars."""
    panel = _placed(barchart.Panel(), title, about, [query], width, 8).unit(unit).x_field(x)
    panel.stacking(StackingMode.NORMAL if stacked else StackingMode.NONE).min(0)
    panel.orientation(VizOrientation.HORIZONTAL if across else VizOrientation.VERTICAL)
    panel.transformations(list(transformations))
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
    return panel.legend(legend.placement(LegendPlacement.BOTTOM).show_legend(True))


def transformation(name: str, **options: object) -> DataTransformerConfig:
    """Return a transformation that Grafana applies to rows before it shows them."""
    return DataTransformerConfig(id_val=name, options=options)


def _placed(panel: P, title: str, about: str, queries: Sequence[Query], width: int, rows: int) -> P:
    source = LEDGER_SOURCE if isinstance(queries[0], Sql) else PROMETHEUS_SOURCE
    panel.title(title).description(about).datasource(source).span(width).height(rows)
    for name, query in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(query.ref_id(name))
    return panel


def _thresholds(steps: Steps, good: str = "green") -> dashboard.ThresholdsConfig:
    levels = [Threshold(value=None, color=good)]
    levels += [Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(levels)


def _fixed(color: str) -> DynamicConfigValue:
    return DynamicConfigValue("color", {"mode": FieldColorModeId.FIXED, "fixedColor": color})
