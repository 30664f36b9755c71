"""Small pictures of pages: PNG with a palette."""

from collections import Counter
from io import BytesIO
from pathlib import Path

from PIL import Image

COLORS = 128
MAX_BYTES = 60_000


def save_small(png: bytes, file: Path) -> int:
    """Save a PNG with a palette; return its size in bytes.

    Raises ValueError if it is larger than MAX_BYTES.
    """
    picture = Image.open(BytesIO(png)).convert("RGB")
    small = picture.quantize(palette=_palette(picture), dither=Image.Dither.NONE)
    out = BytesIO()
    small.save(out, "PNG", optimize=True)
    if out.tell() > MAX_BYTES:
        raise ValueError(f"{file.name} has {out.tell()} bytes, more than {MAX_BYTES}")
    file.write_bytes(out.getvalue())
    return out.tell()


def _palette(picture: Image.Image) -> Image.Image:
    """Return a palette of the most frequent colors as they are, and others by coverage.

    So surfaces keep their exact color, and the few pixels of a small badge theirs.
    """
    counted = Counter(picture.getdata()).most_common(COLORS // 2)
    frequent = [part for color, _ in counted for part in color]
    rare = picture.quantize(COLORS // 2, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([*frequent, *rare])
    return palette
