"""Runs a worker with the variables of its runtime environment, as Ray's script of this name does.

Ray's own imports all of Ray for that before it starts Python again for the worker: 0.9 s of CPU.
"""

import argparse
import json
import os
import runpy
import sys
import types
from pathlib import Path

# Ray imports them for TPUs and for plugins of runtime environments: another 0.3 s.
UNUSED = ("requests", "jsonschema")

parser = argparse.ArgumentParser()
parser.add_argument("--serialized-runtime-env-context", default="{}")
parser.add_argument("--language")
given, command = parser.parse_known_args()
os.environ.update(json.loads(given.serialized_runtime_env_context).get("env_vars", {}))
sys.modules.update({name: types.ModuleType(name) for name in UNUSED})
sys.argv[:] = command
sys.path[0] = str(Path(command[0]).parent)
runpy.run_path(command[0], run_name="__main__")
