"""The log lines of a source that cannot be read: one when that begins, one when it is over."""

import logging

log = logging.getLogger(__name__)


class Outage:
    """The outages of one source. `source` is its description for the log."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._under_way = False

    def begin(self, reason: str, known: int) -> None:
        """Log an outage unless one is under way; `known` servers are kept meanwhile."""
        if not self._under_way:
            self._under_way = True
            log.error("discovery by %s failed: %s; %s", self._source, reason, _kept(known))

    def end(self, found: int) -> None:
        """Log the end of the outage, if one is under way; `found` servers are listed."""
        if self._under_way:
            self._under_way = False
            log.info("discovery by %s works again: %d servers", self._source, found)


def _kept(known: int) -> str:
    return f"the {known} known servers are kept" if known else "no server is known yet"
