"""Runs the vLLM server of another interpreter. A script, never imported; Python 3.10 is enough.

    /opt/vllm/bin/python vllm_gateway_serve.py FLAG...

vLLM 0.30 and newer have the server in `launchers`, 0.28 in `openai`. The command `vllm`
does not run from the CPU build, whose distribution has another name.
"""

import os
import sys
from importlib.util import find_spec


def main() -> None:
    """Become the server: this process is its own from here on."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit(f"{sys.executable} has no vLLM")
    module = "vllm.entrypoints.launchers.api_server.entry"
    entry = os.path.join(os.path.dirname(spec.origin), *module.split(".")[1:]) + ".py"
    if not os.path.exists(entry):
        module = "vllm.entrypoints.openai.api_server"
    # What lies in the working directory is not for vLLM; Python 3.10 has no such flag.
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    os.execv(sys.executable, [sys.executable, *safe, "-m", module, *sys.argv[1:]])


if __name__ == "__main__":
    main()
