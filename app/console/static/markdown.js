// Markdown as elements: the server renders it, from escaped text.

import {ApiError, api} from "./api.js";

const MAX_BYTES = 256 * 1024;
const RETRY_MS = 1500;
let last = Promise.resolve();

/** Return a text in Markdown as a DocumentFragment; null if it stays as it is. One at a time. */
export function renderMarkdown(text) {
  const rendered = last.then(() => render(text));
  last = rendered.catch(() => null);
  return last;
}

async function render(text, again = true) {
  if (!text.trim() || new TextEncoder().encode(text).length > MAX_BYTES) return null;
  try {
    const {html} = await api("/render", {method: "POST", body: {text}});
    if (html === null) return null;
    const template = document.createElement("template");
    template.innerHTML = html; // made by markdown_child.py, which escapes everything
    return template.content;
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 503 || !again) return null;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    return render(text, false);
  }
}
