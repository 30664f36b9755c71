"""The address of an engine."""

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Address:
    """A host and port, or a Unix socket."""

    host: str = "engine"
    port: int = 80
    tls: bool = False
    prefix: str = ""
    uds: str | None = None

    @classmethod
    def from_url(cls, url: str) -> "Address":
        """Return the address of an http:// or https:// URL; its path becomes the prefix."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname or "", port, tls, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        """The value of the Host header; the default port is left out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return self.uds or f"{self.host}:{self.port}"
