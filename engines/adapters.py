"""The LoRA adapters of an engine: those that it should have, and the state of each there."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class AdapterPhase(enum.StrEnum):
    """The states of an adapter at one engine."""

    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The state of an adapter at an engine; `reason`: why it failed, in one line."""

    # Where it was loaded from; None: the server has loaded it itself.
    source: str | None
    phase: AdapterPhase
    reason: str | None = None


# Where each adapter is loaded from, by its name.
AdapterSources = Mapping[str, str | None]
