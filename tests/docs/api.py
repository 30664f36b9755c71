"""The page docs/api.md, made from the OpenAPI document: every operation of both planes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from app.api.admin_auth import RIGHTS
from app.api.error_responses import EVERY_ROUTE
from app.api.schema import RIGHT
from app.api.schema import document as document_of
from app.auth.principal import Role
from app.errors import GatewayError
from app.main import create_app
from tests.docs.page import ROOT, anchor
from tests.gateway import remote, settings_for

PAGE = ROOT / "docs" / "api.md"
OPENAPI = ROOT / "docs" / "openapi.json"

JsonObject = dict[str, Any]

_HEAD = """\
# API reference

*Which path does it, who may, and what does it answer?*

Made from the code by `make schema`; do not edit. The same as OpenAPI 3.1:
[openapi.json](openapi.json), which a running gateway serves at `/admin/openapi.json`. A test sends
generated requests to every operation and fails on an answer that is not documented.

## Keys and rights

A key stands in `Authorization: Bearer KEY` or in `x-api-key: KEY`. The data plane takes any key
that may use the model; `/admin` asks for the right of each operation, which a key has by its role.
The root key, `GATEWAY_ADMIN_KEY`, has every right; so has a key that
`vllm-gateway keys create --name me --role admin` makes. For example:

```console
$ curl -s http://127.0.0.1:8000/admin/keys -H "Authorization: Bearer $GATEWAY_KEY" \\
    -H 'Content-Type: application/json' -d '{"name": "bob", "requests_per_minute": 60}'
{"id":"…
```

"""
_ERRORS = """
## Errors

Errors are JSON, in OpenAI's dialect, and in Anthropic's under `/v1/messages`:

```json
{"error": {"message": "…", "type": "invalid_request_error", "param": null, "code": "conflict"}}
```

```json
{"type": "error", "error": {"type": "not_found_error", "message": "…"}}
```

After the first byte of a stream, a fault is one event with the same object, and the connection
closes without `[DONE]`. An engine's own 4xx and 5xx pass with their status, in the caller's
dialect.

"""
_HEADERS = """
## Headers of answers

| header | in | meaning |
|---|---|---|
"""
# When an error is raised, where its class does not say it.
_MEANINGS = {
    "conflict": "Something else is under way; try again when it has ended.",
    "engine_failed": "The engine died or broke the protocol before the first byte, at every try.",
    "engine_overloaded": "The queue is full, or the request waited in it for too long.",
    "engine_timeout": "The engine took too long.",
    "engine_unavailable": "No engine of the model is up.",
    "insufficient_quota": "The budget of the day or the month is used up.",
    "internal_error": "A bug of the gateway; its log has the request's id.",
    "invalid_api_key": "No key, or one that is unknown, expired or disabled.",
    "invalid_configuration": "The configuration cannot be applied; a line for each fault.",
    "invalid_json": "The body is no JSON object.",
    "invalid_request": "The request is malformed, or a value is not what the tables below say.",
    "method_not_allowed": "The path has other methods; `Allow` lists them.",
    "missing_model": "The body has no `model`.",
    "model_not_found": "There is no such model, or the key may not use it.",
    "not_found": "There is no such path, key, engine or stored response.",
    "permission_denied": "The role of the key does not have the right.",
    "rate_limit_exceeded": "A limit of requests, tokens or concurrent requests is reached.",
    "request_head_too_large": "The headers are too large.",
    "request_timeout": "The headers or the body did not arrive in time.",
    "request_too_large": "The body is larger than `server.max_body_bytes`.",
    "service_unavailable": "The database or Redis does not answer, or the gateway drains.",
    "too_many_connections": "The gateway, or the client's address, has too many connections.",
}
_METHODS = ("get", "post", "put", "patch", "delete")


def openapi() -> JsonObject:
    """Return the OpenAPI document of a gateway with both planes."""
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    with TemporaryDirectory() as directory:
        return document_of(create_app(settings_for(model, run_dir=Path(directory))))


def openapi_text(document: JsonObject) -> str:
    """Return the document as the file holds it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def api_page(document: JsonObject) -> str:
    """Return the page of all operations."""
    reference = _Reference(document)
    return "".join(
        (
            _HEAD,
            *_rights(),
            _ERRORS,
            *_error_table(),
            *_headers(document),
            *reference.index(),
            *reference.sections(),
            *reference.objects(),
        )
    )


def _rights() -> Iterator[str]:
    roles = [role for role in Role if RIGHTS[role]]
    yield f"| right | {' | '.join(roles)} |\n|---|{'---|' * len(roles)}\n"
    for right in sorted({right for rights in RIGHTS.values() for right in rights}):
        marks = ("yes" if right in RIGHTS[role] else "" for role in roles)
        yield f"| `{right}` | {' | '.join(marks)} |\n"


