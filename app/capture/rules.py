"""Which requests are captured, and under which terms, as the configuration in force says. Pure."""

import hashlib
from dataclasses import dataclass, field
from typing import Self

from app.auth import Principal
from app.capture.redaction import Redaction
from app.capture.sealing import Sealer
from app.settings import CaptureSettings

_DAY_MS = 86_400_000
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class CaptureRules:
    """The terms of captures; a reload replaces them as a whole."""

    settings: CaptureSettings
    sealer: Sealer
    redaction: Redaction
    _keys: frozenset[str] = field(init=False)
    _owners: frozenset[str] = field(init=False)
    _models: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("keys", "owners", "models"):
            object.__setattr__(self, f"_{name}", frozenset(getattr(self.settings, name)))

    @classmethod
    def of(cls, settings: CaptureSettings) -> Self | None:
        """Return the rules of a configuration; None: nothing is captured."""
        sealer = Sealer.of(settings) if settings.names_any else None
        return None if sealer is None else cls(settings, sealer, Redaction.of(settings.redact))

    def covers(self, principal: Principal, model: str) -> bool:
        """Return whether the requests of a caller to a model are captured."""
        return model in self._models or self.covers_caller(principal)

    def covers_caller(self, principal: Principal) -> bool:
        """Return whether the requests of a caller are captured, whatever the model."""
        return principal.id in self._keys or principal.owner_name in self._owners

    def models_of(self, principal: Principal) -> list[str]:
        """Return the models at which a caller's requests are captured; ["*"]: at all."""
        if self.covers_caller(principal):
            return ["*"]
        return [name for name in self.settings.models if principal.allows(name)]

    def chooses(self, own_id: str) -> bool:
        """Return whether a request is within the share, always the same for one ID.

        The ID is made by the gateway: a client cannot choose whether it is captured.
        """
        share = self.settings.share
        if share == 1.0:
            return True
        digest = hashlib.blake2b(own_id.encode(), digest_size=_DIGEST_BYTES).digest()
        return int.from_bytes(digest, "big") / (1 << 8 * _DIGEST_BYTES) < share

    @property
    def retention_ms(self) -> int:
        """How long a capture is kept."""
        return int(self.settings.retention_days * _DAY_MS)


def tenant_of(principal: Principal) -> str:
    """Return whose captures share a bound: those of an owner, or of a key without one."""
    return f"owner {principal.owner_name}" if principal.owner_name else f"key {principal.id}"
