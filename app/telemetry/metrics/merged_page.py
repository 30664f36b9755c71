"""Merges the engines' Prometheus pages into one. Pure: bytes in, bytes out.

In the text exposition format 0.0.4 a family (# HELP, # TYPE and its samples) appears once, in one
block, so the samples of all engines are grouped under the header of the first engine. Each sample
gets the label `gateway_engine`; an existing label of that name is renamed to
`exported_gateway_engine`, as Prometheus does (`honor_labels: false`). When two engines declare a
name differently, the first declaration is kept and the family of the later engine is left out.

A malformed line is left out alone: each sample and header is read whole and written anew, so no
line of an engine can end up on the page in another meaning. A page above a limit is left out as a
whole. Merging is a generator that yields after a few lines, so that it never holds the event loop.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
LABEL = b"gateway_engine"
# Of one step, whichever comes first; 8 KiB are about 80 of vLLM's lines.
SLICE_BYTES = 8 * 1024
SLICE_LINES = 100
# Limits of one engine's page. vLLM 0.32 has 94 families in 56 KB, its longest line 1 KB.
MAX_LINE_BYTES = 64 * 1024
MAX_FAMILIES = 2_000
MAX_LINES = 100_000
MAX_TOTAL_BYTES = 64 * 1024 * 1024

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_LABEL_NAME = rb"[a-zA-Z_][a-zA-Z0-9_]*+"
_TEXT = rb'"(?>(?:[^"\\\n]|\\["\\n])*)"'
_PAIR = rb"[ \t]*+" + _LABEL_NAME + rb"[ \t]*+=[ \t]*+" + _TEXT + rb"[ \t]*+"
_LABELS = rb"(?>" + _PAIR + rb"(?>(?:," + _PAIR + rb")*)(?:,[ \t]*+)?|[ \t]*+)"
# Below 1e300: Prometheus rejects a page with a number above the largest float.
_EXPONENT = rb"[eE](?>-[0-9]++|\+?+(?=[0-9])0*+(?>1[0-9]{2}|[0-9]{0,2})(?![0-9]))"
_FINITE = rb"(?>[0-9]{1,100}+(?:\.[0-9]*+)?|\.[0-9]++)(?:" + _EXPONENT + rb")?"
_NUMBER = rb"(?>[+-]?+(?>" + _FINITE + rb"|(?i:inf(?:inity)?))|(?i:nan))"
# The last part is a timestamp: milliseconds, 64 bits.
_SAMPLE = re.compile(
    rb"[ \t]*+(" + _NAME + rb")(?>[ \t]*+\{(" + _LABELS + rb")\}[ \t]*+|[ \t]++)"
    rb"(" + _NUMBER + rb"(?>(?:[ \t]++-?[0-9]{1,18}+)?))"
)  # fmt: skip
_PAIRS = re.compile(rb"(" + _LABEL_NAME + rb")[ \t]*+=[ \t]*+(" + _TEXT + rb")")
_HEADER = re.compile(
    rb"[ \t]*+#[ \t]++(HELP|TYPE)[ \t]++(" + _NAME + rb")(?:[ \t]++((?>(?:[^\\\n]|\\[\\n])*)))?"
)

# Suffixes of a family's sample names, in addition to its own name.
_SUFFIXES: dict[bytes, tuple[bytes, ...]] = {
    b"histogram": (b"_bucket", b"_sum", b"_count"),
    b"summary": (b"_sum", b"_count"),
}
_UNTYPED = b"untyped"
_TYPES = frozenset((b"counter", b"gauge", _UNTYPED, *_SUFFIXES))

_UP_HELP = b"1 for an engine whose series are on this page, 0 for the others."

# Yields after every slice; returns what is left out of the page, in words.
MergeSteps = Generator[None, None, list[str]]


class MalformedPage(ValueError):
    """The page is above a limit, or has malformed lines and no sample."""


class _MalformedLine(ValueError):
    """A line is not in the text exposition format 0.0.4."""


@dataclass(slots=True, eq=False)
class _Family:
    """The header and samples of one name."""

    name: bytes
    help: bytes | None = None
    type: bytes | None = None
    samples: bytearray = field(default_factory=bytearray)

    @property
    def kind(self) -> bytes:
        return self.type or _UNTYPED

    def names(self, kind: bytes) -> set[bytes]:
        """Return the sample names of the family, if this is its kind."""
        return {self.name, *(self.name + suffix for suffix in _SUFFIXES.get(kind, ()))}

    def header(self) -> bytes:
        lines = b""
        if self.help is not None:
            lines = b"# HELP %s %s\n" % (self.name, self.help)
        if self.type is not None:
            lines += b"# TYPE %s %s\n" % (self.name, self.type)
        return lines


class _Page:
    """The families of one page, with the engine's label on each sample."""

    def __init__(self, engine: str) -> None:
        self._pair = _format_pair(engine)
        self.families: dict[bytes, _Family] = {}
        self.size = 0  # of all samples, in bytes
        self.malformed = 0  # lines that were left out
        self.first_fault = ""
        self._owners: dict[bytes, _Family] = {}  # by sample name

    def add_line(self, line: bytes) -> None:
        """Add a line; a malformed one is counted instead. Raises MalformedPage above a limit."""
        text = line.lstrip(b" \t")
        try:
            if text.startswith(b"#"):
                self._add_comment(line)
            elif text:
                self._add_sample(line)
        except _MalformedLine as error:
            self.leave_out(line[:80], str(error))

    def leave_out(self, start: bytes, reason: str) -> None:
        """Count a malformed line, of which this is the start."""
        self.malformed += 1
        self.first_fault = self.first_fault or f"{start.decode(errors='replace')!r} {reason}"

    def _add_comment(self, line: bytes) -> None:
        if line.split(None, 2)[1:2] not in ([b"HELP"], [b"TYPE"]):
            return
        if (header := _HEADER.fullmatch(line)) is None:
            raise _MalformedLine("is not a valid HELP or TYPE line")
        _check_utf8(line)
        word, name, rest = header.groups()
        family = self.families.get(name) or _Family(name)
        if word == b"HELP":
            if family.help is not None:
                raise _MalformedLine("is a second HELP line")
            self._claim(family, family.kind)
            family.help = rest or b""
        else:
            kind = (rest or b"").strip().lower()
            if kind not in _TYPES:
                raise _MalformedLine("has an unknown type")
            if family.type is not None or family.samples:
                raise _MalformedLine("is a second TYPE line, or one after its samples")
            self._claim(family, kind)
            family.type = kind

    def _claim(self, family: _Family, kind: bytes) -> None:
        """Register a family's names. Raises _MalformedLine when another family has one."""
        names = family.names(kind)
        if any(self._owners.get(name, family) is not family for name in names):
            raise _MalformedLine("is of a name that belongs to two families")
        self._owners |= dict.fromkeys(names, family)
        self.families[family.name] = family
        if len(self.families) > MAX_FAMILIES:
            raise MalformedPage(f"the page has more than {MAX_FAMILIES} families")

    def _add_sample(self, line: bytes) -> None:
        if (sample := _SAMPLE.fullmatch(line)) is None:
            raise _MalformedLine("is neither a sample nor a comment")
        _check_utf8(line)
        name, labels, value = sample.groups()
        pairs = _PAIRS.findall(labels) if labels else []
        taken = {label for label, _ in pairs}
        if len(taken) < len(pairs) or b"__name__" in taken:
            raise _MalformedLine("has a duplicate or reserved label")
        if LABEL in taken:
            labels = _rename(pairs, taken)
        if (family := self._owners.get(name)) is None:  # without a header
            family = _Family(name)
            self._claim(family, _UNTYPED)
        more = b"," + labels if pairs else b""
        added = b"%b{%b%b} %b\n" % (name, self._pair, more, value)
        family.samples += added
        self.size += len(added)


