"""Libraries that a serving gateway must not import, since they would stay in memory."""

import subprocess
import sys
from pathlib import Path

import pytest

# With what else they import; docs/decisions/0029-memory.md has what each takes.
NOT_LOADED = (
    "alembic",
    "asyncpg",
    "attr",
    "httpx",
    "jwt",
    "opentelemetry",
    "pygments",
    "ray",
    "redis",
    "rich",
    "sqlalchemy.dialects.postgresql",
    "torch",
    "vllm",
)

# What `serve` does until it listens, with the tables still to be made.
START = """
import sys
from pathlib import Path

import app.cli
from app.main import create_app
from app.server import gateway_server, metrics_server
from app.server.database import prepare_database
from app.settings import load_settings

settings = load_settings(Path("gateway.yaml"))
prepare_database(settings)
app = create_app(settings)
gateway_server(app), metrics_server(app)
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""

CONFIGURATION = """
state: {database_url: "sqlite+aiosqlite:///gateway.db"}
models: [{name: demo, engines: [{kind: remote, url: "http://127.0.0.1:9"}]}]
"""


@pytest.mark.slow
def test_gateway_loads_no_library_that_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(CONFIGURATION)
    done = subprocess.run(
        [sys.executable, "-c", START, *NOT_LOADED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []
