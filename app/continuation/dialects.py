"""Endpoints whose streams can be compared, and how their events are read and renamed. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from app.continuation.choice_parts import read_chunk
from app.continuation.parts import DONE, Part
from app.continuation.typed_parts import read_message_event, read_response_event


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of one endpoint's stream."""

    read: Callable[[bytes], list[Part]]
    # Members at the top of every event that belong to the run, not to the answer.
    run_members: tuple[str, ...] = ()
    # The events are numbered, and contain the time of creation in a response object.
    numbered: bool = False

    def read_parts(self, data: bytes) -> list[Part]:
        """Return the parts of an event's data.

        Raises one of `UNREADABLE` if the data is not of this dialect.
        """
        return [DONE] if data == b"[DONE]" else self.read(data)


_CHOICES = Dialect(read_chunk, run_members=("id", "created"))
DIALECTS = {
    "/v1/chat/completions": _CHOICES,
    "/v1/completions": _CHOICES,
    "/v1/messages": Dialect(read_message_event),
    "/v1/responses": Dialect(read_response_event, numbered=True),
}
