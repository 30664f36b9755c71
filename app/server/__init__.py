"""Runs a gateway behind its ports, as a process: start-up, signals, reload, drain and hand-over.

`run` is the process, `shutdown` its end. `ports` acquires the ports: those that systemd passes
(`passed_sockets`), those of the previous gateway (`handover`), or new ones (`listen`).
`http_server` has the uvicorn servers and `connection` their client connections. `banner` prints the
status for people, `notify` reports it to systemd. `demo_key` creates the API key of the demo.
"""

from app.server.demo_key import read_or_create_key
from app.server.http_server import gateway_server, metrics_server
from app.server.run import serve

__all__ = ["gateway_server", "metrics_server", "read_or_create_key", "serve"]
