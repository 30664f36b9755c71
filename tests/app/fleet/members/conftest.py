"""Lists of servers that a test changes."""

import pytest

from tests.app.fleet.members.gateways import Listing


@pytest.fixture
def listing() -> Listing:
    """A list of servers that the test changes."""
    return Listing()


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check servers again and again, and do not wait long for those that do not respond."""
    monkeypatch.setattr("engines.remote.CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr("app.fleet.members.discovered_servers.SETTLE_S", 0.5)
