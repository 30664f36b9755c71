// Buttons that wait until a request may be sent again.

import {gettext} from "./language.js";

/** Disable a button until a moment, and show the seconds that are left; `null`: it is enabled. */
export function countDown(button, label, until) {
  const left = Math.ceil(((until ?? 0) - Date.now()) / 1000);
  button.disabled = left > 0;
  button.textContent = left > 0 ? gettext("Try again in %(number)s s", {number: left}) : label;
  if (left > 0) setTimeout(() => countDown(button, label, until), 1000);
}
