"""Panels as Grafana asks for them: its variables and macros put in, on the real servers."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import asyncpg

from tests.services import PrometheusServer

# Grafana's least step of a query here, and Prometheus' interval of scrapes in the test.
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
    def texts(self) -> dict[str, str]:
        """Grafana's own variables; the rate interval is four scrapes, or one more than the step."""
        rate_s = max(STEP_S + SCRAPE_S, 4 * SCRAPE_S)
        return {
            "__interval": f"{STEP_S}s",
            "__rate_interval": f"{rate_s}s",
            "__range": f"{self.range_s}s",
        }


@dataclass
class Answer:
    """What a query of a panel returned; `value` is the largest number, None without data."""

    board: str
    panel: str
    query: str
    rows: int = 0
    value: float | str | None = None

    def take(self, values: Iterator[Any]) -> None:
        """Count the values that can be drawn."""
        shown = [value for value in values if _drawn(value)]
        self.rows = len(shown)
        numbers = [float(value) for value in shown if not isinstance(value, str)]
        self.value = max(numbers) if numbers else max(shown, default=None)


def _drawn(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def chosen(text: str, values: dict[str, str]) -> str:
    """Return a query with the values of variables in place of their names."""
    return re.sub(r"\$(\w+)(?!\w*\()", lambda found: values.get(found[1], found[0]), text)


def expanded(sql: str, window: Window) -> str:
    """Return a query with the macros of Grafana's PostgreSQL data source written out.

    As in pkg/tsdb/grafana-postgresql-datasource/macros.go of Grafana 11.
    """

    def iso(seconds: float) -> str:
        return f"'{datetime.fromtimestamp(seconds, UTC).isoformat().replace('+00:00', 'Z')}'"

    def write(found: re.Match[str]) -> str:
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
        raise AssertionError(f"the data source has no macro {name}, or the tests do not know it")

    return _MACRO.sub(write, sql)


@dataclass
class Grafana:
    """Runs the queries of dashboards as Grafana would with All chosen in every variable."""

    prometheus: PrometheusServer
    ledger: asyncpg.Connection
    window: Window
    answers: list[Answer] = field(default_factory=list)

    async def open(self, name: str, board: dict[str, Any]) -> None:
        """Ask for the values of a dashboard's variables, and for each of its panels."""
        values = dict(self.window.texts)
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                values[variable["name"]] = await self._variable(name, variable, values)
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                answer = Answer(name, panel["title"], target.get("rawSql") or target["expr"])
                self.answers.append(answer)
                if "rawSql" in target:
                    answer.take(await self._rows(target, values))
                else:
                    answer.take(self._samples(target, values))

    async def _variable(self, board: str, variable: dict[str, Any], values: dict[str, str]) -> str:
        answer = Answer(board, f"${variable['name']}", str(variable["query"]))
        self.answers.append(answer)
        if isinstance(variable["query"], str):
            found = [row["__value"] for row in await self.ledger.fetch(variable["query"])]
            answer.take(iter(found))
            return ",".join("'" + value.replace("'", "''") + "'" for value in found)
        parts = _LABEL_VALUES.fullmatch(variable["query"]["query"])
        assert parts is not None, variable
        selector = chosen(parts[1], values)
        times = {"start": self.window.start, "end": self.window.end}
        found = self.prometheus.ask(f"label/{parts[2]}/values", **{"match[]": selector}, **times)
        answer.take(iter(found))
        all_of_them: str = variable["allValue"]
        return all_of_them

    def _samples(self, target: dict[str, Any], values: dict[str, str]) -> Iterator[float]:
        expr = chosen(target["expr"], values)
        if target.get("instant"):
            for series in self.prometheus.ask("query", query=expr, time=self.window.end)["result"]:
                yield float(series["value"][1])
            return
        times = {"start": self.window.start, "end": self.window.end, "step": STEP_S}
        for series in self.prometheus.ask("query_range", query=expr, **times)["result"]:
            yield from (float(value) for _, value in series["values"])

    async def _rows(self, target: dict[str, Any], values: dict[str, str]) -> Iterator[Any]:
        sql = expanded(chosen(target["rawSql"], values), self.window)
        rows = await self.ledger.fetch(sql)
        if target["format"] == "time_series":
            assert not rows or {"time", "metric", "value"} == set(rows[0].keys())
            return iter([row["value"] for row in rows])
        return iter([value for row in rows for value in row.values()])

    def table(self) -> str:
        """Return panel, number of values and the largest of them, with the queries."""
        lines = [f"{'dashboard':<9} {'panel':<32} {'values':>6} {'largest':>12}  query"]
        for one in self.answers:
            value = f"{one.value:.6g}" if isinstance(one.value, float) else str(one.value)[:12]
            query = " ".join(one.query.split())
            lines.append(f"{one.board:<9} {one.panel:<32} {one.rows:>6} {value:>12}  {query[:110]}")
        return "\n".join(lines)

    def without_data(self) -> list[str]:
        """Return the queries that returned nothing that can be drawn."""
        return [f"{a.board}: {a.panel}: {a.query}" for a in self.answers if not a.rows]

    def summary(self) -> str:
        """Return how many panels returned data."""
        panels: dict[tuple[str, str], bool] = {}
        for one in self.answers:
            if not one.panel.startswith("$"):
                place = one.board, one.panel
                panels[place] = panels.get(place, False) or one.rows > 0
        queries = len(self.answers)
        return f"{sum(panels.values())} of {len(panels)} panels returned data ({queries} queries)"
