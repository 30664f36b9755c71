"""Merges the engines' Prometheus pages into one. Pure: bytes in, bytes out.

In the text exposition format 0.0.4 a family (# HELP, # TYPE and its samples) appears once, in one
block, so the samples of all engines are grouped under the header of the first engine. Each sample
gets the label `gateway_engine`; an existing label of that name is renamed to
`exported_gateway_engine`, as Prometheus does (`honor_labels: false`). When two engines declare a
name differently, the first declaration is kept and the family of the later engine is left out.

A page is accepted as a whole or rejected: one malformed line makes the rest untrustworthy. A few
regular expressions process one slice of a page at a time, and merging is a generator that yields
after every slice, so the event loop is never blocked for a whole page.
"""

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
LABEL = b"gateway_engine"
# About 80 of vLLM's lines.
SLICE_BYTES = 8 * 1024
# Limits of one engine's page. vLLM 0.32 has 94 families in 56 KB, its longest line 1 KB.
MAX_LINE_BYTES = 64 * 1024
MAX_FAMILIES = 2_000
MAX_SAMPLES = 100_000
MAX_TOTAL_BYTES = 64 * 1024 * 1024

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_LABEL_NAME = rb"[a-zA-Z_][a-zA-Z0-9_]*+"
_TEXT = rb'"(?>(?:[^"\\\n]|\\["\\n])*)"'
_PAIR = rb"[ \t]*+" + _LABEL_NAME + rb"[ \t]*+=[ \t]*+" + _TEXT + rb"[ \t]*+"
_LABELS = rb"\{(?>" + _PAIR + rb"(?>(?:," + _PAIR + rb")*)(?:,[ \t]*+)?|[ \t]*+)\}"
# Below 1e300: Prometheus rejects a page with a number above the largest float.
_EXPONENT = rb"[eE](?>-[0-9]++|\+?+(?=[0-9])0*+(?>1[0-9]{2}|[0-9]{0,2})(?![0-9]))"
_FINITE = rb"(?>[0-9]{1,100}+(?:\.[0-9]*+)?|\.[0-9]++)(?:" + _EXPONENT + rb")?"
_NUMBER = rb"(?>[+-]?+(?>" + _FINITE + rb"|(?i:inf(?:inity)?))|(?i:nan))"
# A timestamp: milliseconds, 64 bits.
_SAMPLE = (
    rb"[ \t]*+" + _NAME + rb"(?>[ \t]*+" + _LABELS + rb"[ \t]*+|[ \t]++)"
    + _NUMBER + rb"(?>(?:[ \t]++-?[0-9]{1,18}+)?)"
)  # fmt: skip
# Valid lines up to the first invalid one; `_HEADER` has the rules of headers.
_VALID_LINES = re.compile(rb"(?>(?>(?>" + _SAMPLE + rb"|[ \t]*+#[^\n]*+|[ \t]*+)\n)*)")
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
_LINE = re.compile(rb"[^\n]*+\n")  # not splitlines: label values may contain \r or \v
_SHAPES = re.compile(rb"\{([^}]*+)\}")
_PAIRS = re.compile(rb"[ \t]*+(" + _LABEL_NAME + rb")[ \t]*+(=[ \t]*+" + _TEXT + rb")[ \t]*+,?+")

# Suffixes of a family's sample names, in addition to its own name.
_SUFFIXES: dict[bytes, tuple[bytes, ...]] = {
    b"histogram": (b"_bucket", b"_sum", b"_count"),
    b"summary": (b"_sum", b"_count"),
}
_UNTYPED = b"untyped"
_TYPES = frozenset((b"counter", b"gauge", _UNTYPED, *_SUFFIXES))

_UP_HELP = b"1 for an engine whose series are on this page, 0 for the others."

# Yields after every slice; returns the names of families that were left out.
MergeSteps = Generator[None, None, list[str]]


class MalformedPage(ValueError):
    """The page is not in the text exposition format 0.0.4."""


