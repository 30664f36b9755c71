"""URLs in settings, checked without repeating them: they may hold a secret."""

import re
from urllib.parse import SplitResult, urlsplit


def split_http_url(url: str, example: str) -> SplitResult:
    """Return the parts of an HTTP URL. Raises ValueError, which does not repeat it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        port = 0
    if port == 0 or not re.fullmatch(r"[!-~]+", url):
        raise ValueError("must be a URL with a port from 1 to 65535, in printable ASCII")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"must look like {example}")
    return parts
