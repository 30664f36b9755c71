"""The section `console`: the web console."""

from pydantic import Field

from engines.spec import SpecModel


class ConsoleSettings(SpecModel):
    """The web console, and the record of recent requests that it shows."""

    enabled: bool = Field(True, description="Serve the web console at /console.")
    edit_configuration: bool = Field(
        False,
        description="Let administrators add, change and remove models on a page of the console, "
        "which writes the configuration file and reloads it. Some settings, such as env, python, "
        "image and volumes, stay for the file alone.",
    )
