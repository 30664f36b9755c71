"""Several engines' pages of Prometheus series as one page. Pure: bytes in, bytes out.

The text exposition format 0.0.4 lets a family (# HELP, # TYPE and its samples) stand on a page once
and together, so the samples of all engines are gathered under the header of the first. Each gets
the label `gateway_engine`; one that has it already keeps its own as `exported_gateway_engine`, as
Prometheus does (`honor_labels: false`). Two engines that declare one name differently cannot share
a header: the first is kept, and the family of the later one is left out.

A page is taken whole or not at all: a wrong line says that the rest is not to be trusted either.
Everything is done for a piece of a page at a time by a few regular expressions, and the work is a
generator that may be left alone after every piece, so a loop is never held for a whole page.
"""

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
LABEL = b"gateway_engine"
# A piece; of vLLM's lines, about 80.
SLICE = 8 * 1024
# Bounds of one engine's page. vLLM 0.32 has 94 families in 56 KB, its longest line 1 KB.
LONGEST_LINE = 64 * 1024
MOST_FAMILIES = 2_000
MOST_SAMPLES = 100_000
MOST_BYTES_OF_ALL = 64 * 1024 * 1024

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_LABEL_NAME = rb"[a-zA-Z_][a-zA-Z0-9_]*+"
_TEXT = rb'"(?>(?:[^"\\\n]|\\["\\n])*)"'
_PAIR = rb"[ \t]*+" + _LABEL_NAME + rb"[ \t]*+=[ \t]*+" + _TEXT + rb"[ \t]*+"
_LABELS = rb"\{(?>" + _PAIR + rb"(?>(?:," + _PAIR + rb")*)(?:,[ \t]*+)?|[ \t]*+)\}"
# Below 1e300: Prometheus drops the page for a number that is above the largest there is.
_EXPONENT = rb"[eE](?>-[0-9]++|\+?+(?=[0-9])0*+(?>1[0-9]{2}|[0-9]{0,2})(?![0-9]))"
_FINITE = rb"(?>[0-9]{1,100}+(?:\.[0-9]*+)?|\.[0-9]++)(?:" + _EXPONENT + rb")?"
_NUMBER = rb"(?>[+-]?+(?>" + _FINITE + rb"|(?i:inf(?:inity)?))|(?i:nan))"
# A timestamp is in milliseconds and has 64 bits.
_SAMPLE = (
    rb"[ \t]*+" + _NAME + rb"(?>[ \t]*+" + _LABELS + rb"[ \t]*+|[ \t]++)"
    + _NUMBER + rb"(?>(?:[ \t]++-?[0-9]{1,18}+)?)"
)  # fmt: skip
# Every line that is right, up to the first that is not; a header's own rules are in `_header`.
_LINES = re.compile(rb"(?>(?>(?>" + _SAMPLE + rb"|[ \t]*+#[^\n]*+|[ \t]*+)\n)*)")
_COMMENT = re.compile(rb"^[ \t]*+#[^\n]*+\n", re.MULTILINE)
_HEADER = re.compile(
    rb"[ \t]*+#[ \t]++(HELP|TYPE)[ \t]++(" + _NAME + rb")(?:[ \t]++((?>(?:[^\\\n]|\\[\\n])*)))?\n"
)
_NAMES = re.compile(rb"^[ \t]*+(" + _NAME + rb")", re.MULTILINE)
_LABELLED = re.compile(rb"^[ \t]*+(" + _NAME + rb")[ \t]*+\{(?=[ \t]*+[a-zA-Z_])", re.MULTILINE)
_BARE = re.compile(
    rb"^[ \t]*+(" + _NAME + rb")(?>[ \t]*+\{[ \t]*+\}[ \t]*+|[ \t]++(?!\{))", re.MULTILINE
)
_VALUES = re.compile(_TEXT)
_EACH = re.compile(rb"[^\n]*+\n")  # a text may hold what else ends lines
_SHAPES = re.compile(rb"\{([^}]*+)\}")
_PAIRS = re.compile(rb"[ \t]*+(" + _LABEL_NAME + rb")[ \t]*+(=[ \t]*+" + _TEXT + rb")[ \t]*+,?+")

# The names that a family's samples have besides its own.
_SUFFIXES: dict[bytes, tuple[bytes, ...]] = {
    b"histogram": (b"_bucket", b"_sum", b"_count"),
    b"summary": (b"_sum", b"_count"),
}
_UNTYPED = b"untyped"
_TYPES = frozenset((b"counter", b"gauge", _UNTYPED, *_SUFFIXES))

_UP_HELP = b"1 for an engine whose series are on this page, 0 for the others."

