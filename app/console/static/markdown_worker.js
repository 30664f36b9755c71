// Markdown as HTML, in a thread of its own: a text can take minutes. The page sanitizes the HTML.

import {Marked, Renderer, Tokenizer} from "./vendor/marked.js";

const LINK = /^(https?:\/\/|mailto:)/i;
const MAX_COLORED = 16 * 1024; // characters of code in a text; every second may become an element
const LONG_LINE = /[^\n]{1000}/; // its time grows with the square
const LOAD_MS = 3000; // less than the page waits for a text
let highlighter = null;
let coloredSoFar = 0; // characters of the text; Infinity: no colors

/** CommonMark with tables and ~~strikethrough~~. HTML stays text, and so do links to other places. */
class PlainTokenizer extends Tokenizer {
  html() {}
  tag() {}
  url() {}

  def(source) {
    return linkOnly(super.def(source));
  }

  link(source) {
    return linkOnly(super.link(source));
  }

  autolink(source) {
    return linkOnly(super.autolink(source));
  }

  del(source, ...rest) {
    return source.startsWith("~~") ? super.del(source, ...rest) : undefined;
  }
}

/** Return the HTML of code with colors; null if its language is not known, or the text has too much. */
function color({text, lang}) {
  const [language] = lang?.match(/^[\w+#-]+/) ?? [];
  if (!language || !highlighter?.getLanguage(language)) return null;
  if (coloredSoFar + text.length > MAX_COLORED || LONG_LINE.test(text)) return null;
  coloredSoFar += text.length;
  return highlighter.highlight(text, {language, ignoreIllegals: true}).value;
}

function linkOnly(token) {
  return token && LINK.test(token.href) ? token : undefined;
}

/** Elements that suit the page: no images, no headings, and what scrolls is reachable by the keyboard. */
class PageRenderer extends Renderer {
  #inLink = false;

  link(token) {
    this.#inLink = true;
    const html = super.link(token);
    this.#inLink = false;
    return html.replace(/^<a /, '<a rel="noopener noreferrer" target="_blank" ');
  }

  image(token) {
    const text = {type: "text", raw: token.raw, text: token.text || token.href};
    return this.#inLink ? this.text(text) : this.link({...token, tokens: [text]});
  }

  code(token) {
    const plain = {...token, lang: ""};
    const colored = color(token);
    const html = super.code(colored === null ? plain : {...plain, text: colored, escaped: true});
    return html.replace("<pre>", '<pre tabindex="0">');
  }

  // The page has headings of its own: an answer's would break their order.
  heading({tokens, depth}) {
    return `<p class="heading h${depth}">${this.parser.parseInline(tokens)}</p>\n`;
  }

  table(token) {
    return `<div class="scroll" tabindex="0">${super.table(token)}</div>\n`;
  }

  tablecell(token) {
    return super.tablecell(token).replace(/^(<t[hd]) align="/, '$1 class="to-');
  }

  checkbox({checked}) {
    return checked ? "[x] " : "[ ] ";
  }
}

const markdown = new Marked().setOptions({tokenizer: new PlainTokenizer(), renderer: new PageRenderer()});

// The library is as large as the rest of the playground, and few texts need it. One that comes late is
// for the next text.
async function loadColors() {
  const loaded = import("./vendor/highlight.js").then((module) => { highlighter = module.default; }, () => {});
  await Promise.race([loaded, new Promise((resolve) => setTimeout(resolve, LOAD_MS))]);
}

addEventListener("message", async ({data: {text, inColors}}) => {
  try {
    if (inColors && highlighter === null) await loadColors();
    coloredSoFar = inColors ? 0 : Infinity;
    postMessage(markdown.parse(text));
  } catch (error) {
    reportError(error); // the page hears of it
  }
});
postMessage("ready");
