"""The gateway as a program whose engines of kind: process are the fake of vLLM's server.

python -m tests.fakes.gateway [serve --config] CONFIG
"""

import sys
from pathlib import Path

from app.cli.faults import faults
from app.server import serve
from app.settings import load_settings
from app.telemetry.logs import configured_log

if __name__ == "__main__":
    with faults():
        settings = load_settings(Path(sys.argv[-1]))
        with configured_log(settings.logs) as output:
            serve(settings, output=output, launcher=(sys.executable, "-m", "tests.fakes.vllm"))
