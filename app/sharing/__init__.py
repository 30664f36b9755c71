"""Shares the load of engines between gateways: requests in flight, and slots of the queues.

`load_sharing` sends reports to the other gateways through Redis and receives theirs, `report` is
the message, `gateways` the state that follows from all reports, and `shared_engines` writes that to
the replicas that routing and admission read. No request waits for any of it.
"""

from app.sharing.load_sharing import LoadSharing, load_sharing_on

__all__ = ["LoadSharing", "load_sharing_on"]
