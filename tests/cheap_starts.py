"""Starts of gateways in a test's own process, without what each of them would build again."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from ssl import SSLContext
from threading import Lock
from types import CodeType
from typing import Any

import httpx
import typer.testing
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from jinja2 import BytecodeCache, Environment
from jinja2.bccache import Bucket
from prometheus_client.registry import Collector, CollectorRegistry
from sqlalchemy import Engine
from sqlalchemy.util import LRUCache
from starlette.routing import BaseRoute, compile_path
from typer.main import get_command

from app import http_application
from app.api import error_responses
from app.console import rendering
from app.telemetry.metrics import gateway_series
from app.telemetry.metrics.series import Registry, Series

_get_names: Callable[[Registry, Collector], list[str]] = vars(CollectorRegistry)["_get_names"]
_names_of_series: dict[tuple[type, str], list[str]] = {}
_fastapi = http_application._fastapi
_build = APIRoute.__init__
_compile_path = cache(compile_path)
_make_context = httpx.create_ssl_context
_default_context = cache(lambda *_authorities: _make_context())
_unverified_context = cache(lambda: _make_context(verify=False))
_response = cache(error_responses._response)


def make_starts_cheap() -> None:
    """Have gateways build only the routes that their test uses, and compile each template once.

    All routes are most of a start's CPU time, and all templates, at the first page, several starts.
    Clients of HTTP share the authorities that they trust, which take as long to load. Databases
    compile each statement once, and runs of the command-line interface make all commands once.
    A value of the metrics is read without building all others.
    """
    for name, member in {"__init__": _defer, "__getattr__": _build_at_first_use}.items():
        setattr(APIRoute, name, member)
    vars(rendering)["Environment"] = partial(Environment, bytecode_cache=_CompiledTemplates())
    vars(http_application)["_fastapi"] = _without_routes
    for module in (gateway_series, rendering):
        vars(module)["version"] = cache(module.version)
    vars(error_responses)["_response"] = _copied_response
    vars(httpx._transports.default)["create_ssl_context"] = _context
    setattr(Engine, "_compiled_cache", _OneCache())  # noqa: B010
    for name, member in {"_get_names": _names, "get_sample_value": _value}.items():
        setattr(Registry, name, member)
    vars(typer.testing)["_get_command"] = cache(get_command)


class _RoutesAsNeeded(list[BaseRoute]):
    """Routes of routers, each of which is made when a request matches none of those before."""

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        super().__init__()
        self._routers = iter(routers)
        self._making = Lock()  # a document of all routes is made in a thread

    def __iter__(self) -> Iterator[BaseRoute]:
        place = 0
        while place < super().__len__() or self._make_more():
            yield self[place]
            place += 1

    def __len__(self) -> int:
        while self._make_more():
            pass
        return super().__len__()

    def _make_more(self) -> bool:
        with self._making:
            for router in self._routers:
                if router.routes:
                    self.extend(router.routes)
                    return True
            return False


def _without_routes(routers: Iterable[APIRouter], **options: Any) -> FastAPI:
    app = _fastapi((), **options)
    app.router.routes = _RoutesAsNeeded(routers)
    return app


def _context(
    verify: SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True
) -> SSLContext:
    if verify is False and cert is None:
        return _unverified_context()
    if verify is not True or cert is not None or not trust_env:
        return _make_context(verify, cert, trust_env)
    return _default_context(*map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))


def _copied_response(kinds: tuple[Any, ...], dialect: Any, relayed: bool) -> dict[str, Any]:
    """Return the response of one status, to which its route may add headers and contents."""
    response = _response(kinds, dialect, relayed)
    return {**response, "content": dict(response["content"])}


def _defer(route: APIRoute, path: str, endpoint: Any, **options: Any) -> None:
    """Keep a route's options, and the path by which requests find it."""
    vars(route).update(path=path, endpoint=endpoint, unbuilt=options)
    route.path_regex, route.path_format, route.param_convertors = _compile_path(path)


def _build_at_first_use(route: APIRoute, name: str) -> Any:
    options = vars(route).pop("unbuilt", None)
    if options is None:
        raise AttributeError(name, name=name, obj=route)
    _build(route, route.path, route.endpoint, **options)
    return getattr(route, name)


def _names(registry: Registry, collector: Collector) -> list[str]:
    """Return the names that a series takes: they follow from its kind and its name."""
    if not isinstance(collector, Series):
        return _get_names(registry, collector)
    key = type(collector), collector.name
    if key not in _names_of_series:
        _names_of_series[key] = _get_names(registry, collector)
    return _names_of_series[key]


def _value(registry: Registry, name: str, labels: dict[str, str] | None = None) -> float | None:
    """Return the value of one sample, of whose series alone all samples are built."""
    registry._read()
    for family in registry.restricted_registry([name]).collect():
        for sample in family.samples:
            if (sample.name, sample.labels) == (name, labels or {}):
                return sample.value
    return None


class _CompiledTemplates(BytecodeCache):
    """Compiled templates of this process, by file and content."""

    def __init__(self) -> None:
        self._codes: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self._codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        if bucket.code is not None:
            self._codes[bucket.key, bucket.checksum] = bucket.code


class _CompiledStatements(LRUCache[tuple[Any, ...], Any]):
    """Compiled statements of this process, by the kind of the database instead of its engine."""

    def get(self, key: tuple[Any, ...], default: Any = None) -> Any:
        return super().get(_of_kind(*key), default)

    def __setitem__(self, key: tuple[Any, ...], compiled: Any) -> None:
        super().__setitem__(_of_kind(*key), compiled)


def _of_kind(dialect: Any, *statement: Any) -> tuple[Any, ...]:
    return type(dialect), getattr(dialect, "server_version_info", None), *statement


class _OneCache:
    """An attribute of every engine, which keeps the value that it has."""

    _statements = _CompiledStatements(1000)

    def __get__(self, *_: object) -> _CompiledStatements:
        return self._statements

    def __set__(self, *_: object) -> None:
        pass
