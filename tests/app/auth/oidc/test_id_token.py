"""What the claims of an ID token make of a person."""

import pytest

from app.auth.oidc.id_token import person_of
from app.auth.tokens import UnusableClaim
from app.settings import OidcSettings


@pytest.mark.parametrize("claim", ["email", "/email"])
@pytest.mark.parametrize("place", ["subject_claim", "role_claim", "owner_claim"])
def test_an_email_that_is_not_verified_is_not_usable(place: str, claim: str) -> None:
    """Whichever way the settings name it."""
    claims = {"sub": "mallory", "groups": "ops", "email": "ops"}
    settings = OidcSettings.model_validate(
        {
            "issuer": "https://id.example",
            "client_id": "console",
            "role_claim": "groups",
            "roles": {"ops": "admin"},
            place: claim,
        }
    )
    with pytest.raises(UnusableClaim, match="email_verified"):
        person_of(claims, settings)
    assert person_of({**claims, "email_verified": True}, settings) is not None