class MergedPage:
    """The families of all pages added so far, and gateway_engine_up for every engine."""

    def __init__(self) -> None:
        self._up = _Family(b"gateway_engine_up", _UP_HELP, b"gauge")
        self._families: dict[bytes, _Family] = {}
        self._owners = {self._up.name: self._up}
        self._size = 0

    def add(self, engine: str, page: bytes) -> MergeSteps:
        """Add an engine's page, a few lines at each step; nothing is added before the last step.

        Returns what is left out: malformed lines, and families that an earlier engine declares
        differently. Raises MalformedPage, and adds nothing of that page.
        """
        added = _Page(engine)
        start = yielded = 0
        for number in range(1, MAX_LINES + 1):
            if start == len(page):
                break
            end = page.find(b"\n", start)
            if end < 0:
                added.leave_out(page[start : start + 80], "ends in the middle")
                break
            if end - start > MAX_LINE_BYTES:
                added.leave_out(page[start : start + 80], f"is longer than {MAX_LINE_BYTES} bytes")
            else:
                added.add_line(page[start:end])
            start = end + 1
            if number % SLICE_LINES == 0 or start - yielded >= SLICE_BYTES:
                yielded = start
                yield
        else:
            if start < len(page):
                raise MalformedPage(f"the page has more than {MAX_LINES} lines")
        if added.malformed and not added.size:
            raise MalformedPage(f"the page has no valid sample: {added.first_fault}")
        if self._size + added.size > MAX_TOTAL_BYTES:
            raise MalformedPage("the pages of all engines together are too large")
        self._size += added.size
        return list(self._merge_all(added))

    def _merge_all(self, page: _Page) -> Iterator[str]:
        """Add the families of a page; yield what is left out."""
        others = [n.decode() for n, family in page.families.items() if not self._merge(family)]
        if others:
            yield f"other engines declare {', '.join(others[:5])} differently"
        if page.malformed:
            yield f"malformed lines left out: {page.malformed}, the first: {page.first_fault}"

    def _merge(self, family: _Family) -> bool:
        """Add a family of one page; return False when it conflicts with another declaration."""
        names = family.names(family.kind)
        existing = self._owners.get(family.name)
        owners = {self._owners.get(name) for name in names}
        if existing is None and owners == {None}:
            self._families[family.name] = family
            self._owners |= dict.fromkeys(names, family)
            return True
        if existing is None or owners != {existing} or existing.kind != family.kind:
            return False
        existing.samples += family.samples
        return True

    def text(self, up: Mapping[str, bool]) -> bytes:
        """Return the page; `up` says for every engine whether its page was added."""
        samples = (b"gateway_engine_up{%s} %d\n" % (_format_pair(name), up[name]) for name in up)
        families = (*self._families.values(), self._up)
        pieces = (piece for family in families for piece in (family.header(), family.samples))
        return b"".join((*pieces, *samples))


def _format_pair(engine: str) -> bytes:
    text = engine.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").encode()
    return LABEL + b'="' + text + b'"'


def _rename(pairs: Iterable[tuple[bytes, bytes]], taken: set[bytes]) -> bytes:
    """Return labels as text; the one that is called as the engine's label has another name."""
    exported = b"exported_" + LABEL
    while exported in taken:
        exported = b"exported_" + exported
    return b",".join(
        b"%b=%b" % (exported if name == LABEL else name, value) for name, value in pairs
    )


def _check_utf8(line: bytes) -> None:
    if not line.isascii():
        try:
            line.decode()
        except UnicodeDecodeError:
            raise _MalformedLine("is not UTF-8") from None