@dataclass(slots=True, eq=False)
class _Family:
    """The header and samples of one name; `pieces` are whole lines of samples."""

    name: bytes
    help: bytes | None = None
    type: bytes | None = None
    pieces: list[bytes] = field(default_factory=list)

    @property
    def kind(self) -> bytes:
        return self.type or _UNTYPED

    def names(self) -> set[bytes]:
        """Return the sample names of the family."""
        return {self.name, *(self.name + suffix for suffix in _SUFFIXES.get(self.kind, ()))}

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
        template = self._pair.replace(b"\\", rb"\\")
        self._labelled = rb"\1{" + template + b","
        self._bare = rb"\1{" + template + b"} "
        self.families: dict[bytes, _Family] = {}
        self.size = 0  # in bytes, with the added labels
        self._samples = 0
        self._owners: dict[bytes, _Family] = {}  # by sample name
        self._valid_shapes: set[bytes] = set()  # label names of samples, without the values
        # The family of the last header, and its sample names.
        self._family: _Family | None = None
        self._family_names: set[bytes] = set()

    def add_lines(self, lines: bytes) -> None:
        """Add whole lines. Raises MalformedPage."""
        if not _is_utf8(lines):
            raise MalformedPage("the page is not UTF-8")
        valid = _VALID_LINES.match(lines)
        if valid is None or valid.end() != len(lines):
            at = valid.end() if valid else 0
            raise MalformedPage(f"{_quote(lines[at:])} is neither a sample nor a comment")
        start = 0
        for comment in _COMMENT.finditer(lines):
            self._add_samples(lines[start : comment.start()])
            start = comment.end()
            self._add_comment(comment.group())
        self._add_samples(lines[start:])

    def _add_comment(self, line: bytes) -> None:
        if line.split(None, 2)[1:2] not in ([b"HELP"], [b"TYPE"]):
            return
        if (header := _HEADER.fullmatch(line)) is None:
            raise MalformedPage(f"{_quote(line)} is not a valid HELP or TYPE line")
        word, name, rest = header.groups()
        family = self.families.get(name) or self._claim(_Family(name))
        if word == b"HELP":
            if family.help is not None:
                raise MalformedPage(f"{_quote(name)} has two HELP lines")
            family.help = rest or b""
        else:
            kind = (rest or b"").strip().lower()
            if kind not in _TYPES:
                raise MalformedPage(f"{_quote(line)} has an unknown type")
            if family.type is not None or family.pieces:
                raise MalformedPage(f"{_quote(name)} has two TYPE lines, or one after its samples")
            family.type = kind
            self._claim(family)
        self._family, self._family_names = family, family.names()

    def _claim(self, family: _Family) -> _Family:
        """Register the names of a family. Raises MalformedPage when another family has one."""
        for name in family.names():
            if self._owners.setdefault(name, family) is not family:
                raise MalformedPage(f"{_quote(name)} belongs to two families")
        self.families[family.name] = family
        if len(self.families) > MAX_FAMILIES:
            raise MalformedPage(f"the page has more than {MAX_FAMILIES} families")
        return family

    def _add_samples(self, lines: bytes) -> None:
        """Add lines of samples to their families: as a rule, that of the last header."""
        names = set(_NAMES.findall(lines))
        if not names:
            return
        self._samples += lines.count(b"\n")
        if self._samples > MAX_SAMPLES:
            raise MalformedPage(f"the page has more than {MAX_SAMPLES} samples")
        self._check_labels(lines)
        if self._family is not None and names <= self._family_names:
            self._put(self._family, lines, names)
        elif len(names) == 1:
            self._put(self._owner(*names), lines, names)
        else:
            for line in _LINE.findall(lines):
                if (name := _NAMES.match(line)) is not None:
                    self._put(self._owner(name[1]), line, {name[1]})

    def _owner(self, name: bytes) -> _Family:
        """Return the family of a sample name; a new one without a header if it has none."""
        return self._owners.get(name) or self._claim(_Family(name))

    def _check_labels(self, lines: bytes) -> None:
        """Raise MalformedPage for a duplicate label; Prometheus rejects a page that has one."""
        for shape in set(_SHAPES.findall(_VALUES.sub(b"", lines))) - self._valid_shapes:
            names = [pair.strip(b" \t=") for pair in shape.split(b",") if pair.strip()]
            if len(set(names)) < len(names) or b"__name__" in names:
                raise MalformedPage(f"duplicate or reserved label in {_quote(shape)}")
            if len(self._valid_shapes) < MAX_FAMILIES:
                self._valid_shapes.add(shape)

    def _put(self, family: _Family, lines: bytes, names: set[bytes]) -> None:
        """Add lines of samples with these names to a family, with the engine's label."""
        if LABEL in lines:
            labelled = b"".join(map(self._label_and_rename, _LINE.findall(lines)))
        else:
            labelled = self._label_fast(lines, names) or self._label(lines)
        family.pieces.append(labelled)
        self.size += len(labelled)

    def _label_fast(self, lines: bytes, names: set[bytes]) -> bytes | None:
        """Return the result of `_label` three times as fast; None for unusual spacing."""
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

    def _label(self, lines: bytes) -> bytes:
        return _BARE.sub(self._bare, _LABELLED.sub(self._labelled, lines))

    def _label_and_rename(self, line: bytes) -> bytes:
        """Return a sample with the engine's label; its own label of that name is renamed."""
        opened = _LABELLED.match(line)
        if opened is None:
            return self._label(line)
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


