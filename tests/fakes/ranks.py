"""The ranks of the fake vLLM over several nodes: how they meet, and how they miss each other.

As seen with vLLM 0.32: rank 0 serves when every rank has come to the master address. A rank without
a server never notices the end of rank 0. When another rank ends, rank 0 still answers /health; its
next request waits for that rank, with some libraries for ever.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags of ranks."""
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29501)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--distributed-executor-backend")
    parser.add_argument("--fake-headless-crash", action="store_true")


async def follow(options: argparse.Namespace) -> None:
    """Run a rank that does not serve."""
    rank = options.node_rank
    print(f"(Worker_TP{rank} pid=1) INFO 11-21 05:30:00 [m.py:1] rank={rank}", flush=True)
    print(json.dumps(dict(os.environ)), flush=True)
    if options.fake_headless_crash:
        print("(Worker pid=2) ERROR 11-21 05:30:01 [core.py:9] ValueError: no room for KV cache")
        sys.exit(1)
    while True:
        with contextlib.suppress(OSError):
            await asyncio.open_connection(options.master_addr, options.master_port)
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(3600)


async def lead(options: argparse.Namespace, missed: Callable[[], None]) -> None:
    """Return when every rank has come; call `missed` when one of them goes."""
    met = asyncio.Semaphore(0)

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.release()
        with contextlib.suppress(OSError):
            await reader.read()
        missed()

    await asyncio.start_server(join, options.master_addr, options.master_port)
    for _ in range(options.nnodes - 1):
        await met.acquire()
