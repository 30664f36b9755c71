"""The gateway's OpenAPI document, and checks of responses against it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator


class Document:
    """A parsed OpenAPI document."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self.whole = whole

    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield path, method and operation object."""
        for path, methods in self.whole["paths"].items():
            for method, operation in methods.items():
                yield path, method.upper(), operation

    def resolved(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return an object of the document, its references followed."""
        while (reference := part.get("$ref")) is not None:
            part = self.whole
            for name in reference.removeprefix("#/").split("/"):
                part = part[name]
        return part

    def response(self, path: str, method: str, status: int) -> dict[str, Any]:
        """Return the response object of a status, or of its range such as 4XX."""
        responses = self.whole["paths"][path][method.lower()]["responses"]
        named = responses.get(str(status)) or responses.get(f"{status // 100}XX")
        assert named is not None, f"{method} {path}: {status} is not documented"
        return self.resolved(named)

    def codes(self, path: str, method: str = "POST") -> set[str]:
        """Return the error codes of an operation, in OpenAI's dialect."""
        responses = self.whole["paths"][path][method.lower()]["responses"]
        text = json.dumps([self.resolved(one) for one in responses.values()])
        mark = "#/components/schemas/openai."
        return {part.split('"', 1)[0] for part in text.split(mark)[1:]}

    def check(
        self, path: str, method: str, status: int, headers: Mapping[str, str], body: bytes
    ) -> None:
        """Fail unless status, content type, headers and body of a response are documented."""
        documented = self.response(path, method, status)
        for name, header in documented.get("headers", {}).items():
            header = self.resolved(header)
            value: str | int | None = headers.get(name.lower())
            assert value is not None or not header.get("required"), name
            if value is not None:
                if header["schema"]["type"] == "integer":
                    value = int(value)
                self.validate(value, header["schema"])
        content_type = headers["content-type"].split(";")[0]
        schema = documented["content"][content_type]["schema"]
        is_json = content_type == "application/json"
        self.validate(json.loads(body) if is_json else body.decode(), schema)

    def validate(self, value: object, schema: dict[str, Any]) -> None:
        """Fail unless a value matches a schema of the document."""
        Draft202012Validator({**schema, "components": self.whole["components"]}).validate(value)
