"""Engines of kind `ray`: vLLM servers on the nodes of a Ray cluster.

    engine      implements the interface, with the supervisor of `engines.process`
    host        the place of one engine: asks the cluster for a node, and watches its actor
    cluster     the gateway's connection to the cluster: a child process, `connector`
    connector   a script: the only process of the gateway that runs Ray
    protocol    the calls of both, and their results
    actor       runs on the node: starts our guardian with vLLM, and reports
    ranks       the vLLMs of an engine over several nodes: names, flags, what is whole. Pure
    joined      the processes and logs of an engine over several nodes as those of one
    headless    a script: runs a rank that does not serve
    placement   what an engine needs and what nodes have. Pure

The gateway never imports Ray. Ray's library ends its process when it loses the cluster, handles
signals, writes to the terminal and blocks: all of that happens in the connector, which is started
again. Requests do not pass it: the gateway sends them to the engine by HTTP.
"""

from engines.ray.cluster import Cluster, ray_is_installed
from engines.ray.engine import RayEngine
from engines.ray.placement import Node, needed_resources, placement_fault
from engines.ray.protocol import ClusterError

__all__ = [
    "Cluster",
    "ClusterError",
    "Node",
    "RayEngine",
    "needed_resources",
    "placement_fault",
    "ray_is_installed",
]
