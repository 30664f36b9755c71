"""Tenants: usage by key, from the ledger, since keys are never labels of a metric.

Single requests are kept for `usage.retention_days`; the daily sums, which the last row shows, are
kept forever.
"""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.generate.board import Panels, board, choice, source
from deploy.grafana.generate.panels import THIRD, WIDE, bars, graph, stat, table, transformation
from deploy.grafana.generate.queries import Sql

# at_ms is compared without conversion, so that its index is used.
REQUESTS = """
    FROM usage_records u LEFT JOIN api_keys k ON k.id = u.key_id
    WHERE u.at_ms BETWEEN $__unixEpochNanoFrom() / 1000000 AND $__unixEpochNanoTo() / 1000000
    AND u.key_id IN ($key) AND u.model IN ($model)
"""
DAYS = """
    FROM usage_daily u LEFT JOIN api_keys k ON k.id = u.key_id
    WHERE u.day BETWEEN left($__timeFrom(), 10) AND left($__timeTo(), 10)
    AND u.key_id IN ($key) AND u.model IN ($model)
"""
NAME = "coalesce(k.name, u.key_id)"
TOKENS = "sum(u.prompt_tokens + u.completion_tokens)"
COST = "sum(u.cost_nano) / 1e9"
BIN = "$__unixEpochGroupAlias(u.at_ms / 1000, $__interval)"
FAILED = "count(*) FILTER (WHERE u.status >= 500)"
USED = """
    SELECT u.key_id,
    sum(u.prompt_tokens + u.completion_tokens) FILTER (WHERE u.day = now.day) AS today,
    sum(u.prompt_tokens + u.completion_tokens) AS this_month
    FROM usage_daily u,
    (SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day) now
    WHERE left(u.day, 7) = left(now.day, 7)
    GROUP BY u.key_id
"""


def tenants() -> Dashboard:
    """Return the dashboard of usage, cost and budgets."""
    return board(
        "vllm-gateway-tenants",
        "vLLM gateway: tenants",
        "Tokens, requests, cost and budgets by key, from the ledger in PostgreSQL.",
        [
            source("ledger", "Ledger"),
            choice(
                "key",
                "Key",
                "Its name, or its ID if the key is in the configuration.",
                f"SELECT DISTINCT {NAME} AS __text, u.key_id AS __value "
                "FROM usage_daily u LEFT JOIN api_keys k ON k.id = u.key_id ORDER BY 1",
            ),
            choice(
                "model",
                "Model",
                "Its own name, not the alias that the client sent.",
                "SELECT DISTINCT model AS __text, model AS __value FROM usage_daily ORDER BY 1",
            ),
        ],
        {"Usage": _usage(), "Budgets": _budgets(), "By day (UTC)": _by_day()},
        since="now-24h",
        refresh="1m",
    )


def _rows(columns: str, rest: str = "") -> Sql:
    return Sql(f"SELECT {columns}{REQUESTS}{rest}", table=True)


def _by_key_over_time(value: str) -> Sql:
    columns = f"{BIN}, {NAME} AS metric, {value} AS value"
    return Sql(f"SELECT {columns}{REQUESTS}GROUP BY 1, 2 ORDER BY 1", table=False)


def _usage() -> Panels:
    columns = f"""{NAME} AS "Key", max(k.owner) AS "Owner", count(*) AS "Requests",
    {TOKENS} AS "Tokens", sum(u.completion_tokens) AS "Generated", {COST} AS "Cost",
    {FAILED} AS "Failed", count(*) FILTER (WHERE u.outcome = 'disconnected') AS "Disconnected",
    count(*) FILTER (WHERE u.estimated) AS "Estimated" """
    return [
        stat(
            "Tokens",
            "Prompt and completion tokens in the time range.",
            "short",
            _rows(f"{TOKENS} AS tokens"),
            width=THIRD,
        ),
        stat(
            "Cost",
            "By models[].price, in the currency of those prices.",
            "short",
            _rows(f"{COST} AS cost"),
            width=THIRD,
        ),
        stat(
            "Error rate",
            "Share of requests that reached an engine and ended with a 5xx.",
            "percentunit",
            _rows(f"{FAILED}::float / nullif(count(*), 0) AS failed"),
            width=THIRD,
            steps=[(0.005, "orange"), (0.05, "red")],
        ),
        graph(
            "Tokens by key",
            "Prompt and completion tokens of each interval.",
            "short",
            _by_key_over_time(TOKENS),
            stacked=True,
        ),
        graph(
            "Errors by key",
            "Requests with a 5xx in each interval. One key alone: look at its requests.",
            "short",
            _by_key_over_time(FAILED),
        ),
        bars(
            "Tokens by model",
            "The ten models with the most tokens in the time range.",
            "short",
            _rows(
                f'u.model AS "Model", {TOKENS} AS "Tokens"', "GROUP BY 1 ORDER BY 2 DESC LIMIT 10"
            ),
            x="Model",
            across=True,
            width=THIRD,
        ),
        table(
            "Usage by key",
            "In the time range. Estimated: the engine reported no usage, so the gateway estimated "
            "the tokens.",
            _rows(columns, "GROUP BY 1 ORDER BY 4 DESC LIMIT 50"),
            units={"Tokens": "short", "Generated": "short", "Requests": "short"},
            width=WIDE,
        ),
    ]


def _budgets() -> Panels:
    query = f"""SELECT k.name AS "Key", k.owner AS "Owner",
    k.daily_tokens AS "By day", coalesce(used.today, 0) AS "Today",
    coalesce(used.today, 0)::float / nullif(k.daily_tokens, 0) AS "Day's share",
    k.monthly_tokens AS "By month", coalesce(used.this_month, 0) AS "This month",
    coalesce(used.this_month, 0)::float / nullif(k.monthly_tokens, 0) AS "Month's share"
    FROM api_keys k LEFT JOIN ({USED}) used ON used.key_id = k.id
    WHERE k.deleted_ms IS NULL AND coalesce(k.daily_tokens, k.monthly_tokens) IS NOT NULL
    AND k.id IN ($key)
    ORDER BY greatest(
    coalesce(used.today, 0)::float / nullif(k.daily_tokens, 0),
    coalesce(used.this_month, 0)::float / nullif(k.monthly_tokens, 0)) DESC NULLS LAST"""
    return [
        table(
            "Budgets",
            "Current use of daily and monthly tokens (UTC), whatever the time range. At 1 requests "
            "get 429: raise the budget or tell the owner.",
            Sql(query, table=True),
            units={"Day's share": "percentunit", "Month's share": "percentunit"},
            bars=["Day's share", "Month's share"],
        ),
    ]


def _by_day() -> Panels:
    columns = f'u.day AS "Day", {NAME} AS metric, {TOKENS} AS "Tokens"'
    matrix = transformation(
        "groupingToMatrix", columnField="metric", rowField="Day", valueField="Tokens"
    )
    return [
        bars(
            "Tokens by day",
            "By key, from the daily sums, which are kept forever.",
            "short",
            Sql(f"SELECT {columns}{DAYS}GROUP BY 1, 2 ORDER BY 1", table=True),
            x="Day\\metric",
            width=WIDE,
            stacked=True,
            transformations=[matrix],
        ),
    ]
