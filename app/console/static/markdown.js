// Markdown as elements that can do nothing, whatever a model writes.

import "./vendor/purify.js";

const {DOMPurify} = globalThis; // purify.js is no module
const MAX_TEXT = 256 * 1024; // characters
const MAX_HTML = 1024 * 1024;
const MAX_ELEMENTS = 20_000; // the page waits while they are sanitized
const TEXT_MS = 4000;
const CODE_WITH_LANGUAGE = /(?:```|~~~)[ \t]*\w/;
const ELEMENTS = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "div", "em", "hr", "li", "ol", "p", "pre", "span",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "rel", "target", "class", "tabindex", "start", "title"],
  ADD_URI_SAFE_ATTR: ["rel", "target", "tabindex", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
let worker = null;
let last = Promise.resolve();

/** Return a text in Markdown as a DocumentFragment; null if it stays as it is. One at a time. */
export function renderMarkdown(text) {
  last = last.then(() => render(text)).catch(() => null);
  return last;
}

async function render(text) {
  if (!text.trim() || text.length > MAX_TEXT) return null;
  const colored = CODE_WITH_LANGUAGE.test(text) ? await htmlOf(text, true) : null;
  const html = colored ?? await htmlOf(text, false);
  return html === null ? null : DOMPurify.sanitize(html, ELEMENTS);
}

// In a text, "<" is escaped.
function isTooMuch(html) {
  return html.length > MAX_HTML || (html.match(/<\w/g)?.length ?? 0) > MAX_ELEMENTS;
}

// Null if it is too much, or if the text is too slow or cannot be rendered: then its thread ends, and the
// next text starts another.
async function htmlOf(text, inColors) {
  try {
    worker ??= await startWorker();
    const message = nextMessage(worker, TEXT_MS);
    worker.postMessage({text, inColors});
    const html = await message;
    return isTooMuch(html) ? null : html;
  } catch {
    worker?.terminate();
    worker = null;
    return null;
  }
}

async function startWorker() {
  const started = new Worker(new URL("./markdown_worker.js", import.meta.url), {type: "module"});
  await nextMessage(started);
  return started;
}

/** Return the next message of a worker. Throws if it fails, or sends none in time. */
function nextMessage(worker, limitMs) {
  return new Promise((resolve, reject) => {
    const limit = limitMs && setTimeout(reject, limitMs);
    worker.onmessage = ({data}) => {
      clearTimeout(limit);
      resolve(data);
    };
    worker.onerror = (event) => {
      event.preventDefault();
      clearTimeout(limit);
      reject(event);
    };
  });
}
