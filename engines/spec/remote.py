"""The specification of servers that the gateway does not run, and of where they are listed."""

import os
import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from engines.output import redact_line
from engines.spec.base import PlacedError, SpecModel, Timeouts


class RemoteSpec(SpecModel):
    """An OpenAI-compatible server that is not managed by the gateway."""

    kind: Literal["remote"]
    url: str = Field(
        description="Base URL of the server: http:// or https://, optionally with a path prefix, "
        "without /v1."
    )
    api_key_env: str | None = Field(
        None,
        description="Environment variable that holds the API key of the server. Default: no key "
        "is sent.",
    )
    served_model_name: str | None = Field(
        None, description="Name of the model on the server. Default: the model's name here."
    )
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="after")
    def _usable(self) -> Self:
        try:
            parts = urlsplit(self.url)
        except ValueError:  # a bracket without its partner
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            # An invalid URL with an @ may contain credentials at any place.
            given = "" if "@" in self.url else f", not {redact_line(repr(self.url))}"
            raise PlacedError(f"must look like http://host:port or https://host{given}", "url")
        if not re.fullmatch(r"[!-~]+", self.url):
            raise PlacedError("must be printable ASCII without blanks", "url")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise PlacedError("must have a port from 1 to 65535", "url")
        if parts.username or parts.password:
            raise PlacedError("must not hold credentials; name a variable in api_key_env", "url")
        if parts.query or parts.fragment:
            raise PlacedError("must not have a query or a fragment", "url")
        if parts.path.rstrip("/").endswith("/v1"):
            raise PlacedError("must not end in /v1, which the gateway adds itself", "url")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            # The setting may hold the key itself by mistake.
            named = re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env)
            which = self.api_key_env if named else "of that name"
            raise PlacedError(f"environment variable {which} is not set", "api_key_env")
        return self
