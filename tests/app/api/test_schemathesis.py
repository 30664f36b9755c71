"""Schemathesis generates valid and invalid requests; every response must be a documented one.

Responses that need a fault, such as a dead engine, are tested in test_openapi.py.
"""

import asyncio
import json
import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from app.api.data_plane import ENDPOINTS
from app.auth import KeyFields
from tests.app.api.openapi import Document
from tests.fakes.vllm import Fake
from tests.gateway import KEY, ROOT, ROOT_KEY, Gateway, remote, running, settings_for

LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance", "response_schema_conformance", "unsupported_method",
    "allow_header_conformance",
)  # fmt: skip
SEED = 20261122
UNKNOWN = "unknown"
# Operations that stop an engine are generated for an unknown name only, and called once afterwards.
STOPPING = ("restart", "unload", "sleep")
STOPPED = (
    ("/admin/engines/{name}/restart", "demo-0"),
    ("/admin/models/{name}/sleep", "demo"),
    ("/admin/models/{name}/unload", "demo"),
)
# Needs a request in flight, of which there is none.
CANCEL = ("POST", "/admin/requests/{id}/cancel")
# Called once at the end, with a key of the permission.
LLAMA_CPP = ("/models/load", "/models/unload")
# A followed log ends only when the client disconnects.
ENDLESS = "follow"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with a process engine, which has a log, and a remote engine."""
    plenty = {"requests_per_minute": 10**9, "tokens_per_minute": 10**9, "concurrent_requests": 99}
    async with Fake() as fake:
        models = (
            {"name": "demo", "engines": [{"kind": "process", "model": "m", "sleep_level": 1}]},
            {"name": "org/far", "engines": [remote(fake.url)], "stores_responses": True},
        )
        settings = settings_for(
            *models,
            run_dir=tmp_path,
            limits={"default": plenty},
            server={"llama_cpp_models": True},
        )
        async with running(settings, launcher=LAUNCHER) as one:
            yield one


async def document_with_names(gateway: Gateway) -> dict[str, Any]:
    """Return the document with existing names as values of its parameters and of `model`.

    Generated names alone would always lead to a 404.
    """
    key, _ = await gateway.state.key_store.create(KeyFields(name="a key"))
    asked = {"model": "org/far", "input": "x", "store": True}
    stored = (await gateway.client.post("/v1/responses", json=asked)).raise_for_status().json()
    answer = await gateway.client.get("/admin/openapi.json", headers=ROOT)
    document: dict[str, Any] = answer.json()
    names = {
        "/admin/keys": ["key_id", key.id],
        "/admin/engines": ["name", "demo-0", "org-far-0"],
        "/admin/models": ["name", "demo", "org/far"],
        "/admin/owners": ["name", "a team"],
        "/v1/models": ["name", "demo", "org/far"],
        "/v1/responses": ["id", stored["id"]],
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            parameters = operation.get("parameters", [])
            operation["parameters"] = [one for one in parameters if one["name"] != ENDLESS]
            for prefix, (name, *known) in names.items():
                for one in operation["parameters"]:
                    if path.startswith(f"{prefix}/") and one["name"] == name:
                        stops = path.rsplit("/", 1)[1] in STOPPING
                        one["schema"] = {"enum": [UNKNOWN] if stops else [*known, UNKNOWN]}
            for content in operation.get("requestBody", {}).get("content", {}).values():
                if "model" in (properties := content["schema"].get("properties", {})):
                    properties["model"] = {"enum": ["demo", "org/far", UNKNOWN]}
                    if path == "/v1/audio/speech":  # no text, no speech
                        properties["input"] = {"enum": ["hello"]}
                        content["schema"]["required"] = ["model", "input"]
    return document


def statuses(document: dict[str, Any], reports: Iterable[Path]) -> dict[tuple[str, str], set[int]]:
    """Return the statuses that each operation was answered with, from reports of Schemathesis."""
    operations = [
        (method.upper(), path, re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))))
        for path, methods in document["paths"].items()
        for method in methods
    ]
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for report in reports:
        for entry in json.loads(report.read_text())["log"]["entries"]:
            address = urlsplit(entry["request"]["url"]).path
            for method, path, pattern in operations:
                if method == entry["request"]["method"] and pattern.fullmatch(address):
                    found[method, path].add(entry["response"]["status"])
    return found


async def schemathesis(
    gateway: Gateway, document: Path, report: str, key: str, *options: str
) -> str:
    """Run Schemathesis against a gateway; return its output if it found a failure, else ""."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", str(document)),
        *("--url", f"http://127.0.0.1:{gateway.port}", "--header", f"Authorization: Bearer {key}"),
        *("--checks", ",".join(CHECKS), "--generation-with-security-parameters", "false"),
        *("--seed", str(SEED), "--generation-database", "none", "--no-shrink", "--no-color"),
        *("--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off"),
        *("--request-timeout", "60"),  # for an overloaded machine
        *("--report-har-path", str(document.with_name(report)), *options),
        cwd=document.parent,  # has no configuration file of Schemathesis
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return printed.decode() if process.returncode else ""


