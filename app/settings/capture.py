"""The section `capture`: requests and answers that are stored, of named keys, owners, models."""

from base64 import b64decode
from typing import Annotated, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from engines.spec import SpecModel

KEY_BYTES = 32
MAX_PATTERN = 500
# Named patterns. Each is read by RE2, in time linear in the text, whatever that is.
PATTERNS = {
    "email": r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,253}\.[A-Za-z]{2,24}",
    "phone": r"(?:\+|\b00)[1-9](?:[ ()./-]{0,3}[0-9]){6,14}\b",
    "card": r"\b[0-9](?:[ -]?[0-9]){12,18}\b",
    "iban": r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b",
    "ip": r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b|\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{0,4}\b",
    "secret": r"\b(?:sk|pk|ghp|gho|glpat|hf|xox[abp]|AKIA|whsec)[-_]?[A-Za-z0-9_-]{16,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*",
}
_HINT = "echo GATEWAY_CAPTURE__ENCRYPTION_KEYS=$(openssl rand -base64 32) >> .env"


def pattern_of(text: str) -> tuple[str, str]:
    """Return what stands for a match, and the regular expression. Raises ValueError."""
    if text in PATTERNS:
        return f"[redacted:{text}]", PATTERNS[text]
    if len(text) > 2 and text[0] == text[-1] == "/":
        return "[redacted]", text[1:-1]
    raise ValueError(
        f"{text!r} is neither a pattern by name ({', '.join(PATTERNS)}) nor an expression between "
        "slashes, such as /EMP-[0-9]{6}/"
    )


def _check_pattern(text: str) -> str:
    """Return the pattern. Raises ValueError for one that RE2 does not read, or that matches ""."""
    _, expression = pattern_of(text)
    if len(expression) > MAX_PATTERN:
        raise ValueError(f"an expression has over {MAX_PATTERN} characters")
    import re2  # 2 MiB, for those who use it

    options = re2.Options()
    options.log_errors = False
    try:
        found = re2.compile(expression, options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"{text!r} is no expression of RE2: {reason}") from None
    if found.search("") is not None:
        raise ValueError(f"{text!r} matches the empty text")
    return text


Pattern = Annotated[str, AfterValidator(_check_pattern)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class CaptureSettings(SpecModel):
    """Requests and answers that are stored. Off unless keys, owners or models are named."""

    keys: tuple[Name, ...] = Field(
        (),
        description="IDs of keys whose requests are captured, as `vllm-gateway keys list` shows "
        "them, or IDs of callers with access tokens, such as sso:alice. Not names, which another "
        "key may get.",
    )
    owners: tuple[Name, ...] = Field((), description="Owners whose keys' requests are captured.")
    models: tuple[Name, ...] = Field(
        (),
        description="Models and adapters whose requests are captured, by their names. Default, "
        "with keys and owners: nothing is captured.",
    )
    share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of these requests, chosen by the gateway's own ID of each.",
    )
    retention_days: float = Field(
        7.0,
        gt=0,
        le=366,
        description="Days that a capture is kept. A change applies to new captures.",
    )
    max_bytes: int = Field(
        262_144,
        ge=1024,
        le=1_048_576,
        description="Maximum text that is kept of a request, and again of its answer, in bytes. "
        "Of a longer one the beginning is kept.",
    )
    tenant_bytes: int = Field(
        67_108_864,
        ge=4_194_304,
        description="Maximum size of the captures of an owner, or of a key without one, in bytes. "
        "Beyond it, its oldest are deleted.",
    )
    total_bytes: int = Field(
        1_073_741_824,
        ge=4_194_304,
        description="Maximum size of all captures, in bytes. Beyond it, captures of an owner or a "
        "key replace its own oldest only; those of others stay.",
    )
    redact: tuple[Pattern, ...] = Field(
        (),
        max_length=50,
        description="What is replaced before a capture is stored: "
        f"{', '.join(PATTERNS)}, or an RE2 expression between slashes, such as /EMP-[0-9]{{6}}/.",
    )
    encryption_keys: SecretStr | None = Field(
        None,
        description="Keys that captures are encrypted with, comma-separated, each 32 bytes in "
        "base64: openssl rand -base64 32. The first encrypts, all decrypt: put a new one first.",
    )

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            if not ((len(key) == 10 and key.isalnum()) or key.startswith("key-") or ":" in key):
                raise ValueError(f"{key!r} is no ID of a key: `vllm-gateway keys list` shows them")
        return keys

    @model_validator(mode="after")
    def _check_encryption(self) -> Self:
        try:
            self.secret_keys()
        except ValueError as error:
            raise ValueError(f"encryption_keys: {error}") from None
        if self.total_bytes < self.tenant_bytes:
            raise ValueError("total_bytes must not be below tenant_bytes")
        return self

    def find_key_fault(self) -> str | None:
        """Return that there is no key and what makes one; None: nothing needs one, or it is there.

        Not a fault of the section: commands that only need the database run without secrets.
        """
        if self.encryption_keys is not None or not self.names_any:
            return None
        return f"captures are stored encrypted only, and there is no key: {_HINT}"

    @property
    def names_any(self) -> bool:
        """True if something is captured."""
        return bool(self.keys or self.owners or self.models)

    def secret_keys(self) -> list[bytes]:
        """Return the keys, the one that encrypts first. Raises ValueError, without a key."""
        if self.encryption_keys is None:
            return []
        return [_key_of(text) for text in self.encryption_keys.get_secret_value().split(",")]


def _key_of(text: str) -> bytes:
    try:
        key = b64decode(text.strip(), validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"each must be {KEY_BYTES} bytes in base64: openssl rand -base64 32")
    return key
