"""Shapes of large JSON bodies, and a search for those that stop the event loop longest. Pure."""

import gzip
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from random import Random

import msgspec
from backports import zstd

# Where the bulk of a body is, by the member's name, and what surrounds it there.
PLACES = (
    "messages", "system", "prompt", "input", "documents", "query", "data_1", "tools", "metadata",
    "logprobs", "return_token_ids", "temperature", "seed", "response_format", "user", "unknown",
    "kv_transfer_params", "prompt_embeds", "include_reasoning", "instructions", "stop", "model_x",
)  # fmt: skip
LAYERS = {
    "list": (b"[", b"]"),
    "tool_result": (b'[{"type":"tool_result","content":', b"}]"),
    "content": (b'[{"role":"user","content":', b"}]"),
    "source": (b'[{"source":', b"}]"),
    "object": (b'{"a":', b"}"),
}
# Repeated up to the size: in a string, or as the elements of a list.
TEXTS = (b"x", b"\\n", b"\\u0041", b"\\\\", b'\\"', "語".encode(), b"\\ud83d\\ude00", b'\\"url\\":')
ITEMS = (b"12345,", b"1,", b'"",', b'"x",', b"{},", b"[1],", b"null,", b'{"":0},', b'{"url":0},')
# One address: refused, inline in several spellings, and none.
ADDRESSES = (
    b"",
    b'{"url":"http://not.allowed/%b"}',
    b'{"image_url":{"url":"\\u0064ata:%b"}}',
    b'{"url":"data:%b"}',
    b'{"source":{"type":"url","url":"http://good.example/%b"}}',
    b'{"url":null}',
    b'{"type":"tool_use","input":{"url":"http://not.allowed/%b"}}',
)
MAX_ITEMS = 90_000
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": partial(gzip.compress, compresslevel=1),
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}


class Shape(msgspec.Struct, frozen=True):
    """A body: what fills it, where, how deep, and the addresses around it."""

    path: str
    place: str = "messages"
    layer: str = "list"
    depth: int = 0
    unit: bytes = b"x"
    address: bytes = b""
    addresses: int = 0
    tail: bytes = b"\\\\"  # of each address, 8 KB
    stream: bool = False
    coding: str = ""

    def encoded(self, size: int) -> bytes:
        """Return the body of so many bytes, in its Content-Encoding."""
        return CODINGS[self.coding](self.build(size))

    def build(self, size: int) -> bytes:
        """Return a body of about `size` bytes at most."""
        opened, closed = LAYERS[self.layer]
        address = (
            self.address % (self.tail * (8000 // len(self.tail)))
            if b"%" in self.address
            else self.address
        )
        count = min(self.addresses, size // 2 // (len(address) + 1)) if address else 0
        head = b'{"model":"demo","max_tokens":5,%b"%b":%b' % (
            b'"stream":true,' * self.stream,
            self.place.encode(),
            opened * self.depth,
        )
        pieces = [address] * count
        room = size - len(head) - (len(address) + 1) * count - len(closed) * self.depth - 64
        if self.unit in ITEMS:
            items = self.unit * min(
                room // len(self.unit), 1_900_000 if self.unit[:1].isdigit() else MAX_ITEMS
            )
            pieces.append(b"[%b]" % items[:-1])
        else:
            text = b'"%b"' % (self.unit * (room // len(self.unit)))
            pieces.append(b'{"type":"text","text":%b}' % text if count else text)
        inner = b"[%b]" % b",".join(pieces) if len(pieces) > 1 else pieces[0]
        return b"".join((head, inner, closed * self.depth, b"}"))


def random_shape(random: Random, paths: Iterable[str]) -> Shape:
    """Return a shape of which everything is chosen at random."""
    return Shape(
        random.choice(list(paths)),
        random.choice(PLACES),
        random.choice(list(LAYERS)),
        random.choice((0, 1, 2, 5, 12, 29)),
        random.choice(TEXTS + ITEMS),
        random.choice(ADDRESSES),
        random.choice((1, 100, 1000, 2040)),
        random.choice(TEXTS),
        random.random() < 0.5,
        random.choice(["", "", *CODINGS]),
    )  # fmt: skip


def mutated(shape: Shape, random: Random, paths: Iterable[str]) -> Shape:
    """Return a shape with one or two properties of another."""
    other = random_shape(random, paths)
    names = random.sample(Shape.__struct_fields__, random.choice((1, 2)))
    return msgspec.structs.replace(shape, **{name: getattr(other, name) for name in names})


def search(
    stop_of: Callable[[Shape], float], paths: Iterable[str], *, seed: int, tries: int, keep: int = 4
) -> list[tuple[float, Shape]]:
    """Return the shapes with the longest stops: some at random, then mutations of the best."""
    random, paths = Random(seed), list(paths)
    found: dict[Shape, float] = {}
    for number in range(tries):
        best = sorted(found, key=lambda shape: -found[shape])[: 2 * keep]
        shape = random_shape(random, paths)
        if number > tries // 3 and random.random() < 0.8:
            shape = mutated(random.choice(best), random, paths)
        if shape not in found:
            found[shape] = stop_of(shape)
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return [(stop, shape) for shape, stop in ordered[:keep]]
