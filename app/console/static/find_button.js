// The button of the search, and Ctrl+K. Every page has this script, so the dialog is loaded when it is used.

async function open() {
  (await import("./quick_find.js")).open();
}

document.addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
  if (document.querySelector("dialog[open]")) return;
  event.preventDefault();
  open();
});
const button = document.getElementById("find-button");
button.hidden = false;
button.addEventListener("click", open);
