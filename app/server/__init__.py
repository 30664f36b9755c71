"""Runs a gateway behind its ports, as a process: start-up, signals, reload, drain and hand-over.

`run` is the process; `listen` acquires its ports and run directory, `http_server` has the uvicorn
servers and `connection` their client connections. `banner` prints the status for people, `notify`
reports it to systemd. `demo_key` creates the API key of the demo.
"""

from app.server.demo_key import read_or_create_key
from app.server.http_server import gateway_server, metrics_server
from app.server.run import serve

__all__ = ["gateway_server", "metrics_server", "read_or_create_key", "serve"]
