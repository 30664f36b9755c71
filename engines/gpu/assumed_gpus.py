"""GPUs of another machine, for a check of its configuration on a machine without them."""

import re
from collections.abc import Sequence
from typing import Self

from engines.gpu.accelerator import Device, HostMemory
from engines.gpu.placement import count_gpus
from engines.spec import LocalSpec

_FORM = re.compile(r"([1-9]\d{0,2})x([1-9]\d{0,3})")


class AssumedGpus(HostMemory):
    """An accelerator whose GPUs do not exist. For placement only: engines on it must not start."""

    def __init__(self, count: int, gib: float | None = None) -> None:
        super().__init__()
        self.count = count
        self._gib = gib

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the GPUs of a text like `8x80`: 8 GPUs with 80 GiB each. Raises ValueError."""
        if (match := _FORM.fullmatch(text)) is None:
            raise ValueError(f"must be like 8x80, for 8 GPUs with 80 GiB each, not {text!r}")
        return cls(int(match[1]), float(match[2]))

    @classmethod
    def enough_for(cls, specs: Sequence[LocalSpec]) -> Self:
        """Return as many GPUs as engines need if no two share one, of unknown memory."""
        listed = [gpu for spec in specs if isinstance(spec.gpus, list) for gpu in spec.gpus]
        return cls(max(listed, default=-1) + 1 + sum(map(_needed, specs)))

    def devices(self) -> tuple[Device, ...]:
        return tuple(
            Device(index, f"assumed-{index}", "assumed", self._gib, self._gib)
            for index in range(self.count)
        )


def _needed(spec: LocalSpec) -> int:
    """Return how many GPUs an engine needs that are not in a list."""
    if isinstance(spec.gpus, list):
        return 0
    if isinstance(spec.gpus, int):
        return spec.gpus
    try:
        return count_gpus(spec.args)[0]
    except ValueError:  # the placement says so
        return 0
