"""Message framing: the headers that say where a request's body ends, checked strictly.

llhttp refuses content-length together with chunked encoding, several lengths, and a length that is
not a number or exceeds 64 bits. It accepts any transfer codings that end in `chunked`, and any
number of leading zeros in a length.
"""

FRAMING_FIELDS = frozenset({b"content-length", b"transfer-encoding"})
# Leading zeros included. Python refuses to convert numbers of more than 4,300 digits.
MAX_LENGTH_CHARACTERS = 32
# All numbers of this many digits are below 2^64.
MAX_LENGTH_DIGITS = 19


def content_length(value: bytes) -> int | None:
    """Return the value of a content-length header; None if it is invalid."""
    if value.isdigit() and len(value) < MAX_LENGTH_DIGITS:
        return int(value)
    digits = value.strip(b" \t")  # whitespace around a value is not part of it
    if (
        not digits.isdigit()
        or len(digits) > MAX_LENGTH_CHARACTERS
        or len(digits.lstrip(b"0")) > MAX_LENGTH_DIGITS
    ):
        return None
    return int(digits)