# Yields after every piece of work; returns the names of families that were left out.
Work = Generator[None, None, list[str]]


class Malformed(ValueError):
    """A page that is not in the text exposition format 0.0.4."""


@dataclass(slots=True, eq=False)
class _Family:
    """What a page says under one name; `pieces` are whole lines of samples."""

    name: bytes
    help: bytes | None = None
    type: bytes | None = None
    pieces: list[bytes] = field(default_factory=list)

    @property
    def kind(self) -> bytes:
        return self.type or _UNTYPED

    def names(self) -> set[bytes]:
        """Return the names that belong to it."""
        suffixes = _SUFFIXES.get(self.type or _UNTYPED)
        return {self.name, *(self.name + one for one in suffixes)} if suffixes else {self.name}

    def header(self) -> bytes:
        lines = b""
        if self.help is not None:
            lines = b"# HELP %s %s\n" % (self.name, self.help)
        if self.type is not None:
            lines += b"# TYPE %s %s\n" % (self.name, self.type)
        return lines


class _Page:
    """The families of one page, with one more label on each sample."""

    def __init__(self, engine: str) -> None:
        self._pair = _pair(engine)
        template = self._pair.replace(b"\\", rb"\\")
        self._labelled = rb"\1{" + template + b","
        self._bare = rb"\1{" + template + b"} "
        self.families: dict[bytes, _Family] = {}
        self.size = 0  # in bytes, the labels included
        self._count = 0  # of samples
        self._owners: dict[bytes, _Family] = {}  # by the name of a sample
        self._shapes: set[bytes] = set()  # label names of samples, which were found to be right
        # The family of the last header, and its names.
        self._family: _Family | None = None
        self._current: set[bytes] = set()

    def take(self, lines: bytes) -> None:
        """Take in whole lines. Raises Malformed."""
        if not _is_utf8(lines):
            raise Malformed("it is not UTF-8")
        right = _LINES.match(lines)
        if right is None or right.end() != len(lines):
            at = right.end() if right else 0
            raise Malformed(f"{_shown(lines[at:])} is no line of it")
        start = 0
        for comment in _COMMENT.finditer(lines):
            self._samples(lines[start : comment.start()])
            start = comment.end()
            self._comment(comment.group())
        self._samples(lines[start:])

    def _comment(self, line: bytes) -> None:
        if line.split(None, 2)[1:2] not in ([b"HELP"], [b"TYPE"]):
            return
        if (header := _HEADER.fullmatch(line)) is None:
            raise Malformed(f"{_shown(line)} is no header of a family")
        word, name, rest = header.groups()
        family = self.families.get(name) or self._claim(_Family(name))
        if word == b"HELP":
            if family.help is not None:
                raise Malformed(f"{_shown(name)} has two HELP lines")
            family.help = rest or b""
        else:
            kind = (rest or b"").strip().lower()
            if kind not in _TYPES:
                raise Malformed(f"{_shown(line)} names no type that there is")
            if family.type is not None or family.pieces:
                raise Malformed(f"{_shown(name)} has two TYPE lines, or one behind its samples")
            family.type = kind
            self._claim(family)
        self._family, self._current = family, family.names()

    def _claim(self, family: _Family) -> _Family:
        """Note whose the names of a family are. Raises Malformed when they are another's."""
        for name in family.names():
            if self._owners.setdefault(name, family) is not family:
                raise Malformed(f"{_shown(name)} belongs to two families")
        self.families[family.name] = family
        if len(self.families) > MOST_FAMILIES:
            raise Malformed(f"it has more than {MOST_FAMILIES} families")
        return family

    def _samples(self, lines: bytes) -> None:
        """Put lines of samples where they go: as a rule to the family of the last header."""
        names = set(_NAMES.findall(lines))
        if not names:
            return
        self._count += lines.count(b"\n")
        if self._count > MOST_SAMPLES:
            raise Malformed(f"it has more than {MOST_SAMPLES} samples")
        self._check_labels(lines)
        if self._family is not None and names <= self._current:
            self._put(self._family, lines, names)
        elif len(names) == 1:
            self._put(self._owner(*names), lines, names)
        else:
            for line in _EACH.findall(lines):
                if (name := _NAMES.match(line)) is not None:
                    self._put(self._owner(name[1]), line, {name[1]})

    def _owner(self, name: bytes) -> _Family:
        """Return the family of a sample's name, a new one without a header if there is none."""
        return self._owners.get(name) or self._claim(_Family(name))

    def _check_labels(self, lines: bytes) -> None:
        """Raise Malformed when a sample has a label twice, for which Prometheus drops the page."""
        for shape in set(_SHAPES.findall(_VALUES.sub(b"", lines))) - self._shapes:
            names = [pair.strip(b" \t=") for pair in shape.split(b",") if pair.strip()]
            if len(set(names)) < len(names) or b"__name__" in names:
                raise Malformed(f"the labels {_shown(shape)} are not apart")
            if len(self._shapes) < MOST_FAMILIES:
                self._shapes.add(shape)

    def _put(self, family: _Family, lines: bytes, names: set[bytes]) -> None:
        """Add lines of samples, whose names these are, to a family."""
        if LABEL in lines:
            marked = b"".join(map(self._renamed, _EACH.findall(lines)))
        else:
            marked = self._replaced(lines, names) or self._marked(lines)
        family.pieces.append(marked)
        self.size += len(marked)

    def _replaced(self, lines: bytes, names: set[bytes]) -> bytes | None:
        """Return what `_marked` does, three times as fast; None where a sample is written oddly."""
        text = b"\n" + lines
        if any(odd in text for odd in (b"{}", b"{ ", b"{\t", b" {")):
            return None
        left = lines.count(b"\n")
        for name in names:
            for old, new in ((b"{", b"{" + self._pair + b","), (b" ", b"{" + self._pair + b"} ")):
                start = b"\n" + name
                left -= text.count(start + old)
                text = text.replace(start + old, start + new)
        return text[1:] if left == 0 else None

    def _marked(self, lines: bytes) -> bytes:
        return _BARE.sub(self._bare, _LABELLED.sub(self._labelled, lines))

    def _renamed(self, line: bytes) -> bytes:
        """Return a sample with the engine's label, its own label of that name renamed."""
        opened = _LABELLED.match(line)
        if opened is None:
            return self._marked(line)
        pairs: list[tuple[bytes, bytes]] = []
        at = opened.end()
        while (pair := _PAIRS.match(line, at)) is not None:
            pairs.append((pair[1], pair[2]))
            at = pair.end()
        taken = {name for name, _ in pairs}
        exported = b"exported_" + LABEL
        while exported in taken:
            exported = b"exported_" + exported
        kept = ((exported if name == LABEL else name) + value for name, value in pairs)
        return opened[1] + b"{" + b",".join((self._pair, *kept)) + line[at:]


