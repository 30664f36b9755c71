"""GET /metrics/engines with real vLLM behind it, read by Prometheus's own tools."""

import subprocess

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.deployment import Deployment

# What `promtool check metrics` exits with when a page can be read and its names could be better.
LINT = 3


def test_prometheus_reads_the_page_of_real_vllm(gateway: Deployment) -> None:
    with gateway.client() as client, gateway.engine() as engine:
        page = client.get("/metrics/engines").text
        own = engine.get("/metrics").text
    found = list(text_string_to_metric_families(page))
    samples = {(s.name, s.labels["gateway_engine"]) for family in found for s in family.samples}
    assert ("vllm:num_requests_running", "demo-0") in samples
    assert {(f.name, f.type) for f in text_string_to_metric_families(own)} <= {
        (family.name, family.type) for family in found
    }
    up = next(family for family in found if family.name == "gateway_engine_up")
    assert {s.labels["gateway_engine"]: s.value for s in up.samples}["demo-0"] == 1
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, text=True, capture_output=True, check=False
    )
    assert checked.returncode in (0, LINT), checked.stderr
