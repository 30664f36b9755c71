"""Queries of panels: PromQL for the selected gateways and models, SQL for the ledger."""

import json
from dataclasses import dataclass
from typing import Any, Self

from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.runtime import DataqueryConfig
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.dashboard import Dashboard, DataSourceRef
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

POSTGRES = "grafana-postgresql-datasource"
# Dashboard variables, so that it can be imported where the data sources have other names.
PROMETHEUS_SOURCE = DataSourceRef(type_val="prometheus", uid="${prometheus}")
LEDGER_SOURCE = DataSourceRef(type_val=POSTGRES, uid="${ledger}")

OF_INSTANCE = 'instance=~"$instance"'
OF_MODEL = 'model=~"$model"'
OF_ENGINE = 'gateway_engine=~"$engine"'


def series(name: str, *matchers: str) -> str:
    """Return a selector of series of the selected gateways; `matchers` are PromQL."""
    selector = ", ".join((OF_INSTANCE, *matchers))
    return f"{name}{{{selector}}}"


def total(selector: str, *by: str) -> str:
    """Return a sum by labels."""
    return f"sum by ({', '.join(by)}) ({selector})" if by else f"sum({selector})"


def rate(selector: str, *by: str) -> str:
    """Return the increase per second of counters, summed by labels."""
    return total(f"rate({selector}[$__rate_interval])", *by)


def increase(selector: str, window: str) -> str:
    """Return the increase of counters in a window."""
    return f"increase({selector}[{window}])"


def quantile(share: float, name: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(series(f'{name}_bucket', *matchers), 'le', *by)})"


def ask(expr: str, legend: str) -> prometheus.Dataquery:
    """Return a query over the time range of the dashboard."""
    query = prometheus.Dataquery().expr(expr).legend_format(legend)
    return query.range().format(PromQueryFormat.TIME_SERIES)


def ask_now(expr: str, legend: str = "") -> prometheus.Dataquery:
    """Return a query of the values at the end of the time range, as rows of a table."""
    query = prometheus.Dataquery().expr(expr).legend_format(legend)
    return query.instant().format(PromQueryFormat.TABLE)


def percentiles(name: str, *matchers: str) -> list[prometheus.Dataquery]:
    """Return queries of p50, p95 and p99 of a histogram."""
    return [ask(quantile(n / 100, name, *matchers), f"p{n}") for n in (50, 95, 99)]


@dataclass
class SqlQuery(Dataquery):
    """A query of Grafana's PostgreSQL data source, for which the SDK has no model."""

    raw_sql: str
    format_val: str  # time_series or table
    ref_id: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "editorMode": "code",
            "format": self.format_val,
            "rawQuery": True,
            "rawSql": self.raw_sql,
            "refId": self.ref_id,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(data["rawSql"], data["format"], data["refId"])


def sql_variant() -> DataqueryConfig:
    """Return the SDK's configuration for reading such queries."""
    return DataqueryConfig(POSTGRES, SqlQuery.from_json)


class Sql(Builder[SqlQuery]):
    """Builds an SqlQuery as the SDK's builders build theirs."""

    def __init__(self, sql: str, *, table: bool) -> None:
        lines = (line.strip() for line in sql.strip().splitlines())
        self._query = SqlQuery("\n".join(lines), "table" if table else "time_series")

    def ref_id(self, ref_id: str) -> Self:
        """Set the query's name in its panel."""
        self._query.ref_id = ref_id
        return self

    def build(self) -> SqlQuery:
        return self._query


Query = prometheus.Dataquery | Sql


def written(board: Dashboard) -> str:
    """Return the text of a dashboard's file."""
    return json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