class Merged:
    """The families of all pages so far, and of every engine whether its page is among them."""

    def __init__(self) -> None:
        self._up = _Family(b"gateway_engine_up", _UP_HELP, b"gauge")
        self._families: dict[bytes, _Family] = {}
        self._owners = {self._up.name: self._up}
        self._size = 0

    def add(self, engine: str, page: bytes) -> Work:
        """Take in an engine's page, a piece at each step; none of it before the last one.

        Returns the families that are left out, since engines before declare them differently.
        Raises Malformed: nothing is taken of that page.
        """
        if page and not page.endswith(b"\n"):
            raise Malformed("it ends in the middle of a line")
        read = _Page(engine)
        start = 0
        while start < len(page):
            end = page.find(b"\n", start + SLICE) + 1 or len(page)
            if end - start > SLICE + LONGEST_LINE:
                raise Malformed(f"a line is longer than {LONGEST_LINE} bytes")
            read.take(page[start:end])
            start = end
            yield
        if self._size + read.size > MOST_BYTES_OF_ALL:
            raise Malformed("there is no room for it beside the pages of the other engines")
        self._size += read.size
        return [name.decode() for name, one in read.families.items() if not self._merge(one)]

    def _merge(self, family: _Family) -> bool:
        """Add what one page says under a name; return whether that can stand on the page."""
        names = family.names()
        mine = self._owners.get(family.name)
        owners = {self._owners.get(name) for name in names}
        if mine is None and owners == {None}:
            self._families[family.name] = family
            self._owners |= dict.fromkeys(names, family)
            return True
        if mine is None or owners != {mine} or mine.kind != family.kind:
            return False
        mine.pieces += family.pieces
        return True

    def text(self, up: Mapping[str, bool]) -> bytes:
        """Return the page; `up` tells of every engine whether its page is there."""
        ends = (b"gateway_engine_up{%s} %d\n" % (_pair(name), up[name]) for name in up)
        families = (*self._families.values(), self._up)
        pieces = (piece for one in families for piece in (one.header(), *one.pieces))
        return b"".join((*pieces, *ends))


def _pair(engine: str) -> bytes:
    text = engine.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").encode()
    return LABEL + b'="' + text + b'"'


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(line: bytes) -> str:
    """Return the beginning of a line, for a message."""
    return repr(line.partition(b"\n")[0][:80].decode(errors="replace"))
