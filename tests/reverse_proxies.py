"""nginx and Caddy in front of a gateway, with the lines of deploy/proxy/."""

import signal
import socket
import ssl
from pathlib import Path

from tests.certificates import make_identity
from tests.gateway import free_port
from tests.services import Server

LINES = Path(__file__).parent.parent / "deploy" / "proxy"
ROOT_PATH = "/llm"
# The settings of the gateway behind them.
BEHIND_PROXY = {"root_path": ROOT_PATH, "trusted_proxies": ["127.0.0.1"]}


class ReverseProxy(Server):
    """A proxy that ends TLS; `url` is the gateway's behind it."""

    def __init__(self, name: str, gateway_port: int) -> None:
        super().__init__(name)
        identity = make_identity()
        self.certificate = self.directory / "certificate.pem"
        self.certificate.write_bytes(identity.certificate_pem)
        (self.directory / "key.pem").write_bytes(identity.key_pem)
        self.context = ssl.create_default_context(cadata=identity.certificate_pem.decode())
        self.origin = f"https://127.0.0.1:{self.port}"
        self.url = f"{self.origin}{ROOT_PATH}"
        self._configuration = self.directory / "configuration"
        self._gateway_port = gateway_port

    def _write(self, file: str, replaced: dict[str, str]) -> None:
        """Write the lines of a file, with what names a machine replaced."""
        text = (LINES / file).read_text()
        here = {"127.0.0.1:8000": f"127.0.0.1:{self._gateway_port}"}
        for before, after in {**here, **replaced}.items():
            assert before in text, before
            text = text.replace(before, after)
        self._configuration.write_text(text)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Nginx(ReverseProxy):
    """nginx of the distribution."""

    _end = signal.SIGTERM  # one that is killed leaves its worker

    def __init__(self, gateway_port: int, *, strips_prefix: bool = False) -> None:
        """`strips_prefix`: the gateway gets paths without the prefix."""
        super().__init__("nginx", gateway_port)
        to = "proxy_pass http://vllm_gateway"
        self._write(
            "nginx.conf",
            {
                "listen 443": f"listen 127.0.0.1:{self.port}",
                "/etc/nginx/tls/fullchain.pem": str(self.certificate),
                "/etc/nginx/tls/privkey.pem": str(self.directory / "key.pem"),
                f"{to};": f"{to}/;" if strips_prefix else f"{to};",
            },
        )
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"{kind}_temp_path {self.directory}/{kind}; " for kind in kinds)
        self._main = self.directory / "main"
        self._main.write_text(
            f"daemon off; user root; pid {self.directory}/pid; worker_processes 1; events {{}} "
            f"http {{ access_log off; {paths} include {self._configuration}; }}"
        )

    def _command(self) -> list[str]:
        return ["nginx", "-p", str(self.directory), "-e", "stderr", "-c", str(self._main)]


class NginxChain(Nginx):
    """Three nginx, one behind the other: the lines, and two proxies that pass headers on."""

    # From where each of them calls the next one.
    ADDRESSES = ("127.0.0.1", "127.0.0.3", "127.0.0.4")

    def __init__(self, gateway_port: int) -> None:
        middle, inner = free_port(), free_port()
        super().__init__(middle)
        _, from_middle, from_inner = self.ADDRESSES
        behind = _passing_on(middle, from_middle, inner) + _passing_on(
            inner, from_inner, gateway_port
        )
        included = f"include {self._configuration};"
        self._main.write_text(self._main.read_text().replace(included, f"{included} {behind}"))


def _passing_on(port: int, address: str, to_port: int) -> str:
    """Return a server of nginx that is called by proxies only."""
    return (
        f"server {{ listen 127.0.0.1:{port}; location / {{ "
        f"proxy_pass http://127.0.0.1:{to_port}; proxy_bind {address}; "
        "proxy_set_header Host $http_host; "
        "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; "
        "proxy_set_header X-Forwarded-Proto $http_x_forwarded_proto; } } "
    )


class Caddy(ReverseProxy):
    """Caddy of the distribution."""

    def __init__(self, gateway_port: int) -> None:
        super().__init__("caddy", gateway_port)
        key = self.directory / "key.pem"
        site = f"{self.origin} {{\n\tbind 127.0.0.1\n\ttls {self.certificate} {key}"
        self._write("Caddyfile", {"tools.example {": site})
        # HTTP/3 would take the UDP port of the same number, which `free_port` holds.
        options = "admin off", "auto_https disable_redirects", "servers {\nprotocols h1 h2\n}"
        block = "\n".join(["{", *options, f"storage file_system {self.directory}", "}\n"])
        self._configuration.write_text(block + self._configuration.read_text())

    def _command(self) -> list[str]:
        return ["caddy", "run", "--adapter", "caddyfile", "--config", str(self._configuration)]
