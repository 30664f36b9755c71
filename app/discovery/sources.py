"""Makes the source that a specification names."""

from collections.abc import Callable

from app.discovery.endpoints import Source
from app.discovery.file import FileSource
from app.discovery.kubernetes import KubernetesSource
from engines.spec import Discovery

FindSource = Callable[[Discovery], Source]


def find_source(spec: Discovery) -> Source:
    """Return the source of a specification, which does not read anything yet."""
    if spec.dns is not None and spec.port is not None:
        # dnspython is imported only where it is used.
        from app.discovery.dns import DnsSource

        return DnsSource(spec.dns, spec.port)
    if spec.file is not None:
        return FileSource(spec.file, spec.api_key_envs)
    assert spec.kubernetes is not None
    return KubernetesSource(spec.kubernetes)
