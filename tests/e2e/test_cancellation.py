"""A client that leaves ends its generation in real vLLM.

vLLM 0.32's abort counter does not move when a client disconnects, so the proof is that nothing
runs or waits, that the count of generated tokens stands still, and that it stands far below what
was asked for. Each request asks for minutes of work, more than any wait in here: on a machine where
a process is not scheduled for ten seconds, only the hang-up can be why the work has ended.
"""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.deployment import KEY, Deployment
from tests.waiting import poll_until


def gauge(deployment: Deployment, name: str) -> float:
    """The sum of one of the engine's own series."""
    with deployment.engine() as engine:
        text = engine.get("/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def busy(deployment: Deployment) -> float:
    running = gauge(deployment, "vllm:num_requests_running")
    return running + gauge(deployment, "vllm:num_requests_waiting")


CHOICES = 512
TOKENS = 1900
# A quarter of the time that the work of one request takes on the fastest machine seen.
PATIENCE_S = 40


@contextmanager
def generation(
    deployment: Deployment, *, stream: bool, choices: int = CHOICES
) -> Iterator[socket.socket]:
    """Begin answers of TOKENS tokens each; CHOICES of them are some minutes' work."""
    body = json.dumps(
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "Hello!"}],
            "stream": stream,
            "n": choices,
            "temperature": 1.0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }
    )
    with socket.create_connection(("127.0.0.1", deployment.port), timeout=60) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        yield connection


def generated(deployment: Deployment) -> float:
    return gauge(deployment, "vllm:generation_tokens_total")


def assert_generation_ends(deployment: Deployment, before: float, asked: int) -> None:
    """See that vLLM stops, and well before it had to."""
    poll_until(lambda: busy(deployment) == 0)
    count = generated(deployment)
    time.sleep(0.5)
    assert generated(deployment) == count
    assert count - before < 0.8 * asked


def test_disconnect_in_mid_stream_ends_generation(gateway: Deployment) -> None:
    before = generated(gateway)
    with generation(gateway, stream=True) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        poll_until(lambda: generated(gateway) > before)
    assert_generation_ends(gateway, before, CHOICES * TOKENS)


def test_disconnect_of_a_plain_request_ends_generation(gateway: Deployment) -> None:
    before = generated(gateway)
    with generation(gateway, stream=False):
        poll_until(lambda: generated(gateway) > before)
    assert_generation_ends(gateway, before, CHOICES * TOKENS)


def test_disconnect_of_many_clients_leaves_nothing_running(gateway: Deployment) -> None:
    before = generated(gateway)
    with ExitStack() as clients:
        for n in range(8):
            clients.enter_context(generation(gateway, stream=n % 2 == 0))
        poll_until(lambda: generated(gateway) > before)
    assert_generation_ends(gateway, before, 8 * CHOICES * TOKENS)
    with gateway.client() as client:
        metrics = client.get("/metrics").text
    assert 'gateway_requests_in_flight{model="demo"} 0.0' in metrics
