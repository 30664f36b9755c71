"""Loggers of events that concern one engine or one model. Standard library only."""

import logging
from typing import Any, ClassVar


class SubjectLogger(logging.LoggerAdapter[logging.Logger]):
    """Begins each event with its subject, and adds that as a field of the record.

    `log.error("failed: %s", reason)` becomes "engine demo-0 failed: …". A colon at the beginning of
    an event follows the name without a blank.
    """

    kind: ClassVar[str]

    def __init__(self, logger: logging.Logger, name: str) -> None:
        super().__init__(logger, {self.kind: name})
        self._name = name

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See `logging.LoggerAdapter`. The name may contain anything: it is an argument."""
        if self.isEnabledFor(level):
            event = str(msg)
            text = f"{self.kind} %s{event}" if event[:1] == ":" else f"{self.kind} %s {event}"
            self.logger.log(level, text, self._name, *args, extra=self.extra, **kwargs)


class EngineLogger(SubjectLogger):
    """Logs events of one engine."""

    kind = "engine"


class ModelLogger(SubjectLogger):
    """Logs events of one model."""

    kind = "model"
