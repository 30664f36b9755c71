"""Markdown of models as elements, in Chromium: a text is shown and can do nothing."""

import itertools
from typing import Any

import pytest
from playwright.async_api import Page

from app.auth import Role
from tests.console.site import Site
from tests.console.test_playground_scripts import evaluate, page, playground

pytestmark = pytest.mark.asyncio(loop_scope="session")
__all__ = ["page", "playground"]

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
    '~~~php\n<?php echo "<b onclick=x></code></pre><img src=x onerror=x>"; ?>\n~~~',
    "|a|\n|:-:|\n|<b onclick=x>|",
    "\x1b[31mred\x1b[0m \x00 \u202e",
)
BETWEEN = ("", "\n\n", "`", "[", "](", "*", "> ", "- ")
# What the page would do if the parser let everything pass.
HOSTILE_HTML = (
    "<script>alert(1)</script><style>*{display:none}</style><base href=//x><meta charset=x>",
    "<img src=/console/logout onerror=alert(1)><svg onload=alert(1)><a xlink:href='javascript:x'>",
    "<a href='javascript:alert(1)' onclick=alert(1) style='color:red' id=turns name=x>x</a>",
    "<a href=' java\tscript:alert(1)'>x</a><a href=/console/logout>x</a><a href=//x.y>x</a>",
    "<form action=http://x><input name=key><button formaction=http://x>x</button></form>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe><object data=x></object><embed src=x>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)></style></table></math>",
    "<template><img src=x onerror=alert(1)></template><noscript><p title='</noscript><img src=x>'>",
    "<div data-part=message aria-label=x role=alert contenteditable>x</div><video src=x></video>",
)
FAULTS = """
const ELEMENTS = new Set(("a blockquote br code del div em hr li ol p pre span strong table tbody"
    + " td th thead tr ul").split(" "));
const ATTRIBUTES = new Set("href rel target class tabindex start title".split(" "));
const faultsOf = (content) => [...content.querySelectorAll("*")].flatMap((element) => [
    ...(ELEMENTS.has(element.localName) ? [] : [element.outerHTML]),
    ...[...element.attributes]
        .filter(({name, value}) => !ATTRIBUTES.has(name)
            || name === "href" && !/^(https?:\\/\\/|mailto:)/i.test(value))
        .map(({name, value}) => `${element.localName} ${name}=${value}`),
]);
const htmlOf = (content) => {
    const place = document.createElement("div");
    place.append(content);
    return place.innerHTML;
};
const {renderMarkdown} = await load("markdown.js");
"""


async def render(page: Page, text: str) -> str | None:
    """Return the HTML of a text; None: it stays plain."""
    program = """const content = await renderMarkdown(given);
        return content && htmlOf(content);"""
    html: str | None = await evaluate(page, FAULTS + program, text)
    return html


async def faults_of(page: Page, texts: list[str]) -> Any:
    """Return what acts of the elements of texts; null: a text stays plain."""
    program = """const found = await Promise.all(given.map(renderMarkdown));
        return found.flatMap((content) => content ? faultsOf(content) : [null]);"""
    return await evaluate(page, FAULTS + program, texts)


async def test_no_text_makes_an_element_or_attribute_that_acts(page: Page) -> None:
    mixed = ["".join(parts) for parts in itertools.product(HOSTILE, BETWEEN, HOSTILE)]
    assert await faults_of(page, [*HOSTILE, "".join(HOSTILE), *mixed]) == []


async def test_html_that_passed_the_parser_would_do_nothing(site: Site) -> None:
    echo = """self.Worker = class {
        constructor() { setTimeout(() => this.onmessage({data: "ready"})); }
        postMessage({text}) { setTimeout(() => this.onmessage({data: text})); }
    };"""
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        await page.goto("/console/playground")
        await page.evaluate(f"() => {{ {echo} }}")
        # The sanitizer parses in a document without scripts, which has the policy of the page.
        with watched_page.accepting("^policy: ", "Content Security Policy"):
            assert await render(page, "<b onclick=alert(1)><p>shown</p></b>") == "<p>shown</p>"
            assert await faults_of(page, [*HOSTILE_HTML, "".join(HOSTILE_HTML)]) == []


async def test_code_of_a_known_language_has_colors(page: Page) -> None:
    html = await render(page, '- ```py title="x"\n  def f(): return "<b>"  # </code>\n  ```')
    assert html is not None
    assert '<span class="hljs-keyword">def</span>' in html
    assert '<span class="hljs-string">"&lt;b&gt;"</span>' in html
    assert '<span class="hljs-comment"># &lt;/code&gt;</span>' in html


async def test_code_that_takes_the_square_of_its_length_has_no_colors(page: Page) -> None:
    html = await render(page, f"```java\nint {'_' * 999};\n```\n\n```java\nint i = 1;\n```")
    assert html is not None
    long, short = html.split("<pre")[1:]
    assert "<span" not in long
    assert "<span" in short


async def test_much_code_is_shown_without_colors(page: Page) -> None:
    code = "```json\n%s\n```\n" % ("[1, 2]\n" * 1000)
    html = await render(page, code * 4)
    assert html is not None
    first, second, *others = html.split("<pre")[1:]
    assert '"hljs-number"' in first
    assert '"hljs-number"' in second
    assert len(others) == 2
    assert not any("<span" in one for one in others)


