"""The script that runs vLLM's server: what the processes that the server spawns have of it."""

import subprocess
from pathlib import Path

import pytest

from engines.interpreter import launcher
from tests.engines.environments import make_environment

SERVER = """
import gc, multiprocessing, sys

imported = gc.isenabled()

def main():
    print(sys.argv[1:], imported, gc.isenabled(), gc.get_threshold()[0], flush=True)
    child = multiprocessing.get_context("spawn").Process(target=print_process)
    child.start()
    child.join()
"""
CORE = """
import gc, sys

def print_process():
    print([name for name in sys.modules if "api_server" in name], gc.get_threshold()[0])
"""


@pytest.mark.slow
def test_server_imports_without_the_collector_and_spawned_processes_nothing_of_it(
    tmp_path: Path,
) -> None:
    python = make_environment(tmp_path, "0.32.0")
    [vllm] = tmp_path.glob("lib/python3*/site-packages/vllm")
    server = vllm / "entrypoints" / "launchers" / "api_server" / "entry.py"
    server.write_text(f"from vllm.core import print_process\n{SERVER}")
    (vllm / "core.py").write_text(CORE)
    done = subprocess.run(
        [*launcher(python), "--flag"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["['--flag'] False True 5000", "[] 5000"], done.stderr
