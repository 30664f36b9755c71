"""Finds the servers of a model that are listed elsewhere: EndpointSlices of Kubernetes.

`endpoints` has what every source yields. `kubernetes` lists and watches through `kubernetes_api`,
and `endpoint_slices` decides which servers that are.
"""

from app.discovery.endpoints import Endpoint, Source
from app.discovery.kubernetes import KubernetesSource

__all__ = ["Endpoint", "KubernetesSource", "Source"]
