"""The section `console`: the web console."""

from pydantic import Field

from engines.spec import SpecModel


class ConsoleSettings(SpecModel):
    """The web console, and the record of recent requests that it shows."""

    enabled: bool = Field(True, description="Serve the web console at /console.")
