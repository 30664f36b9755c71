"""A tiny chat model that has memorized two dozen dialogues, shipped with its weights.

A first run and the tests can so use real vLLM on real weights with known answers, where there is
no GPU and nothing to download.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

# Names the recipe of a finished model. A directory without it is not ours to touch.
MARKER = "demo.json"
WEIGHTS = Path(__file__).with_name("weights")
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
RECIPE = ("training.py", "lessons.py", "dialogues.py", TEMPLATE.name)


class DemoModelError(Exception):
    """The demo model could not be made, or does not know what it should. Says why in one line."""


def copy_demo_model(directory: Path) -> bool:
    """Copy the demo model to `directory`; return False if it is there already.

    Raises DemoModelError as `place` does.
    """

    def make(new: Path) -> None:
        for file in WEIGHTS.iterdir():
            shutil.copyfile(file, new / file.name)

    shipped = recipe_of(WEIGHTS) or recipe()
    if recipe_of(directory) == shipped:
        return False
    place(directory, shipped, make)
    return True


def place(directory: Path, wanted: str, make: Callable[[Path], None]) -> None:
    """Put a demo model of the recipe `wanted` in `directory`, in place of one that is there.

    `make` writes it to an empty directory. The model appears as a whole or not at all. Raises
    DemoModelError when the directory holds anything else or cannot be written.
    """
    directory = directory.resolve()
    try:
        recipe_of(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        # A sibling, so that the move at the end is a rename within one file system.
        prefix = f".{directory.name}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch:
            new = Path(scratch) / "new"
            new.mkdir()
            make(new)
            (new / MARKER).write_text(json.dumps({"recipe": wanted}) + "\n")
            for file in new.iterdir():
                file.chmod(0o644)  # weights come out readable by their owner only
            if directory.exists():
                directory.rename(Path(scratch) / "old")
            new.rename(directory)
    except OSError as error:
        raise DemoModelError(f"cannot write the demo model: {error}") from error


def recipe() -> str:
    """Return the hash of all that the weights depend on."""
    digest = hashlib.sha256()
    for name in RECIPE:
        digest.update(TEMPLATE.with_name(name).read_bytes())
    return digest.hexdigest()


def recipe_of(directory: Path) -> str | None:
    """Return the recipe of the model there, None if nothing is. Raises DemoModelError."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    try:
        return str(json.loads((directory / MARKER).read_bytes())["recipe"])
    except (OSError, ValueError, TypeError, KeyError):
        raise DemoModelError(
            f"{directory} holds something other than a demo model; choose another directory"
        ) from None
