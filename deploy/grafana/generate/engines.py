"""Engines: their state, what they said of themselves, and vLLM's own series by engine."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.generate.board import Panels, board, choice, source
from deploy.grafana.generate.panels import (
    HALF,
    THIRD,
    graph,
    stat,
    states,
    table,
    transformation,
)
from deploy.grafana.generate.queries import (
    OF_ENGINE,
    OF_MODEL,
    ask,
    ask_now,
    quantile,
    rate,
    series,
    total,
)

# Numbers that stand for states, which Prometheus cannot keep as words: by what is worse.
STATES = {
    1: ("ready", "green"),
    2: ("starting", "blue"),
    3: ("draining", "light-blue"),
    4: ("asleep", "purple"),
    5: ("stopping", "semi-dark-orange"),
    6: ("stopped", "text"),
    7: ("failed", "red"),
}
FACTS = {
    "gateway_engine_max_model_len": "Longest sequence",
    "gateway_engine_kv_cache_tokens": "KV cache",
    "gateway_engine_weights_gib": "Weights",
    "gateway_engine_memory_gib": "Memory",
}
ENGINE = "gateway_engine"
LABEL = "{{gateway_engine}}"


def engines() -> Dashboard:
    """Return the dashboard of one or many engines."""
    return board(
        "vllm-gateway-engines",
        "vLLM gateway: engines",
        "State, start-up facts and vLLM's own figures of the engines that are chosen.",
        [
            source("prometheus", "Prometheus"),
            choice(
                "instance", "Gateway", "Its address.", "label_values(gateway_engine_state,instance)"
            ),
            choice(
                "model",
                "Model",
                "By the name that clients send.",
                'label_values(gateway_engine_state{instance=~"$instance"},model)',
            ),
            choice(
                "engine",
                "Engine",
                "By the gateway's name for it.",
                "label_values(gateway_engine_state"
                '{instance=~"$instance",model=~"$model"},gateway_engine)',
            ),
        ],
        {
            "State": _state(),
            "Starts": _starts(),
            "KV cache": _cache(),
            "Work": _work(),
            "Latency inside vLLM": _latency(),
        },
    )


def _of_state(state: str) -> str:
    return series("gateway_engine_state", OF_MODEL, OF_ENGINE, f'state="{state}"')


def _of_engine(name: str, *matchers: str) -> str:
    return series(name, OF_ENGINE, *matchers)


def _state() -> Panels:
    as_number = " + ignoring (state) ".join(
        f"{number} * {_of_state(state)}" for number, (state, _) in STATES.items()
    )
    facts = (f"max by (model, {ENGINE}) ({series(name, OF_MODEL, OF_ENGINE)})" for name in FACTS)
    info = (
        f"max by (model, {ENGINE}, version, architecture, dtype, quantization) "
        f"({series('gateway_engine_info', OF_MODEL, OF_ENGINE)})"
    )
    names = dict(zip(("Value #B", "Value #C", "Value #D", "Value #E"), FACTS.values(), strict=True))
    return [
        states(
            "State",
            "Where each engine is in its life; a model on demand is stopped until it is asked for.",
            ask(as_number, LABEL),
            STATES,
        ),
        table(
            "What engines said of themselves",
            "At their start, on their door and in their log; empty where an engine did not say.",
            ask_now(info),
            *map(ask_now, facts),
            units={
                "Longest sequence": "suffix: tokens",
                "KV cache": "suffix: tokens",
                "Weights": "gbytes",
                "Memory": "gbytes",
            },
            transformations=[
                transformation("merge"),
                transformation(
                    "organize",
                    excludeByName={"Time": True, "Value #A": True},
                    renameByName={"model": "Model", ENGINE: "Engine", **names},
                ),
            ],
        ),
    ]


def _starts() -> Panels:
    load = series("gateway_engine_load_seconds_bucket", OF_MODEL)
    return [
        stat(
            "Ready",
            "Engines that take requests.",
            "short",
            ask(total(_of_state("ready")), "ready"),
            steps=[(1, "green")],
            good="red",
            width=THIRD // 2,
        ),
        stat(
            "Failed",
            "Engines that were given up, or that do not answer.",
            "short",
            ask(total(_of_state("failed")), "failed"),
            steps=[(1, "red")],
            width=THIRD // 2,
        ),
        stat(
            "Restarts",
            "In the time range, after a failure.",
            "short",
            ask(
                "sum(increase("
                + series("gateway_engine_restarts_total", OF_MODEL, OF_ENGINE)
                + "[$__range]))",
                "restarts",
            ),
            steps=[(1, "orange"), (3, "red")],
            width=THIRD // 2,
        ),
        stat(
            "Models on demand",
            "Models whose engines start at a request, not with the gateway.",
            "short",
            ask(total(series("gateway_model_on_demand", OF_MODEL)), "on demand"),
            width=THIRD // 2,
        ),
        stat(
            "Longest load",
            "p95 of the time range, from the start of an engine to its first READY.",
            "s",
            ask(f"histogram_quantile(0.95, sum by (le) ({load}))", "p95"),
            width=THIRD // 2,
        ),
        stat(
            "Unreadable metrics",
            "Scrapes of engines in the time range that failed: theirs are missing below.",
            "short",
            ask(
                "sum(increase("
                + series("gateway_engine_scrape_errors_total", OF_MODEL, OF_ENGINE)
                + "[$__range])) or vector(0)",
                "errors",
            ),
            steps=[(1, "orange")],
            width=THIRD // 2,
        ),
        graph(
            "Restarts by engine",
            "In five minutes, after a failure.",
            "short",
            ask(
                f"increase({series('gateway_engine_restarts_total', OF_MODEL, OF_ENGINE)}[5m])",
                LABEL,
            ),
            steps=[(2, "red")],
        ),
        graph(
            "Time to load",
            "Seconds that the engines of a model took to start or to wake, on average so far.",
            "s",
            ask(
                total(series("gateway_engine_load_seconds_sum", OF_MODEL), "model")
                + " / "
                + total(series("gateway_engine_load_seconds_count", OF_MODEL), "model"),
                "{{model}}",
            ),
        ),
        graph(
            "Models unloaded",
            "In five minutes: idle, to make room for another, or by an operator.",
            "short",
            ask(
                "sum by (model, reason) (increase("
                + series("gateway_model_evictions_total", OF_MODEL)
                + "[5m]))",
                "{{model}}: {{reason}}",
            ),
        ),
    ]


def _cache() -> Panels:
    hits = rate(_of_engine("vllm:prefix_cache_hits_total"), ENGINE)
    queries = rate(_of_engine("vllm:prefix_cache_queries_total"), ENGINE)
    return [
        graph(
            "KV cache in use",
            "Share of its blocks; near 1 vLLM preempts requests or lets them wait.",
            "percentunit",
            ask(_of_engine("vllm:kv_cache_usage_perc"), LABEL),
            most=1,
            steps=[(0.95, "red")],
        ),
        graph(
            "Prefix cache hits",
            "Share of prompt tokens whose KV was found in the cache.",
            "percentunit",
            ask(f"{hits} / ({queries} > 0)", LABEL),
            most=1,
        ),
        graph(
            "Preemptions",
            "Requests in a second that lost their place in the KV cache and were computed again.",
            "ops",
            ask(rate(_of_engine("vllm:num_preemptions_total"), ENGINE), LABEL),
            steps=[(0.1, "orange")],
        ),
    ]


def _work() -> Panels:
    return [
        graph(
            "Running",
            "Requests in the batch that vLLM works on.",
            "short",
            ask(total(_of_engine("vllm:num_requests_running"), ENGINE), LABEL),
            width=HALF,
        ),
        graph(
            "Waiting in vLLM",
            "Requests that vLLM has and does not work on yet; the gateway's own are in Overview.",
            "short",
            ask(total(_of_engine("vllm:num_requests_waiting"), ENGINE), LABEL),
            width=HALF,
        ),
        graph(
            "Tokens generated",
            "In a second, as vLLM makes them.",
            "short",
            ask(rate(_of_engine("vllm:generation_tokens_total"), ENGINE), LABEL),
        ),
        graph(
            "Prompt tokens",
            "In a second, as vLLM reads them.",
            "short",
            ask(rate(_of_engine("vllm:prompt_tokens_total"), ENGINE), LABEL),
        ),
        graph(
            "Why answers ended",
            "Requests that ended in vLLM, in a second: stop, length, abort or error.",
            "reqps",
            ask(
                rate(_of_engine("vllm:request_success_total"), "finished_reason"),
                "{{finished_reason}}",
            ),
            stacked=True,
        ),
    ]


def _latency() -> Panels:
    parts = (
        (
            "First token, by vLLM",
            "vllm:time_to_first_token_seconds",
            "p95 inside the engine; Overview has it as clients see it, queue included.",
        ),
        (
            "Between tokens, by vLLM",
            "vllm:inter_token_latency_seconds",
            "p95 inside the engine.",
        ),
        (
            "Queue, by vLLM",
            "vllm:request_queue_time_seconds",
            "p95 of the time that requests wait inside vLLM.",
        ),
    )
    return [
        graph(title, about, "s", ask(quantile(0.95, name, OF_ENGINE, by=(ENGINE,)), LABEL))
        for title, name, about in parts
    ]
