"""Names of the engines for discovered servers. Pure.

A name is made from the model and the server's URL alone, so that it is the same in every gateway
and after a restart: affinity, metrics and dashboards hold.
"""

import hashlib
import ipaddress
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from app.fleet.engine_plan import slug

MAX_HOST_CHARS = 60
MAX_PREFIX_CHARS = 24


def engine_name(model: str, url: str, is_taken: Callable[[str], bool]) -> str:
    """Return the name of the engine for a server, such as demo-10.0.0.7-8000.

    A hash of model and URL is appended where the name would not have all of both, and where it is
    taken.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        host = ipaddress.ip_address(host).compressed.replace(":", "-")
        whole = True
    except ValueError:
        whole = len(host) <= MAX_HOST_CHARS and re.fullmatch(r"[a-z0-9.-]+", host) is not None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    prefix = parts.path.strip("/")
    pieces = [slug(model), _clean(host, MAX_HOST_CHARS), str(port)]
    if prefix:
        pieces.append(_clean(prefix, MAX_PREFIX_CHARS))
    name = "-".join(pieces)
    if whole and not prefix and slug(model) == model and not is_taken(name):
        return name
    digest = hashlib.sha256(f"{model}\n{url}".encode()).hexdigest()
    return f"{name}-{digest[:8]}"


def _clean(text: str, most: int) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:most]
