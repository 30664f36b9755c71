"""The cached result of a check: a secret or a token, and who has it."""

from dataclasses import dataclass

from app.auth.principal import Principal


@dataclass(frozen=True, slots=True)
class Entry:
    """A valid secret of a stored key, or a verified access token."""

    principal: Principal
    disabled: bool
    until: float  # seconds since 1970; end of its life, or of the grace after a rotation
