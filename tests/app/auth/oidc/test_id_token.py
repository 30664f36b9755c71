"""What the claims of an ID token make of a person."""

import pytest
from pydantic import ValidationError

from app.auth.oidc.id_token import person_of
from app.auth.tokens import UnusableClaim
from app.settings import OidcSettings


def settings_with(**fields: str) -> OidcSettings:
    return OidcSettings.model_validate(
        {
            "issuer": "https://id.example",
            "client_id": "console",
            "role_claim": "groups",
            "roles": {"ops": "admin"},
            **fields,
        }
    )


@pytest.mark.parametrize("claim", ["email", "/email"])
@pytest.mark.parametrize("place", ["role_claim", "owner_claim"])
def test_an_email_that_is_not_verified_is_not_usable(place: str, claim: str) -> None:
    """Whichever way the settings name it."""
    claims = {"sub": "mallory", "groups": "ops", "email": "ops"}
    settings = settings_with(**{place: claim})
    with pytest.raises(UnusableClaim, match="email_verified"):
        person_of(claims, settings)
    assert person_of({**claims, "email_verified": True}, settings) is not None


@pytest.mark.parametrize("claim", ["email", "/email"])
def test_an_email_is_the_name_of_no_person(claim: str) -> None:
    """Even a verified one: two accounts can have it, and would be one caller."""
    with pytest.raises(ValidationError, match="two people can have one e-mail address: use sub"):
        settings_with(subject_claim=claim)
