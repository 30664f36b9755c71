"""`python -m tests.clients [NAME…]`: runs the clients, and prints a line for each."""

import sys
import tempfile
import time
from pathlib import Path

from tests.clients.clients import CLIENTS
from tests.clients.environments import Unavailable
from tests.clients.running import ClientFault, Gateway
from tests.e2e.deployment import ENGINE, demo_model, deployed, until_ready


def main(names: list[str]) -> int:
    """Return the exit code: 0 only if every client was run and did what it should."""
    if unknown := [name for name in names if name not in CLIENTS]:
        print(f"no client {', '.join(unknown)}; there are {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    demo_model()
    model = {"name": "demo", "aliases": ["gpt-4o-mini"], "engines": [ENGINE]}
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="vllm-gateway-clients-") as directory,
        deployed(Path(directory), model, llama_cpp_models=True) as deployment,
    ):
        until_ready(deployment)
        for name in names or CLIENTS:
            work = Path(directory, name)
            work.mkdir()
            failed += _run(name, Gateway(deployment.url, work))
    return 1 if failed else 0


def _run(name: str, gateway: Gateway) -> bool:
    """Run a client and print its line; return whether it did not pass."""
    started = time.monotonic()
    try:
        outcome, detail = "passed", CLIENTS[name](gateway)
    except Unavailable as reason:
        outcome, detail = "not run", str(reason)
    except (ClientFault, AssertionError) as fault:
        outcome, detail = "FAILED", f"\n{fault}"
    took = time.monotonic() - started
    print(f"{name:20} {outcome:8} {took:6.1f} s  {detail}", flush=True)
    return outcome != "passed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
