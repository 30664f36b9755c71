// Copies text; where the browser does not allow it, shows the text to be copied by hand.

import {notify} from "./api.js";
import {gettext} from "./language.js";

/** Copy a text and say so; `what` names it. */
export async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text); // missing on pages that came without TLS
    notify(gettext("%(what)s copied.", {what}));
  } catch {
    show(text, what);
  }
}

function show(text, what) {
  const dialog = document.createElement("dialog");
  const label = document.createElement("label");
  label.textContent = gettext("%(what)s: copy it from here", {what});
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
  close.textContent = gettext("Close");
  form.append(close);
  dialog.append(label, form);
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
  area.select();
}
