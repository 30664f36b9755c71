"""Builds nvml.c and writes the file that it reads; see there."""

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml.c")
GIB = 1024**3


def library(directory: Path, *defines: str) -> Path:
    """Compile the library into a directory; skip the test where there is no compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("the fake of NVIDIA's library is C, and there is no gcc here")
    # This is the name that nvidia-ml-py loads, by file name or because it is loaded already.
    target = directory / "libnvidia-ml.so.1"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-Wl,-soname,{target.name}",
    ]
    flags = [f"-D{define}" for define in defines]
    subprocess.run([*command, *flags, "-o", str(target), str(SOURCE)], check=True)
    return target


def load(path: Path) -> None:
    """Make the library the one that nvidia-ml-py finds in this process."""
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@dataclass
class Driver:
    """Values that the library returns, with GiB for bytes; `write` after a change."""

    file: Path
    used: list[float] = field(default_factory=lambda: [0.5, 0.5])
    total: float = 80.0
    name: str = "NVIDIA H100 80GB HBM3"
    mig: set[int] = field(default_factory=set)
    # GPU, pid, GiB; None: the driver does not tell
    processes: list[tuple[int, int, float | None]] = field(default_factory=list)
    # Function, GPU (-1: any), NVML's error code
    faults: list[tuple[str, int, int]] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)

    def write(self) -> None:
        lines = [
            f"device GPU-{gpu:08d} {int(self.total * GIB)} {int(used * GIB)} "
            f"{int(gpu in self.mig)} {self.name}"
            for gpu, used in enumerate(self.used)
        ]
        for gpu, pid, gib in self.processes:
            lines.append(f"process {gpu} {pid} {-1 if gib is None else int(gib * GIB)}")
        lines += [f"fault {function} {gpu} {code}" for function, gpu, code in self.faults]
        lines += [f"hang {function}" for function in self.hangs]
        # Replaced, not rewritten: the library may read it at any moment.
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.file)
