"""Runs a rank of an engine over several nodes that does not serve. A script, never imported.

    python -P headless.py --headless --nnodes=N --node-rank=R FLAG...

It does what `vllm serve` does with `--headless`. That command does not run from the CPU build,
whose distribution has another name, and the module that runs the server knows no `--headless`.
"""

import gc

from engines.inside import import_cli_args

gc.set_threshold(5_000, 20, 20)  # as in engines.inside.vllm_gateway_serve, workers as well


def main() -> None:
    """Run `vllm serve` with the flags of this process."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:  # since 0.33
        from vllm.entrypoints.common.startup import cli_env_setup
    except ImportError:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    try:  # since 0.31
        from vllm.logger import configure_logging_from_args
    except ImportError:
        configure_logging_from_args = None

    cli_env_setup()
    command = ServeSubcommand()
    arguments = import_cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args()
    if configure_logging_from_args is not None:
        configure_logging_from_args(arguments)
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
