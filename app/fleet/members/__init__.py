"""The discovered servers of models, which come and go without a reload.

`DiscoveredServers` has a roster for each model whose servers are discovered. A `roster` reads the
sources of its model (`app.discovery`) and has a member for each server: `member` says how a server
joins its model and how it leaves. `names` makes the names of their engines.
"""

from app.fleet.members.discovered_servers import DiscoveredServers

__all__ = ["DiscoveredServers"]
