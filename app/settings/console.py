"""The section `console`: the web console."""

from pydantic import Field, model_validator

from app.settings.oidc import OidcSettings
from engines.spec import PlacedError, SpecModel


class ConsoleSettings(SpecModel):
    """The web console, and the record of recent requests that it shows."""

    enabled: bool = Field(True, description="Serve the web console at /console.")
    edit_configuration: bool = Field(
        False,
        description="Let administrators add, change and remove models on a page of the console, "
        "which writes the configuration file and reloads it. Some settings, such as env, python, "
        "image and volumes, stay for the file alone.",
    )
    key_sign_in: bool = Field(
        True,
        description="Let people sign in with a key. false: only by `oidc`, which must be set.",
    )
    oidc: OidcSettings | None = Field(
        None, description="Sign-in by OpenID Connect. Default: only with a key."
    )

    @model_validator(mode="after")
    def _check_sign_in(self) -> "ConsoleSettings":
        if not self.key_sign_in and self.oidc is None:
            raise PlacedError("nobody could sign in: set console.oidc", "key_sign_in")
        return self
