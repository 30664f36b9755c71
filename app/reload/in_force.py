"""The configuration in force, setting by setting, without secrets. Pure.

Settings that the gateway declares are secret by their type; what is named freely, as flags and
variables of engines and rules on fields, is secret by its name. When in doubt, a value is hidden.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr

from app.fleet import flatten
from app.reload.shown import shown, value
from app.settings import SECRETS, ModelSettings, Settings
from engines.output import is_secret

# Tokens of a model are counted; where the value is no number, they are those that let somebody in.
_COUNTED = re.compile(r"tokens?", re.IGNORECASE)
# The query and the fragment of a URL.
_QUERY = re.compile(r"(://[^\s?#]*)[?#]\S*")


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """A setting; `text` is None where the value is hidden."""

    path: str
    text: str | None
    # Not the default.
    changed: bool


@dataclass(frozen=True, slots=True)
class ShownSection:
    """The settings of a section, or of a model."""

    title: str
    settings: tuple[ShownSetting, ...]


def settings_in_force(settings: Settings) -> list[ShownSection]:
    """Return all settings by section: first those of the gateway, then each model's."""
    sections: list[ShownSection] = []
    for name in type(settings).model_fields:
        member = getattr(settings, name)
        if isinstance(member, BaseModel):
            sections.append(ShownSection(name, tuple(_declared(member, ""))))
    sections.append(ShownSection("keys of the environment", tuple(_keys(settings))))
    return [*sections, *map(model_in_force, settings.models)]


def model_in_force(model: ModelSettings) -> ShownSection:
    """Return the settings of a model and its engines."""
    return ShownSection(f"model {shown(model.name)}", tuple(_model(model)))


def _keys(settings: Settings) -> Iterator[ShownSetting]:
    for name in sorted(SECRETS):
        given = bool(getattr(settings, name))
        yield ShownSetting(name, None if given else "none", given)


def _model(model: ModelSettings) -> Iterator[ShownSetting]:
    yield from _declared(model, "", skip="engines")
    for number, spec in enumerate(model.engines):
        yield from _declared(spec, f"engines[{number}].")


def _declared(section: BaseModel, within: str, skip: str = "") -> Iterator[ShownSetting]:
    """Yield the settings of a section whose names the gateway declares."""
    for name, about in type(section).model_fields.items():
        if name == skip:
            continue
        member, path = getattr(section, name), f"{within}{name}"
        if isinstance(member, BaseModel):
            yield from _declared(member, f"{path}.")
        elif isinstance(member, Mapping):
            yield from _free(name, path, member)
        else:
            changed = about.is_required() or member != about.get_default(call_default_factory=True)
            yield ShownSetting(path, _text(name, member, numbers=True), changed)


def _free(name: str, path: str, members: Mapping[str, Any]) -> Iterator[ShownSetting]:
    """Yield the members of a mapping, whose names nobody declared."""
    for key, member in flatten(dict(members)).items():
        counted = _is_number(member) and not is_secret(_COUNTED.sub("", key))
        text = None if name == "env" else _text(key, member, numbers=counted)
        yield ShownSetting(shown(f"{path}.{key}"), text, True)


def _text(name: str, member: object, *, numbers: bool) -> str | None:
    """Return the text of a value; None if it is or may be a secret. `numbers` are none."""
    if isinstance(member, SecretStr | bytes):
        return None
    if member is None or (numbers and _is_number(member)):
        return value("", member)
    if is_secret(_COUNTED.sub("token", name)):
        return None
    if isinstance(member, list | tuple):
        if any(isinstance(one, bytes | SecretStr) for one in member):
            return None
        if any(isinstance(one, list | dict) for one in member):
            return f"{len(member)} items"
        member = [_QUERY.sub(r"\1?…", one) if isinstance(one, str) else one for one in member]
    elif isinstance(member, str):
        member = _QUERY.sub(r"\1?…", member)
    return value(name, member)


def _is_number(member: object) -> bool:
    return isinstance(member, bool | int | float)
