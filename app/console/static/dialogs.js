// Confirmation before an action, and buttons that act.

import {api, notify} from "./api.js";
import {gettext} from "./language.js";

const CONFIRMED = "confirmed";

/** Ask before an action; resolve to true if it was confirmed. */
export function confirmAction({title, text, action, danger = false}) {
  const dialog = document.createElement("dialog");
  const heading = document.createElement("h2");
  heading.textContent = title;
  heading.id = "dialog-title";
  dialog.setAttribute("aria-labelledby", heading.id);
  const body = document.createElement("p");
  body.textContent = text;
  const form = document.createElement("form");
  form.method = "dialog";
  form.className = "row end";
  // By value, not by label: the action itself may be to cancel something.
  const back = button(gettext("Back"), "", "");
  const act = button(action, CONFIRMED, danger ? "danger" : "primary");
  form.append(back, act);
  dialog.append(heading, body, form);
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === CONFIRMED);
    });
    dialog.showModal();
  });
}

function button(text, value, kind) {
  const one = document.createElement("button");
  one.textContent = text;
  one.value = value;
  one.className = kind;
  return one;
}

/**
 * Run the action of a <button data-action="/admin/…" data-title data-confirm data-confirm-label data-done>: a POST
 * after a confirmation. One listener for the page: buttons in live regions come and go.
 */
document.addEventListener("click", async (event) => {
  const pressed = event.target.closest("button[data-action]");
  if (!pressed) return;
  const {action, title, confirm, done, danger} = pressed.dataset;
  const label = pressed.dataset.confirmLabel ?? pressed.textContent.trim();
  const confirmed = !confirm || await confirmAction({title, text: confirm, action: label, danger: danger !== undefined});
  // A live region may have been drawn again meanwhile, with a new button of the same ID.
  document.getElementById(pressed.id)?.focus();
  if (!confirmed) return;
  pressed.disabled = true;
  try {
    await api(action, {method: "POST"});
    notify(done ?? gettext("Done."));
  } catch (error) {
    notify(error.message, "bad");
  } finally {
    pressed.disabled = false;
  }
});
