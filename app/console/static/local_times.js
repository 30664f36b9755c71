// Adds the reader's own time to the UTC time that a <time datetime title> has, when it is pointed at.

import {LOCALE} from "./language.js";

document.addEventListener("pointerover", (event) => {
  const time = event.target.closest("time[datetime]");
  if (!time || time.dataset.local) return;
  time.dataset.local = "shown";
  time.title += `\n${new Date(time.dateTime).toLocaleString(LOCALE, {dateStyle: "medium", timeStyle: "long"})}`;
});
