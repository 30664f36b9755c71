"""Code that runs in vLLM's own processes, of any environment. Standard library and vLLM only.

This directory is on the PYTHONPATH of engines in another environment, which has no vllm-gateway:
there the modules have no package, and the dist-info directory names the plugin to vLLM. In the
gateway's environment they are `engines.inside.…`, and its own distribution names the plugin.
"""

from pathlib import Path

from engines.inside.vllm_gateway_parser import import_cli_args
from engines.inside.vllm_gateway_plugin import METHOD

# For PYTHONPATH.
DIRECTORY = Path(__file__).parent.absolute()

__all__ = ["DIRECTORY", "METHOD", "import_cli_args"]
