"""Renders Markdown, as a script that `markdown_process` starts; it imports nothing of ours.

A text is anything that a model or a user may write. HTML in it is shown as text, links lead to the
web or to a mail only, images are not loaded, and code is colored by classes.

The regular expressions behind both libraries can take minutes for a text that is made for it, and
hold the interpreter's lock meanwhile: hence a process, which the kernel ends when a text takes more
than `CPU_S`, or more than `MEMORY_BYTES`. It ends by itself when its standard input does.

Each request is a text, each response a status byte and the JSON of `{"html": …}`; both begin with
the length of what follows.
"""

import json
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from functools import cache
from typing import IO, Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

REQUEST = struct.Struct(">I")
RESPONSE = struct.Struct(">?I")
# Of processor time, for one text.
CPU_S = 2.0
MEMORY_BYTES = 512 * 2**20
MAX_HTML_BYTES = 4 * 2**20
# Longer code is not colored: each token of it becomes an element.
MAX_CODE = 65_536
# Behind the gateway, which shares the processors.
NICENESS = 5
_LINK = re.compile(r"https?://|mailto:", re.IGNORECASE)


def render_markdown(text: str) -> str:
    """Return the HTML of a text in Markdown."""
    html: str = _markdown().render(text)
    return html


@cache
def _markdown() -> MarkdownIt:
    markdown = MarkdownIt("commonmark", {"html": False})
    markdown.enable(["table", "strikethrough"])
    markdown.validateLink = lambda url: _LINK.match(url) is not None  # type: ignore[method-assign]
    markdown.core.ruler.push("finish", _finish)
    markdown.add_render_rule("fence", _code)
    markdown.add_render_rule("code_block", _code)
    markdown.add_render_rule("heading_open", _heading_open)
    markdown.add_render_rule("heading_close", _heading_close)
    markdown.add_render_rule("table_open", _table_open)
    markdown.add_render_rule("table_close", _table_close)
    return markdown


def _finish(state: StateCore) -> None:
    """Have links open apart from the page, turn images into links, and styles into classes."""
    for token in state.tokens:
        if token.type == "inline" and token.children:
            token.children = _without_images(token.children)
        elif token.type in ("th_open", "td_open") and "style" in token.attrs:
            # The page's policy allows no style attribute: `text-align:right`.
            token.attrs = {"class": str(token.attrs["style"]).replace("text-align:", "to-")}


def _without_images(tokens: Sequence[Token]) -> list[Token]:
    found: list[Token] = []
    in_link = False
    for token in tokens:
        if token.type in ("link_open", "link_close"):
            in_link = token.type == "link_open"
        if token.type == "link_open":
            found.append(_apart(token))
        elif token.type == "image":
            target = str(token.attrs.get("src", ""))
            name = Token("text", "", 0, content=token.content or target)
            if in_link:
                found.append(name)
            else:
                opening = _apart(Token("link_open", "a", 1, attrs={"href": target}))
                found += (opening, name, Token("link_close", "a", -1))
        else:
            found.append(token)
    return found


def _apart(link: Token) -> Token:
    link.attrs |= {"rel": "noopener noreferrer", "target": "_blank"}
    return link


def _highlight(code: str, language: str) -> str:
    """Return code as HTML with a class for each kind of token; empty: it stays as it is."""
    if not language or len(code) > MAX_CODE:
        return ""
    try:
        lexer = get_lexer_by_name(language[:40])
    except ClassNotFound:
        return ""
    html: str = highlight(code, lexer, HtmlFormatter(nowrap=True, classprefix="hl-"))
    return html


def _code(
    renderer: RendererHTML, tokens: Sequence[Token], at: int, options: OptionsDict, env: EnvType
) -> str:
    token = tokens[at]
    language = token.info.split(maxsplit=1)[0] if token.info.strip() else ""
    html = _highlight(token.content, language) or _escaped(token.content)
    # What scrolls must be reachable by the keyboard.
    return f'<pre tabindex="0"><code>{html}</code></pre>\n'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# The page has headings of its own: an answer's would break their order.
def _heading_open(renderer: RendererHTML, tokens: Sequence[Token], at: int, *_: Any) -> str:
    return f'<p class="heading {tokens[at].tag}">'


def _heading_close(*_: Any) -> str:
    return "</p>\n"


def _table_open(*_: Any) -> str:
    return '<div class="scroll" tabindex="0"><table>\n'


def _table_close(*_: Any) -> str:
    return "</table></div>\n"


def _serve(requests: IO[bytes], responses: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    responses.write(RESPONSE.pack(True, 0))  # it has started
    responses.flush()
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        text = requests.read(*REQUEST.unpack(head))
        body = _respond(text.decode())
        responses.write(RESPONSE.pack(body is not None, len(body or b"")) + (body or b""))
        responses.flush()


def _respond(text: str) -> bytes | None:
    """Return the JSON of a response; None: the text cannot be rendered."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        html = render_markdown(text)
        if len(html) > MAX_HTML_BYTES:
            return None
        return json.dumps({"html": html}).encode()
    except Exception:  # noqa: BLE001 - a lexer or a rule may raise anything
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_process() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the gateway too
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)


if __name__ == "__main__":
    _limit_process()
    _markdown()
    _serve(sys.stdin.buffer, sys.stdout.buffer)
