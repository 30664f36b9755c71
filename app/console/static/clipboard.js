// Copies text; where the browser does not allow it, shows the text to be copied by hand.

import {notify} from "./api.js";

/** Copy a text and say so; `what` names it. */
export async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text); // missing on pages that came without TLS
    notify(`${what} copied.`);
  } catch {
    show(text, what);
  }
}

function show(text, what) {
  const dialog = document.createElement("dialog");
  const label = document.createElement("label");
  label.textContent = `${what}: copy it from here`;
  const area = document.createElement("textarea");
  area.className = "mono";
  area.rows = 14;
  area.readOnly = true;
  area.value = text;
  label.append(area);
  const form = document.createElement("form");
  form.method = "dialog";
  form.className = "row end";
  const close = document.createElement("button");
  close.textContent = "Close";
  form.append(close);
  dialog.append(label, form);
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
  area.select();
}
