"""The servers of a model as a source lists them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One server: its base URL, and the environment variable with its API key."""

    url: str
    api_key_env: str | None = None  # None: that of the specification


class Source(Protocol):
    """A place that lists the servers of a model."""

    @property
    def is_failing(self) -> bool:
        """True while it cannot be read."""

    def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield the complete list as soon as it is known, and after each change.

        A list that cannot be read is not yielded: what was known goes on. An empty list is yielded
        only where the source says so with authority. It raises nothing, and ends when it is closed.
        """
