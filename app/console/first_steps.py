"""The first steps of a new gateway, shown on the overview until the last of them was taken."""

from collections.abc import Callable
from dataclasses import dataclass

from app.auth import KeyStore
from app.console.language import gettext
from app.console.visitor import CONSOLE
from app.database import DatabaseError
from app.relay import RequestDirectory
from app.routing import Catalogue
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A step; `path` is the page where it is taken."""

    title: str
    done: bool
    path: str


class FirstSteps:
    """Finds which steps were taken; once a request was answered, it does not look again."""

    def __init__(
        self,
        catalogue: Catalogue,
        keys: KeyStore,
        requests: RequestDirectory,
        settings: Callable[[], Settings],
    ) -> None:
        self._catalogue = catalogue
        self._keys = keys
        self._requests = requests
        self._settings = settings
        self._over = False

    async def find(self) -> list[FirstStep]:
        """Return the steps; none once a request was answered, and while the database is down."""
        if self._over:
            return []
        try:
            self._over = await self._requests.answered_any()
            has_key = await self._keys.has_client()
        except DatabaseError:
            return []
        if self._over:
            return []
        settings = self._settings()
        open_to_all = not settings.auth.enabled or bool(settings.api_keys)
        ready = any(model.ready for model in self._catalogue.models)
        return [
            FirstStep(gettext("Have a model ready"), ready, f"{CONSOLE}/models"),
            FirstStep(
                gettext("Create a key for a client"),
                has_key or open_to_all,
                f"{CONSOLE}/keys/new",
            ),
            FirstStep(gettext("Send the first request"), False, f"{CONSOLE}/playground"),
        ]
