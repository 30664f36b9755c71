// Buttons that copy the text of an element: <button data-copy="ID" data-copy-name="What it is">.

import {copyText} from "./clipboard.js";

document.addEventListener("click", (event) => {
  const pressed = event.target.closest("button[data-copy]");
  if (!pressed) return;
  const {copy, copyName} = pressed.dataset;
  copyText(document.getElementById(copy).textContent, copyName);
});
