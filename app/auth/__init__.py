"""API keys: their format, their storage, and who a request's key belongs to.

`Authenticator` turns headers into a `Principal`; `KeyStore` and `OwnerStore` are the tables of keys
and owners; `validation` checks what may be stored, and `views` shows it.
"""

from app.auth.authenticator import Authenticator
from app.auth.key_format import NewKey, id_of
from app.auth.key_store import KeyStore
from app.auth.keys import ApiKey, NameTaken, TooManyKeys, UnknownKey
from app.auth.model_checks import check_models
from app.auth.owner_store import (
    OwnerStore,
    ShownOwner,
    ShownOwners,
    UnknownOwner,
    checked_owner_name,
)
from app.auth.presented_key import presented_key
from app.auth.principal import (
    DEFAULT_PRIORITY,
    DEFAULT_WEIGHT,
    UNAUTHENTICATED,
    AdminScope,
    Allowed,
    Owner,
    Principal,
    Role,
)
from app.auth.validation import (
    KeyChanges,
    KeyFields,
    Name,
    OwnerFields,
    Rotation,
    duration,
    faults,
    milliseconds,
    moment,
    written,
)
from app.auth.views import ShownKey, ShownNewKey, ShownPage

__all__ = (
    "DEFAULT_PRIORITY",
    "DEFAULT_WEIGHT",
    "UNAUTHENTICATED",
    "AdminScope",
    "Allowed",
    "ApiKey",
    "Authenticator",
    "KeyChanges",
    "KeyFields",
    "KeyStore",
    "Name",
    "NameTaken",
    "NewKey",
    "Owner",
    "OwnerFields",
    "OwnerStore",
    "Principal",
    "Role",
    "Rotation",
    "ShownKey",
    "ShownNewKey",
    "ShownOwner",
    "ShownOwners",
    "ShownPage",
    "TooManyKeys",
    "UnknownKey",
    "UnknownOwner",
    "check_models",
    "checked_owner_name",
    "duration",
    "faults",
    "id_of",
    "milliseconds",
    "moment",
    "presented_key",
    "written",
)
