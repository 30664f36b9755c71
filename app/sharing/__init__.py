"""Shares the load of engines between gateways: requests in flight, and slots of the queues.

`load_sharing` reports to the other gateways through Redis and hears them, `report` is the message,
`gateways` what the messages say, and `shared_engines` writes that to the replicas that routing and
admission read. No request waits for any of it.
"""

from app.sharing.load_sharing import LoadSharing, load_sharing_on

__all__ = ["LoadSharing", "load_sharing_on"]
