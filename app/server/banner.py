"""The ready banner and the status line, for people."""

import contextlib
import ipaddress
import json
import os
import shlex
import sys
import threading
from collections.abc import Iterator

from app.application import Application
from app.settings import LOOPBACK, ServerSettings


def banner(application: Application, port: int, key: str | None) -> str:
    """Return the ready banner: the URL, the models, the console, and a `curl` line to paste."""
    settings, models = application.settings, application.catalogue.models
    url = f"{settings.server.scheme}://{settings.server.local_host}:{port}"
    lines = ["", f"vllm-gateway serves on {url}", *_exposure(settings.server), ""]
    for model in models:
        also = f", also as {', '.join(model.aliases)}" if model.aliases else ""
        if model.parent is not None:
            also += f", adapter of {model.parent}"
        if model.split:
            also += f", split: {', '.join(f'{t.model} {t.weight}' for t in model.split)}"
        ready = f"{model.ready} of {len(model.replicas)} engines ready"
        if model.on_demand and not model.ready:
            ready = "loads at the first request"
        elif model.discovered and not model.replicas:
            ready = "no server is known yet"
        lines.append(f"  model  {model.name}{also} ({ready})")
    lines += [f"         {failure}" for failure in engine_failures(application)]
    header = ""
    if settings.auth.enabled:
        made = "one that `vllm-gateway keys create --name NAME` makes"
        source = "one of GATEWAY_API_KEYS" if settings.api_keys else made
        lines.append(f"  key    {key or source}")
        header = f' -H "Authorization: Bearer {key or "$KEY"}"'
    if settings.console.enabled:
        lines.append(f"  page   {url}/console")
    first = next((model for model in models if model.ready), models[0])
    question = {"model": first.name, "messages": [{"role": "user", "content": "Hello!"}]}
    lines += [
        "",
        f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(question))}",
        "",
    ]
    return "\n".join(lines)


def status_line(application: Application) -> str:
    """Return the state of the engines and the requests in flight, in one line."""
    engines = application.catalogue.engines
    ready = sum(engine.state == "ready" for engine in engines)
    in_flight = application.admission.in_flight
    return f"{ready} of {len(engines)} engines ready, {in_flight} requests in flight"


def engine_failures(application: Application) -> Iterator[str]:
    """Yield a line for each engine that failed, with the reason."""
    for engine in application.catalogue.engines:
        if engine.state == "failed":
            yield f"engine {engine.name}: {engine.last_error}"


def print_without_waiting(text: str) -> None:
    """Print to standard output, without waiting for a reader that is slow or has stopped."""
    if sys.stdout is None:
        return
    data = f"{text}\n".encode()
    sys.stdout.flush()

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), data)

    # A daemon thread: a reader that has stopped must not keep the process from exiting.
    threading.Thread(target=write, name="print the banner", daemon=True).start()


def _exposure(server: ServerSettings) -> Iterator[str]:
    """Yield a warning if other machines can connect without TLS."""
    host = server.host
    if server.tls is not None:
        return
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost":
        where = "all interfaces" if host in LOOPBACK else host
        yield (
            f"listens on {where} over plain HTTP: set server.tls, put a TLS proxy in front, or set "
            "server.host: 127.0.0.1"
        )
