"""The HTTP client of the data path, and control requests to engines.

`client` is the connection pool of one engine, `connection` one HTTP/1.1 connection, `response` a
response in flight, also of an engine in this process. `probe` and `scrape` send the gateway's own
requests. `identity` tells whether two gateways send to the same server.
"""

from engines.http.address import Address
from engines.http.client import Http1Client
from engines.http.identity import identify
from engines.http.probe import EngineProbe
from engines.http.response import ResponseBody
from engines.http.scrape import scrape_metrics

__all__ = [
    "Address",
    "EngineProbe",
    "Http1Client",
    "ResponseBody",
    "identify",
    "scrape_metrics",
]
