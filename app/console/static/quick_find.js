// The dialog of Ctrl+K (find_button.js): finds pages by the navigation, and models, engines, keys and requests by the server.

import {ROOT_PATH} from "./addresses.js";
import {api} from "./api.js";
import {gettext} from "./language.js";

const WAIT_MS = 150; // after the last letter
const HINT = gettext("A name or a part of it, or a whole ID. ↑ ↓ choose, Enter opens, Esc closes.");
let asked = 0;

const dialog = build("dialog", {className: "find-dialog", ariaLabel: gettext("Find")});
const input = build("input", {type: "text", maxLength: 128, autocomplete: "off", spellcheck: false, placeholder: gettext("Find a page, model, engine, key or request"), ariaLabel: gettext("Find")});
const list = build("div", {id: "found", role: "listbox", ariaLabel: gettext("Found")});
const note = build("p", {role: "status"});
input.setAttribute("role", "combobox");
input.setAttribute("aria-controls", list.id);
input.setAttribute("aria-expanded", "true");
dialog.append(input, list, note);

function build(name, properties) {
  return Object.assign(document.createElement(name), properties);
}

function pages(text) {
  const links = [...document.querySelectorAll(".rail nav a")];
  return links
    .map((link) => ({kind: gettext("Page"), title: link.textContent.trim(), path: link.getAttribute("href")}))
    .filter(({title}) => title.toLowerCase().includes(text.toLowerCase()));
}

function show(found, said) {
  list.replaceChildren(...found.map(({kind, title, path}, at) => {
    const option = build("a", {href: path, id: `found-${at}`, role: "option", tabIndex: -1});
    option.append(build("small", {textContent: kind}), title);
    return option;
  }));
  note.textContent = said;
  choose(0);
}

// Make an option the one that Enter opens.
function choose(at) {
  const options = [...list.children];
  for (const [place, option] of options.entries()) option.ariaSelected = String(place === at);
  input.setAttribute("aria-activedescendant", options[at]?.id ?? "");
  options[at]?.scrollIntoView({block: "nearest"});
}

function chosen() {
  return [...list.children].findIndex((option) => option.ariaSelected === "true");
}

async function find() {
  const text = input.value.trim();
  const mine = ++asked;
  const first = pages(text);
  if (!text) return show(first, HINT);
  await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
  if (mine !== asked) return;
  let found = first;
  let said = HINT;
  try {
    const answer = await api("/find", {method: "POST", body: {text}});
    found = [...first, ...answer.data.map((one) => ({...one, path: ROOT_PATH + one.path}))];
    if (!answer.complete) said = gettext("The database does not answer now: keys and stored requests are left out.");
    else if (!found.length) said = gettext("Nothing has this name or ID.");
  } catch (error) {
    said = error.message;
  }
  if (mine === asked) show(found, said);
}

/** Show the dialog, unless it is shown. */
export function open() {
  if (!dialog.isConnected) document.body.append(dialog);
  if (dialog.open) return;
  document.querySelector(".rail:popover-open")?.hidePopover();
  input.value = "";
  dialog.showModal();
  find();
}

input.addEventListener("input", find);
input.addEventListener("keydown", (event) => {
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  const number = list.children.length;
  if (step && number) {
    event.preventDefault();
    choose((chosen() + step + number) % number);
  } else if (event.key === "Enter") {
    event.preventDefault();
    list.children[chosen()]?.click();
  }
});
// A press outside of the dialog closes it.
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
