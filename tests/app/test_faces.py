"""Packages import each other by their faces: the names that an `__init__.py` exports."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(path for top in ("app", "engines") for path in (ROOT / top).rglob("*.py"))
# Modules that other packages import directly.
OPEN = {
    "app.config_import.reading",
    "app.database.backup",  # of commands alone
    "app.database.migration_process",  # run with `-m` as well
    "app.database.schema",  # the tables
    "app.redis.connection",  # redis-py is imported only where it is used
    "app.redis.subscription",
    "app.settings.log_names",
    "app.telemetry.traces.tracer",  # OpenTelemetry is imported only where it is used
    "engines.output.failure",
    "engines.output.startup",
}


def exports(package: Path) -> set[str]:
    """Return the names that a package's face exports; without `__all__` it has no face."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


FACES = {
    ".".join(path.parent.relative_to(ROOT).parts): names
    for path in FILES
    if path.name == "__init__.py" and (names := exports(path.parent))
}


def faults(path: Path) -> Iterator[str]:
    """Yield the imports of a module that look past a face."""
    importer = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.module in FACES:
            continue
        package, _, module = node.module.rpartition(".")
        if package not in FACES or module in FACES[package]:
            continue
        if importer.startswith(f"{package}."):
            continue
        names = {alias.name for alias in node.names}
        if exported := names & FACES[package]:
            yield f"{importer}: import {exported} from {package}"
        if node.module not in OPEN:
            yield f"{importer}: {package} does not export {names}"


def test_packages_import_each_other_by_their_faces() -> None:
    assert [fault for path in FILES for fault in faults(path)] == []
