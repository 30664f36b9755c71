"""The benchmarks: the gateway and its peers beside each other, on a stub engine and on real vLLM.

    python -m bench [--quick] [--only PART]...

A whole run writes bench/RESULTS.md, a run of parts in process alone (telemetry, isolation) their
sections there, any other run .bench/RESULTS.md.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from bench import disturbances, isolation, kinds, machine, noisy_neighbor, real, rounds, telemetry
from bench.chaos_report import ACTS, CHECKS, REQUESTS
from bench.children import WORK, StartError, terminated_like_interrupted
from bench.peers import Peer, peers, stub
from bench.report import Table, facts, replace_section, section_of, tables
from bench.samples import Sample, Samples
from bench.seats import Seat, direct
from bench.terminal import show

IN_PROCESS = {"telemetry": telemetry, "isolation": isolation}
PARTS = ("streams", "plain", "stall", disturbances.PART, "real", "kinds", *IN_PROCESS)
RESULTS = Path(__file__).with_name("RESULTS.md")
# Written by `make soak` and `make chaos`; a run of the benchmarks keeps them.
KEPT = ("Soak", ACTS, REQUESTS, CHECKS)
METHOD = """\
Everything talks to loopback on one machine: a stub engine that answers like `vllm serve` and
computes nothing (`bench/stub_engine.py`), whoever is measured in front of it, and a load client
(`bench/load.py`). All run at the same time, and each round asks one after the other, so that
whatever else the machine does meets all alike. A figure is the median over the rounds. CPU is what
the processes in between used, read from `/proc`. “Added” is what a round has more than the same
round asked directly. Everybody has its settings at defaults and logs to a file; the gateway and
LiteLLM check a key, vllm-router has none to check.
"""


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="The benchmarks.")
    parser.add_argument("--quick", action="store_true", help="small counts, about two minutes")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; repeatable")
    options = parser.parse_args()
    parts: Sequence[str] = options.only or PARTS
    console = Console(stderr=True)
    if set(parts) <= set(IN_PROCESS) and not options.quick:
        for made_alone in _in_process(parts, quick=False):
            RESULTS.write_text(replace_section(RESULTS.read_text(), made_alone.markdown()))
            show(made_alone)
        return
    started = time.monotonic()
    notes: list[str] = []
    with terminated_like_interrupted(), console.status("setting up the peers") as status:

        def say(text: str) -> None:
            status.update(f"{time.monotonic() - started:4.0f} s  {text}")

        def note(text: str) -> None:
            notes.append(text)
            console.print(text)

        found = peers(note)
        samples = list(_measure(parts, found, say, note, quick=options.quick))
        disturbed = list(
            noisy_neighbor.measure(say, note, found, quick=options.quick)
            if disturbances.PART in parts
            else ()
        )
        say("costs in process")
        costs = list(_in_process(parts, quick=options.quick))
    whole = not options.quick and set(parts) == set(PARTS)
    results = Samples(samples)
    output = RESULTS if whole else WORK / "RESULTS.md"
    *most, goals = tables(results, disturbances.Disturbances(disturbed))
    made = [*most, *costs, goals]
    failed = [f"{count} of {reason}" for reason, count in results.failures().items()]
    heading = (
        f"# Results of the benchmarks\n\nWritten by `{_command(parts, quick=options.quick)}`; the "
        f"targets are at the end.\nRequests that failed: {'; '.join(failed) or 'none'}.\n"
        + "".join(f"\n{text}.\n" for text in notes)
    )
    output.write_text(_document(heading, made, found, _kept(output)))
    (WORK / "samples.json").write_bytes(msgspec.json.encode([*samples, *disturbed]))
    for table in made:
        show(table)
    console.print(f"requests that failed: {'; '.join(failed) or 'none'}")
    console.print(f"written to {output.relative_to(WORK.parent)}")


def _measure(
    parts: Sequence[str], found: Sequence[Peer], say: rounds.Say, note: rounds.Say, *, quick: bool
) -> Iterator[Sample]:
    cases = rounds.cases(parts, quick=quick)
    if cases:
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = stack.enter_context(stub(itl_ms=rounds.PACE_MS))
            seats = []
            for peer in (direct(), *found):
                say(f"starting {peer.name}")
                seat = stack.enter_context(Seat(peer, engine, directory))
                try:
                    seat.target()
                    seats.append(seat)
                except StartError as error:
                    note(f"{peer.name} is left out: {error}")
            yield from rounds.measure(cases, seats, say, note)
    if "real" in parts:
        try:
            yield from real.measure(say, found, quick=quick)
        except StartError as error:
            note(f"real vLLM is left out: {error}")
    if "kinds" in parts:
        try:
            yield from kinds.measure(say, quick=quick)
        except StartError as error:
            note(f"the kinds of engine are left out: {error}")


def _in_process(parts: Sequence[str], *, quick: bool) -> Iterator[Table]:
    for part, module in IN_PROCESS.items():
        if part in parts:
            yield module.table(module.measure(quick=quick))


def _command(parts: Sequence[str], *, quick: bool) -> str:
    chosen = [] if set(parts) == set(PARTS) else [f"--only {part}" for part in parts]
    return " ".join(["python -m bench", *(["--quick"] if quick else []), *chosen])


def _document(heading: str, made: Sequence[Table], found: Sequence[Peer], kept: str) -> str:
    versions = {peer.name: peer.version for peer in found} | {"vLLM": real.version()}
    sections = [
        heading,
        facts("Machine", machine.describe()).markdown(),
        facts("Versions", versions).markdown(),
        f"## Method\n\n{METHOD}",
        *(table.markdown() for table in made),
        *([kept] if kept else []),
    ]
    return "\n".join(sections)


def _kept(output: Path) -> str:
    """Return the sections that other commands wrote."""
    text = output.read_text() if output.exists() else ""
    return "\n".join(found for heading in KEPT if (found := section_of(text, heading)))


if __name__ == "__main__":
    main()
