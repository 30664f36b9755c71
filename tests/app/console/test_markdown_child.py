"""Markdown of models as HTML: whatever a text says, it is shown and never does anything."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.console.markdown_child import MAX_CODE, render_markdown

# What Markdown without HTML and images is made of.
ELEMENTS = {
    *("a", "blockquote", "br", "code", "div", "em", "hr", "li", "ol", "p", "pre", "s", "span"),
    *("strong", "table", "tbody", "td", "th", "thead", "tr", "ul"),
}
ATTRIBUTES = {"href", "rel", "target", "class", "tabindex", "start", "title"}
HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt&colon;alert(1))",
    "[a](data:text/html,<script>alert(1)</script>)",
    "[a](/console/logout)",
    "[a]: vbscript:x\n\n[a]",
    '[a](http://x "\\" onmouseover=alert(1) ")',
    '[a](http://x/"onmouseover=alert(1))',
    "![a](http://evil.example/pixel.png)",
    "![a](data:image/svg+xml;base64,AAAA)",
    "<javascript:alert(1)>",
    '```"><script>\ncode\n```',
    "```html\n<script>alert(1)</script>\n```",
    "|a|\n|:-:|\n|<b onclick=x>|",
    "\x1b[31mred\x1b[0m \x00 \u202e",
)


class _Elements(HTMLParser):
    """Collects what is not allowed on the page."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ELEMENTS:
            self.faults.append(tag)
        for name, value in attrs:
            link = name == "href" and not re.match("(https?://|mailto:)", value or "", re.I)
            if name not in ATTRIBUTES or link:
                self.faults.append(f"{tag} {name}={value}")


def faults_of(html: str) -> list[str]:
    parser = _Elements()
    parser.feed(html)
    parser.close()
    return parser.faults


@given(st.lists(st.sampled_from([*HOSTILE, "\n\n", "`", "[", "](", "*", "> ", "- "])).map("".join))
@example("".join(HOSTILE))
def test_no_text_makes_an_element_or_attribute_that_acts(text: str) -> None:
    assert faults_of(render_markdown(text)) == []


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_as_text(text: str) -> None:
    assert faults_of(render_markdown(text)) == []


def test_a_link_opens_apart_from_the_page() -> None:
    html = render_markdown("[a](https://example.com/)")
    assert '<a href="https://example.com/" rel="noopener noreferrer" target="_blank">a</a>' in html


def test_an_image_becomes_a_link_with_its_text() -> None:
    html = render_markdown("![a picture](https://example.com/a.png)")
    assert "<img" not in html
    assert 'href="https://example.com/a.png"' in html
    assert ">a picture</a>" in html


def test_an_image_in_a_link_is_its_text() -> None:
    html = render_markdown("[![a picture](https://example.com/a.png)](https://example.com/)")
    assert html.count("<a ") == 1
    assert ">a picture</a>" in html


def test_code_is_colored_by_classes() -> None:
    html = render_markdown("```python\ndef f(): pass\n```")
    assert '<span class="hl-k">def</span>' in html
    assert "style=" not in html


@pytest.mark.parametrize("language", ["", "no-such-language", "x" * 1000])
def test_code_of_an_unknown_language_stays_plain(language: str) -> None:
    html = render_markdown(f"```{language}\na < b\n```")
    assert '<pre tabindex="0"><code>a &lt; b\n</code></pre>' in html


def test_long_code_stays_plain() -> None:
    assert "hl-" not in render_markdown("```python\n" + "a = 1\n" * (MAX_CODE // 6 + 1) + "```")


def test_the_alignment_of_a_table_is_a_class() -> None:
    html = render_markdown("|a|b|\n|--:|:-:|\n|1|2|")
    assert '<td class="to-right">1</td>' in html
    assert '<td class="to-center">2</td>' in html


def test_headings_do_not_break_the_order_of_the_page() -> None:
    assert render_markdown("# One") == '<p class="heading h1">One</p>\n'
