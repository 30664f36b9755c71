"""Two tenants on one real vLLM engine: caches, stored responses and charges are separate."""

import json
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml

from app.auth import Principal, Role
from app.request_body.cache_salts import CacheSalts, Isolation
from app.settings import NO_LIMITS
from tests.e2e.deployment import ADMIN_KEY, Deployment
from tests.e2e.test_cancellation import busy, gauge, generated
from tests.e2e.test_usage import counted, tokens
from tests.waiting import poll_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
CACHED_PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
# Longer than the engine's blocks, which are cached as a whole or not at all.
LONG_TEXT = "Once upon a time there was a lighthouse by the sea. " * 60
STEERING_FIELDS: dict[str, Any] = {
    "kv_transfer_params": {},
    "priority": 7,
    "request_id": "chosen-by-the-client",
    "stream_interval": 50,
}
SUFFIX = re.compile(r"-([0-9a-f]{16})")
WAIT_S = 40
# As much as fits into the engine's context.
LONG_ANSWER = 1900


@dataclass(frozen=True)
class Tenant:
    """A key of a gateway, and a client that presents it."""

    key_id: str
    client: httpx.Client

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the engine's answer to a request."""
        answer = self.client.post(path, json={"model": "demo", **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def cached(self, path: str, text: str, **fields: Any) -> int:
        """Return how many tokens of a prompt the engine had cached for this tenant."""
        return cached_tokens(self.ask(path, **prompt_body(path, text), **fields))


@dataclass(frozen=True)
class Tenants:
    """Three keys: `a` and `same_owner` have one owner, `b` has another."""

    a: Tenant
    same_owner: Tenant
    b: Tenant


def prompt_body(path: str, text: str) -> dict[str, Any]:
    """Return a request to an endpoint for one token after a text."""
    if path == COMPLETIONS:
        return {"prompt": text, "max_tokens": 1}
    if path == RESPONSES:
        return {"input": text, "max_output_tokens": 1, "store": False}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


def cached_tokens(answer: dict[str, Any]) -> int:
    """Return the cached tokens that an answer reports, each endpoint in its own words."""
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    return int(details["cache_read_input_tokens" if details is usage else "cached_tokens"])


@pytest.fixture(scope="module")
def tenants(gateway: Deployment) -> Iterator[Tenants]:
    def tenant(name: str, owner: str) -> Tenant:
        made = admin.post("/admin/keys", json={"name": name, "owner": owner})
        assert made.status_code == 201, made.text
        return Tenant(made.json()["id"], gateway.client(made.json()["key"]))

    with gateway.client(ADMIN_KEY) as admin:
        made = Tenants(tenant("a", "red"), tenant("a-too", "red"), tenant("b", "blue"))
    with made.a.client, made.same_owner.client, made.b.client:
        yield made


def running_engine(deployment: Deployment) -> tuple[int, int]:
    """Return the engine's process ID and how often it was restarted."""
    with deployment.client(ADMIN_KEY) as admin:
        rows = admin.get("/admin/engines").json()["data"]
    (row,) = (row for row in rows if row["name"] == "demo-0")
    return row["pid"], row["restarts"]


def reload_with(deployment: Deployment, **fields: Any) -> None:
    """Change fields of the model in the configuration and have them applied."""
    file = deployment.run_dir.parent / "gateway.yaml"
    config = yaml.safe_load(file.read_text())
    config["models"][0] |= fields
    file.write_text(yaml.safe_dump(config))
    with deployment.client(ADMIN_KEY) as admin:
        done = admin.post("/admin/reload", json={})
    assert done.status_code == 200, done.text
    assert done.json()["ok"], done.text


@contextmanager
def isolated_by(deployment: Deployment, isolation: Isolation) -> Iterator[None]:
    """Have the body run under an isolation, on the engine that runs already."""
    before = running_engine(deployment)
    reload_with(deployment, isolation=isolation)
    try:
        assert running_engine(deployment) == before
        yield
    finally:
        reload_with(deployment, isolation="key")
    assert running_engine(deployment) == before


def cache_table(tenants: Tenants, label: str, show: Callable[[str], None]) -> list[list[int]]:
    """Return the cached tokens of A, A again, A's owner's other key and B, for each endpoint."""
    lines = [f"{'cached tokens, isolation: ' + label:<36}{'A':>6}{'A':>6}{'owner':>7}{'B':>6}"]
    rows = []
    for path in CACHED_PATHS:
        text = f"{label} {path} {LONG_TEXT}"
        asked = tenants.a, tenants.a, tenants.same_owner, tenants.b
        first, again, owner, other = row = [tenant.cached(path, text) for tenant in asked]
        lines.append(f"{path:<36}{first:>6}{again:>6}{owner:>7}{other:>6}")
        rows.append(row)
    show("\n".join(lines))
    return rows


class TestPrefixCache:
    def test_each_key_has_its_own_by_default(
        self, tenants: Tenants, show: Callable[[str], None]
    ) -> None:
        for first, again, owner, other in cache_table(tenants, "key", show):
            assert (first, owner, other) == (0, 0, 0)
            assert again > 0

    def test_keys_of_one_owner_share_it_where_isolation_is_owner(
        self, gateway: Deployment, tenants: Tenants, show: Callable[[str], None]
    ) -> None:
        with isolated_by(gateway, "owner"):
            for first, again, owner, other in cache_table(tenants, "owner", show):
                assert (first, other) == (0, 0)
                assert again == owner > 0

    def test_all_keys_share_it_where_isolation_is_none(
        self, gateway: Deployment, tenants: Tenants, show: Callable[[str], None]
    ) -> None:
        with isolated_by(gateway, "none"):
            for first, again, owner, other in cache_table(tenants, "none", show):
                assert first == 0
                assert again == owner == other > 0

    @pytest.mark.parametrize("path", CACHED_PATHS)
    def test_another_keys_salt_does_not_open_its_cache(
        self, gateway: Deployment, tenants: Tenants, path: str
    ) -> None:
        text = f"salt {path} {LONG_TEXT}"
        salt = salt_of(gateway, tenants.a)
        assert tenants.a.cached(path, text) == 0
        assert tenants.b.cached(path, text, cache_salt=salt) == 0
        # Past the gateway the salt does open it, so it is the right one.
        with gateway.engine() as engine:
            assert Tenant("", engine).cached(path, text, cache_salt=salt) > 0

    @pytest.mark.parametrize("path", CACHED_PATHS)
    def test_keys_that_agree_on_a_salt_share_nothing(self, tenants: Tenants, path: str) -> None:
        text = f"agreed {path} {LONG_TEXT}"
        assert tenants.a.cached(path, text, cache_salt="agreed") == 0
        assert tenants.b.cached(path, text, cache_salt="agreed") == 0
        assert tenants.a.cached(path, text, cache_salt="changed") > 0


def salt_of(deployment: Deployment, tenant: Tenant) -> str:
    """Return the salt that the gateway sets for a key, from the secret in its database."""
    with closing(sqlite3.connect(deployment.run_dir.parent / "gateway.db")) as database:
        (secret,) = database.execute(
            "SELECT value FROM secrets WHERE name = 'cache_salt'"
        ).fetchone()
    principal = Principal(tenant.key_id, Role.CLIENT, NO_LIMITS)
    salt = CacheSalts(lambda: secret).salt("key", principal)
    assert salt
    return str(json.loads(salt))


class TestSteeringFields:
    @pytest.mark.parametrize("path", CACHED_PATHS)
    def test_steering_fields_do_not_change_an_answer(self, tenants: Tenants, path: str) -> None:
        body = {**prompt_body(path, "Tell me a story about a lighthouse."), "temperature": 0}
        body |= {name: 30 for name in body if name.startswith("max_")}
        plain = tenants.a.ask(path, **body)
        steered = tenants.a.ask(path, **body, **STEERING_FIELDS)
        assert STEERING_FIELDS["request_id"] not in json.dumps(steered)
        assert without_ids(steered) == without_ids(plain)

    def test_stream_interval_does_not_bundle_a_streams_tokens(
        self, gateway: Deployment, tenants: Tenants
    ) -> None:
        body = {**prompt_body(CHAT, "Tell me a story about a lighthouse."), "max_tokens": 60}
        body |= {"model": "demo", "stream": True, "temperature": 0, "ignore_eos": True}

        def events(client: httpx.Client, **fields: Any) -> int:
            return client.post(CHAT, json={**body, **fields}).text.count("data: {")

        one_by_one = events(tenants.a.client, stream_interval=50)
        # Past the gateway the field does bundle tokens.
        with gateway.engine() as engine:
            assert one_by_one > 5 * events(engine, stream_interval=50)

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
    def test_answer_id_contains_the_request_id_and_a_random_suffix(
        self, tenants: Tenants, path: str
    ) -> None:
        body = {"model": "demo", **prompt_body(path, "Hello!"), "request_id": "chosen"}
        suffixes = set()
        for _ in range(2):
            answer = tenants.a.client.post(path, json=body, headers={"x-request-id": "mine-1"})
            assert answer.headers["x-request-id"] == "mine-1"
            kind, _, rest = answer.json()["id"].partition("-mine-1")
            assert kind in ("chatcmpl", "cmpl")
            suffix = SUFFIX.match(rest)
            assert suffix, answer.json()["id"]
            suffixes.add(suffix[1])
        assert len(suffixes) == 2

    def test_a_client_does_not_choose_the_id_of_a_response(
        self, gateway: Deployment, tenants: Tenants
    ) -> None:
        body = {**prompt_body(RESPONSES, "Hello!"), "request_id": "resp_chosen"}
        assert tenants.a.ask(RESPONSES, **body)["id"] != "resp_chosen"
        # Past the gateway the field does name it.
        with gateway.engine() as engine:
            assert Tenant("", engine).ask(RESPONSES, **body)["id"] == "resp_chosen"


def without_ids(value: Any) -> Any:
    """Return an answer without what differs from one to the next, such as cached tokens."""
    if isinstance(value, dict):
        return {
            name: without_ids(inner)
            for name, inner in value.items()
            if name not in ("id", "created", "created_at", "completed_at", "usage")
        }
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


class TestStoredResponses:
    def test_key_reads_and_continues_its_response(self, tenants: Tenants) -> None:
        one = tenants.a.ask(RESPONSES, input="Hello!", max_output_tokens=20, store=True)
        read = tenants.a.client.get(f"{RESPONSES}/{one['id']}")
        assert read.status_code == 200
        assert read.json()["output"] == one["output"]
        continued = tenants.a.ask(
            RESPONSES, input="And now?", max_output_tokens=20, previous_response_id=one["id"]
        )
        assert continued["id"] != one["id"]
        assert continued["previous_response_id"] == one["id"]
        alone = tenants.a.ask(RESPONSES, input="And now?", max_output_tokens=20)
        assert continued["usage"]["input_tokens"] > alone["usage"]["input_tokens"]

    def test_response_of_another_key_is_not_found(self, tenants: Tenants) -> None:
        one = tenants.a.ask(RESPONSES, input="Hello!", max_output_tokens=20, store=True)["id"]
        assert_hidden(tenants.b, one)
        assert_hidden(tenants.same_owner, one)
        assert tenants.a.client.get(f"{RESPONSES}/{one}").status_code == 200

    def test_background_response_belongs_to_its_key_and_is_charged_as_reserved(
        self, gateway: Deployment, tenants: Tenants, show: Callable[[str], None]
    ) -> None:
        before, computed = tokens(gateway), generated(gateway)
        asked = 400
        queued = tenants.a.ask(
            RESPONSES,
            input="Tell me a story about a lighthouse.",
            max_output_tokens=asked,
            background=True,
        )
        assert queued["status"] in ("queued", "in_progress")
        path = f"{RESPONSES}/{queued['id']}"
        assert_hidden(tenants.b, queued["id"])
        done = until_completed(tenants.a.client, path)
        assert_hidden(tenants.b, queued["id"])
        assert done["output"]
        charged = tokens(gateway)[1] - before[1]
        took = generated(gateway) - computed
        assert charged == asked >= took == done["usage"]["output_tokens"] > 0
        show(f"background response: charged {charged:g}, generated {took:g} tokens")

    def test_cancel_of_a_background_response_ends_its_generation(
        self, gateway: Deployment, tenants: Tenants
    ) -> None:
        before = generated(gateway)
        body = {"input": "Hello!", "max_output_tokens": LONG_ANSWER, "ignore_eos": True}
        one = tenants.a.ask(RESPONSES, **body, background=True)["id"]
        canceled = tenants.a.client.post(f"{RESPONSES}/{one}/cancel")
        assert canceled.status_code == 200, canceled.text
        assert canceled.json()["status"] == "cancelled"
        assert_hidden(tenants.b, one)
        poll_until(lambda: busy(gateway) == 0, WAIT_S)
        assert generated(gateway) - before < 0.8 * LONG_ANSWER


def assert_hidden(tenant: Tenant, response_id: str) -> None:
    """See that a key gets 404 for everything that can be done with a response."""
    path = f"{RESPONSES}/{response_id}"
    continued = {"model": "demo", "input": "And?", "previous_response_id": response_id}
    for answer in (
        tenant.client.get(path),
        tenant.client.post(f"{path}/cancel"),
        tenant.client.post(RESPONSES, json=continued),
        tenant.client.post(RESPONSES, json={**continued, "background": True}),
    ):
        assert answer.status_code == 404, answer.text


def until_completed(client: httpx.Client, path: str) -> dict[str, Any]:
    """Return a response when the engine has completed it."""
    deadline = time.monotonic() + WAIT_S
    while (found := client.get(path).json())["status"] in ("queued", "in_progress"):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    assert found["status"] in ("completed", "incomplete"), found
    answer: dict[str, Any] = found
    return answer


def test_image_address_is_refused_before_the_engine_sees_it(
    gateway: Deployment, tenants: Tenants
) -> None:
    before = gauge(gateway, "http_requests_total")
    image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/"}}
    content = [{"type": "text", "text": "What is this?"}, image]
    body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    refused = tenants.a.client.post(CHAT, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "media_not_allowed"
    assert gauge(gateway, "http_requests_total") == before


class TestLeaving:
    """A client that leaves early is charged for what the engine did for it."""

    def test_plain_request_left_early_is_charged_at_least_what_was_generated(
        self, gateway: Deployment, tenants: Tenants, show: Callable[[str], None]
    ) -> None:
        before = generated(gateway)
        with charge(gateway) as charged, unfinished(tenants.a.client, n=16, temperature=1.0):
            poll_until(lambda: generated(gateway) > before, WAIT_S)
        show(f"plain request left early: {charged}")
        assert charged.generated <= charged.completion == 16 * LONG_ANSWER
        assert charged.generated < 0.8 * charged.completion, "it was not left early"

    def test_stream_left_early_is_charged_at_least_what_was_read(
        self, gateway: Deployment, tenants: Tenants, show: Callable[[str], None]
    ) -> None:
        with (
            charge(gateway) as charged,
            unfinished(tenants.a.client, stream=True) as connection,
        ):
            seen = b""
            while seen.count(b"data: {") <= 50:
                seen += connection.recv(65536)
        show(f"stream left early: {charged}")
        # By events and, where the engine bundles tokens, by bytes: that can be a little too much.
        assert seen.count(b"data: {") - 1 <= charged.completion < 2 * charged.generated


@contextmanager
def unfinished(client: httpx.Client, **fields: Any) -> Iterator[socket.socket]:
    """Ask for long answers on a connection of its own, and leave when the body ends."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": LONG_ANSWER,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    request = client.build_request("POST", CHAT, json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    url = request.url
    with socket.create_connection((url.host, url.port), timeout=WAIT_S) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        yield connection


@dataclass
class Charged:
    """Tokens that a request was charged, and that the engine generated for it."""

    completion: float = 0
    generated: float = 0

    def __str__(self) -> str:
        return f"charged {self.completion:g}, generated {self.generated:g} tokens"


@contextmanager
def charge(deployment: Deployment) -> Iterator[Charged]:
    """Have the body leave a request early; what it cost is known when the engine has ended it."""
    records = "gateway_usage_records_total"

    def left() -> float:
        return counted(deployment, records, outcome="disconnected")

    charged = Charged()
    before, charged_before, generated_before = (
        left(),
        tokens(deployment)[1],
        generated(deployment),
    )
    yield charged
    poll_until(lambda: left() > before and busy(deployment) == 0, WAIT_S)
    charged.completion = tokens(deployment)[1] - charged_before
    charged.generated = generated(deployment) - generated_before
