"""What is read from the head of a request once, and is true of every request with the same head."""

from engines.base import Headers


class HeadFacts:
    """Facts that follow from a request's headers alone, without its content-length.

    Clients repeat their head on a connection; the server then passes on the same facts. Each is
    None until it is needed. They are kept in memory only, and have no `repr`: one is of a key.
    """

    __slots__ = ("engine_headers", "key_digest")

    def __init__(self) -> None:
        # The digest of the caller's key.
        self.key_digest: bytes | None = None
        # The headers that an engine gets with a body.
        self.engine_headers: Headers | None = None
