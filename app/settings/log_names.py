"""Public names for log levels: subsystems of the gateway, and the libraries it uses.

`logs.levels`, PUT /admin/logs and `vllm-gateway log-level` take these names instead of module
paths, so that a module can move without breaking a configuration.
"""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from app.settings.suggest import did_you_mean

ROOT = "root"  # everything without a level of its own
ACCESS = "access"  # one line for each request

# Subsystem → the loggers of its packages and modules. A logger covers all modules below it.
SUBSYSTEMS: Mapping[str, tuple[str, ...]] = {
    ROOT: (ROOT,),
    ACCESS: (ACCESS,),
    "admission": ("app.admission", "app.concurrency"),
    "api": ("app.api",),
    "audit": ("app.audit",),
    "auth": ("app.auth",),
    "capture": ("app.capture",),
    "console": ("app.console",),
    "database": ("app.database",),
    "discovery": ("app.discovery", "app.fleet.members"),
    "engines": ("engines",),
    "engines.gpu": ("engines.gpu",),
    "engines.guardian": ("engines.guard",),
    "engines.in_process": ("engines.inprocess",),
    "engines.remote": ("engines.remote",),
    "engines.supervisor": ("engines.process",),
    "fleet": ("app.fleet",),
    "limits": ("app.limits",),
    "limits.redis": ("app.limits.redis_store",),
    "relay": ("app.relay",),
    "reload": ("app.reload",),
    "residency": ("app.residency",),
    "routing": ("app.routing",),
    "scaling": ("app.scaling",),
    "server": ("app.application", "app.certificate", "app.main", "app.server"),
    "sharing": ("app.sharing",),
    "traces": ("app.telemetry.traces",),
    "usage": ("app.usage",),
    "usage.alerts": ("app.usage.alerts",),
}
# Libraries that log; names below them (`sqlalchemy.engine`) are accepted too.
LIBRARIES = (
    "aiosqlite", "alembic", "asyncio", "asyncpg", "fastapi", "httpcore", "httpx", "opentelemetry",
    "py.warnings", "python_multipart", "ray", "redis", "sqlalchemy", "uvicorn", "vllm",
)  # fmt: skip
_LIBRARY = re.compile(
    f"(?:{'|'.join(map(re.escape, LIBRARIES))})" + r"(?:\.[A-Za-z0-9_-]{1,64}){0,8}"
)
_NAMES = (*SUBSYSTEMS, *LIBRARIES)


def loggers_of(name: str) -> tuple[str, ...]:
    """Return the loggers that a name stands for."""
    return SUBSYSTEMS.get(name, (name,))


def check_log_name(name: str) -> str:
    """Return the name. Raises ValueError, with the nearest name, for an unknown one."""
    if name in SUBSYSTEMS or _LIBRARY.fullmatch(name):
        return name
    hint = did_you_mean(name, _NAMES, f"; subsystems: {', '.join(SUBSYSTEMS)}")
    raise ValueError(f"{name!r} is not a subsystem or a library that logs{hint}")


LogName = Annotated[
    str,
    AfterValidator(check_log_name),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^(?:{'|'.join(map(re.escape, SUBSYSTEMS))}|{_LIBRARY.pattern})$",
        }
    ),
]
