"""The wall clock and the monotonic clock of sign-ins, sessions and access tokens, moved by a test.

Real processes next to the test keep the real time.
"""

import time
from datetime import datetime, timedelta, tzinfo

import pytest
from jwt import api_jwt

from app.auth.oidc import PersonSessions, RelyingParty
from app.auth.tokens import IdentityProvider, TokenCallers


class MovedClock:
    """A clock that is `by_s` ahead; gateways that are made later go by it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.by_s = 0.0
        clock = self

        class Moved(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + timedelta(seconds=clock.by_s)

        patch.setattr(api_jwt, "datetime", Moved)
        patch.setattr(RelyingParty.__init__, "__defaults__", (self.time,))
        for part in (TokenCallers, PersonSessions, IdentityProvider):
            defaults = part.__init__.__kwdefaults__ or {}
            for name, moved in (("now", self.time), ("monotonic", self.monotonic)):
                if name in defaults:
                    patch.setitem(defaults, name, moved)

    def time(self) -> float:
        return time.time() + self.by_s

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s
