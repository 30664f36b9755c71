"""Overview: what comes in, what goes wrong, how long it takes, what is nearly full."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.generate.board import Panels, board, choice, source
from deploy.grafana.generate.panels import (
    HALF,
    LOST,
    PERCENTILES,
    STATUSES,
    THIRD,
    buckets,
    graph,
    stat,
    table,
    transformation,
)
from deploy.grafana.generate.queries import (
    OF_MODEL,
    ask,
    ask_now,
    percentiles,
    quantile,
    rate,
    series,
    total,
)

REQUESTS = series("gateway_requests_total", OF_MODEL)
FAILED = series("gateway_requests_total", OF_MODEL, 'status=~"5.."')
TOKENS = series("gateway_tokens_total", OF_MODEL)
COMPLETION = series("gateway_tokens_total", OF_MODEL, 'kind="completion"')
READY = series("gateway_engine_state", OF_MODEL, 'state="ready"')
DEPTH = series("gateway_queue_depth", OF_MODEL)
LIMIT = series("gateway_queue_limit", OF_MODEL)
GATEWAY = 'job="gateway"'
LAG_S = (0.1, "orange"), (0.25, "red")
NEARLY_FULL = (0.8, "orange"), (1, "red")


def overview() -> Dashboard:
    """Return the dashboard that is opened first."""
    return board(
        "vllm-gateway-overview",
        "vLLM gateway: overview",
        "Traffic, errors, latencies and saturation of the gateways and models that are chosen.",
        [
            source("prometheus", "Prometheus"),
            choice(
                "instance", "Gateway", "Its address.", "label_values(gateway_engine_state,instance)"
            ),
            choice(
                "model",
                "Model",
                "unknown: refused before anybody could tell which.",
                'label_values(gateway_requests_total{instance=~"$instance"},model)',
            ),
        ],
        {
            "At a glance": _glance(),
            "Traffic": _traffic(),
            "Latency": _latency(),
            "Tokens": _tokens(),
            "Queue and saturation": _saturation(),
            "Objectives": _objectives(),
            "What the gateway depends on": _dependencies(),
        },
    )


def _glance() -> Panels:
    return [
        stat("Requests", "Requests that ended, in a second.", "reqps", ask(rate(REQUESTS), "all")),
        stat(
            "Failed",
            "Share of requests that ended in a 5xx.",
            "percentunit",
            ask(f"({rate(FAILED)} or vector(0)) / {rate(REQUESTS)}", "5xx"),
            steps=[(0.005, "orange"), (0.05, "red")],
        ),
        stat(
            "First token",
            "p95 from the request's head to the first byte of a stream.",
            "s",
            ask(quantile(0.95, "gateway_time_to_first_token_seconds", OF_MODEL), "p95"),
            steps=[(2.5, "orange"), (5, "red")],
        ),
        stat("Tokens generated", "In a second.", "short", ask(rate(COMPLETION), "tokens/s")),
        stat(
            "Engines ready",
            "Engines that take requests; those of models on demand come and go.",
            "short",
            ask(total(READY), "ready"),
            steps=[(1, "green")],
            good="red",
        ),
        stat(
            "Alerts",
            "Alerts of the gateway's rules that are firing; Prometheus' page of alerts lists them.",
            "short",
            ask(
                'count(ALERTS{alertname=~"Gateway.*", alertstate="firing"}) or vector(0)', "firing"
            ),
            steps=[(1, "red")],
        ),
    ]


def _traffic() -> Panels:
    return [
        graph(
            "Requests by model",
            "Requests that ended, in a second.",
            "reqps",
            ask(rate(REQUESTS, "model"), "{{model}}"),
            stacked=True,
        ),
        graph(
            "Requests by endpoint",
            "Requests that ended, in a second; none: refused before the path was known.",
            "reqps",
            ask(rate(REQUESTS, "endpoint"), "{{endpoint}}"),
            stacked=True,
        ),
        graph(
            "Answers by status",
            "By the status the client was sent; 499: it left before its answer was whole.",
            "reqps",
            ask(rate(REQUESTS, "status"), "{{status}}"),
            stacked=True,
            colors=STATUSES,
        ),
        graph(
            "Failed by model",
            "Share of requests that ended in a 5xx. The line is the objective.",
            "percentunit",
            ask(f"{rate(FAILED, 'model')} / {rate(REQUESTS, 'model')}", "{{model}}"),
            steps=[(0.005, "red")],
        ),
        graph(
            "Refused with 429",
            "By the limit that was reached: requests, tokens, concurrency or budget.",
            "reqps",
            ask(rate(series("gateway_rate_limited_total"), "limit"), "{{limit}}"),
        ),
        graph(
            "Refused for their key",
            "Requests with 401: no key, or one that is not valid.",
            "reqps",
            ask(rate(series("gateway_auth_failures_total"), "reason"), "{{reason}}"),
            steps=[(1, "orange")],
        ),
        graph(
            "Clients that left",
            "Requests whose client hung up before its answer was whole; generation ends then.",
            "reqps",
            ask(rate(series("gateway_client_disconnects_total")), "left"),
        ),
        graph(
            "Sent to another replica",
            "Requests that were tried again, by what went wrong with the replica before.",
            "reqps",
            ask(rate(series("gateway_retries_total"), "reason"), "{{reason}}"),
        ),
        graph(
            "Sent to another model",
            "Requests that went on to a model's fallback because none of its engines could serve.",
            "reqps",
            ask(
                rate(series("gateway_fallbacks_total", OF_MODEL), "model", "fallback"),
                "{{model}} to {{fallback}}",
            ),
        ),
    ]


def _latency() -> Panels:
    return [
        graph(
            "Time to first token",
            "From the request's head to the first byte of a streamed answer's body.",
            "s",
            *percentiles("gateway_time_to_first_token_seconds", OF_MODEL),
            colors=PERCENTILES,
            steps=[(5, "red")],
        ),
        graph(
            "Between tokens",
            "Between two pieces of a streamed answer, as they leave for the client.",
            "s",
            *percentiles("gateway_inter_token_latency_seconds", OF_MODEL),
            colors=PERCENTILES,
        ),
        graph(
            "Duration",
            "From the request's head to the last byte of its answer.",
            "s",
            *percentiles("gateway_request_duration_seconds", OF_MODEL),
            colors=PERCENTILES,
        ),
        buckets(
            "Times to first token",
            "How many streams a second had their first token in so many seconds.",
            "s",
            ask(
                rate(series("gateway_time_to_first_token_seconds_bucket", OF_MODEL), "le"),
                "{{le}}",
            ),
        ),
        graph(
            "First token by model",
            "p95 from the request's head to the first byte of a streamed answer's body.",
            "s",
            ask(
                quantile(0.95, "gateway_time_to_first_token_seconds", OF_MODEL, by=("model",)),
                "{{model}}",
            ),
            steps=[(5, "red")],
        ),
        graph(
            "The gateway's own part",
            "From the request's whole body to the moment the engine is asked, waiting left out.",
            "s",
            *percentiles("gateway_overhead_seconds", OF_MODEL),
            colors=PERCENTILES,
            steps=[(0.005, "orange")],
        ),
    ]


def _tokens() -> Panels:
    return [
        graph(
            "Tokens by kind",
            "In a second, counted when a request ends; cached ones are part of the prompt's.",
            "short",
            ask(rate(TOKENS, "kind"), "{{kind}}"),
            width=HALF,
        ),
        graph(
            "Tokens generated by model",
            "In a second, counted when a request ends.",
            "short",
            ask(rate(COMPLETION, "model"), "{{model}}"),
            width=HALF,
            stacked=True,
        ),
    ]


def _saturation() -> Panels:
    cpu = rate(series("process_cpu_seconds_total", GATEWAY), "instance")
    return [
        graph(
            "In flight",
            "Requests that were admitted and have not ended.",
            "short",
            ask(total(series("gateway_requests_in_flight", OF_MODEL), "model"), "{{model}}"),
            stacked=True,
        ),
        graph(
            "Waiting",
            "Requests that wait in the gateway for an engine.",
            "short",
            ask(total(DEPTH, "model"), "{{model}}"),
            stacked=True,
        ),
        graph(
            "Waited",
            "How long requests waited for an engine, of those that had to.",
            "s",
            *percentiles("gateway_queue_wait_seconds", OF_MODEL),
            colors=PERCENTILES,
            steps=[(5, "red")],
        ),
        graph(
            "Queue in use",
            "Share of queue.max_waiting; at 1 further requests get a 503.",
            "percentunit",
            ask(f"max by (model) ({DEPTH} / ({LIMIT} > 0))", "{{model}}"),
            most=1,
            steps=NEARLY_FULL,
        ),
        graph(
            "Connections in use",
            "Share of server.max_connections; at 1 further clients get a 503.",
            "percentunit",
            ask(
                f"{series('gateway_connections')} / {series('gateway_connections_limit')}",
                "{{instance}}",
            ),
            most=1,
            steps=NEARLY_FULL,
        ),
        graph(
            "Event loop",
            "The longest that a timer was late in the last seconds: every token waits that long.",
            "s",
            ask(series("gateway_event_loop_lag_seconds"), "{{instance}}"),
            steps=LAG_S,
        ),
        graph(
            "CPU",
            "Cores that a gateway's process takes; it has one to use, engines not counted.",
            "short",
            ask(cpu, "{{instance}}"),
            steps=[(0.8, "orange"), (0.95, "red")],
        ),
        graph(
            "Memory",
            "Resident memory of a gateway's process, engines not counted.",
            "bytes",
            ask(series("process_resident_memory_bytes", GATEWAY), "{{instance}}"),
        ),
        graph(
            "Files",
            "Share of the files and sockets that a gateway's process may have open.",
            "percentunit",
            ask(
                f"{series('process_open_fds', GATEWAY)} / {series('process_max_fds', GATEWAY)}",
                "{{instance}}",
            ),
            most=1,
            steps=NEARLY_FULL,
        ),
    ]


def _objectives() -> Panels:
    # As recorded over all gateways: deploy/prometheus/rules/recording.yml.
    about = (
        "How many times faster than allowed, over an hour, by all gateways: 1 spends a month's "
        "budget in a month, 14.4 pages. "
    )
    return [
        graph(
            title,
            about + objective,
            "short",
            ask(f"model:{recorded}:ratio_rate1h{{{OF_MODEL}}} / {share}", "{{model}}"),
            steps=[(6, "orange"), (14.4, "red")],
        )
        for title, recorded, share, objective in (
            (
                "Burn rate: errors",
                "gateway_requests_errors",
                0.005,
                "Allowed: 0.5 % of requests with a 5xx.",
            ),
            (
                "Burn rate: first token",
                "gateway_time_to_first_token_slow",
                0.05,
                "Allowed: 5 % of streams whose first token takes over 5 s.",
            ),
            (
                "Burn rate: waiting",
                "gateway_queue_wait_slow",
                0.05,
                "Allowed: 5 % of requests that wait over 5 s for an engine.",
            ),
        )
    ]


def _dependencies() -> Panels:
    return [
        stat(
            "Redis",
            "1 while limits are counted in Redis; nothing where none is configured.",
            "short",
            ask(f"min({series('gateway_redis_available')})", "available"),
            steps=[(1, "green")],
            good="red",
        ),
        stat(
            "Usage records lost",
            "In the time range: the database did not take them before memory was full.",
            "short",
            ask(f"sum(increase({series('gateway_usage_records_lost_total')}[$__range]))", "lost"),
            steps=[(1, "red")],
        ),
        stat(
            "Log lines lost",
            "In the time range: the log could not be written as fast as it came, or at all.",
            "short",
            ask(f"sum(increase({series('gateway_log_lines_lost_total')}[$__range]))", "lost"),
            steps=[(1, "red")],
        ),
        stat(
            "Budgets nearly used",
            "Keys in use that have spent nine tenths of a budget or more; Tenants names them.",
            "short",
            ask(f"max by (window) ({series('gateway_budgets_nearly_used')})", "{{window}}"),
            steps=[(1, "orange")],
            names=True,
        ),
        stat(
            "Budgets used up",
            "Keys in use that get a 429 until the window ends (UTC).",
            "short",
            ask(f"max by (window) ({series('gateway_budgets_exhausted')})", "{{window}}"),
            steps=[(1, "red")],
            names=True,
        ),
        stat(
            "Reloads refused",
            "In the time range: configurations that were not, or not wholly, taken.",
            "short",
            ask(
                "sum(increase("
                + series("gateway_reloads_total", 'outcome!="done"')
                + "[$__range])) or vector(0)",
                "refused",
            ),
            steps=[(1, "orange")],
        ),
        graph(
            "Redis errors",
            "Calls that failed or took too long, in a second.",
            "ops",
            ask(rate(series("gateway_redis_errors_total"), "instance"), "{{instance}}"),
            colors=LOST,
        ),
        graph(
            "Usage records",
            "Requests that reached an engine, in a second, by how they ended.",
            "ops",
            ask(rate(series("gateway_usage_records_total"), "outcome"), "{{outcome}}"),
        ),
        graph(
            "Usage records that wait",
            "For the database; at 100,000 the new ones are lost.",
            "short",
            ask(series("gateway_usage_records_pending"), "{{instance}}"),
            steps=[(10_000, "orange"), (100_000, "red")],
        ),
        graph(
            "Ledger errors",
            "Writes of usage records that failed, in a second; they are repeated.",
            "ops",
            ask(rate(series("gateway_ledger_errors_total"), "instance"), "{{instance}}"),
            colors=LOST,
        ),
        graph(
            "Trace spans",
            "In a second: exported, or dropped because the collector was too slow or away.",
            "ops",
            ask(rate(series("gateway_trace_spans_total"), "outcome"), "{{outcome}}"),
        ),
        table(
            "Gateways",
            "What runs where, and since when.",
            ask_now(f"max by (instance, version) ({series('gateway_info')})"),
            ask_now(
                "max by (instance) (" + series("process_start_time_seconds", GATEWAY) + ") * 1000"
            ),
            width=THIRD,
            units={"Since": "dateTimeFromNow"},
            transformations=[
                transformation("merge"),
                transformation(
                    "organize",
                    excludeByName={"Time": True, "Value #A": True},
                    renameByName={
                        "instance": "Gateway",
                        "version": "Version",
                        "Value #B": "Since",
                    },
                ),
            ],
        ),
    ]
