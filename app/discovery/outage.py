"""The log lines of a source that cannot be read: one per reason, and one when it is over."""

import logging

log = logging.getLogger(__name__)


class Outage:
    """The outages of one source. `source` is its description for the log."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._reason: str | None = None

    @property
    def under_way(self) -> bool:
        """True while the source cannot be read."""
        return self._reason is not None

    def begin(self, reason: str, known: int) -> None:
        """Log an outage unless one for this reason is under way; `known` servers are kept."""
        if reason != self._reason:
            self._reason = reason
            log.error("discovery by %s failed: %s; %s", self._source, reason, _kept(known))

    def end(self, found: int) -> None:
        """Log the end of the outage, if one is under way; `found` servers are listed."""
        if self._reason is not None:
            self._reason = None
            log.info("discovery by %s works again; servers: %d", self._source, found)


def _kept(known: int) -> str:
    return f"servers that are kept: {known}" if known else "no server is known yet"
