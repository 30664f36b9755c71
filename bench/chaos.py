"""The chaos run: kills and freezes processes under load, on real vLLM, then checks for leaks.

    python -m bench.chaos [--minutes 10] [--seed 1]

Two engines on the demo model behind one gateway. Whenever both have been READY for a few seconds, a
process of one of them, or the gateway, gets SIGKILL or SIGSTOP; a gateway that was killed is
started again as systemd would. Writes its sections of bench/RESULTS.md, or of .bench/RESULTS.md
when it was shorter than five minutes. Exit code 1 when a check fails.
"""

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from rich.console import Console

from bench import chaos_acts as acts
from bench.chaos_acts import Act, Family, Run, Target
from bench.chaos_gateway import MODELS, Gateway, Watcher, make_keys
from bench.chaos_load import SLOTS, Load, Outcome, chat, classify, exchange, slots
from bench.chaos_report import Chaos, Done, tables
from bench.children import (
    WORK,
    StartError,
    terminated_like_interrupted,
)
from bench.real import make_model
from bench.report import replace_section
from bench.terminal import show
from engines.guard import process_tree

RESULTS = Path(__file__).with_name("RESULTS.md")
WORTH_KEEPING_MIN = 5.0
CLIENTS = 6
# On two cores and a cold page cache one engine took 57 s; they load one after the other.
READY_S = 300.0
END_READY_S = 180.0
# Between two acts, once every engine is READY again: time to serve.
QUIET_S = (4.0, 14.0)
# After its guardian began: Python's imports, the spawn of EngineCore and worker, the weights.
LOADS_S = (1.0, 20.0)
SYSTEMD_S = 1.0  # RestartSec
FROZEN_GATEWAY_S = 5.0

Say = Callable[[str], None]


