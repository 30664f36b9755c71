"""An image without programs: those of this machine are mounted into its containers."""

import io
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGE = "localhost/bare:latest"


def bare_image(data: bytes = b"") -> bytes:
    """Return an image without programs, with a file of `data`: this machine's are mounted."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(directory)
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        file = tarfile.TarInfo("data")
        file.size = len(data)
        archive.addfile(file, io.BytesIO(data))
    return made.getvalue()


def machine() -> list[str]:
    """Return the volumes with this machine's programs, its interpreter and this repository."""
    base = Path(sys.base_prefix)
    own = [] if base.is_relative_to("/usr") else [base]
    return [f"{path}:{path}:ro" for path in ("/usr", *own, ROOT)]
