"""What is kept of a request while it runs: its body, and what its client is sent."""

from collections import Counter
from dataclasses import dataclass, field

from app.capture.rules import CaptureRules

# Of all captures that run or wait to be written, and of those of one tenant.
MEMORY_BYTES = 64 * 1024 * 1024
TENANT_MEMORY_BYTES = 16 * 1024 * 1024
# A larger request body is not kept: only its size is.
MAX_REQUEST_BYTES = 8 * 1024 * 1024
# Of an answer as it is sent. An event of a stream has about 20 times the bytes of its text.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
# About what an object takes besides its bytes.
OBJECT_BYTES = 64


@dataclass(slots=True)
class CaptureMemory:
    """Counts the bytes that captures hold; no tenant can take all of them."""

    most: int = MEMORY_BYTES
    most_of_tenant: int = TENANT_MEMORY_BYTES
    taken: int = 0
    _by_tenant: Counter[str] = field(default_factory=Counter)

    def take(self, tenant: str, size: int) -> bool:
        """Take memory; return whether there was as much."""
        if self.taken + size > self.most or self._by_tenant[tenant] + size > self.most_of_tenant:
            return False
        self.taken += size
        self._by_tenant[tenant] += size
        return True

    def release(self, tenant: str, size: int) -> None:
        """Give memory back."""
        self.taken -= size
        self._by_tenant[tenant] -= size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class Transcript:
    """The copy of one request and of its answer. Nothing of it is ever shown: see `__repr__`."""

    __slots__ = (
        "_memory", "_pieces", "answer_bytes", "answer_cut", "body", "body_bytes", "content_type",
        "held", "rules", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        rules: CaptureRules,
        memory: CaptureMemory,
        tenant: str,
        content_type: bytes,
        body: bytes,
    ) -> None:
        """The memory of the body is taken by the caller, as `size_of(body)`."""
        self.rules = rules
        self.tenant = tenant
        self.content_type = content_type
        self.body_bytes = len(body)
        self.body = body if len(body) <= MAX_REQUEST_BYTES else b""
        self.held = size_of(body)
        self.answer_bytes = 0
        self.answer_cut = False  # only its beginning is here
        self._memory = memory
        self._pieces: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Transcript of {self.body_bytes} and {self.answer_bytes} bytes>"

    def add(self, data: bytes) -> None:
        """Copy a piece of the answer's body, which the client is sent."""
        size = len(data)
        self.answer_bytes += size
        if self.answer_cut or not size:
            return
        taken = size + OBJECT_BYTES
        if self.answer_bytes > MAX_ANSWER_BYTES or not self._memory.take(self.tenant, taken):
            self.answer_cut = True
            return
        self.held += taken
        self._pieces.append(data)

    def answer(self) -> bytes:
        """Return the answer's body as far as it is kept."""
        return b"".join(self._pieces)

    def release(self) -> None:
        """Give its memory back. Use it no more."""
        self._memory.release(self.tenant, self.held)
        self.held = 0


def size_of(body: bytes) -> int:
    """Return the memory that a request takes by itself."""
    return OBJECT_BYTES + (len(body) if len(body) <= MAX_REQUEST_BYTES else 0)