class Storm:
    """One chaos run: the acts, one after the other, and the result of each."""

    def __init__(
        self, chaos: Chaos, gateway: Gateway, watcher: Watcher, load: Load, say: Say
    ) -> None:
        self._chaos = chaos
        self._gateway = gateway
        self._watcher = watcher
        self._load = load
        self._say = say
        self._dice = random.Random(chaos.seed)
        self._began = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Strike until the time is over."""
        loop = asyncio.get_running_loop()
        deck = acts.deck(self._dice, self._targets())
        while loop.time() < self._began + self._chaos.minutes * 60:
            quiet_s = self._dice.uniform(*QUIET_S)
            await self._watcher.until(lambda: False, quiet_s)
            await self._strike(next(deck), self._dice.choice(list(MODELS)))

    def _targets(self) -> list[Target]:
        """Return the targets that every engine has; a small executor has no separate worker."""
        runs = [run for model in MODELS if (run := self._watcher.run(model)) is not None]
        common = [acts.members(run).keys() for run in runs]
        always = (Target.GATEWAY, Target.LOADING)
        return [t for t in Target if t in always or all(t in some for some in common)]

    async def _strike(self, act: Act, model: str) -> None:
        if act.target is Target.GATEWAY:
            await self._strike_gateway(act)
            return
        before = self._watcher.run(model)
        if act.target is Target.LOADING:
            await self._strike_loading(act, model, before)
            return
        victims = acts.members(before).get(act.target, []) if before is not None else []
        if before is None or not victims:
            self._record(Done(act, model, None), f"{model}: there was none")
            return
        family = acts.family_of(before)
        pid = self._dice.choice(victims)
        began = self._now
        self._announce(act, f"of {model} (pid {pid})")
        os.kill(pid, act.signum)
        await self._await_recovery(act, model, began, {model: before}, family)

    async def _strike_loading(self, act: Act, model: str, before: Run | None) -> None:
        loads_s = self._dice.uniform(*LOADS_S)
        began = self._now
        family = acts.family_of(before) if before is not None else {}
        if before is not None:
            self._announce(act, f"of {model} (pid {before.engine} first)")
            os.kill(before.engine, signal.SIGKILL)
        await self._watcher.until(lambda: self._watcher.run(model) not in (None, before), READY_S)
        await self._watcher.until(lambda: False, loads_s)
        if (loading := self._watcher.run(model)) is None:
            self._record(Done(act, model, None), f"{model}: it did not start again")
            return
        family |= acts.family_of(loading)
        pid = self._dice.choice(acts.vital(loading))
        state = self._watcher.states.get(f"{model}-0")
        job = acts.job(loading, pid, process_tree.read_title(pid)) or "spawned, without a title yet"
        self._announce(act, f"of {model} (pid {pid}, {job}, {state})")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await self._await_recovery(act, model, began, {model: loading}, family)

    async def _strike_gateway(self, act: Act) -> None:
        if act.signum is signal.SIGKILL:
            # A leak before this act would be lost with the process.
            await leases(self._chaos, self._watcher, self._load)
            await self._watcher.until(lambda: False, QUIET_S[0])
        before = {m: run for m in MODELS if (run := self._watcher.run(m)) is not None}
        family = acts.family(self._gateway.pid)
        began = self._now
        self._announce(act, f"(pid {self._gateway.pid})")
        if act.signum is signal.SIGSTOP:
            os.kill(self._gateway.pid, signal.SIGSTOP)
            await asyncio.sleep(FROZEN_GATEWAY_S)
            os.kill(self._gateway.pid, signal.SIGCONT)
            await self._await_recovery(act, "", began, {}, {})
            return
        self._load.gateway_goes()
        self._gateway.kill()
        await asyncio.sleep(SYSTEMD_S)
        self._gateway.start()
        await self._watcher.until(lambda: bool(self._watcher.states), READY_S)
        self._load.gateway_is_back()
        await self._await_recovery(act, "", began, before, family)

    async def _await_recovery(
        self, act: Act, model: str, began: float, before: dict[str, Run], family: Family
    ) -> None:
        """Wait until every engine is READY, those of `before` as new processes."""

        def recovered() -> bool:
            new = all(self._watcher.run(name) not in (None, run) for name, run in before.items())
            return new and self._watcher.all_ready

        in_time = await self._watcher.until(recovered, READY_S)
        took = self._now - began if in_time else None
        left = acts.alive(family)
        self._chaos.left += [f"{act} of {model or 'all'}: pid {pid}" for pid in left]
        words = f"READY again after {took:.1f} s" if took else f"not READY in {READY_S:g} s"
        self._record(Done(act, model, took), words + (f", left: {left}" if left else ""))

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    def _announce(self, act: Act, whom: str) -> None:
        self._say(f"{time.strftime('%H:%M:%S')} {self._now:6.1f} s  {act} {whom}")

    def _record(self, done: Done, words: str) -> None:
        self._chaos.acts.append(done)
        self._say(f"{time.strftime('%H:%M:%S')} {self._now:6.1f} s      {words}")


async def leases(chaos: Chaos, watcher: Watcher, load: Load) -> None:
    """Pause the clients, check for leaked leases, and resume the clients."""
    await load.pause()
    sums = await watcher.open_leases()
    if not sums:
        chaos.leaks.append("the gateway did not tell")
    chaos.leaks += [f"{name} {value:g}" for name, value in sums.items() if value]
    for index, key in enumerate(load.keys):
        whole, refused = await slots(load.port, key, load.models[index % len(load.models)])
        if (whole, refused) != (SLOTS, 1):
            chaos.leaks.append(
                f"key {index}: of {SLOTS + 1} requests at once {whole} were answered and {refused} "
                f"refused, not {SLOTS} and 1"
            )
    chaos.lease_checks += 1
    load.resume()


async def _last_look(chaos: Chaos, watcher: Watcher, load: Load) -> None:
    """Check the gateway after the last act."""
    chaos.all_ready = await watcher.until(lambda: watcher.all_ready, END_READY_S)
    for model in MODELS:
        body = chat(model, 8, stream=False)
        answer = await exchange(load.port, load.keys[0], body, f"last-{model}")
        verdict = classify(answer.raw, answer.ending, stream=False)
        if verdict.outcome is not Outcome.WHOLE:
            chaos.unanswered.append(f"{model}: {verdict.words}")
    await leases(chaos, watcher, load)
    await load.pause()


@contextlib.asynccontextmanager
async def _background(work: Load) -> AsyncIterator[None]:
    task = asyncio.create_task(work.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()  # clients that broke were no load


async def _serve(chaos: Chaos, gateway: Gateway, say: Say) -> None:
    """Run load and acts on a gateway. Raises StartError."""
    watcher = Watcher(gateway)
    try:
        if not await watcher.until(lambda: watcher.all_ready, READY_S):
            raise StartError(f"the engines were not READY in {READY_S:g} s: see .bench/log/")
        load = Load(gateway.port, tuple(MODELS), await make_keys(gateway, CLIENTS), chaos.seed)
        chaos.outcomes, chaos.faults = load.outcomes, load.faults
        async with _background(load):
            load.resume()
            await Storm(chaos, gateway, watcher, load, say).run()
            await _last_look(chaos, watcher, load)
        chaos.silence_s = load.silence_s
    finally:
        chaos.starts = {name: len(runs) for name, runs in sorted(watcher.runs.items())}
        await watcher.close()


def run(minutes: float, seed: int, say: Say) -> Chaos:
    """Run everything; return the results. Raises StartError."""
    make_model()
    _forget_logs()
    chaos = Chaos(minutes, seed)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        gateway = Gateway(directory)
        stack.callback(_keep_logs, gateway.run_dir)
        stack.callback(_end_all, gateway)
        gateway.start()
        asyncio.run(_serve(chaos, gateway, say))
        chaos.exit_code = gateway.end()
        orphans = acts.alive(gateway.family | acts.marked(gateway.run_dir))
        chaos.orphans = [f"pid {pid} ({process_tree.read_title(pid)[:60]})" for pid in orphans]
        chaos.sockets = [str(path) for path in acts.live_sockets(gateway.run_dir)]
        chaos.gateway_starts = gateway.starts
        chaos.traces = list(_traces(gateway.starts))
    return chaos


def _forget_logs() -> None:
    """Remove files of an earlier run, so that they do not pass for this one's."""
    for file in (WORK / "log").glob("chaos-*"):
        file.unlink()


