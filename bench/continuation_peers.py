"""Peers in the continuation run: two engines that only the run restarts, and one proxy."""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.children import ROOT, StartError, child, environment, free_port, wait_until
from bench.continuation_report import Row
from bench.continuation_target import MODEL, Hit, arrivals, core_below, engine_spec, kill
from bench.peers import PROXIES, answers, install
from bench.real import DEMO, START_S
from engines.guard.process_tree import MARKER_VARIABLE
from engines.process import vllm_launcher
from engines.spec import ProcessSpec

ENGINES = 2


class LoneEngine:
    """A vLLM server on TCP, started again on the same port after it ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._port = free_port()
        self._starts = 0
        self._stack = contextlib.ExitStack()
        self._pid: int | None = None
        self.logs: list[Path] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def core(self) -> int:
        """Return the pid of its EngineCore. Raises StartError."""
        if self._pid is None:
            raise StartError(f"{self.name} does not run")
        return core_below(self._pid, self.name)

    def start(self) -> None:
        """Start it and wait until it answers. Raises StartError."""
        self.close()
        self._starts += 1
        demo = ProcessSpec.model_validate(engine_spec())
        argv = [*vllm_launcher(), f"--model={DEMO}", f"--served-model-name={MODEL}"]
        argv += ["--host=127.0.0.1", f"--port={self._port}", *demo.argv()]
        marker = str(ROOT / ".bench" / self.name)
        env = environment(**demo.env, **{MARKER_VARIABLE: marker})
        started = child(f"continuation-{self.name}-{self._starts}", argv, env=env, end_s=30)
        running = self._stack.enter_context(started)
        self._pid = running.pid
        self.logs.append(running.log)
        wait_until(lambda: answers(self.url, MODEL), running, START_S)

    def serves(self) -> bool:
        """Return whether it answers."""
        return answers(self.url, MODEL)

    def close(self) -> None:
        """End it and its processes."""
        self._stack.close()
        self._pid = None


class PeerTarget:
    """A proxy of the package index in front of two engines."""

    def __init__(self, name: str, url: str, engines: list[LoneEngine]) -> None:
        self.name = name
        self.port = int(url.rpartition(":")[2])
        self._engines = {engine.name: engine for engine in engines}

    def ready(self) -> bool:
        """Return whether every engine serves, and the proxy; an engine that ended is started."""
        for engine in self._engines.values():
            if not engine.serves():
                engine.start()
        return answers(f"http://127.0.0.1:{self.port}", MODEL)

    def hit(self, number: int) -> Hit:
        """Return the hit of a round: each engine is killed in turn. Raises StartError."""
        engines = list(self._engines.values())
        engine = engines[number % len(engines)]
        return kill(engine.core(), engine.name)

    def engines(self) -> list[str]:
        """Return the engines' names."""
        return list(self._engines)

    def arrived(self, engine: str) -> Counter[str]:
        """Return how often each request arrived at an engine, by ID, as its logs say."""
        return arrivals(iter(self._engines[engine].logs))

    def ledger(self) -> dict[str, Row] | None:
        """Return None: there is no ledger."""
        return None


@contextlib.contextmanager
def peer_target(name: str) -> Iterator[PeerTarget]:
    """Run a peer in front of two engines; all answer when the body begins. Raises StartError."""
    install(name)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [LoneEngine(f"engine-{number}") for number in range(ENGINES)]
        for engine in engines:
            stack.callback(engine.close)
            engine.start()
        urls = [engine.url for engine in engines]
        running = stack.enter_context(PROXIES[name](urls, directory, MODEL))
        yield PeerTarget(name, running.url, engines)