async def check_refusals(gateway: Gateway, document: Document) -> None:
    """Send each operation without a key, and with one that is not for it; check the responses.

    Such a request is refused before anything else of it is looked at.
    """
    for path, method, operation in document.operations():
        parameters = [one for one in operation["parameters"] if one["in"] == "path"]
        address = path.format(**{one["name"]: UNKNOWN for one in parameters})
        for key in (None, KEY if path.startswith("/admin") else ROOT_KEY):
            sent = gateway.client.build_request(method, address, json={})
            del sent.headers["authorization"]
            if key is not None:
                sent.headers["authorization"] = f"Bearer {key}"
            answer = await gateway.client.send(sent)
            document.check(path, method, answer.status_code, dict(answer.headers), answer.content)


@pytest.mark.slow
@pytest.mark.usefixtures("levels_as_before")
async def test_every_response_conforms_to_the_openapi_document(
    gateway: Gateway, tmp_path: Path
) -> None:
    document = tmp_path / "openapi.json"
    known = await document_with_names(gateway)
    document.write_text(json.dumps(known))
    stateful = ("--phases", "stateful", "--max-examples", "5")
    not_stopping = ("--exclude-path-regex", f"/({'|'.join(STOPPING)})$")
    some = ("--phases", "coverage,fuzzing", "--max-examples", "5")
    admin, others = ("--include-path-regex", "^/admin"), ("--exclude-path-regex", "^/admin")
    found = await asyncio.gather(
        schemathesis(gateway, document, "a.har", ROOT_KEY, *some, *admin),
        # Sequences of requests take names from responses, so that they could stop an engine.
        schemathesis(gateway, document, "b.har", ROOT_KEY, *stateful, *not_stopping),
        schemathesis(gateway, document, "c.har", KEY, *some, *others),
    )
    assert not any(found), "\n".join(found)
    await check_refusals(gateway, Document(known))
    # No operation was left out, and each did once what it is for.
    answered = statuses(known, tmp_path.glob("*.har"))
    operations = {
        (method.upper(), path) for path, ones in known["paths"].items() for method in ones
    }
    succeeded = {one for one, codes in answered.items() if any(200 <= c < 300 for c in codes)}
    once = [path for path, _ in STOPPED] + [*LLAMA_CPP]
    none_captured = ("GET", "/admin/requests/{id}/capture")
    assert operations - succeeded == {CANCEL, none_captured, *(("POST", path) for path in once)}
    # The requests reached engines and admin routes.
    for path in ENDPOINTS:
        labels = {"endpoint": path, "status": "200"}
        assert await gateway.metric("gateway_requests_total", model="demo", **labels), path
    for status in ("200", "201", "202", "204", "400", "401", "403", "404", "405", "409"):
        labels = {"endpoint": "/admin", "status": status}
        assert await gateway.metric("gateway_requests_total", model="unknown", **labels), status
    for path, name in STOPPED:
        address = f"{path.format(name=name)}?wait=true"
        answer = await gateway.client.post(address, headers=ROOT)
        assert (path, answer.status_code) == (path, 200)
        Document(known).check(path, "POST", 200, dict(answer.headers), answer.content)
    _, made = await gateway.state.key_store.create(KeyFields(name="loads", may_load_models=True))
    headers = {"authorization": f"Bearer {made.text}"}
    for path in LLAMA_CPP:
        answer = await gateway.client.post(path, json={"model": "demo"}, headers=headers)
        assert (path, answer.status_code) == (path, 200)
        Document(known).check(path, "POST", 200, dict(answer.headers), answer.content)
