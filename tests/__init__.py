"""Tests of vllm-gateway."""

import os
import sys

# If it is set, each process compiles its modules again, most of a start; vLLM's take seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
