"""The models that a remote server lists, as the form of a new model offers them.

An administrator who edits models can have the gateway connect to any URL: as that of an engine,
which is sent requests, and whose answers come back. To ask a URL for its models is less than that:
GET requests without a key, no redirect is followed, at most 1 MiB is read, and a page has only
names of it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from engines.http import Address, EngineProbe, Http1Client
from engines.spec import PlacedError, Timeouts, check_url

PATIENCE_S = 10.0
MAX_MODELS = 100
MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class ServerModels:
    """The names that a server lists, or the fault of it or of its URL."""

    names: Sequence[str] = ()
    fault: str = ""


class RemoteModels:
    """Asks servers for their models, one at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def of(self, url: str) -> ServerModels:
        """Return the models of the server at a base URL, after PATIENCE_S at the latest."""
        try:
            check_url(url)
        except PlacedError as error:
            return ServerModels(fault=str(error))
        async with self._turn:
            client = Http1Client(Address.from_url(url), Timeouts())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await _ask(EngineProbe(client))
            except TimeoutError:
                return ServerModels(fault=f"it gave no answer in {PATIENCE_S:g} s")
            finally:
                client.close()


async def _ask(probe: EngineProbe) -> ServerModels:
    fault = await probe.check_reachable()
    if fault is not None:
        return ServerModels(fault=fault)
    found = await probe.fetch_models()
    if found is None:
        return ServerModels(fault=await probe.find_models_fault(keyed=False))
    names = [name for name in found if 0 < len(name) <= MAX_NAME and name.isprintable()]
    return ServerModels(names[:MAX_MODELS], "" if names else "it lists no models at /v1/models")
