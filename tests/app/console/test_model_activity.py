"""What the overview says of each model, by a fake clock, and of a new gateway."""

from pathlib import Path

from app.console.history import INTERVAL_S
from app.console.model_activity import ModelActivities
from app.telemetry import RequestRecord
from app.telemetry.metrics import Metrics
from app.usage import Usage
from tests.app.console.test_requests_page import end
from tests.app.console.visits import new_key, visiting
from tests.fakes.vllm import Fake
from tests.gateway import ROOT_KEY, Gateway, serving_demo


def answered(model: str, tokens: int) -> RequestRecord:
    """Return a completed request."""
    usage = Usage(1, tokens)
    return RequestRecord("r", "/v1/completions", "POST", 200, 1.0, "k", model, "e", usage=usage)


class Machine:
    """Counters and a clock that tests set, and the requests of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.metrics = Metrics()
        self.now = 1000.0
        self.activities = ModelActivities(self.metrics, gateway.state.requests, lambda: self.now)
        self.activities.read()

    def read_after(self, seconds: float = INTERVAL_S) -> None:
        self.now += seconds
        self.activities.read()


async def test_tokens_and_ttft_are_those_of_each_model_in_the_last_minute(
    gateway: Gateway,
) -> None:
    machine = Machine(gateway)
    assert machine.activities.of("a").tokens_per_s == 0
    for _ in range(3):
        machine.metrics.record(answered("a", tokens=30))
    machine.metrics.record(answered("b", tokens=15))
    machine.metrics.time_to_first_token.observe(("a",), 0.2)
    machine.read_after(30)
    a, b = machine.activities.of("a"), machine.activities.of("b")
    assert (a.tokens_per_s, b.tokens_per_s) == (3, 0.5)
    assert a.ttft_p95 is not None
    assert a.ttft_p95 <= 0.5
    assert b.ttft_p95 is None
    for _ in range(7):
        machine.read_after()
    assert machine.activities.of("a") == machine.activities.of("none")


async def test_the_last_request_that_failed_is_that_of_its_model(gateway: Gateway) -> None:
    machine = Machine(gateway)
    end(gateway, model="a")
    machine.read_after()
    assert machine.activities.of("a").last_failed is None
    end(gateway, model="a", status=503)
    newest = end(gateway, model="a", status=502)
    machine.read_after()
    view = machine.activities.of("a").last_failed
    assert view is not None
    assert (view.id, view.record.status) == (newest, 502)
    assert machine.activities.of("b").last_failed is None


async def test_first_steps_go_away_with_the_first_answer(tmp_path: Path, fake: Fake) -> None:
    async with serving_demo(tmp_path, fake.url) as gateway, visiting(gateway, ROOT_KEY) as admin:
        assert "First steps" in (page := (await admin.get("/console/overview")).text)
        assert page.count('class="done"') == 2  # a model is ready; the environment has a key
        assert 'href="/console/playground">Send the first' in page
        await gateway.chat()
        assert "First steps" not in (await admin.get("/console/overview")).text


async def test_an_auditor_gets_no_link_to_what_it_may_not_do(tmp_path: Path, fake: Fake) -> None:
    async with serving_demo(tmp_path, fake.url) as gateway, visiting(gateway, ROOT_KEY) as admin:
        made = await new_key(gateway, admin, name="reads", role="auditor")
        async with visiting(gateway, made["key"]) as auditor:
            page = (await auditor.get("/console/overview")).text
        assert "Send the first request" in page
        assert "/console/playground" not in page
