"""Filters of a page in its address: one chip for each, whose choices are links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from app.console.language import gettext


@dataclass(frozen=True, slots=True)
class Option:
    """A choice of a chip."""

    title: str
    path: str
    current: bool


@dataclass(frozen=True, slots=True)
class Field:
    """An input of a chip, for values that are no choice."""

    name: str
    label: str
    value: str
    example: str


@dataclass(frozen=True, slots=True)
class Chip:
    """A filter. `value` is what it selects, in words; empty: everything."""

    title: str
    value: str
    without: str  # the path of the page without it
    options: Sequence[Option]
    fields: Sequence[Field] = ()
    kept: Sequence[tuple[str, str]] = ()  # the other filters, for the form of its fields


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of a page that are set: `fields`, by their names in its address."""

    page: str
    fields: Mapping[str, str]

    def path(self, **changes: str) -> str:
        """Return the path of the first page with some filters changed; empty: without them."""
        fields = {**self.fields, **changes}
        text = urlencode({name: value for name, value in fields.items() if value})
        return self.page + (f"?{text}" if text else "")

    def chip(
        self,
        title: str,
        name: str,
        choices: Mapping[str, str],
        *,
        label: str = "",
        example: str = "",
    ) -> Chip:
        """Return the chip of a filter; `choices` are titles by value. `example`: of its input."""
        current = self.fields.get(name, "")
        options = [
            Option(shown, self.path(**{name: value}), value == current)
            for value, shown in choices.items()
        ]
        inputs = [Field(name, label or title, "", example)] if example else []
        value = choices.get(current, current)
        return Chip(title, value, self.path(**{name: ""}), options, inputs, self.kept(name))

    def time_chip(self, spans: Mapping[str, str]) -> Chip:
        """Return the chip of `from` and `to`; `spans` are titles of times before now."""
        since, until = self.fields.get("from", ""), self.fields.get("to", "")
        value = spans.get(since, "")
        if since and not value:
            value = gettext("from %(time)s", time=since)
        if until:
            value = gettext("%(since)s to %(until)s", since=value, until=until)
        return Chip(
            gettext("Time"),
            value.strip(),
            self.path(**{"from": "", "to": ""}),
            [
                Option(title, self.path(**{"from": word, "to": ""}), word == since)
                for word, title in spans.items()
            ],
            (
                Field("from", gettext("From (UTC)"), since, "2026-11-26T14:00"),
                Field("to", gettext("To (UTC)"), until, "2026-11-26"),
            ),
            self.kept("from", "to"),
        )

    def kept(self, *names: str) -> list[tuple[str, str]]:
        """Return the filters that a form with inputs of these names keeps."""
        return [(name, value) for name, value in self.fields.items() if name not in names]
