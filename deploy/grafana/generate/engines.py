"""Engines: their states, start-up facts, and vLLM's own series by engine."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.generate.board import Panels, board, choice, source
from deploy.grafana.generate.panels import HALF, graph, states, table, transformation
from deploy.grafana.generate.queries import (
    OF_ENGINE,
    OF_MODEL,
    ask,
    ask_now,
    increase,
    quantile,
    rate,
    series,
    total,
)

# Numbers for the states, since Prometheus keeps no text; a larger one is worse.
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
    "gateway_engine_max_model_len": ("Longest sequence", "suffix: tokens"),
    "gateway_engine_kv_cache_tokens": ("KV cache", "suffix: tokens"),
    "gateway_engine_weights_gib": ("Weights", "gbytes"),
    "gateway_engine_memory_gib": ("Memory", "gbytes"),
}
ENGINE = "gateway_engine"
LABEL = "{{gateway_engine}}"


def engines() -> Dashboard:
    """Return the dashboard of one or many engines."""
    return board(
        "vllm-gateway-engines",
        "vLLM gateway: engines",
        "State, start-up facts and vLLM's own metrics of the selected engines.",
        [
            source("prometheus", "Prometheus"),
            choice(
                "instance", "Gateway", "Its address.", "label_values(gateway_engine_state,instance)"
            ),
            choice(
                "model",
                "Model",
                "The name that clients send.",
                'label_values(gateway_engine_state{instance=~"$instance"},model)',
            ),
            choice(
                "engine",
                "Engine",
                "The gateway's name for it.",
                "label_values(gateway_engine_state"
                '{instance=~"$instance",model=~"$model"},gateway_engine)',
            ),
        ],
        {"State": _state(), "Memory": _memory(), "Load": _load()},
    )


def _of_engine(name: str, *matchers: str) -> str:
    return series(name, OF_ENGINE, *matchers)


def _state() -> Panels:
    state = " + ignoring (state) ".join(
        f"{number} * " + _of_engine("gateway_engine_state", OF_MODEL, f'state="{name}"')
        for number, (name, _) in STATES.items()
    )
    facts = (f"max by (model, {ENGINE}) ({_of_engine(name, OF_MODEL)})" for name in FACTS)
    info = (
        f"max by (model, {ENGINE}, version, architecture, dtype, quantization) "
        f"({_of_engine('gateway_engine_info', OF_MODEL)})"
    )
    columns = dict(
        zip(
            ("Value #B", "Value #C", "Value #D", "Value #E"),
            (title for title, _ in FACTS.values()),
            strict=True,
        )
    )
    load = "gateway_engine_load_seconds"
    wanted = series("gateway_engines_wanted", OF_MODEL)
    up = series("gateway_engine_state", OF_MODEL, 'state="ready"')
    ready = total(up, "instance", "model")
    return [
        states(
            "State",
            "Failed: run vllm-gateway logs ENGINE. A model on demand is stopped until a request "
            "needs it.",
            ask(state, LABEL),
            STATES,
        ),
        graph(
            "Restarts, ejections and scrape errors",
            "In five minutes. Restarts and ejections (its answers fail): read the engine's log. "
            "Scrape errors: its own /metrics cannot be read.",
            "short",
            *(
                ask(increase(_of_engine(name, OF_MODEL), "5m"), f"{LABEL}: {legend}")
                for legend, name in (
                    ("restarts", "gateway_engine_restarts_total"),
                    ("ejections", "gateway_engine_ejections_total"),
                    ("scrape errors", "gateway_engine_scrape_errors_total"),
                )
            ),
            ask(_of_engine("gateway_engine_ejected", OF_MODEL), f"{LABEL}: taken out"),
            steps=[(2, "red")],
        ),
        graph(
            "Load time",
            "Average time that the engines of a model took to start or wake up. Long: a slow disk "
            "or a cold cache.",
            "s",
            ask(
                total(series(f"{load}_sum", OF_MODEL), "model")
                + " / "
                + total(series(f"{load}_count", OF_MODEL), "model"),
                "{{model}}",
            ),
        ),
        graph(
            "On-demand models",
            "Their number, and unloads in five minutes by reason. Repeated room: models displace "
            "each other; raise server.memory_budget_gib.",
            "short",
            ask(total(series("gateway_model_on_demand", OF_MODEL)), "on-demand models"),
            ask(
                total(
                    increase(series("gateway_model_evictions_total", OF_MODEL), "5m"),
                    "model",
                    "reason",
                ),
                "{{model}}: {{reason}}",
            ),
        ),
        graph(
            "Engines wanted",
            "By scaling, beside those that are ready. Ready stays below: no room in the cluster or "
            "failed starts. Wanted at replicas.max while requests wait: raise it.",
            "short",
            ask(wanted, "{{model}}: wanted, {{instance}}"),
            ask(f"{ready} and on (instance, model) {wanted}", "{{model}}: ready, {{instance}}"),
            width=HALF,
        ),
        graph(
            "Discovered servers",
            "Listed by DNS, a file or Kubernetes, and serving. Serving below listed: the gateway's "
            "log says why a server is not used.",
            "short",
            ask(
                series("gateway_discovered_servers", OF_MODEL), "{{model}}: {{state}}, {{instance}}"
            ),
            ask(
                series("gateway_discovery_sources_failing", OF_MODEL),
                "{{model}}: sources that cannot be read, {{instance}}",
            ),
            width=HALF,
        ),
        table(
            "Facts",
            "Reported by each engine at its start; empty where it reported nothing.",
            ask_now(info),
            *map(ask_now, facts),
            units=dict(FACTS.values()),
            transformations=[
                transformation("merge"),
                transformation(
                    "organize",
                    excludeByName={"Time": True, "Value #A": True},
                    renameByName={"model": "Model", ENGINE: "Engine", **columns},
                ),
            ],
        ),
    ]


def _memory() -> Panels:
    hits = rate(_of_engine("vllm:prefix_cache_hits_total"), ENGINE)
    queries = rate(_of_engine("vllm:prefix_cache_queries_total"), ENGINE)
    return [
        graph(
            "KV cache usage",
            "Near 1 vLLM queues or preempts requests: see Preemptions.",
            "percentunit",
            ask(_of_engine("vllm:kv_cache_usage_perc"), LABEL),
            most=1,
            steps=[(0.95, "red")],
        ),
        graph(
            "Preemptions",
            "Requests per second that are computed again for lack of KV cache. Lower "
            "queue.max_in_flight, or give the cache more memory.",
            "ops",
            ask(rate(_of_engine("vllm:num_preemptions_total"), ENGINE), LABEL),
            steps=[(0.1, "orange")],
        ),
        graph(
            "Prefix cache hit rate",
            "Share of prompt tokens found in the cache. Low: try the routing policy prefix or "
            "session.",
            "percentunit",
            ask(f"{hits} / ({queries} > 0)", LABEL),
            most=1,
        ),
    ]


def _load() -> Panels:
    return [
        graph(
            "Requests in vLLM",
            "Running and waiting inside the engine. Many waiting: add a replica. The gateway's own "
            "queue is in Overview.",
            "short",
            *(
                ask(total(_of_engine(f"vllm:num_requests_{name}"), ENGINE), f"{LABEL}: {name}")
                for name in ("running", "waiting")
            ),
            width=HALF,
        ),
        graph(
            "Requests of other gateways",
            "In flight at an engine, as each gateway hears it. The policies count them: an engine "
            "that is full here gets no more. Empty without Redis and for managed engines.",
            "short",
            ask(
                _of_engine("gateway_engine_in_flight_elsewhere", OF_MODEL),
                f"{LABEL}, {{{{instance}}}}",
            ),
            width=HALF,
        ),
        graph(
            "Tokens",
            "Per second: generated, and prompt tokens computed.",
            "short",
            *(
                ask(rate(_of_engine(f"vllm:{name}_tokens_total"), ENGINE), f"{LABEL}: {name}")
                for name in ("generation", "prompt")
            ),
            width=HALF,
        ),
        graph(
            "Time to first token in vLLM (p95)",
            "Without the gateway's queue. High: long prompts, a full KV cache or few prefix hits.",
            "s",
            ask(quantile(0.95, "vllm:time_to_first_token_seconds", OF_ENGINE, by=(ENGINE,)), LABEL),
            width=HALF,
        ),
    ]
