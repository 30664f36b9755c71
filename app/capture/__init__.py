"""Captures: requests and answers of named keys, owners and models, stored encrypted for a time.

A request whose binding says so gets a `Transcript`, which copies what its client is sent. At its
end the `CaptureWriter` makes a document of both in a thread: streams are put together
(`streamed_answer`), media become digests (`media`), patterns are replaced (`redaction`), and the
whole is bounded (`document`), encrypted (`sealing`) and put into the database (`store`). A capture
never delays a request and never fails one: what finds no room is dropped and counted.

`CaptureReader` is the only way back, and leaves a record in the audit.
"""

from app.capture.document import Document
from app.capture.reader import Capture, CaptureFilter, CapturePage, CaptureReader
from app.capture.rules import CaptureRules
from app.capture.sealing import Sealer, Unreadable
from app.capture.store import CaptureStore
from app.capture.transcript import Transcript
from app.capture.writer import CaptureWriter

__all__ = [
    "Capture",
    "CaptureFilter",
    "CapturePage",
    "CaptureReader",
    "CaptureRules",
    "CaptureStore",
    "CaptureWriter",
    "Document",
    "Sealer",
    "Transcript",
    "Unreadable",
]
