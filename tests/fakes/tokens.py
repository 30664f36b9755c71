"""The fake's tokenizer: ids that map to text and back, in every process the same. Pure.

A token is up to five letters with the blank before them, one other ASCII character, or one of the
two halves of any other character. As with byte-level BPE, the first half gives no text. Ids below
PROMPT_END are a prompt's: text never has them, so that an answer's ids are found behind a prompt's.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PROMPT_END = 1_000
EOS, THINK, THINK_END, TOOL, TOOL_END = range(1_000, 1_005)
SPECIAL = {
    EOS: "<|im_end|>",
    THINK: "<think>",
    THINK_END: "</think>",
    TOOL: "<tool_call>",
    TOOL_END: "</tool_call>",
}
_BY_TEXT = {text: token for token, text in SPECIAL.items()}
_CHARACTER, _FIRST_HALF, _SECOND_HALF, _LETTERS = 10_000, 20_000, 30_000, 100_000
_LENGTH = 5
_PIECE = re.compile("|".join(map(re.escape, _BY_TEXT)) + f"| ?[a-z]{{1,{_LENGTH}}}|.", re.DOTALL)
# What a tokenizer writes for bytes that are no character.
REPLACEMENT = "\ufffd"


def encode(text: str) -> list[int]:
    """Return the tokens of a text; special ones are written out, as `<think>`."""
    return [token for piece in _PIECE.findall(text) for token in _tokens(piece)]


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens, special ones included, as `POST /detokenize` does."""
    text, half = "", False
    first = 0
    for token in tokens:
        if half:
            half = False
            if _is_second_half(token):
                text += chr((first - _FIRST_HALF) << 8 | (token - _SECOND_HALF))
                continue
            text += REPLACEMENT
        if ends_inside_character((token,)):
            first, half = token, True
        else:
            text += _text(token)
    return text + REPLACEMENT * half


def ends_inside_character(tokens: Sequence[int]) -> bool:
    """Return whether the last token is the first half of a character."""
    return bool(tokens) and _FIRST_HALF <= tokens[-1] < _SECOND_HALF


def prompt_tokens(content: str, count: int) -> list[int]:
    """Return so many tokens of a rendered prompt; one of them stands for its content."""
    return [1, 10 + zlib.crc32(content.encode()) % 900, *[3] * (count - 3), 2][:count]


def split_prompt(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the prompt's tokens and those of the answer behind them."""
    end = next((n for n, token in enumerate(tokens) if token >= PROMPT_END), len(tokens))
    return list(tokens[:end]), list(tokens[end:])


@dataclass
class Detokenizer:
    """The text that each token adds, as vLLM's incremental detokenizer tells it.

    After a prompt that ends inside a character the first text is preceded by the whole prompt's:
    vLLM looks for a place in the prompt from which its text is whole, and finds none.
    """

    prompt: Sequence[int]
    _pending: list[int] = field(default_factory=list)
    _spoiled: bool = False

    def __post_init__(self) -> None:
        self._spoiled = ends_inside_character(self.prompt)

    def add(self, token: int) -> str:
        """Return the text that is whole now."""
        self._pending.append(token)
        if ends_inside_character(self._pending):
            return ""
        before = self.prompt if self._spoiled else ()
        text = "" if token == EOS else decode([*before, *self._pending])
        self._pending.clear()
        self._spoiled = False
        return text


def _is_second_half(token: int) -> bool:
    return _SECOND_HALF <= token < _SECOND_HALF + 256


def _tokens(piece: str) -> list[int]:
    if piece in _BY_TEXT:
        return [_BY_TEXT[piece]]
    letters = piece.removeprefix(" ")
    if letters.isascii() and letters.isalpha() and letters.islower():
        number = 0
        for letter in letters:
            number = number * 27 + ord(letter) - ord("a") + 1
        return [_LETTERS + number * 2 + (letters != piece)]
    if piece.isascii():
        return [_CHARACTER + ord(piece)]
    return [_FIRST_HALF + (ord(piece) >> 8), _SECOND_HALF + (ord(piece) & 0xFF)]


def _text(token: int) -> str:
    if token in SPECIAL:
        return SPECIAL[token]
    if token >= _LETTERS:
        number, blank = divmod(token - _LETTERS, 2)
        letters = ""
        while number:
            number, letter = divmod(number, 27)
            letters = chr(letter + ord("a") - 1) + letters
        return " " * blank + letters
    if token < PROMPT_END:
        return f"<|{token}|>"
    return REPLACEMENT if _is_second_half(token) else chr(token - _CHARACTER)
