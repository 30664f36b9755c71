"""The header fields that say where a request's body ends, read more strictly than the parser does.

llhttp refuses a length beside chunks, several lengths, and a length that is no number or over 64
bits. It takes any transfer codings that end in `chunked`, and any number of zeros before a length.
"""

FRAMING_FIELDS = frozenset({b"content-length", b"transfer-encoding"})
# A client may fill up with zeros. Python refuses to read numbers of more than 4,300 digits.
MAX_LENGTH_CHARACTERS = 32
# All numbers of so many digits are below 2^64.
MAX_LENGTH_DIGITS = 19


def content_length(value: bytes) -> int | None:
    """Return the length that a content-length field names; None if it is none."""
    digits = value.strip(b" \t")  # spaces after a value are no part of it
    if (
        not digits.isdigit()
        or len(digits) > MAX_LENGTH_CHARACTERS
        or len(digits.lstrip(b"0")) > MAX_LENGTH_DIGITS
    ):
        return None
    return int(digits)


def is_chunked(value: bytes) -> bool:
    """Whether a transfer-encoding field names chunks and no other coding."""
    return value.lower() == b"chunked"
