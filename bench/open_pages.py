"""Keeps pages of the console open, as browsers do: streams of live events that are read.

    python -m bench.open_pages --url URL --key KEY --pages 50

Prints a line when every page has got its first event, and reads until it is terminated.
"""

import argparse
import asyncio
import sys

import httpx

READY = "open"
EVENTS = "/console/api/events/overview"
# What a browser sends with a form of the same site.
SAME_SITE = {"sec-fetch-site": "same-origin"}


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.open_pages", description="Open pages.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--pages", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(_keep_open(options.url, options.key, options.pages))


async def _keep_open(url: str, key: str, pages: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=limits, trust_env=False
    ) as client:
        answer = await client.post("/console/login", data={"key": key}, headers=SAME_SITE)
        if answer.status_code != 303:
            sys.exit(f"login: HTTP {answer.status_code}")
        begun = [asyncio.Event() for _ in range(pages)]
        async with asyncio.TaskGroup() as group:
            for one in begun:
                group.create_task(_read(client, one))
            await asyncio.gather(*(one.wait() for one in begun))
            print(READY, flush=True)


async def _read(client: httpx.AsyncClient, begun: asyncio.Event) -> None:
    async with client.stream("GET", EVENTS) as answer:
        if answer.status_code != 200:
            sys.exit(f"a page: HTTP {answer.status_code}")
        async for _ in answer.aiter_raw():
            begun.set()
    sys.exit("a page ended")


if __name__ == "__main__":
    main()
