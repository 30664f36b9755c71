"""The benchmarks: the gateway and its peers side by side, on a stub engine and on real vLLM.

    python -m bench [--quick] [--only PART]... [--noise] [--before TREE]

`--only proxies` leaves LiteLLM out and takes about nine minutes.
`--only bytecodes` counts what a request runs, without a clock; `--only ledger` measures what its
row costs. `--noise` compares two processes of
the same build, `--before` this checkout with an earlier one. A whole run writes bench/RESULTS.md,
any other run .bench/RESULTS.md.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from bench import (
    bytecodes,
    disturbances,
    handshakes,
    ledger,
    machine,
    memory,
    noisy_neighbor,
    real,
    restart,
    rounds,
)
from bench.chaos_report import ACTS, CHECKS, REQUESTS
from bench.children import WORK, StartError, terminated_like_interrupted
from bench.continuation import SECTIONS
from bench.peers import LITELLM, Build, Peer, direct, peers, stub
from bench.report import Table, facts, section_of, tables
from bench.samples import Sample, Samples
from bench.terminal import show

PROXIES = ("streams", "plain")
PARTS = (
    *PROXIES,
    LITELLM,
    "stall",
    memory.PART,
    disturbances.PART,
    handshakes.PART,
    bytecodes.PART,
    ledger.PART,
    "real",
)
RESULTS = Path(__file__).with_name("RESULTS.md")
# Written by `make soak`, `make chaos`, `make continuation` and `bench.restart`; a run of the
# benchmarks keeps them.
KEPT = ("Soak", ACTS, REQUESTS, CHECKS, *SECTIONS, restart.TITLE)
METHOD = """\
Everything runs on one machine over loopback: a stub engine that answers like `vllm serve` and
computes nothing (`bench/stub_engine.py`), a target in front of it, and a load client
(`bench/load.py`). All targets run at the same time, and each round loads one after the other, every
second round in reverse order, so that a drift of the machine affects all alike. A figure is the
median over the rounds, and a ratio is taken within each round. The interval in parentheses covers
the median with 95 % confidence and needs six rounds (`bench/figures.py`). CPU is what the target's
processes used, to the nanosecond by each process's CPU clock. “Added” is the difference
to `direct`, the stub itself, in the same round. All targets run with default settings and log to a
file; the gateway and LiteLLM check a key, vllm-router and smg run without keys.
"""


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="The benchmarks.")
    parser.add_argument("--quick", action="store_true", help="one round of each load")
    parser.add_argument(
        "--only",
        action="append",
        choices=("proxies", *PARTS),
        help=f"this part; repeatable; proxies: {' and '.join(PROXIES)}",
    )
    parser.add_argument(
        "--noise", action="store_true", help="also compare two processes of the same build"
    )
    parser.add_argument(
        "--before", type=_checkout, metavar="TREE", help="also measure this earlier checkout"
    )
    parser.add_argument(
        "--before-python",
        type=_interpreter,
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter of the earlier checkout; default: this one",
    )
    options = parser.parse_args()
    before = Build(options.before, options.before_python) if options.before else None
    parts = parts_of(options.only)
    console = Console(stderr=True)
    started = time.monotonic()
    notes: list[str] = []
    with terminated_like_interrupted(), console.status("setting up the peers") as status:

        def say(text: str) -> None:
            status.update(f"{time.monotonic() - started:4.0f} s  {text}")

        def note(text: str) -> None:
            notes.append(text)
            console.print(text)

        found = peers(note, before=before, copy=options.noise, litellm=LITELLM in parts)
        samples = list(_measure(parts, found, say, note, quick=options.quick))
        disturbed = list(
            noisy_neighbor.measure(say, note, found, quick=options.quick)
            if disturbances.PART in parts
            else ()
        )
        others: list[Table] = []
        if handshakes.PART in parts:
            others.append(handshakes.measure(found, say, note, quick=options.quick))
        if bytecodes.PART in parts:
            others.append(bytecodes.measure())
        if ledger.PART in parts:
            say("the ledger")
            others.append(ledger.measure(quick=options.quick))
    whole = not options.quick and before is None and set(parts) == set(PARTS)
    results = Samples(samples)
    output = RESULTS if whole else WORK / "RESULTS.md"
    made = [*tables(results, disturbances.Disturbances(disturbed)), *others]
    failed = [f"{count} of {reason}" for reason, count in results.failures().items()]
    heading = (
        f"# Results of the benchmarks\n\nWritten by `{_command(options)}`; the "
        f"targets are at the end.\nRequests that failed: {'; '.join(failed) or 'none'}.\n"
        + "".join(f"\n{text}.\n" for text in notes)
    )
    output.write_text(_document(heading, made, found, _kept(output)))
    (WORK / "samples.json").write_bytes(msgspec.json.encode([*samples, *disturbed]))
    for table in made:
        show(table)
    console.print(f"requests that failed: {'; '.join(failed) or 'none'}")
    console.print(f"written to {output.relative_to(WORK.parent)}")


def _checkout(path: str) -> Path:
    tree = Path(path).resolve()
    if not (tree / "app" / "main.py").is_file():
        raise argparse.ArgumentTypeError(f"not a checkout of this project: {path}")
    return tree


def _interpreter(path: str) -> str:
    # Not resolved: the interpreter of a virtual environment is a link.
    python = Path(path).absolute()
    if not os.access(python, os.X_OK):
        raise argparse.ArgumentTypeError(f"not an interpreter: {path}")
    return str(python)


def parts_of(chosen: Sequence[str] | None) -> list[str]:
    """Return the selected parts in their order; all if none is selected."""
    names = {*(chosen or PARTS)}
    if names & {"proxies", LITELLM}:
        names |= {*PROXIES}
    return [part for part in PARTS if part in names]


def _measure(
    parts: Sequence[str], found: Sequence[Peer], say: rounds.Say, note: rounds.Say, *, quick: bool
) -> Iterator[Sample]:
    cases = rounds.cases(parts, quick=quick)
    if cases:
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = stack.enter_context(stub(itl_ms=rounds.PACE_MS))
            targets = []
            for peer in (direct(), *found):
                if not any(case.includes(peer.name, 0) for case in cases):
                    continue
                say(f"starting {peer.name}")
                try:
                    targets.append(stack.enter_context(peer.start(engine, directory)))
                except StartError as error:
                    note(f"{peer.name} is left out: {error}")
            yield from rounds.measure(cases, targets, say, note)
    if memory.PART in parts:
        yield from memory.measure(found, say, note, quick=quick)
    if "real" in parts:
        try:
            yield from real.measure(say, found, quick=quick)
        except StartError as error:
            note(f"real vLLM is left out: {error}")


def _command(options: argparse.Namespace) -> str:
    flags = [f"--{name}" for name in ("quick", "noise") if getattr(options, name)]
    flags += ["--before TREE"] if options.before else []
    return " ".join(["python -m bench", *flags, *(f"--only {part}" for part in options.only or ())])


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
