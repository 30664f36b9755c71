"""Tenants: who uses what, from the ledger. Keys are never labels of a metric.

Within the ledger's retention (`usage.retention_days`) each request has a row; the sums by day,
which the panels of the last row read, are kept for good.
"""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.generate.board import Panels, board, choice, source
from deploy.grafana.generate.panels import HALF, WIDE, bars, graph, stat, table, transformation
from deploy.grafana.generate.queries import Sql

# at_ms is compared as it is kept, so that its index is used.
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
    """Return the dashboard of those who pay."""
    return board(
        "vllm-gateway-tenants",
        "vLLM gateway: tenants",
        "Tokens, requests, cost and budgets by key, from the ledger in PostgreSQL.",
        [
            source("ledger", "Ledger"),
            choice(
                "key",
                "Key",
                "By its name, or its id where the key is in the configuration.",
                f"SELECT DISTINCT {NAME} AS __text, u.key_id AS __value "
                "FROM usage_daily u LEFT JOIN api_keys k ON k.id = u.key_id ORDER BY 1",
            ),
            choice(
                "model",
                "Model",
                "By its own name, whatever alias was asked for.",
                "SELECT DISTINCT model AS __text, model AS __value FROM usage_daily ORDER BY 1",
            ),
        ],
        {
            "At a glance": _glance(),
            "Over time": _over_time(),
            "Who": _who(),
            "Budgets": _budgets(),
            "By day, UTC": _by_day(),
        },
        since="now-24h",
        refresh="1m",
    )


def _rows(columns: str, rest: str = "") -> Sql:
    return Sql(f"SELECT {columns}{REQUESTS}{rest}", table=True)


def _by_key_over_time(value: str) -> Sql:
    columns = f"{BIN}, {NAME} AS metric, {value} AS value"
    return Sql(f"SELECT {columns}{REQUESTS}GROUP BY 1, 2 ORDER BY 1", table=False)


def _glance() -> Panels:
    return [
        stat(
            "Tokens",
            "Of prompts and answers, in the time range.",
            "short",
            _rows(f"{TOKENS} AS tokens"),
        ),
        stat(
            "Requests",
            "Requests that reached an engine, in the time range.",
            "short",
            _rows("count(*) AS requests"),
        ),
        stat(
            "Cost",
            "By models[].price, in the currency that those prices are in.",
            "short",
            _rows(f"{COST} AS cost"),
        ),
        stat(
            "Keys", "With a request in the time range.", "short", _rows("count(DISTINCT u.key_id)")
        ),
        stat(
            "Failed",
            "Share of the requests that reached an engine and ended in a 5xx.",
            "percentunit",
            _rows(f"{FAILED}::float / nullif(count(*), 0) AS failed"),
            steps=[(0.005, "orange"), (0.05, "red")],
        ),
        stat(
            "Prompt from cache",
            "Share of prompt tokens that an engine found in its prefix cache.",
            "percentunit",
            _rows("sum(u.cached_tokens)::float / nullif(sum(u.prompt_tokens), 0) AS cached"),
        ),
    ]


def _over_time() -> Panels:
    return [
        graph(
            "Tokens by key",
            "Of prompts and answers that ended in each interval.",
            "short",
            _by_key_over_time(TOKENS),
            stacked=True,
        ),
        graph(
            "Requests by key",
            "That reached an engine and ended in each interval.",
            "short",
            _by_key_over_time("count(*)"),
            stacked=True,
        ),
        graph(
            "Failures by key",
            "Requests that ended in a 5xx in each interval.",
            "short",
            _by_key_over_time(FAILED),
        ),
        graph(
            "Cost by key",
            "In each interval, in the currency of models[].price.",
            "short",
            _by_key_over_time(COST),
            stacked=True,
        ),
        graph(
            "First token by key",
            "p95 of streams, in milliseconds as the ledger keeps them.",
            "ms",
            _by_key_over_time("percentile_cont(0.95) WITHIN GROUP (ORDER BY u.ttft_ms)"),
        ),
        graph(
            "Waited by key",
            "p95 of the time that requests waited for an engine, of those that had to.",
            "ms",
            _by_key_over_time("percentile_cont(0.95) WITHIN GROUP (ORDER BY u.queue_ms)"),
        ),
    ]


def _who() -> Panels:
    columns = f"""{NAME} AS "Key", max(k.owner) AS "Owner", count(*) AS "Requests",
    {TOKENS} AS "Tokens", sum(u.completion_tokens) AS "Generated", {COST} AS "Cost",
    {FAILED} AS "Failed", count(*) FILTER (WHERE u.outcome = 'disconnected') AS "Left",
    count(*) FILTER (WHERE u.estimated) AS "Estimated" """
    return [
        table(
            "Use by key",
            "In the time range. Left: the client hung up. Estimated: tokens were not told by the "
            "engine, and counted by the gateway.",
            _rows(columns, "GROUP BY 1 ORDER BY 4 DESC LIMIT 50"),
            units={"Tokens": "short", "Generated": "short", "Requests": "short"},
            width=WIDE,
        ),
        bars(
            "Top models",
            "Tokens of prompts and answers in the time range.",
            "short",
            _rows(
                f'u.model AS "Model", {TOKENS} AS "Tokens"', "GROUP BY 1 ORDER BY 2 DESC LIMIT 10"
            ),
            x="Model",
            across=True,
        ),
        bars(
            "How requests ended",
            "Completed, refused by the engine, failed, or disconnected: the client left.",
            "short",
            _rows('u.outcome AS "Outcome", count(*) AS "Requests"', "GROUP BY 1 ORDER BY 2 DESC"),
            x="Outcome",
            across=True,
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
            "Keys with a budget, now: what is used of the day's and the month's tokens (UTC), "
            "whatever the time range. At 1 requests get a 429.",
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
            "Of prompts and answers, by key, from the sums that are kept for good.",
            "short",
            Sql(f"SELECT {columns}{DAYS}GROUP BY 1, 2 ORDER BY 1", table=True),
            x="Day\\metric",
            stacked=True,
            transformations=[matrix],
        ),
        table(
            "Days",
            "Sums of the keys and models that are chosen.",
            Sql(
                'SELECT u.day AS "Day", sum(u.requests) AS "Requests", '
                f'{TOKENS} AS "Tokens", sum(u.cached_tokens) AS "Cached", {COST} AS "Cost"'
                f"{DAYS}GROUP BY 1 ORDER BY 1 DESC",
                table=True,
            ),
            units={"Requests": "short", "Tokens": "short", "Cached": "short"},
            width=HALF,
        ),
    ]
