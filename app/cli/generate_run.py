"""Runs a batch of `vllm-gateway generate`: vLLM's events become output and an exit code."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from app.cli.faults import EXIT_FAILED, EXIT_FAULT, complain, fail
from engines.offline import Advance, Finished, Job, Loaded, Loading, OfflineError, Session

if TYPE_CHECKING:  # slow to import
    from app.cli.generate_output import ProgressMeter, Record, RecordWriter


class _Terminated(BaseException):
    """SIGTERM was received."""


def run_job(job: Job, *, as_json: bool, output: Path | None, verbose: bool) -> int:
    """Run a job and return the exit code."""
    from rich.console import Console

    from app.cli.generate_output import JsonLinesWriter, ProgressMeter, TextWriter

    console = Console(stderr=True, highlight=False)
    with ExitStack() as resources:
        out: IO[str] = sys.stdout
        if output is not None:
            out = resources.enter_context(_open(output))
        several = len(job.prompts) > 1 or job.sampling.get("n", 1) > 1
        writer = JsonLinesWriter(out) if as_json else TextWriter(out, titles=several)
        meter = ProgressMeter(console, len(job.prompts), live=not verbose)
        batch = _Batch(writer, resources.enter_context(meter))
        try:
            with _sigterm_raises(), Session(job, _show_log if verbose else None) as session:
                for event in session.events():
                    if isinstance(event, Loaded) and output is not None and out.seekable():
                        out.truncate(0)
                    batch.handle(event)
        except BrokenPipeError:
            # The reader has closed the pipe; Python would report that when it flushes at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except OSError as error:
            complain(f"cannot continue: {error}")
            return EXIT_FAILED
        except (KeyboardInterrupt, _Terminated) as interruption:
            batch.write_rest()
            complain(f"stopped: {meter.summary(batch.failed)}")
            stopped_by_term = isinstance(interruption, _Terminated)
            return 128 + (signal.SIGTERM if stopped_by_term else signal.SIGINT)
        except OfflineError as error:
            batch.write_rest()
            complain(str(error))
            return EXIT_FAULT if error.users else EXIT_FAILED
    print(meter.summary(batch.failed), file=sys.stderr)
    return EXIT_FAILED if batch.failed else 0


class _Batch:
    """The answers so far: written in the order of their prompts, failures counted."""

    def __init__(self, writer: "RecordWriter", meter: "ProgressMeter") -> None:
        from app.cli.generate_output import PromptOrder

        self._writer = writer
        self._meter = meter
        self._order = PromptOrder()
        self.failed = 0

    def handle(self, event: Loading | Loaded | Advance | Finished) -> None:
        """Show the progress of an event, and write the records that are due."""
        match event:
            case Loading(progress):
                self._meter.loading(progress)
            case Loaded():
                self._meter.loaded()
            case Advance():
                self._meter.advance(event)
            case Finished(place, records):
                self._write(self._order.add(place, records))

    def write_rest(self) -> None:
        """Write the records that are left when the batch ends early."""
        self._write(self._order.rest())

    def _write(self, records: "Iterator[Record]") -> None:
        with self._meter.aside():
            for record in records:
                self._writer.write(record)
                if "error" in record:
                    self.failed += 1
                    complain(f"prompt {record['index'] + 1}: {record['error']['message']}")


def _open(output: Path) -> IO[str]:
    try:
        # The previous content stays until there are answers to replace it.
        return output.open("a", encoding="utf-8")
    except OSError as error:
        fail(f"--output: cannot write {output}: {error.strerror or error}")


def _on_sigterm(signum: int, frame: object) -> NoReturn:
    raise _Terminated


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show_log(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()