def _end_all(gateway: Gateway) -> None:
    """End the gateway, and whatever it failed to end."""
    gateway.end()
    for pid in acts.alive(gateway.family | acts.marked(gateway.run_dir)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _keep_logs(run_dir: Path) -> None:
    for file in run_dir.glob("*/engine.log*"):
        shutil.copy(file, WORK / "log" / f"chaos-{file.parent.name}-{file.name}")


def _traces(starts: int) -> Iterator[str]:
    """Yield the gateway's logs that contain a stack trace."""
    for number in range(1, starts + 1):
        name = f"chaos-gateway-{number}.log"
        if "Traceback" in (WORK / "log" / name).read_text(errors="replace"):
            yield name


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description="The chaos run.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    console = Console(stderr=True)
    try:
        with terminated_like_interrupted():
            chaos = run(
                options.minutes,
                options.seed,
                lambda text: console.print(text, soft_wrap=True, highlight=False),
            )
    except StartError as error:
        sys.exit(str(error))
    output = RESULTS if options.minutes >= WORTH_KEEPING_MIN else WORK / "RESULTS.md"
    text = output.read_text() if output.exists() else ""
    for made in tables(chaos):
        text = replace_section(text, made.markdown())
        show(made)
    output.write_text(text)
    for fault in chaos.faults:
        console.print(fault, markup=False, soft_wrap=True, highlight=False)
    console.print(f"written to {output.relative_to(WORK.parent)}")
    sys.exit(0 if chaos.passed else 1)


if __name__ == "__main__":
    main()
