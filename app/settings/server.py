"""The section `server`: where the gateway listens, its bounds, and the engines' shared limits."""

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, IPvAnyNetwork, model_validator

from app.settings.tls import TlsSettings
from engines.spec import SpecModel

# Wildcard addresses, and the address that reaches each from the same machine.
LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
_ROOT_PATH = re.compile("(/[A-Za-z0-9._~-]+)*/?")
# Where paths of the gateway's own begin that have more than one part.
_OWN_PATHS = frozenset({"admin", "console", "metrics", "models", "v1"})


def _check_root_path(path: str) -> str:
    if not _ROOT_PATH.fullmatch(path):
        raise ValueError("must be a path such as /llm")
    if path.strip("/").partition("/")[0] in _OWN_PATHS:
        raise ValueError(f"{path} is where paths of the gateway itself begin: choose another one")
    return path.rstrip("/")


def _check_network(network: IPvAnyNetwork) -> IPvAnyNetwork:
    if network.prefixlen == 0:
        raise ValueError("name the proxies: here any client could claim any address")
    return network


class ServerSettings(SpecModel):
    """Client connections, request bodies, and the engines on this machine."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. 0.0.0.0 accepts connections from other machines over "
        "plain HTTP: set server.tls, or put a TLS proxy in front.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free port.")
    tls: TlsSettings | None = Field(
        None, description="HTTPS by the gateway itself. Default: plain HTTP."
    )
    root_path: Annotated[str, AfterValidator(_check_root_path)] = Field(
        "",
        description="Path under which a proxy serves the gateway, such as /llm: the console's "
        "links, cookies and redirects, and the OpenAPI document have it. The proxy may remove it "
        "from requests or leave it.",
    )
    trusted_proxies: tuple[Annotated[IPvAnyNetwork, AfterValidator(_check_network)], ...] = Field(
        (),
        description="Addresses and networks of proxies in front. The client's address and scheme "
        "are read from their X-Forwarded-For and X-Forwarded-Proto, and from no one else's. "
        "Default: these headers are ignored.",
    )
    max_body_bytes: int = Field(
        33554432,
        ge=1,
        description="Maximum size of a request body, in bytes. Larger requests are refused with "
        "413.",
    )
    body_memory_bytes: int = Field(
        268435456,
        ge=1,
        description="Memory for the request bodies of all clients, in bytes. While it is used up, "
        "large requests are refused with 503. The keys of one owner get at most as much as is free "
        "for others.",
    )
    body_memory_per_key_bytes: int = Field(
        67108864,
        ge=1,
        description="Memory for the request bodies of one key, in bytes. While it is used up, "
        "large requests are refused with 429.",
    )
    body_memory_per_peer_bytes: int = Field(
        134217728,
        ge=1,
        description="Memory for the request bodies from one client address, in bytes. Behind a "
        "proxy that is not in trusted_proxies, set it to body_memory_bytes.",
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        description="Time for requests in flight to finish after SIGTERM, in seconds. Requests "
        "that take longer are aborted.",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="Maximum number of client connections. Further connections are answered with "
        "503 and closed.",
    )
    max_connections_per_peer: int = Field(
        2048,
        ge=1,
        description="Maximum number of connections from one client address. Further connections "
        "are answered with 503 and closed. Those of trusted_proxies are not limited; behind "
        "another load balancer, set it to max_connections.",
    )
    header_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Timeout for receiving the complete request headers, in seconds from "
        "connection open.",
    )
    body_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Timeout for receiving the complete request body after the headers, in "
        "seconds.",
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        description="Time that an idle connection stays open between requests, in seconds. Set it "
        "above the idle timeout of the load balancer in front.",
    )
    client_stall_s: float = Field(
        300.0, gt=0, description="Seconds before a client that stops reading is disconnected."
    )
    sse_keepalive_s: float | None = Field(
        None,
        gt=0,
        description="Send a comment into a stream that has been silent for this many seconds, for "
        "load balancers that close idle connections. The stream then starts with status 200 "
        "before the engine answers, and an error arrives as an event in it. Default: never.",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins whose pages may call the API from a browser, or *. Default: none."
    )
    llama_cpp_models: bool = Field(
        False,
        description="Serve GET /models, POST /models/load and POST /models/unload as llama.cpp's "
        "server does, for clients such as Open WebUI, and the state of each model in /v1/models. "
        "Only keys with may_load_models load and unload.",
    )
    directory: Path | None = Field(
        None,
        description="Directory at which relative paths of the configuration start: files, "
        "directories of models, the SQLite database. Default: that of the configuration file.",
    )
    run_dir: Path = Field(
        Path("var/run"),
        description="Directory of the engines' sockets and logs, one per gateway. Keep the path "
        "short: a Unix socket's path is limited to 107 bytes.",
    )
    keep_engines: bool = Field(
        False,
        description="Keep engines of kind: process, container and ray running when the gateway "
        "exits or crashes. The next gateway adopts them instead of loading the models again.",
    )
    handover_wait_s: float = Field(
        10.0,
        ge=0,
        description="Time that a gateway with keep_engines goes on serving after SIGTERM, in "
        "seconds, until the next gateway takes over its port and engines. If none comes, it "
        "accepts no more connections and drains. 0 closes the port at once: for supervisors that "
        "start a gateway only after the previous one has exited. Not used under systemd.",
    )
    memory_budget_gib: float | None = Field(
        None,
        gt=0,
        description="Memory that all engines on this machine may use together, in GiB. Models "
        "loaded on demand are unloaded to make room for each other. Default: no limit.",
    )
    parallel_starts: int = Field(
        1,
        ge=1,
        description="Number of engines that may load at the same time. vLLM measures free memory "
        "while it loads, so engines that share a GPU must load one by one.",
    )

    @property
    def local_host(self) -> str:
        """Host of a URL that reaches the gateway from its own machine."""
        host = LOOPBACK.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host

    @property
    def scheme(self) -> str:
        """Scheme of the gateway's URLs."""
        return "http" if self.tls is None else "https"

    @model_validator(mode="after")
    def _check_body_memory(self) -> Self:
        for name in (
            "body_memory_bytes",
            "body_memory_per_key_bytes",
            "body_memory_per_peer_bytes",
        ):
            if getattr(self, name) < self.max_body_bytes:
                raise ValueError(f"{name} must be at least max_body_bytes, {self.max_body_bytes}")
        return self