async def test_code_that_takes_too_long_in_colors_is_shown_without(page: Page) -> None:
    # JavaScript in XML in JavaScript, and so on: each level reads the rest again, for seconds.
    code = "x = <script a>\n" * 880 + "1\n" + "/>\n" * 880
    program = """const wait = setTimeout;
        globalThis.setTimeout = (end, limitMs) => {
            globalThis.setTimeout = wait;
            return wait(end, limitMs / 20);
        };
        const contents = await Promise.all(given.map(renderMarkdown));
        return contents.map((one) => one && htmlOf(one));"""
    texts = [f"```js\n{code}```\n*end*", "```js\n1\n```"]
    slow, quick = await evaluate(page, FAULTS + program, texts)
    assert "<span" not in slow
    assert "<p><em>end</em></p>" in slow
    assert "hljs-number" in quick


async def test_colors_do_not_make_a_text_too_much(page: Page) -> None:
    code, table = "1,\n" * 5000, "|a|b|c|d|\n|-|-|-|-|\n" + "|1|2|3|4|\n" * 3000
    html = await render(page, f"```json\n[{code}]\n```\n\n{table}")
    assert html is not None
    assert "<table>" in html
    assert "<span" not in html
    html = await render(page, f"```json\n[{code}]\n```")
    assert html is not None
    assert html.count("<span") >= 5000


async def test_the_library_of_colors_is_loaded_with_the_first_code_that_needs_it(
    site: Site,
) -> None:
    async with site.visit(Role.CLIENT) as watched_page:
        page = watched_page.page
        loaded: list[str] = []
        page.context.on("request", lambda request: loaded.append(request.url))
        await page.goto("/console/playground")
        for text in ("`a`", "    a", "```\na\n```"):
            await render(page, text)
        assert not [url for url in loaded if url.endswith("vendor/highlight.js")]
        assert [url for url in loaded if url.endswith("vendor/marked.js")]
        for _ in range(2):
            await render(page, "~~~sql\nselect 1\n~~~")
        assert len([url for url in loaded if url.endswith("vendor/highlight.js")]) == 1


async def test_elements_suit_the_page(page: Page) -> None:
    opening = '<a rel="noopener noreferrer" target="_blank" href="https://example.com/"'
    expected = {
        "[a](https://example.com/)": f"<p>{opening}>a</a></p>",
        "![a picture](https://example.com/)": f"<p>{opening}>a picture</a></p>",
        "[![b](https://x/b.png)](https://example.com/)": f"<p>{opening}>b</a></p>",
        "[a](/console/logout)": "<p>[a](/console/logout)</p>",
        "https://example.com/": "<p>https://example.com/</p>",
        "<b>*a*</b> &lt;": "<p>&lt;b&gt;<em>a</em>&lt;/b&gt; &lt;</p>",
        "~~a~~ ~b~": "<p><del>a</del> ~b~</p>",
        "# One": '<p class="heading h1">One</p>',
        "- [ ] a\n- [x] b": "<ul>\n<li>[ ] a</li>\n<li>[x] b</li>\n</ul>",
        "3. a": '<ol start="3">\n<li>a</li>\n</ol>',
        "```constructor\na < b\n```": '<pre tabindex="0"><code>a &lt; b\n</code></pre>',
        "```no such\na < b\n```": '<pre tabindex="0"><code>a &lt; b\n</code></pre>',
        "    a < b": '<pre tabindex="0"><code>a &lt; b\n</code></pre>',
    }
    assert {text: await render(page, text) for text in expected} == {
        text: f"{html}\n" for text, html in expected.items()
    }


async def test_a_table_scrolls_and_its_alignment_is_a_class(page: Page) -> None:
    html = await render(page, "|a|b|\n|--:|:-:|\n|1|2|")
    assert html is not None
    assert html.startswith('<div class="scroll" tabindex="0"><table>')
    assert '<td class="to-right">1</td>' in html
    assert '<td class="to-center">2</td>' in html


async def test_a_text_that_takes_too_much_stays_plain(page: Page) -> None:
    too_long, too_much_html = "a" * (256 * 1024 + 1), "&" * 250_000
    nested_too_deeply, too_many_elements = "- " * 20_000 + "a", "*a* " * 20_000
    for text in (too_long, too_much_html, nested_too_deeply, too_many_elements, ""):
        assert await render(page, text) is None
        assert await render(page, "*next*") == "<p><em>next</em></p>\n"


async def test_a_text_that_cannot_be_sanitized_leaves_the_next_one_formatted(page: Page) -> None:
    program = """const {DOMPurify} = globalThis, {sanitize} = DOMPurify;
        DOMPurify.sanitize = () => { throw new Error("cannot"); };
        const first = renderMarkdown("*first*");
        await first.catch(() => null);
        DOMPurify.sanitize = sanitize;
        return [await first, htmlOf(await renderMarkdown("*next*"))];"""
    assert await evaluate(page, FAULTS + program, None) == [None, "<p><em>next</em></p>\n"]


async def test_a_slow_text_stays_plain_and_leaves_its_page_usable(page: Page) -> None:
    # The limit of the first one comes sooner: until then, its thread takes all the time there is.
    program = """const wait = setTimeout;
        globalThis.setTimeout = (end, limitMs) => {
            globalThis.setTimeout = wait;
            return wait(end, limitMs / 2);
        };
        let frames = 0;
        const count = () => { frames++; requestAnimationFrame(count); };
        count();
        const contents = await Promise.all(given.map(renderMarkdown));
        return [contents.map((one) => one && htmlOf(one)), frames];"""
    # Its cost grows with the square of its length: minutes, on any machine.
    contents, frames = await evaluate(page, FAULTS + program, ["a*" * 120_000, "*next*"])
    assert contents == [None, "<p><em>next</em></p>\n"]
    assert frames > 10
