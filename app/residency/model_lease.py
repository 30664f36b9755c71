"""The lease that keeps an on-demand model loaded."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self


class ModelLease:
    """Keeps a model loaded for one request until the context is left."""

    __slots__ = ("_release", "waited_s")

    def __init__(self, release: Callable[[], None], waited_s: float | None) -> None:
        self._release = release
        self.waited_s = waited_s  # None: it did not have to wait

    async def renew(self, acquire: Callable[[], Awaitable["ModelLease"]]) -> None:
        """Release the model, and take the place of the lease that `acquire` returns later."""
        release, self._release = self._release, _do_nothing
        release()
        self._release = (await acquire())._release

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()


def _do_nothing() -> None:
    """Release nothing: the lease has been released."""
