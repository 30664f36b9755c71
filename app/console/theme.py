"""The color scheme that a browser asked for, kept in a cookie of its own."""

from enum import StrEnum

COOKIE = "gateway_theme"
LIFETIME_S = 365 * 24 * 3600


class Theme(StrEnum):
    """Color schemes of the pages."""

    AUTO = "auto"  # as the browser's system has it
    LIGHT = "light"
    DARK = "dark"


def theme_named(text: str) -> Theme:
    """Return a scheme by its name; AUTO for every other text."""
    return Theme(text) if text in set(Theme) else Theme.AUTO
