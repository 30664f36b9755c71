"""Lists the servers of models that are discovered: by DNS, in a file, or in Kubernetes.

A source (`dns`, `file`, `kubernetes`) lists the servers that a specification names; `find_source`
makes it. A file is parsed by `endpoint_list`; EndpointSlices are read by `kubernetes_api` and
interpreted by `endpoint_slices`. `app.fleet.members` has the listed servers join their models.
"""

from app.discovery.endpoints import Endpoint, Source
from app.discovery.file import file_fault
from app.discovery.sources import FindSource, find_source

__all__ = ["Endpoint", "FindSource", "Source", "file_fault", "find_source"]
