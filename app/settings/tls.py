"""The section `server.tls`: the certificate that the gateway serves HTTPS with."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from engines.spec import SpecModel


class TlsSettings(SpecModel):
    """HTTPS on the main port. Files that change are read again without a restart."""

    cert_file: Path = Field(
        description="PEM file with the certificate, followed by those of intermediate authorities."
    )
    key_file: Path = Field(
        description="PEM file with the private key of the certificate, without a password."
    )
    client_ca_file: Path | None = Field(
        None,
        description="PEM file with the authorities whose certificates clients must show, as well "
        "as their key. Default: clients need no certificate.",
    )
    min_version: Literal["1.2", "1.3"] = Field(
        "1.2", description="Oldest version of TLS that clients may use."
    )
    hsts_s: int | None = Field(
        None,
        ge=0,
        description="Tell browsers for how many seconds to use HTTPS only, for every port of this "
        "host name (Strict-Transport-Security). Default: not said.",
    )

    def files(self) -> dict[str, Path]:
        """Return the files that are set, by the name of their setting."""
        named = (
            (name, getattr(self, name)) for name in ("cert_file", "key_file", "client_ca_file")
        )
        return {name: file for name, file in named if file is not None}
