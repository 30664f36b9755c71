"""Starts of gateways in a test's own process, without what each of them would build again."""

from functools import cache, partial
from types import CodeType
from typing import Any

from fastapi.routing import APIRoute
from jinja2 import BytecodeCache, Environment
from jinja2.bccache import Bucket
from starlette.routing import compile_path

from app.console import rendering

_build = APIRoute.__init__
_compile_path = cache(compile_path)


def make_starts_cheap() -> None:
    """Have gateways build only the routes that their test uses, and compile each template once.

    All routes are most of a start's CPU time, and all templates, at the first page, several starts.
    """
    for name, member in {"__init__": _defer, "__getattr__": _build_at_first_use}.items():
        setattr(APIRoute, name, member)
    vars(rendering)["Environment"] = partial(Environment, bytecode_cache=_CompiledTemplates())


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


class _CompiledTemplates(BytecodeCache):
    """Compiled templates of this process, by file and content."""

    def __init__(self) -> None:
        self._codes: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self._codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        if bucket.code is not None:
            self._codes[bucket.key, bucket.checksum] = bucket.code
