// Markdown as HTML, in a thread of its own: a text can take minutes. The page sanitizes the HTML.

import {Marked, Renderer, Tokenizer} from "./vendor/marked.js";

const LINK = /^(https?:\/\/|mailto:)/i;

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
    return super.code({...token, lang: ""}).replace("<pre>", '<pre tabindex="0">');
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

addEventListener("message", ({data}) => postMessage(markdown.parse(data)));
postMessage("ready");
