"""The continuation run: what clients get of their streams when an engine dies or is replaced.

    python -m bench.continuation [--scenario two-engines] [--peer vllm-router] [--streams 200]

Real vLLM on the demo model behind the gateway, or behind a peer. Streams of all kinds are open when
the EngineCore of one engine gets SIGKILL, an engine is replaced or a model evicted; each is then
compared with its undisturbed answer. Writes its section of bench/RESULTS.md, or of
.bench/RESULTS.md when it was meant for fewer than 200 streams of each kind. Exit code 1 when an
answer is wrong.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop
from rich.console import Console

from bench.children import WORK, StartError, terminated_like_interrupted
from bench.continuation_kinds import KINDS, kinds
from bench.continuation_peers import peer_target
from bench.continuation_report import Continuation, Row, table
from bench.continuation_rounds import Rounds
from bench.continuation_target import SCENARIOS, TWO_ENGINES, Target, gateway_target
from bench.peers import GATEWAY, PROXIES
from bench.real import make_model
from bench.report import replace_section
from bench.rounds import Say
from bench.terminal import show

RESULTS = Path(__file__).with_name("RESULTS.md")
STREAMS = 200
# The ledger is written in batches.
LEDGER_S = 15.0


def main() -> None:
    """Entry point of the command."""
    options = _options()
    console = Console(stderr=True)
    started = time.monotonic()

    def say(text: str) -> None:
        took = time.monotonic() - started
        console.print(f"{took:6.1f} s  {text}", soft_wrap=True, highlight=False, markup=False)

    target_name = options.peer or GATEWAY
    run = Continuation(SCENARIOS[options.scenario], target_name, options.minutes, options.seed)
    try:
        with terminated_like_interrupted():
            make_model()
            with _target(options, run) as target:
                uvloop.run(_play(options, run, target, say))
                say("reading the ledger")
                run.ledger = _ledger(target, run)
    except (StartError, SystemExit) as error:
        # What was seen until then counts.
        run.notes.append(f"Ended early: {error}.")
        say(f"ended early: {error}")
        if not run.ended:
            sys.exit(1)
    run.minutes = (time.monotonic() - started) / 60
    made = table(run)
    output = RESULTS if options.streams >= STREAMS else WORK / "RESULTS.md"
    text = output.read_text() if output.exists() else ""
    output.write_text(replace_section(text, made.markdown()))
    show(made)
    for wrong in run.wrong():
        console.print(wrong, markup=False, soft_wrap=True, highlight=False)
    console.print(f"written to {output.relative_to(WORK.parent)}")
    sys.exit(0 if run.passed else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.continuation", description="The continuation run."
    )
    parser.add_argument("--scenario", choices=SCENARIOS, default="two-engines")
    parser.add_argument(
        "--peer", choices=PROXIES, help="this proxy in place of the gateway, with two engines"
    )
    parser.add_argument(
        "--streams", type=int, default=STREAMS, help="streams of each kind to be hit"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="no round begins after them")
    parser.add_argument("--workers", type=int, default=128, help="streams at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kind",
        action="append",
        choices=[kind.name for kind in KINDS],
        help="only this kind of stream; repeatable",
    )
    options = parser.parse_args()
    if options.peer is not None and SCENARIOS[options.scenario] != TWO_ENGINES:
        parser.error("--peer has the scenario two-engines only")
    return options


@contextlib.contextmanager
def _target(options: argparse.Namespace, run: Continuation) -> Iterator[Target]:
    """Run what is to be hit."""
    if options.peer is not None:
        with peer_target(options.peer) as peer:
            yield peer
        return
    with (
        tempfile.TemporaryDirectory(prefix="continuation-") as directory,
        gateway_target(run.scenario, Path(directory)) as gateway,
    ):
        yield gateway


async def _play(options: argparse.Namespace, run: Continuation, target: Target, say: Say) -> None:
    """Record the undisturbed answers, then play rounds until enough streams were hit."""
    rounds = Rounds(
        run,
        target,
        kinds(options.kind),
        say,
        workers=options.workers,
        streams=options.streams,
    )
    await rounds.record()
    deadline = time.monotonic() + options.minutes * 60
    while rounds.missing and time.monotonic() < deadline:
        await rounds.play(target.hit(run.rounds))


def _ledger(target: Target, run: Continuation) -> dict[str, Row] | None:
    """Return the ledger once it has every request that was answered, or after LEDGER_S."""
    deadline = time.monotonic() + LEDGER_S
    wanted = {one.request_id for one in run.ended if one.usage is not None}
    while True:
        rows = target.ledger()
        if rows is None or wanted <= rows.keys() or time.monotonic() > deadline:
            return rows
        time.sleep(0.5)


if __name__ == "__main__":
    main()
