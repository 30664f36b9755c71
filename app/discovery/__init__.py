"""Discovers the servers of models, which come and go without a reload.

A source (`dns`, `file`, `kubernetes`) lists the servers of a model. `ServerDiscovery` has a roster
for each model that has one, which reads its sources and has a member for each server: `member` says
how a server joins its model and how it leaves. A file is parsed by `endpoint_list`; EndpointSlices
are read by `kubernetes_api` and interpreted by `endpoint_slices`; `names` makes the names of
engines.
"""

from app.discovery.endpoints import Endpoint, Source
from app.discovery.file import file_fault
from app.discovery.server_discovery import ServerDiscovery
from app.discovery.sources import FindSource, find_source

__all__ = ["Endpoint", "FindSource", "ServerDiscovery", "Source", "file_fault", "find_source"]
