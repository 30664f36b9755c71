"""The libraries in `static/vendor` are the published ones, byte for byte."""

import hashlib
import json

import pytest

from app.console.rendering import STATIC

VENDOR = STATIC / "vendor"
PINS = json.loads((VENDOR / "versions.json").read_text())


def test_every_library_is_pinned_and_has_its_license() -> None:
    pinned = {"versions.json", *PINS, *(pin["license_file"] for pin in PINS.values())}
    assert {path.name for path in VENDOR.iterdir()} == pinned


@pytest.mark.parametrize("name", PINS)
def test_a_library_is_as_it_was_published(name: str) -> None:
    content = (VENDOR / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == PINS[name]["sha256"]
    assert PINS[name]["version"] in content[:300].decode()
