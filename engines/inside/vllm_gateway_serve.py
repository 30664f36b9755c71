"""Runs the vLLM server of an interpreter, of any version. A script; Python 3.10 is enough.

    /opt/vllm/bin/python vllm_gateway_serve.py FLAG...

vLLM 0.30 and newer have the server in `launchers`, 0.28 in `openai`. The command `vllm`
does not run from the CPU build, whose distribution has another name.

Imports are most of a start. A process that the server spawns runs the main module of its parent
first: this script, which imports nothing of the server. All of these processes look for garbage
less often than by default, where that is a fifth of the imports' time; the server not at all until
it has imported its modules, which are no garbage.
"""

import gc
import os
import sys
from importlib import import_module
from importlib.util import find_spec

# The default is 700, 10, 10. With more than these, a single pause would be noticed when it serves.
gc.set_threshold(5_000, 20, 20)


def main() -> None:
    """Run the server; versions before 0.30 replace this process by it."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit(f"{sys.executable} has no vLLM")
    module = "vllm.entrypoints.launchers.api_server.entry"
    if os.path.exists(os.path.join(os.path.dirname(spec.origin), *module.split(".")[1:]) + ".py"):
        gc.disable()
        server = import_module(module)
        gc.freeze()
        gc.enable()
        server.main()
        return
    # What lies in the working directory is not for vLLM; Python 3.10 has no such flag.
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    module = "vllm.entrypoints.openai.api_server"
    os.execv(sys.executable, [sys.executable, *safe, "-m", module, *sys.argv[1:]])


if __name__ == "__main__":
    main()
