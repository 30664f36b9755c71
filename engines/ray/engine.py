"""The engine of kind `ray`: a supervised vLLM server on a node of a Ray cluster."""

import shlex
from collections.abc import Sequence

from engines.base import EngineCapabilities
from engines.http import Address, Http1Client
from engines.inside import vllm_gateway_key
from engines.output import redact_command
from engines.process import QUIET_FLAG, Launch, SupervisedEngine
from engines.ray.cluster import Cluster
from engines.ray.host import RayHost
from engines.ray.placement import needed_resources, place_words
from engines.setup import EngineSetup
from engines.spec import RaySpec, RayTls

# Nothing listens there: the address of an engine is known when it has a place.
NOWHERE = Address("127.0.0.1", 9)


class RayEngine(SupervisedEngine):
    """A vLLM server on a node of a Ray cluster, with an actor of the gateway's beside it."""

    kind = "ray"
    capabilities = EngineCapabilities(managed=True, unloadable=True, has_log=True, elsewhere=True)

    def __init__(
        self,
        setup: EngineSetup,
        spec: RaySpec,
        cluster: Cluster,
        *,
        launcher: Sequence[str] | None = None,
        tls: RayTls | None = None,
    ) -> None:
        """`launcher` runs vLLM's server on the node; default: the vLLM that is installed there.

        The variables that the setup withholds are those of the node. Default of `tls`: plain HTTP.
        """
        self._needs = place_words(needed_resources(spec), spec.nodes)
        command = (
            f"--model={spec.model}",
            f"--served-model-name={setup.served_name}",
            QUIET_FLAG,
            vllm_gateway_key.FLAG,
            *(tls.flags if tls else ()),
            *spec.added_flags(setup.media_domains, lora=setup.lora),
            *spec.argv(),
        )
        launch = Launch.of(setup, spec, command, place=self._needs)
        client = Http1Client(NOWHERE, spec.timeouts)
        control = Http1Client(NOWHERE, spec.timeouts)
        self._host = RayHost(launch, cluster, (client, control), launcher=launcher, tls=tls)
        # Engines on other nodes load at the same time.
        super().__init__(launch, self._host, client=client, control=control, turn=None)
        self._cluster = cluster
        cluster.expect(setup.name)

    def describe(self) -> str:
        variables = [f"{name}={value}" for name, value in self._launch.env.items()]
        command = shlex.join([*variables, "vllm", "serve", *self._launch.command])
        # In front: what follows the last flag would be read as its value.
        on = f" on {self._host.where}" if self._host.where and self.pid is not None else ""
        return f"Ray at {self._cluster.address} ({self._needs}){on}: {redact_command(command)}"

    async def stop(self, grace: float) -> None:
        await super().stop(grace)
        await self._cluster.leave(self._name)

    async def release(self) -> None:
        await super().release()
        await self._cluster.leave(self._name)