class MergedPage:
    """The families of all pages added so far, and gateway_engine_up for every engine."""

    def __init__(self) -> None:
        self._up = _Family(b"gateway_engine_up", _UP_HELP, b"gauge")
        self._families: dict[bytes, _Family] = {}
        self._owners = {self._up.name: self._up}
        self._size = 0

    def add(self, engine: str, page: bytes) -> MergeSteps:
        """Add an engine's page, one slice at each step; nothing is added before the last step.

        Returns the families that are left out because an earlier engine declares them differently.
        Raises MalformedPage, and adds nothing of that page.
        """
        if page and not page.endswith(b"\n"):
            raise MalformedPage("the page ends in the middle of a line")
        added = _Page(engine)
        start = 0
        while start < len(page):
            end = page.find(b"\n", start + SLICE_BYTES) + 1 or len(page)
            if end - start > SLICE_BYTES + MAX_LINE_BYTES:
                raise MalformedPage(f"a line is longer than {MAX_LINE_BYTES} bytes")
            added.add_lines(page[start:end])
            start = end
            yield
        if self._size + added.size > MAX_TOTAL_BYTES:
            raise MalformedPage("the pages of all engines together are too large")
        self._size += added.size
        return [n.decode() for n, family in added.families.items() if not self._merge(family)]

    def _merge(self, family: _Family) -> bool:
        """Add a family of one page; return False when it conflicts with another declaration."""
        names = family.names()
        existing = self._owners.get(family.name)
        owners = {self._owners.get(name) for name in names}
        if existing is None and owners == {None}:
            self._families[family.name] = family
            self._owners |= dict.fromkeys(names, family)
            return True
        if existing is None or owners != {existing} or existing.kind != family.kind:
            return False
        existing.pieces += family.pieces
        return True

    def text(self, up: Mapping[str, bool]) -> bytes:
        """Return the page; `up` says for every engine whether its page was added."""
        samples = (b"gateway_engine_up{%s} %d\n" % (_format_pair(name), up[name]) for name in up)
        families = (*self._families.values(), self._up)
        pieces = (piece for family in families for piece in (family.header(), *family.pieces))
        return b"".join((*pieces, *samples))


def _format_pair(engine: str) -> bytes:
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


def _quote(line: bytes) -> str:
    """Return the beginning of a line in quotes, for an error message."""
    return repr(line.partition(b"\n")[0][:80].decode(errors="replace"))
