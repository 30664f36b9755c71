"""The dashboards: generated, valid for Grafana, complete and readable."""

import copy
import json
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import yaml

from deploy.grafana.generate import DASHBOARDS, generated
from tests.deploy.dashboard_schema import faults
from tests.e2e.deployment import ROOT

BOARDS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text()) for file in sorted(DASHBOARDS.glob("*.json"))
}
PROVISIONING = DASHBOARDS.parent / "provisioning"
# Grafana's current panel types; graph, singlestat and table-old are obsolete.
TYPES = {"barchart", "stat", "state-timeline", "table", "timeseries"}
# Of Grafana's packages/grafana-data/src/valueFormats/categories.ts.
UNITS = {"bytes", "ms", "none", "ops", "percentunit", "reqps", "s", "short"}
# Grafana's own variables.
BUILT_IN = {"__interval", "__rate_interval", "__range"}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


ALL_PANELS = [
    pytest.param(panel, id=f"{name}-{panel['title']}")
    for name, board in BOARDS.items()
    for panel in panels(board)
]


def test_committed_dashboards_equal_the_generated_ones() -> None:
    committed = {file.name: file.read_text() for file in DASHBOARDS.iterdir()}
    assert committed == generated(), "run: make dashboards"


@pytest.mark.parametrize("name", BOARDS)
def test_dashboard_follows_the_schema_of_grafana(name: str) -> None:
    assert faults(BOARDS[name]) == []


def _panel(board: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in board["panels"] if p["type"] == kind)
    return found


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda b: b.update(titel="x"), "dashboard.titel is not known"),
        (lambda b: b.update(editable="yes"), "dashboard.editable is 'yes', not a bool"),
        (lambda b: b.update(panels=7), "cannot be read"),
        (lambda b: b.update(graphTooltip=7), "not a DashboardCursorSync"),
        (lambda b: _panel(b, "stat").update(type="singlestat"), "unknown type 'singlestat'"),
        (lambda b: _panel(b, "stat")["gridPos"].update(w="4"), "grid_pos.w is '4', not a int"),
        (
            lambda b: _panel(b, "stat")["options"].update(colorMode="loud"),
            "not a BigValueColorMode",
        ),
        (lambda b: _panel(b, "stat")["options"].update(sparkline=True), "sparkline is not known"),
        (
            lambda b: _panel(b, "timeseries")["fieldConfig"]["defaults"]["custom"].update(
                lineWidth="thin"
            ),
            "line_width is 'thin', not a float",
        ),
        (
            lambda b: _panel(b, "timeseries")["fieldConfig"]["defaults"].update(units="s"),
            "fieldConfig.defaults.units is not known",
        ),
        (lambda b: _panel(b, "timeseries")["targets"][0].update(expr=5), "expr is 5, not a str"),
        (
            lambda b: _panel(b, "timeseries")["targets"][0].update(expression="up"),
            "targets[0].expression is not known",
        ),
        (lambda b: b["templating"]["list"][0].update(type="guess"), "not a VariableType"),
        (lambda b: b["links"][0].update(kind="x"), "kind is not known"),
    ],
)
def test_schema_check_finds_what_grafana_would_misread(
    spoil: Callable[[dict[str, Any]], None], fault: str
) -> None:
    board = copy.deepcopy(BOARDS["overview"])
    spoil(board)
    assert any(fault in found for found in faults(board)), faults(board)


@pytest.mark.parametrize("panel", ALL_PANELS)
def test_panel_has_description_unit_and_legends(panel: dict[str, Any]) -> None:
    assert panel["type"] in TYPES
    assert len(panel["description"]) > 8
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["targets"]
    for target in panel["targets"]:
        over_time = panel["datasource"]["type"] == "prometheus" and target["format"] != "table"
        assert bool(target.get("legendFormat")) == over_time


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_on_the_grid_and_do_not_overlap(name: str) -> None:
    placed = [panel["gridPos"] for panel in BOARDS[name]["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in placed)
    for one, other in combinations(placed, 2):
        distinct = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert distinct, (one, other)
    ids = [panel["id"] for panel in BOARDS[name]["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels(BOARDS[name])]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", BOARDS)
def test_queries_use_all_variables_of_the_dashboard_and_no_others(name: str) -> None:
    board = BOARDS[name]
    defined = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)(?!\w*\()", json.dumps(board["panels"])))
    assert used - BUILT_IN == defined


def test_dashboards_are_linked_by_a_common_tag() -> None:
    for board in BOARDS.values():
        (link,) = board["links"]
        assert link["type"] == "dashboards"
        assert set(link["tags"]) <= set(board["tags"])
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)


def test_tenants_dashboard_reads_the_ledger_only() -> None:
    sources = {panel["datasource"]["uid"] for panel in panels(BOARDS["tenants"])}
    assert sources == {"${ledger}"}


def test_every_metric_of_an_alert_is_on_a_dashboard() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml").read_text())
    expressions = " ".join(rule["expr"] for group in rules["groups"] for rule in group["rules"])
    metrics = set(re.findall(r"\b(?:gateway_|vllm:|model:)\w+(?::\w+)?", expressions))
    assert len(metrics) > 20
    # Burn rates have several windows, of which one hour is shown. The rate of requests only
    # excludes models without traffic.
    shown = {re.sub(r"ratio_rate\w+", "ratio_rate1h", metric) for metric in metrics}
    shown.remove("model:gateway_requests:rate1h")
    queries = json.dumps([panel["targets"] for board in BOARDS.values() for panel in panels(board)])
    assert [metric for metric in sorted(shown) if metric not in queries] == []


def test_provisioned_data_sources_have_the_types_of_the_dashboards() -> None:
    file = PROVISIONING / "datasources" / "gateway.yml"
    provisioned = {source["type"] for source in yaml.safe_load(file.read_text())["datasources"]}
    variables = [v for board in BOARDS.values() for v in board["templating"]["list"]]
    assert provisioned == {v["query"] for v in variables if v["type"] == "datasource"}
