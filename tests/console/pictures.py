"""Small pictures of pages: PNG with a palette."""

from io import BytesIO
from pathlib import Path

from PIL import Image

COLORS = 128
MAX_BYTES = 60_000


def save_small(png: bytes, file: Path) -> int:
    """Save a PNG with a palette; return its size in bytes.

    Raises ValueError if it is larger than MAX_BYTES.
    """
    # By coverage, not by frequency: the few pixels of a small badge keep their color.
    picture = Image.open(BytesIO(png)).convert("RGB")
    small = picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    out = BytesIO()
    small.save(out, "PNG", optimize=True)
    if out.tell() > MAX_BYTES:
        raise ValueError(f"{file.name} has {out.tell()} bytes, more than {MAX_BYTES}")
    file.write_bytes(out.getvalue())
    return out.tell()
