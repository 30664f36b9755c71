"""A client of the Docker Engine API on a Unix socket; Podman serves it too. Standard library only.

Errors:

    DaemonError
    ├── DaemonUnavailable   nothing answers at the socket, or not to this user
    └── ApiError            the daemon refused a request; it has a status
"""

import http.client
import json
import socket
from collections.abc import Mapping
from urllib.parse import quote, urlencode

# Creating a container may unpack layers first.
TIMEOUT_S = 60.0
# For the first request, by which a daemon that hangs is found.
PING_TIMEOUT_S = 10.0


class DaemonError(Exception):
    """The daemon did not do what it was asked; the text says why, in one line."""


class DaemonUnavailable(DaemonError):
    """Nothing answers at the socket, or this user may not use it."""


class ApiError(DaemonError):
    """The daemon refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class DockerApi:
    """The daemon behind one socket. Each request has a connection of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._version = ""
        self._podman = False

    def is_podman(self) -> bool:
        """Return whether the daemon is Podman. Blocks. Raises DaemonError."""
        self._ping()
        return self._podman

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> object:
        """Return the response's JSON, None if it is empty. Blocks. Raises DaemonError."""
        with self.open(method, path, query=query, body=body, timeout_s=timeout_s) as response:
            try:
                data = response.read()
                return json.loads(data) if data else None
            except (OSError, http.client.HTTPException) as error:
                raise self.unavailable(error) from None
            except ValueError:
                raise ApiError(response.status, f"{path} answered without JSON") from None

    def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> http.client.HTTPResponse:
        """Return a successful response, to be read and closed. Blocks. Raises DaemonError.

        `timeout_s` bounds each read; None: it may take for ever.
        """
        self._ping()
        target = f"{self._version}{quote(path)}"
        if query:
            target += f"?{urlencode(query)}"
        response = self._request(method, target, body, timeout_s)
        if response.status < 400:
            return response
        with response:
            raise ApiError(response.status, _message(response))

    def unavailable(self, error: OSError | http.client.HTTPException) -> DaemonUnavailable:
        """Return the error of a connection in words, with what to do."""
        match error:
            case FileNotFoundError():
                return DaemonUnavailable(
                    f"no socket {self.path}: is Docker or Podman running here? containers.socket "
                    "names another"
                )
            case PermissionError():
                return DaemonUnavailable(
                    f"no permission for the socket {self.path}: the user of the gateway must be in "
                    "the socket's group, which is as much as root"
                )
            case ConnectionRefusedError():
                return DaemonUnavailable(
                    f"nothing listens at the socket {self.path}: start Docker or podman.socket"
                )
        said = str(error) or type(error).__name__
        return DaemonUnavailable(f"the daemon at {self.path} does not respond: {said}")

    def _ping(self) -> None:
        """Learn the path of the daemon's newest version of the API, by the first request."""
        if self._version:
            return
        with self._request("GET", "/_ping", None, PING_TIMEOUT_S) as response:
            version = response.headers.get("Api-Version")
            self._podman = "Libpod-API-Version" in response.headers
        if version is None:
            raise DaemonUnavailable(f"{self.path} is not a socket of Docker or Podman")
        self._version = f"/v{version}"

    def _request(
        self, method: str, target: str, body: object, timeout_s: float | None
    ) -> http.client.HTTPResponse:
        connection = _UnixConnection(self.path, timeout_s)
        data = None if body is None else json.dumps(body)
        try:
            # Closed with its response.
            headers = {"Connection": "close", "Content-Type": "application/json"}
            connection.request(method, target, data, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self.unavailable(error) from None


def _message(response: http.client.HTTPResponse) -> str:
    """Return what the daemon says of a refused request, in one line."""
    try:
        text = response.read(64 * 1024).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        text = ""
    try:
        found = json.loads(text)
        text = str(found.get("message", text)) if isinstance(found, dict) else text
    except ValueError:
        pass
    return " ".join(text.split()) or f"status {response.status}"
