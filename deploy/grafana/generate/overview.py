"""Overview: traffic, errors, latency, and what will be full or fail next."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.generate.board import Panels, board, choice, source
from deploy.grafana.generate.panels import (
    HALF,
    PERCENTILES,
    STATUSES,
    THIRD,
    graph,
    stat,
    table,
    transformation,
)
from deploy.grafana.generate.queries import (
    OF_MODEL,
    ask,
    ask_now,
    increase,
    percentiles,
    quantile,
    rate,
    series,
    total,
)

REQUESTS = series("gateway_requests_total", OF_MODEL)
FAILED = series("gateway_requests_total", OF_MODEL, 'status=~"5.."')
TTFT = "gateway_time_to_first_token_seconds"
GATEWAY = 'job="gateway"'
NEARLY_FULL = (0.8, "orange"), (1, "red")


def overview() -> Dashboard:
    """Return the dashboard that is opened first."""
    return board(
        "vllm-gateway-overview",
        "vLLM gateway: overview",
        "Traffic, errors, latency and capacity of the selected gateways and models.",
        [
            source("prometheus", "Prometheus"),
            choice(
                "instance", "Gateway", "Its address.", "label_values(gateway_engine_state,instance)"
            ),
            choice(
                "model",
                "Model",
                "unknown: requests refused before their model was known.",
                'label_values(gateway_requests_total{instance=~"$instance"},model)',
            ),
        ],
        {
            "Status": _status(),
            "Traffic and errors": _traffic(),
            "Latency": _latency(),
            "Capacity": _capacity(),
            "Dependencies": _dependencies(),
        },
    )


def _status() -> Panels:
    return [
        stat(
            "Requests", "Completed requests per second.", "reqps", ask(rate(REQUESTS), "requests")
        ),
        stat(
            "Error rate",
            "Share of requests that ended with a 5xx. If it is red, read Responses by status.",
            "percentunit",
            ask(f"({rate(FAILED)} or vector(0)) / {rate(REQUESTS)}", "5xx"),
            steps=[(0.005, "orange"), (0.05, "red")],
        ),
        stat(
            "First token (p95)",
            "Time to first token of streams. If it is red, compare it with Queue wait.",
            "s",
            ask(quantile(0.95, TTFT, OF_MODEL), "p95"),
            steps=[(2.5, "orange"), (5, "red")],
        ),
        stat(
            "Engines ready",
            "Engines that accept requests. If it is 0, open the Engines dashboard.",
            "short",
            ask(total(series("gateway_engine_state", OF_MODEL, 'state="ready"')), "ready"),
            steps=[(1, "green")],
            good="red",
        ),
        stat(
            "Redis",
            "1: limits are counted in Redis. 0: limits.redis_unavailable applies; restore Redis. "
            "Empty without Redis.",
            "short",
            ask(f"min({series('gateway_redis_available')})", "available"),
            steps=[(1, "green")],
            good="red",
        ),
        stat(
            "Alerts",
            "Firing alerts of the gateway's rules. Prometheus' alerts page lists them.",
            "short",
            ask(
                'count(ALERTS{alertname=~"Gateway.*", alertstate="firing"}) or vector(0)', "firing"
            ),
            steps=[(1, "red")],
        ),
    ]


def _traffic() -> Panels:
    # Recorded over all gateways: deploy/prometheus/rules/recording.yml.
    objectives = (
        ("errors", "gateway_requests_errors", 0.005),
        ("first token", "gateway_time_to_first_token_slow", 0.05),
        ("queue wait", "gateway_queue_wait_slow", 0.05),
    )
    return [
        graph(
            "Requests by model",
            "Completed requests per second.",
            "reqps",
            ask(rate(REQUESTS, "model"), "{{model}}"),
            stacked=True,
        ),
        graph(
            "Responses by status",
            "502 and 504: read the engines' logs. 503: queue full or no engine. 429: limits. 401: "
            "keys. 499: the client disconnected.",
            "reqps",
            ask(rate(REQUESTS, "status"), "{{status}}"),
            stacked=True,
            colors=STATUSES,
        ),
        graph(
            "Error budget burn rate",
            "1 spends a month's error budget in a month; above 14.4 an alert fires. Over one hour, "
            "all gateways.",
            "short",
            *(
                ask(
                    f"model:{recorded}:ratio_rate1h{{{OF_MODEL}}} / {share}",
                    f"{{{{model}}}}: {name}",
                )
                for name, recorded, share in objectives
            ),
            steps=[(6, "orange"), (14.4, "red")],
        ),
        graph(
            "Refused requests",
            "By exceeded limit (429), or key missing or invalid (401). Raise the key's limits, or "
            "find the client with the old key.",
            "reqps",
            ask(rate(series("gateway_rate_limited_total"), "limit"), "429: {{limit}}"),
            ask(rate(series("gateway_auth_failures_total"), "reason"), "401: {{reason}}"),
            width=HALF,
            steps=[(1, "orange")],
        ),
        graph(
            "Retries and fallbacks",
            "Requests sent to another replica, by error, or to a fallback model: an engine is "
            "failing; open the Engines dashboard.",
            "reqps",
            ask(rate(series("gateway_retries_total"), "reason"), "{{reason}}"),
            ask(
                rate(series("gateway_fallbacks_total", OF_MODEL), "model", "fallback"),
                "{{model}} to {{fallback}}",
            ),
            width=HALF,
        ),
        graph(
            "Interrupted streams",
            "In five minutes, by outcome. Any: an engine died, stalled or was drained. Not "
            "continued: the client got an error event; the outcome is the reason.",
            "short",
            ask(
                total(increase(series("gateway_continuations_total", OF_MODEL), "5m"), "outcome")
                + " > 0",
                "{{outcome}}",
            ),
            width=HALF,
            stacked=True,
            colors={"^continued": "green", "^disconnected": "blue"},
        ),
        graph(
            "Continuation gap",
            "Time that a continued stream stood still. Tens of seconds: no other replica is ready, "
            "and streams wait for a restart.",
            "s",
            *percentiles("gateway_continuation_gap_seconds", OF_MODEL),
            width=HALF,
            colors=PERCENTILES,
            steps=[(10, "orange")],
        ),
    ]


def _latency() -> Panels:
    return [
        graph(
            title,
            about,
            "s",
            *percentiles(name, OF_MODEL),
            width=HALF,
            colors=PERCENTILES,
            steps=steps,
        )
        for title, about, name, steps in (
            (
                "Time to first token",
                "If it rises with Queue wait, add engines; if alone, the engines are slow.",
                TTFT,
                [(5, "red")],
            ),
            (
                "Queue wait",
                "Of requests that had to wait for an engine: add replicas, or raise "
                "queue.max_in_flight if the engines have room.",
                "gateway_queue_wait_seconds",
                [(5, "red")],
            ),
            (
                "Inter-token latency",
                "Time between two chunks of a stream. High: the batch is too large for the device, "
                "or the event loop is late.",
                "gateway_inter_token_latency_seconds",
                [],
            ),
            (
                "Gateway overhead",
                "The gateway's own time, queueing excluded. Above 5 ms: Redis is slow, or the "
                "event loop is late.",
                "gateway_overhead_seconds",
                [(0.005, "orange")],
            ),
        )
    ]


def _capacity() -> Panels:
    depth, limit = (
        series(f"gateway_queue_{name}", OF_MODEL) for name in ("depth", "limit")
    )  # fmt: skip
    return [
        graph(
            "Requests in flight",
            "Admitted requests. At queue.max_in_flight further ones wait.",
            "short",
            ask(total(series("gateway_requests_in_flight", OF_MODEL), "model"), "{{model}}"),
            stacked=True,
        ),
        graph(
            "Demand",
            "Requests in flight and waiting. More than the engines take at once for minutes: add "
            "engines; an autoscaler goes by this.",
            "short",
            ask(
                total(series("gateway_requests_in_flight", OF_MODEL), "model")
                + " + "
                + total(depth, "model"),
                "{{model}}",
            ),
            ask(
                series("gateway_engine_concurrency_target", OF_MODEL),
                "{{model}}: {{gateway_engine}} takes, {{instance}}",
            ),
            stacked=True,
        ),
        graph(
            "Queue usage",
            "Share of queue.max_waiting. At 1 requests get 503: add a replica.",
            "percentunit",
            ask(f"max by (model) ({depth} / ({limit} > 0))", "{{model}}"),
            most=1,
            steps=NEARLY_FULL,
        ),
        graph(
            "Queue fairness",
            "Jain's index of what waiting keys were served, by weight; 1 is equal. Below 0.8 for "
            "minutes: one key's requests are as large as all others'. Empty unless two keys wait.",
            "short",
            ask(f"min by (model) ({series('gateway_queue_fairness', OF_MODEL)})", "{{model}}"),
            most=1,
        ),
        graph(
            "Connection usage",
            "Share of server.max_connections. At 1 new clients get 503: raise it or add a gateway.",
            "percentunit",
            ask(
                f"{series('gateway_connections')} / {series('gateway_connections_limit')}",
                "{{instance}}",
            ),
            most=1,
            steps=NEARLY_FULL,
        ),
        graph(
            "Certificate",
            "Time until the certificate of server.tls expires. Below two weeks: nothing renews it.",
            "s",
            ask(
                f"{series('gateway_tls_certificate_expiry_timestamp_seconds')} - time()",
                "{{instance}}",
            ),
        ),
        graph(
            "Event loop lag",
            "Longest delay of a timer; every stream waits as long. Compare it with CPU usage.",
            "s",
            ask(series("gateway_event_loop_lag_seconds"), "{{instance}}"),
            steps=[(0.1, "orange"), (0.25, "red")],
        ),
        graph(
            "CPU usage",
            "Cores used by the gateway's process, engines excluded. It can use one: near 1, add a "
            "gateway.",
            "short",
            ask(rate(series("process_cpu_seconds_total", GATEWAY), "instance"), "{{instance}}"),
            steps=[(0.8, "orange"), (0.95, "red")],
        ),
    ]


def _dependencies() -> Panels:
    return [
        graph(
            "Pending usage records",
            "Not yet in the database. At 100,000 new records are lost: restore the database.",
            "short",
            ask(series("gateway_usage_records_pending"), "{{instance}}"),
            steps=[(10_000, "orange"), (100_000, "red")],
        ),
        graph(
            "Failed calls",
            "Redis calls and ledger writes that failed, per second. The gateway's log has the "
            "reason.",
            "ops",
            ask(rate(series("gateway_redis_errors_total"), "instance"), "Redis: {{instance}}"),
            ask(rate(series("gateway_ledger_errors_total"), "instance"), "ledger: {{instance}}"),
        ),
        graph(
            "Load sharing",
            "Gateways that each gateway hears, itself included; and 1 while reports arrive. Lines "
            "that differ: one is cut off, or its engines have other URLs. Empty without Redis.",
            "short",
            ask(series("gateway_load_sharing_gateways"), "gateways: {{instance}}"),
            ask(series("gateway_load_sharing_available"), "reports arrive: {{instance}}"),
        ),
        graph(
            "Lost data",
            "In five minutes. Usage records: the database; log lines: the log's disk or reader; "
            "trace spans: the collector; backups: those that failed; captures: not stored.",
            "short",
            *(
                ask(total(increase(series(name, *matchers), "5m")), legend)
                for legend, name, matchers in (
                    ("usage records", "gateway_usage_records_lost_total", ()),
                    ("log lines", "gateway_log_lines_lost_total", ()),
                    ("trace spans", "gateway_trace_spans_total", ('outcome="dropped"',)),
                    ("backups", "gateway_backups_total", ('outcome="failed"',)),
                    ("captures", "gateway_captures_total", ('outcome!="stored"',)),
                )
            ),
        ),
        graph(
            "Budgets",
            "Active keys and owners near (90 %) or over a budget. Tenants names them.",
            "short",
            ask(f"max by (window) ({series('gateway_budgets_nearly_used')})", "near: {{window}}"),
            ask(f"max by (window) ({series('gateway_budgets_exhausted')})", "over: {{window}}"),
        ),
        stat(
            "Failed reloads",
            "In the time range. Run vllm-gateway check on the configuration.",
            "short",
            ask(
                total(increase(series("gateway_reloads_total", 'outcome!="done"'), "$__range"))
                + " or vector(0)",
                "failed",
            ),
            steps=[(1, "orange")],
            width=THIRD,
        ),
        table(
            "Gateways",
            "Version and start time of each gateway.",
            ask_now(f"max by (instance, version) ({series('gateway_info')})"),
            ask_now(
                "max by (instance) (" + series("process_start_time_seconds", GATEWAY) + ") * 1000"
            ),
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
