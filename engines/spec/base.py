"""The base of all specifications: their validation, timeouts and restarts."""

from pydantic import BaseModel, ConfigDict, Field


class PlacedError(ValueError):
    """A fault of one member of a validated value; `place` is the path to it."""

    def __init__(self, message: str, *place: str | int) -> None:
        super().__init__(message)
        self.place = place


class SpecModel(BaseModel):
    """Base of everything that is read from the configuration file: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Timeouts(SpecModel):
    """Timeouts of an engine, in seconds."""

    connect_s: float = Field(
        5.0, gt=0, description="Maximum time to connect to the engine, in seconds."
    )
    # OpenAI's SDK gives up after 600 s; a shorter default would fail requests that it waits for.
    first_byte_s: float = Field(
        600.0,
        gt=0,
        description="Maximum time from sending a request to the response headers, in seconds. The "
        "request then fails with 504.",
    )
    stall_s: float = Field(
        300.0,
        gt=0,
        description="Maximum time between two reads of a response, in seconds. The response is "
        "then aborted.",
    )


class Restart(SpecModel):
    """Automatic restarts of an engine that failed, with exponential backoff."""

    backoff_s: float = Field(
        1.0,
        gt=0,
        description="Delay before the first restart, in seconds. It doubles with each further "
        "restart.",
    )
    max_backoff_s: float = Field(
        60.0, gt=0, description="Maximum delay before a restart, in seconds."
    )
    budget: int = Field(
        5,
        ge=0,
        description="Maximum number of counted restarts. After that the engine stays failed until "
        "it is started by hand. 0: no restarts.",
    )
    window_s: float = Field(
        600.0,
        gt=0,
        description="Time that the engine must serve before a restart no longer counts against "
        "the budget, in seconds.",
    )
