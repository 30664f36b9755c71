"""Directories of published models, as far as a plan reads them: config.json and headers.

`models/*.json` has each configuration and its tensors: name, number, shape, type. The weights
themselves are holes in sparse files.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODELS = Path(__file__).with_name("models")
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}
Shapes = Mapping[str, tuple[str, Sequence[int]]]


def published(name: str, directory: Path) -> Path:
    """Write the directory of a published model and return it."""
    data = json.loads((MODELS / f"{name}.json").read_text())
    tensors: dict[str, tuple[str, Sequence[int]]] = {}
    counts: Counter[str] = Counter()
    for pattern, number, shape, dtype in data["tensors"]:
        for _ in range(number):
            tensors[pattern.replace("*", str(counts[pattern]))] = dtype, shape
            counts[pattern] += 1
    write_config(directory, data["config"])
    write_weights(directory / "model.safetensors", tensors)
    return directory


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))


def write_weights(path: Path, tensors: Shapes) -> None:
    """Write a safetensors file whose data is a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    write_header(path, json.dumps(header).encode(), end)


def write_header(path: Path, header: bytes, data: int = 0) -> None:
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data)
