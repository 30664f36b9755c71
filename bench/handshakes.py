"""What a TLS handshake costs: the gateway's own, and Caddy's with the same certificate.

`openssl s_time` opens connections one after the other, each with a whole handshake, and closes them
without a request. So nothing behind Caddy is part of its figure.
"""

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bench import proc
from bench.children import StartError, child, environment, free_port, wait_until
from bench.credentials import certificate
from bench.figures import estimate, ratio
from bench.load import TAIL_S
from bench.peers import WITH_TLS, Peer, Target, answers, stub
from bench.report import Table, shown
from bench.rounds import Say, turns

PART = "handshakes"
CADDY = "Caddy"
ROUNDS = 9
SECONDS = 2
START_S = 30.0
_CONNECTIONS = re.compile(r"^(\d+) connections in \d+ real seconds", re.MULTILINE)


class Cost(msgspec.Struct, frozen=True):
    """Of one target in one round."""

    target: str
    round: int
    cpu_us: float  # of one handshake
    per_s: float


def caddy() -> Peer:
    """Return Caddy, which ends TLS before an engine. Raises StartError if it is not installed."""
    program = shutil.which("caddy")
    if program is None:
        raise StartError("it is not installed (tests/install-services.sh)")
    version = subprocess.run([program, "version"], capture_output=True, text=True, check=True)
    return Peer(CADDY, version.stdout.split()[0], _caddy)


@contextlib.contextmanager
def _caddy(engine: str, directory: Path) -> Iterator[Target]:
    home = Path(tempfile.mkdtemp(dir=directory))
    files = certificate(home)
    url = f"https://127.0.0.1:{free_port()}"
    # HTTP/3 would need the UDP port of the same number. Keys and connections only, as in deploy/.
    (home / "Caddyfile").write_text(
        "{\nadmin off\nauto_https disable_redirects\nservers {\nprotocols h1 h2\n}\n"
        f"storage file_system {home}\n}}\n"
        f"{url} {{\nbind 127.0.0.1\ntls {files['cert_file']} {files['key_file']}\n"
        f"reverse_proxy {engine.removeprefix('http://')}\n}}\n"
    )
    argv: list[str | Path] = ["caddy", "run", "--adapter", "caddyfile"]
    argv += ["--config", home / "Caddyfile"]
    with child("caddy", argv, env=environment(XDG_DATA_HOME=str(home))) as running:
        wait_until(lambda: answers(url), running, START_S)
        yield Target(CADDY, url, running.pid)


def measure(found: Sequence[Peer], say: Say, note: Say, *, quick: bool) -> Table:
    """Shake hands with each target in turn; return the table."""
    members = [peer for peer in found if peer.name == WITH_TLS]
    try:
        members.append(caddy())
    except StartError as error:
        note(f"{CADDY} is left out: {error}")
    costs = []
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = stack.enter_context(stub("handshakes-stub"))
        targets = []
        for peer in members:
            try:
                targets.append(stack.enter_context(peer.start(engine, home)))
            except StartError as error:
                note(f"{peer.name} is left out of {PART}: {error}")
        rounds = 1 if quick else ROUNDS
        for number_ in range(-1, rounds):  # the first one warms up
            say(f"{PART}, round {number_ + 1} of {rounds}")
            costs += [_shake(target, number_) for target in turns(targets, number_)]
    versions = {peer.name: peer.version for peer in members}
    return table([cost for cost in costs if cost.round >= 0], versions.get(CADDY, ""))


def _shake(target: Target, number_: int) -> Cost:
    assert target.pid is not None
    pids = proc.family(target.pid)
    address = target.url.removeprefix("https://")
    argv = ["openssl", "s_time", "-new", "-time", str(SECONDS), "-connect", address]
    before, began = proc.cpu_clocks(pids), time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10 * SECONDS, check=True)
    wall_s = time.perf_counter() - began
    time.sleep(TAIL_S)  # in which connections are closed
    spent_s = proc.cpu_spent(before, proc.cpu_clocks(pids))
    connections = _CONNECTIONS.search(done.stdout)
    assert connections is not None, done.stdout
    count = int(connections[1])
    return Cost(target.name, number_, spent_s / count * 1e6, count / wall_s)


def table(costs: Sequence[Cost], caddys_version: str) -> Table:
    """Return the table of costs."""
    caddys = {cost.round: cost.cpu_us for cost in costs if cost.target == CADDY}
    rows = []
    for target in dict.fromkeys(cost.target for cost in costs):
        own = [cost for cost in costs if cost.target == target]
        compared = estimate(ratio(cost.cpu_us, caddys.get(cost.round)) for cost in own)
        rows.append(
            [
                target,
                shown(estimate(cost.cpu_us for cost in own), 0),
                shown(compared, 2),
                shown(estimate(cost.per_s for cost in own), 0),
            ]
        )
    return Table(
        "TLS handshakes",
        ["", "CPU µs per handshake", f"× {CADDY}", "handshakes/s"],
        rows,
        f"Whole handshakes of TLS 1.3, one after the other for {SECONDS} s, without a request; a "
        f"certificate on P-256. {CADDY} {caddys_version} is what it would cost in front instead. "
        "The client shares the cores.",
    )
