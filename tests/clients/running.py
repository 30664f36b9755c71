"""Runs the programs of clients against a gateway, with what the pages show."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.docs.page import ROOT, Block, Page
from tests.e2e.deployment import KEY

PAGES = [Page.read(ROOT / "docs" / name) for name in ("clients.md", "open-webui.md")]
RUN_S = 180.0


class ClientFault(AssertionError):
    """A client failed; the text is its output."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where the gateway is, and a directory for what clients write."""

    url: str
    directory: Path

    def here(self, text: str) -> str:
        """Return a text of the page with this gateway's address."""
        return text.replace("http://127.0.0.1:8000", self.url)


def blocks(language: str, *words: str) -> list[Block]:
    """Return the pages' blocks with these words behind the fence."""
    every = (block for page in PAGES for block in page.blocks)
    return [block for block in every if (block.language, block.words) == (language, words)]


def environment(gateway: Gateway) -> dict[str, str]:
    """The environment of a client: ours without settings of a developer's own, and a key."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GATEWAY_")}
    return {**kept, "KEY": KEY, "OPENAI_API_KEY": KEY, "GATEWAY_URL": gateway.url}


def ended(
    gateway: Gateway, *command: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever that is."""
    return subprocess.run(
        command,
        cwd=gateway.directory,
        env={**environment(gateway), **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def run(gateway: Gateway, *command: str) -> str:
    """Return what a command prints. Raises ClientFault."""
    done = ended(gateway, *command)
    if done.returncode != 0:
        raise ClientFault(done.stdout + done.stderr)
    return done.stdout
