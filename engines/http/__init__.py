"""The HTTP client of the data path, and control requests to engines.

`client` is the connection pool of one engine, `connection` one HTTP/1.1 connection, `response` a
response in flight, also of an engine in this process. `probe` sends the gateway's own requests.
`address` also tells whether two gateways send to the same server.
"""

from engines.http.address import Address, identify
from engines.http.client import Http1Client
from engines.http.probe import EngineProbe, scrape_metrics
from engines.http.response import ResponseBody, read_body

__all__ = [
    "Address",
    "EngineProbe",
    "Http1Client",
    "ResponseBody",
    "identify",
    "read_body",
    "scrape_metrics",
]
