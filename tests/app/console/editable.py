"""A gateway whose configuration file its console may edit."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from app.settings import Settings, digest, load_settings
from tests.gateway import KEY, ROOT_KEY, Gateway, make_tables, running

FILE = """\
server: {{host: 127.0.0.1, port: 0}}   # of the test
console: {{edit_configuration: {allowed}}}
models:
  # The first one.
  - name: demo
    engines:
      - kind: remote
        url: {url}   # of the fake
"""
PROCESS = """\
  - name: own   # runs here
    load: on_demand
    engines:
      - kind: process
        model: m
        memory_gib: 0.1
        env: {HF_TOKEN: hf_canary0123456789, PLAIN: canary}
        args: {max-model-len: 1024, hf-token: canary}
"""


@dataclass
class EditableGateway:
    """A gateway and its file."""

    gateway: Gateway
    file: Path

    @property
    def text(self) -> str:
        return self.file.read_text()

    @property
    def names(self) -> list[str]:
        """The models that are in force."""
        return [model.name for model in self.gateway.state.settings.models]


@asynccontextmanager
async def editable(
    directory: Path,
    url: str,
    more: str = "",
    *,
    allowed: bool = True,
    launcher: Sequence[str] | None = None,
) -> AsyncIterator[EditableGateway]:
    """Run a gateway with a file of a remote model, and what `more` adds to it."""
    file = directory / "gateway.yaml"
    file.write_text(FILE.format(allowed=str(allowed).lower(), url=url) + more)
    make_tables(directory / "var" / "gateway.db")

    def load(text: str | None = None) -> Settings:
        found = load_settings(file, text=text)
        keys = {"api_keys": (digest(KEY.encode()),), "admin_key": digest(ROOT_KEY.encode())}
        return found.model_copy(update=keys)

    async with running(load(), launcher, source=load, source_of_text=load) as gateway:
        yield EditableGateway(gateway, file)