def _error_table() -> Iterator[str]:
    kinds = sorted(set(_family(GatewayError)), key=lambda kind: (kind.status, kind.code))
    yield "| status | code | type | Anthropic's type | meaning |\n|---|---|---|---|---|\n"
    for kind in kinds:
        if "code" in vars(kind):
            types = f"`{kind.openai_type}` | `{kind.anthropic_type}`"
            text = _MEANINGS.get(kind.code) or (kind.__doc__ or "").split("\n\n")[0]
            yield f"| {kind.status} | `{kind.code}` | {types} | {_cell(text)} |\n"
    common = ", ".join(f"`{code}`" for code in dict.fromkeys(kind.code for kind in EVERY_ROUTE))
    yield f"\nEvery operation may answer {common}; the tables below leave these out.\n"


def _headers(document: JsonObject) -> Iterator[str]:
    yield _HEADERS
    for name, header in document["components"]["headers"].items():
        yield f"| `{name}` | {_carriers(document, name)} | {_cell(header['description'])} |\n"
    yield "| `Retry-After` | 429, 503 | Seconds; absent if waiting does not help. |\n"
    yield "| `WWW-Authenticate` | 401 | RFC 9110, section 11.6.1. |\n"
    yield "| `Allow` | 405, OPTIONS of any path | The methods of the path. |\n"


def _carriers(document: JsonObject, header: str) -> str:
    """Return in a few words which operations answer with a header."""
    mark = f'"#/components/headers/{header}"'
    every = {path: json.dumps(ones) for path, ones in document["paths"].items()}
    carriers = {path for path, text in every.items() if mark in text}
    if carriers == every.keys():
        return "every answer"
    relayed = {path for path in carriers if '"data plane"' in every[path]}
    others = [f"`{path}`" for path in every if path in carriers - relayed]
    return ", ".join(["the data plane", *others] if relayed else others)


class _Reference:
    """The operations and objects of a document, as Markdown."""

    def __init__(self, document: JsonObject) -> None:
        self._document = document
        self._shown: dict[str, None] = {}  # objects that operations refer to, in order
        self._operations = [
            (path, method, operations[method])
            for path, operations in document["paths"].items()
            for method in _METHODS
            if method in operations
        ]

    def index(self) -> Iterator[str]:
        """Yield the table of all operations."""
        for tag in self._tags():
            yield f"\n## {_title(tag)}\n\n| operation | key | purpose |\n|---|---|---|\n"
            for path, method, operation in self._of(tag):
                name = f"{method.upper()} {path}"
                link = f"[`{name}`](#{anchor(name)})"
                yield f"| {link} | {_key(operation)} | {_purpose(operation)} |\n"

    def sections(self) -> Iterator[str]:
        """Yield a section for each operation."""
        yield "\n# Operations\n"
        for tag in self._tags():
            for path, method, operation in self._of(tag):
                yield f"\n### {method.upper()} {path}\n\n"
                yield from self._section(operation)

    def objects(self) -> Iterator[str]:
        """Yield the fields of each object that an operation takes or returns."""
        yield "\n# Objects\n"
        schemas = self._document["components"]["schemas"]
        shown = 0
        while shown < len(self._shown):  # an object may refer to further ones
            name = list(self._shown)[shown]
            shown += 1
            schema = schemas[name]
            yield f"\n### {name} object\n\n"
            if text := schema.get("description"):
                yield f"{' '.join(text.split())}\n\n"
            yield from self._fields(schema)

    def _tags(self) -> list[str]:
        found = dict.fromkeys(operation["tags"][0] for _, _, operation in self._operations)
        return sorted(found, key=lambda tag: tag != "data plane")

    def _of(self, tag: str) -> Iterator[tuple[str, str, JsonObject]]:
        return (one for one in self._operations if one[2]["tags"][0] == tag)

    def _section(self, operation: JsonObject) -> Iterator[str]:
        text = operation.get("description") or operation["summary"]
        yield f"{' '.join(text.split())} Key: {_key(operation)}.\n"
        if parameters := operation.get("parameters"):
            yield "\n| parameter | in | values | default | meaning |\n|---|---|---|---|---|\n"
            for one in parameters:
                schema = one["schema"]
                meaning = _cell(one.get("description") or schema.get("description") or "")
                row = (f"`{one['name']}`", one["in"], self._type(schema), _default(one), meaning)
                yield f"| {' | '.join(row)} |\n"
        if body := operation.get("requestBody"):
            yield from self._body(body)
        yield "\n| status | content | errors |\n|---|---|---|\n"
        for status, response in sorted(operation["responses"].items()):
            yield from self._answer(status, self._resolved(response))

    def _body(self, body: JsonObject) -> Iterator[str]:
        for kind, content in body["content"].items():
            schema = content["schema"]
            needed = "" if body.get("required") else ", optional"
            if "properties" not in schema:
                yield f"\nBody: `{kind}`{needed}, {self._type(schema)}.\n"
                continue
            yield f"\nBody: `{kind}`{needed}; further fields go to the engine.\n\n"
            yield from self._fields(schema)

    def _answer(self, status: str, response: JsonObject) -> Iterator[str]:
        """Yield the row of a status, none where it has only what every operation may answer."""
        content = response.get("content", {})
        codes = self._codes(content)
        own = [code for code in codes if code not in _COMMON]
        if codes and not own:
            return
        kinds = [] if own else [self._content(kind, one) for kind, one in content.items()]
        shown = "none" if not content else "an error" if own else " or ".join(kinds)
        if status.endswith("XX"):
            shown = "an engine's own error" + ("" if status == "5XX" else ", of any content type")
            own = []
        yield f"| {status} | {shown} | {', '.join(f'`{code}`' for code in own)} |\n"

    def _codes(self, content: Mapping[str, Any]) -> list[str]:
        """Return the codes of the errors among the contents of a response."""
        mark = '"#/components/schemas/openai.'
        found = [part.split('"', 1)[0] for part in json.dumps(content).split(mark)[1:]]
        anthropic = '"#/components/schemas/anthropic.'
        found += [part.split('"', 1)[0] for part in json.dumps(content).split(anthropic)[1:]]
        return [code for code in dict.fromkeys(found) if code != "engine_error"]

    def _content(self, kind: str, content: JsonObject) -> str:
        schema = content.get("schema", {})
        text = f"`{kind}`"
        if "$ref" in schema or "anyOf" in schema or "items" in schema:
            text += f": {self._type(schema)}"
        return text

    def _fields(self, schema: JsonObject) -> Iterator[str]:
        if "enum" in schema:
            yield f"{_values(schema['enum'])}\n"
            return
        if "properties" not in schema:
            yield "Any JSON value.\n"
            return
        required = schema.get("required", ())
        yield "| field | values | default | meaning |\n|---|---|---|---|\n"
        for name, field in schema["properties"].items():
            default = _default({"required": name in required, "schema": field})
            meaning = _cell(field.get("description", ""))
            yield f"| `{name}` | {self._type(field)} | {default} | {meaning} |\n"

    def _type(self, schema: JsonObject) -> str:
        """Return in a few words what a value may be; objects are links."""
        if reference := schema.get("$ref"):
            name = reference.rpartition("/")[2]
            if name == "JsonValue":
                return "any JSON value"
            self._shown.setdefault(name)
            return f"[{name}](#{anchor(f'{name} object')})"
        if "const" in schema:
            return f"`{json.dumps(schema['const'])}`"
        if "enum" in schema:
            return _values(schema["enum"])
        if "anyOf" in schema:
            return " or ".join(dict.fromkeys(self._type(one) for one in schema["anyOf"]))
        match schema.get("type"):
            case "array":
                return f"a list: {self._type(schema.get('items', {}))}"
            case "object" if isinstance(values := schema.get("additionalProperties"), dict):
                return f"an object: {self._type(values)}"
            case "object":
                return "an object"
            case "integer" | "number" as kind:
                return " ".join(
                    ("whole number" if kind == "integer" else "number", *_bounds(schema))
                )
            case "boolean":
                return "`true`, `false`"
            case "null":
                return "`null`"
            case "string":
                return f"text, `{schema['format']}`" if "format" in schema else "text"
            case _:
                return "any JSON value"

    def _resolved(self, part: JsonObject) -> JsonObject:
        while (reference := part.get("$ref")) is not None:
            part = self._document
            for name in reference.removeprefix("#/").split("/"):
                part = part[name]
        return part


_COMMON = frozenset(kind.code for kind in EVERY_ROUTE)


def _key(operation: JsonObject) -> str:
    if right := operation.get(RIGHT):
        return f"`{right}`"
    schemes = {name for one in operation["security"] for name in one}
    if not schemes:
        return "none"
    return "a client's" if "client" in schemes else "the metrics key, if one is set"


def _title(tag: str) -> str:
    return {"data plane": "The data plane"}.get(tag, tag.capitalize())


def _purpose(operation: JsonObject) -> str:
    text = operation.get("description") or operation["summary"]
    return _cell(text.split("\n\n")[0])


def _default(holder: JsonObject) -> str:
    if holder.get("required"):
        return "required"
    value = holder["schema"].get("default")
    return (
        "none"
        if value is None
        else f"`{_cell(value if isinstance(value, str) else json.dumps(value))}`"
    )


def _values(members: list[object]) -> str:
    return ", ".join(f"`{_cell(str(member))}`" for member in members)


def _bounds(schema: JsonObject) -> Iterator[str]:
    for name, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("maximum", "≤")):
        if name in schema:
            yield f"{sign} {schema[name]:.0f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _family(root: type[GatewayError]) -> Iterator[type[GatewayError]]:
    yield root
    for child in root.__subclasses__():
        yield from _family(child)
