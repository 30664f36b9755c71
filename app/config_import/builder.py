"""Builds the settings of an import, consistent and valid."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from app.config_import.reading import ImportFault, one_line
from app.settings import (
    LogSettings,
    ModelSettings,
    ServerSettings,
    StateSettings,
    find_fallback_fault,
)
from engines.environment import PRIVATE_PREFIX

__all__ = ("ImportFault", "ImportResult", "Note", "SettingsBuilder")

_SECTIONS: Mapping[str, type[BaseModel]] = {
    "server": ServerSettings,
    "logs": LogSettings,
    "state": StateSettings,
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Note:
    """Something that was not imported: its place in the source, and what to do instead."""

    place: str
    text: str

    def __str__(self) -> str:
        return one_line(f"{self.place}: {self.text}")


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The result of an import."""

    settings: dict[str, Any]
    variables: Mapping[str, str]  # to set before the gateway starts: name and meaning
    notes: tuple[Note, ...]


@dataclass(slots=True)
class SettingsBuilder:
    """Collects models and sections. `build` leaves out those that the gateway would refuse."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    _models: dict[str, dict[str, Any]] = field(default_factory=dict)
    _variables: dict[str, str] = field(default_factory=dict)
    _secrets: dict[str, str] = field(default_factory=dict)  # variable by secret
    _notes: dict[Note, None] = field(default_factory=dict)

    def note(self, place: str, text: str) -> None:
        """Add a note, once."""
        self._notes.setdefault(Note(place, text))

    def note_keys(self, place: str, names: Iterable[str], advice: Mapping[str, str]) -> None:
        """Add a note for each key of the source without a counterpart in the settings."""
        for name in sorted(names):
            shown = name if len(name) <= 64 else f"{name[:63]}…"
            where = f"{place}.{shown}" if place else shown
            self.note(where, advice.get(name, "has no counterpart"))

    def require(self, variable: str, meaning: str) -> None:
        """Add a variable that must be set before the gateway starts."""
        self._variables.setdefault(variable, meaning)

    def use_key_variable(self, variable: str, place: str, program: str) -> str | None:
        """Return a variable that holds a server's key, as in the source.

        None, with a note, for a variable of the gateway: its root key would be sent to that server.
        """
        if variable.startswith(PRIVATE_PREFIX):
            self.note(
                place,
                f"its key is in {variable}, a variable of the gateway itself: put the key into "
                "another variable and set api_key_env",
            )
            return None
        self.require(variable, f"the key of {place}, in the same variable as for {program}")
        return variable

    def secret_variable(self, secret: str, owner: str, place: str) -> str:
        """Return the variable for a secret of the source; equal secrets share one."""
        if secret not in self._secrets:
            stem = re.sub(r"[^A-Z0-9]+", "_", owner.upper()).strip("_")
            if not re.match(r"(?!GATEWAY)[A-Z]", stem):
                stem = f"ENGINE_{stem}".rstrip("_")
            name, count = f"{stem}_API_KEY", 2
            while name in self._variables or name == "VLLM_API_KEY":
                name, count = f"{stem}_{count}_API_KEY", count + 1
            self._secrets[secret] = name
            self.require(name, f"the value of {place}, which is not copied")
        return self._secrets[secret]

    def add(self, place: str, model: dict[str, Any]) -> None:
        """Add a model; one that the gateway would refuse becomes a note."""
        model = {key: value for key, value in model.items() if value not in (None, [], {}, ())}
        if fault := find_fault(ModelSettings, model):
            self.note(place, f"is left out: {fault}")
        elif model["name"] in self._models:
            self.note(place, f"is left out: another model is named {model['name']!r}")
        else:
            self._models[model["name"]] = model

    def build(self) -> ImportResult:
        """Return valid settings. Raises ImportFault if no model is left."""
        if not self._models:
            reasons = "; ".join(str(note) for note in list(self._notes)[:3])
            raise ImportFault(f"nothing to import: {reasons or 'the source names no model'}")
        self._resolve_aliases()
        self._resolve_fallbacks()
        self._resolve_inherited()
        settings: dict[str, Any] = {}
        for name, kind in _SECTIONS.items():
            if section := self.sections.get(name):
                if fault := find_fault(kind, section):
                    self.note(name, f"is left out: {fault}")
                else:
                    settings[name] = section
        settings["models"] = [_ordered(model) for model in self._models.values()]
        return ImportResult(settings, dict(self._variables), tuple(self._notes))

    def _resolve_aliases(self) -> None:
        taken = set(self._models)
        for name, model in self._models.items():
            kept: list[str] = []
            for alias in model.pop("aliases", ()):
                if alias in taken:
                    if alias != name and alias not in kept:
                        self.note(f"alias {alias!r} of {name!r}", "is the name of another model")
                    continue
                taken.add(alias)
                kept.append(alias)
            if kept:
                model["aliases"] = kept

    def _resolve_fallbacks(self) -> None:
        wanted: dict[str, list[str]] = {name: [] for name in self._models}
        for name, model in self._models.items():
            for fallback in dict.fromkeys(model.pop("fallbacks", ())):
                if fallback in self._models and fallback != name:
                    wanted[name].append(fallback)
                elif fallback != name:
                    self.note(
                        f"fallback {fallback!r} of {name!r}", "is left out: there is no such model"
                    )
        resolved = wanted if find_fallback_fault(wanted) is None else self._without_cycles(wanted)
        for name, names in resolved.items():
            if names:
                self._models[name]["fallbacks"] = names

    def _without_cycles(self, wanted: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Return the fallbacks without those that close a cycle."""
        resolved: dict[str, list[str]] = {name: [] for name in wanted}
        for name, fallbacks in wanted.items():
            for fallback in fallbacks:
                resolved[name].append(fallback)
                if fault := find_fallback_fault(resolved):
                    resolved[name].pop()
                    self.note(f"fallback {fallback!r} of {name!r}", f"is left out: {fault.message}")
        return resolved

    def _resolve_inherited(self) -> None:
        engines = [engine for model in self._models.values() for engine in model["engines"]]
        keys = {engine.get("api_key_env") for engine in engines}
        for engine in engines:
            inherited = engine.pop("inherit_env", [])
            if kept := [name for name in inherited if name not in keys]:
                engine["inherit_env"] = kept
            for name in sorted(set(inherited) & keys):
                self.note(name, "is the key of a remote engine, which engines never inherit")


def is_variable(name: str) -> bool:
    """Return whether a text can be the name of an environment variable."""
    return _VARIABLE.fullmatch(name) is not None


def find_fault(kind: type[BaseModel], values: Mapping[str, Any]) -> str | None:
    """Return in one line why a section of the settings is invalid, None if it is valid."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        further = getattr(first.get("ctx", {}).get("error"), "place", ())
        place = ".".join(str(part) for part in (*first["loc"], *further))
        message = first["msg"].removeprefix("Value error, ")
        return " ".join((f"{place}: {message}" if place else message).split())
    return None


def _ordered(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model with its keys in the usual order: names first, engines last."""
    names = ("name", "aliases", "fallbacks")
    order = [*names, *(key for key in model if key not in {*names, "engines"}), "engines"]
    return {key: model[key] for key in order if key in model}
