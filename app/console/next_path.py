"""Where a browser goes after the login."""

from urllib.parse import unquote

from app.console.visitor import CONSOLE

_DOTS = frozenset({".", ".."})


def next_path(path: str, root_path: str) -> str:
    """Return a path of the console, without `root_path`; its start in place of any other place."""
    path = path.removeprefix(root_path)
    plain = path.startswith(f"{CONSOLE}/") and "//" not in path and "\\" not in path
    # A browser takes these for steps upwards, encoded or not.
    climbs = not _DOTS.isdisjoint(unquote(path.partition("?")[0]).split("/"))
    return path if plain and path.isprintable() and not climbs else CONSOLE
