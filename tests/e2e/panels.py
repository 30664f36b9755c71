"""Runs the queries of dashboards as Grafana does: variables and macros expanded, real servers."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import asyncpg

from tests.services import PrometheusServer

# The smallest step of a query, and the scrape interval of the test's Prometheus.
STEP_S = 5
SCRAPE_S = 1
_MACRO = re.compile(r"\$(__\w+)\(([^)]*)\)")
_LABEL_VALUES = re.compile(r"label_values\((.+),\s*(\w+)\)")


@dataclass(frozen=True)
class Window:
    """The time range of a dashboard, in seconds since 1970."""

    start: float
    end: float

    @property
    def range_s(self) -> int:
        return math.ceil(self.end - self.start)

    @property
    def variables(self) -> dict[str, str]:
        """Grafana's built-in variables; the rate interval is four scrapes, or step plus scrape."""
        rate_s = max(STEP_S + SCRAPE_S, 4 * SCRAPE_S)
        return {
            "__interval": f"{STEP_S}s",
            "__rate_interval": f"{rate_s}s",
            "__range": f"{self.range_s}s",
        }


@dataclass
class Result:
    """The result of a panel's query; `value` is the largest number, None without data."""

    board: str
    panel: str
    query: str
    rows: int = 0
    value: float | str | None = None

    def count_values(self, values: Iterator[Any]) -> None:
        """Count the values that can be drawn, and keep the largest."""
        shown = [value for value in values if _is_drawable(value)]
        self.rows = len(shown)
        numbers = [float(value) for value in shown if not isinstance(value, str)]
        self.value = max(numbers) if numbers else max(shown, default=None)


def _is_drawable(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def substitute(text: str, values: dict[str, str]) -> str:
    """Return a query with variables replaced by their values."""
    return re.sub(r"\$(\w+)(?!\w*\()", lambda found: values.get(found[1], found[0]), text)


def expand_macros(sql: str, window: Window) -> str:
    """Return a query with the macros of Grafana's PostgreSQL data source expanded.

    As in pkg/tsdb/grafana-postgresql-datasource/macros.go of Grafana 11.
    """

    def iso(seconds: float) -> str:
        return f"'{datetime.fromtimestamp(seconds, UTC).isoformat().replace('+00:00', 'Z')}'"

    def expand(found: re.Match[str]) -> str:
        name, arguments = found[1], [part.strip() for part in found[2].split(",")]
        match name:
            case "__timeFrom":
                return iso(window.start)
            case "__timeTo":
                return iso(window.end)
            case "__unixEpochNanoFrom":
                return str(int(window.start * 1e9))
            case "__unixEpochNanoTo":
                return str(int(window.end * 1e9))
            case "__unixEpochGroupAlias":
                seconds = arguments[1].removesuffix("s")
                return f'floor(({arguments[0]})/{seconds})*{seconds} AS "time"'
        raise AssertionError(f"unknown macro {name}")

    return _MACRO.sub(expand, sql)


@dataclass
class Grafana:
    """Runs the queries of dashboards with All selected in every variable."""

    prometheus: PrometheusServer
    ledger: asyncpg.Connection
    window: Window
    results: list[Result] = field(default_factory=list)

    async def open(self, name: str, board: dict[str, Any]) -> None:
        """Query the values of a dashboard's variables, then each of its panels."""
        values = dict(self.window.variables)
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                values[variable["name"]] = await self._variable(name, variable, values)
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                result = Result(name, panel["title"], target.get("rawSql") or target["expr"])
                self.results.append(result)
                if "rawSql" in target:
                    result.count_values(await self._rows(target, values))
                else:
                    result.count_values(self._samples(target, values))

    async def _variable(self, board: str, variable: dict[str, Any], values: dict[str, str]) -> str:
        result = Result(board, f"${variable['name']}", str(variable["query"]))
        self.results.append(result)
        if isinstance(variable["query"], str):
            found = [row["__value"] for row in await self.ledger.fetch(variable["query"])]
            result.count_values(iter(found))
            return ",".join("'" + value.replace("'", "''") + "'" for value in found)
        parts = _LABEL_VALUES.fullmatch(variable["query"]["query"])
        assert parts is not None, variable
        selector = substitute(parts[1], values)
        times = {"start": self.window.start, "end": self.window.end}
        found = self.prometheus.ask(f"label/{parts[2]}/values", **{"match[]": selector}, **times)
        result.count_values(iter(found))
        all_values: str = variable["allValue"]
        return all_values

    def _samples(self, target: dict[str, Any], values: dict[str, str]) -> Iterator[float]:
        expr = substitute(target["expr"], values)
        if target.get("instant"):
            for series in self.prometheus.ask("query", query=expr, time=self.window.end)["result"]:
                yield float(series["value"][1])
            return
        times = {"start": self.window.start, "end": self.window.end, "step": STEP_S}
        for series in self.prometheus.ask("query_range", query=expr, **times)["result"]:
            yield from (float(value) for _, value in series["values"])

    async def _rows(self, target: dict[str, Any], values: dict[str, str]) -> Iterator[Any]:
        sql = expand_macros(substitute(target["rawSql"], values), self.window)
        rows = await self.ledger.fetch(sql)
        if target["format"] == "time_series":
            assert not rows or {"time", "metric", "value"} == set(rows[0].keys())
            return iter([row["value"] for row in rows])
        return iter([value for row in rows for value in row.values()])

    def table(self) -> str:
        """Return a table of panels: number of values, the largest value, the query."""
        lines = [f"{'dashboard':<9} {'panel':<32} {'values':>6} {'largest':>12}  query"]
        for one in self.results:
            value = f"{one.value:.6g}" if isinstance(one.value, float) else str(one.value)[:12]
            query = " ".join(one.query.split())
            lines.append(f"{one.board:<9} {one.panel:<32} {one.rows:>6} {value:>12}  {query[:110]}")
        return "\n".join(lines)

    def queries_without_data(self) -> list[str]:
        """Return the queries without a drawable value."""
        return [f"{r.board}: {r.panel}: {r.query}" for r in self.results if not r.rows]

    def summary(self) -> str:
        """Return a line with the number of panels that have data."""
        panels: dict[tuple[str, str], bool] = {}
        for one in self.results:
            if not one.panel.startswith("$"):
                place = one.board, one.panel
                panels[place] = panels.get(place, False) or one.rows > 0
        queries = len(self.results)
        return f"{sum(panels.values())} of {len(panels)} panels returned data ({queries} queries)"
