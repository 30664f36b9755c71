"""The message in which a gateway reports its load: encoding, bounds and validation. Pure.

A report is the whole state of one gateway, so a lost one does no harm. It is JSON, which an
operator can read with `redis-cli subscribe`:

    [1,"4f1d0c…","serving",57,{"9be0a3…":3,"c21f88…":0}] 5c0e17…

Behind it stands its signature, by a secret of the database that the gateways share: to forge a
report takes more than Redis. The keys are digests: of fixed length, and without the addresses of
engines.
"""

import hmac
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_SIGNATURE_BYTES = 16
# What the secret is used for is part of what is signed.
_PURPOSE = b"load report"

# Bounds of what is accepted; a report within them is shorter than MAX_BYTES.
MAX_BYTES = 65536
MAX_ENGINES = 1024
MAX_IN_FLIGHT = 100_000


class State(StrEnum):
    """State of a gateway as the others see it."""

    SERVING = "serving"
    DRAINING = "draining"  # its requests count, and it takes no part of the slots
    LEFT = "left"


class InvalidReport(Exception):
    """The message is not a report of this version within the bounds."""


class ForgedReport(InvalidReport):
    """The message is not signed with the secret of this gateway's database."""


_Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Count = Annotated[int, Meta(ge=0, le=MAX_IN_FLIGHT)]


class LoadReport(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The load of one gateway."""

    version: Literal[1]
    gateway: _Id
    state: State
    # One more with each report of a gateway.
    sequence: Annotated[int, Meta(ge=0, le=2**62)]
    # Requests in flight by the key of the engine; engines without any are in it too.
    engines: Annotated[dict[_Id, _Count], Meta(max_length=MAX_ENGINES)]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LoadReport)


def engine_key(shared_id: str, model: str) -> str:
    """Return the key of an engine of a model; gateways count the requests of each model apart."""
    text = f"{shared_id}\0{model}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).hexdigest()


def encode(report: LoadReport) -> bytes:
    """Return the message."""
    return _encoder.encode(report)


def decode(message: bytes) -> LoadReport:
    """Return the report. Raises InvalidReport; the message is not in its text."""
    if len(message) > MAX_BYTES:
        raise InvalidReport(f"longer than {MAX_BYTES} bytes")
    try:
        return _decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidReport("not a report of version 1") from None


def sign(message: bytes, secret: bytes) -> bytes:
    """Return the message with its signature."""
    return message + b" " + _signature(message, secret)


def verify(signed: bytes, secret: bytes) -> bytes:
    """Return the message without its signature. Raises InvalidReport."""
    if len(signed) > MAX_BYTES:
        raise InvalidReport(f"longer than {MAX_BYTES} bytes")
    message, _, signature = signed.rpartition(b" ")
    if not hmac.compare_digest(signature, _signature(message, secret)):
        raise ForgedReport("not signed by a gateway of this database")
    return message


def _signature(message: bytes, secret: bytes) -> bytes:
    made = blake2b(message, key=secret, digest_size=_SIGNATURE_BYTES, person=_PURPOSE)
    return made.hexdigest().encode()
