"""The command `vllm-gateway` of a shell as a fork of a process that has imported it."""

import socketserver
from base64 import b64decode
from functools import cache
from pathlib import Path
from threading import Thread

from tests.forked import ForkedCommand

# Sends one line: its process, whose outputs are the command's, its directory, the arguments and the
# environment. The answer is the exit code. What sends is a subshell: an echo of the shell itself
# would make the connection its output while the fork opens that.
_FUNCTION = r"""
vllm-gateway() {
    local gateway code process=$BASHPID
    exec {gateway}<>/dev/tcp/127.0.0.1/PORT
    { printf '%s\0' "$process" "$PWD" "$#" "$@"; env -0; } | { base64 -w 0; echo; } >&"$gateway"
    read -r code <&"$gateway"
    exec {gateway}>&-
    return "$code"
}
"""


@cache
def shell_function() -> str:
    """Return the definition of a function of bash that takes the place of the program."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Command)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    return _FUNCTION.replace("PORT", str(server.server_address[1]))


class _Command(socketserver.StreamRequestHandler):
    """One command, from its line to its exit code."""

    def handle(self) -> None:
        sent = b64decode(self.rfile.readline()).decode()
        process, directory, count, *texts = sent.removesuffix("\0").split("\0")
        arguments, variables = texts[: int(count)], texts[int(count) :]
        outputs = Path("/proc", process, "fd")
        command = ForkedCommand(
            *arguments,
            env=dict(text.split("=", 1) for text in variables),
            cwd=Path(directory),
            output=outputs / "1",
            errors=outputs / "2",
        )
        self.wfile.write(b"%d\n" % command.wait())
