// Keys and owners: forms and buttons that change them. A secret is on the page only while its
// dialog is open: in no URL, no storage, and not in the page that "back" returns to.

import {CONSOLE, PUBLIC_URL} from "./addresses.js";
import {api, notify} from "./api.js";
import {confirmAction} from "./dialogs.js";
import {gettext} from "./language.js";
import {refresh} from "./page_parts.js";
import {curlOf, pythonOf, shellQuoted} from "./snippets.js";

const NUMBERS = [
  "requests_per_minute", "tokens_per_minute", "concurrent_requests", "daily_tokens", "monthly_tokens",
  "daily_cost", "monthly_cost",
];
const KEYS = `${CONSOLE}/keys`;
const NOT_COPIED = gettext("The browser does not let this page copy: select the text and copy it.");

/** Return a key's fields as the API has them. Throws Error if the rules are not JSON. */
function keyFields(form) {
  const text = (name) => form.elements[name].value.trim();
  const fields = {
    name: text("name"),
    owner: text("owner"),
    models: modelsOf(form),
    expires: text("expires") ? `${text("expires")}:00Z` : null,
    priority: Number(text("priority")),
    weight: Number(text("weight")),
    max_wait_s: text("max_wait_s") === "" ? null : Number(text("max_wait_s")),
    fields: rules(text("fields")),
    ...limitFields(form),
  };
  if (form.elements.role) fields.role = text("role");
  return fields;
}

function modelsOf(form) {
  return form.elements.models.value.split(/[\n,]/).map((one) => one.trim()).filter(Boolean);
}

// Boxes and text are the same list: each follows the other.
document.addEventListener("input", ({target}) => {
  const form = target.closest("[data-key-form]");
  if (!form) return;
  if (target.dataset.model) {
    const others = modelsOf(form).filter((name) => name !== target.dataset.model);
    form.elements.models.value = (target.checked ? [...others, target.dataset.model] : others).join("\n");
  } else if (target.name === "models") {
    for (const box of form.querySelectorAll("[data-model]")) box.checked = modelsOf(form).includes(box.dataset.model);
  }
});

function limitFields(form) {
  const values = NUMBERS.map((name) => form.elements[name].value.trim());
  return Object.fromEntries(NUMBERS.map((name, i) => [name, values[i] === "" ? null : Number(values[i])]));
}

function rules(text) {
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(gettext("Rules on request fields: %(reason)s", {reason: error.message}));
  }
}

/** Return what differs: what somebody else has changed meanwhile stays. */
function changes(before, after) {
  const differs = ([name, value]) => JSON.stringify(value) !== JSON.stringify(before[name]);
  return Object.fromEntries(Object.entries(after).filter(differs));
}

// What one needs to begin with a key. The programs read it from the environment.
function snippetsOf(secret, model) {
  const url = `${PUBLIC_URL}/v1`;
  const body = {model, messages: [{role: "user", content: "Hello!"}], stream: true};
  return {
    environment: `API_KEY=${secret}\nOPENAI_API_KEY=${secret}\nOPENAI_BASE_URL=${url}\n`,
    curl: `export API_KEY=${shellQuoted(secret)}\n${curlOf(`${url}/chat/completions`, body)}`,
    Python: pythonOf(`${url}/chat/completions`, body),
  };
}

/**
 * Show the secret of a key once; resolve when the dialog is closed and the secret is gone.
 * What to begin with is shown for clients: keys of other roles may use no model.
 */
function showSecret(title, {key: secret, role, models}) {
  const dialog = document.getElementById("secret-dialog");
  const output = document.getElementById("secret");
  const copied = document.getElementById("copied");
  document.getElementById("secret-title").textContent = title;
  output.textContent = secret;
  copied.textContent = "";
  const environment = document.getElementById("environment");
  const model = models.find((name) => !name.includes("*")) ?? dialog.dataset.model;
  let snippets = snippetsOf(secret, model);
  environment.textContent = snippets.environment;
  document.getElementById("snippets").hidden = role !== "client";
  const clear = () => {
    output.textContent = "";
    environment.textContent = "";
    snippets = {};
  };
  for (const button of dialog.querySelectorAll("[data-snippet]")) {
    button.onclick = async () => {
      copied.textContent = await copyText(environment, snippets[button.dataset.snippet]) ? gettext("Copied.") : NOT_COPIED;
    };
  }
  const copy = async () => {
    copied.textContent = await copyText(output) ? gettext("Copied.") : NOT_COPIED;
  };
  const close = () => {
    clear(); // at once: the event of the close comes later
    dialog.close();
  };
  // Escape would lose the secret by accident.
  const stay = (event) => event.preventDefault();
  document.getElementById("copy-secret").addEventListener("click", copy);
  document.getElementById("close-secret").addEventListener("click", close);
  dialog.addEventListener("cancel", stay);
  addEventListener("pagehide", clear);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      clear();
      document.getElementById("copy-secret").removeEventListener("click", copy);
      document.getElementById("close-secret").removeEventListener("click", close);
      dialog.removeEventListener("cancel", stay);
      removeEventListener("pagehide", clear);
      resolve();
    }, {once: true});
    dialog.showModal();
  });
}

/** Copy the text of an element, or another one in its place; return whether the browser did. It offers the clipboard only over TLS. */
async function copyText(element, text = element.textContent) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { /* refused: the old way may work */ }
  }
  if (text !== element.textContent) element.textContent = text; // to be selected
  getSelection().selectAllChildren(element);
  return document.execCommand("copy");
}

async function createKey(form) {
  const made = await api("/admin/keys", {method: "POST", body: keyFields(form)});
  form.reset();
  await showSecret(gettext("The key “%(name)s”", {name: made.name}), made);
  location.assign(`${KEYS}/${made.id}`);
}

async function createOwnKey(form) {
  const tokens = form.elements.monthly_tokens.value;
  const body = {
    name: form.elements.name.value,
    days: Number(form.elements.days.value),
    monthly_tokens: tokens === "" ? null : Number(tokens),
  };
  const made = await api("/own_keys", {method: "POST", body});
  form.reset();
  await showSecret(gettext("The key “%(name)s”", {name: made.name}), made);
  location.reload();
}

async function revokeOwnKey({revokeOwn: id, name}) {
  const text = gettext("Requests with %(name)s are refused from now on, and those in flight end.", {name});
  if (!await confirmAction({title: gettext("Revoke the key?"), text, action: gettext("Revoke"), danger: true})) return;
  await api(`/own_keys/${id}`, {method: "DELETE"});
  location.reload();
}

async function changeKey(form) {
  const changed = changes(initial.get(form) ?? {}, keyFields(form));
  if (Object.keys(changed).length) {
    const key = await api(`/admin/keys/${form.dataset.keyId}`, {method: "PATCH", body: changed});
    document.querySelector("h1").textContent = key.name;
    initial.set(form, keyFields(form));
    await refresh("facts");
  }
  notify(gettext("Saved."));
}

async function rotateKey(form) {
  const body = {grace_s: Number(form.elements.grace.value)};
  const made = await api(`/admin/keys/${form.dataset.rotate}/rotate`, {method: "POST", body});
  form.closest("dialog").close();
  await showSecret(gettext("The new secret of “%(name)s”", {name: made.name}), made);
  await refresh("facts");
}

async function disableKey(form) {
  await api(`/admin/keys/${form.dataset.disable}/disable${now(form)}`, {method: "POST"});
  form.closest("dialog").close();
  await refresh("facts");
  notify(gettext("Disabled."));
}

async function deleteKey(form) {
  await api(`/admin/keys/${form.dataset.delete}${now(form)}`, {method: "DELETE"});
  location.assign(KEYS);
}

const now = (form) => (form.elements.now.checked ? "?now=true" : "");

async function saveOwner(form) {
  const name = encodeURIComponent(form.elements.name.value.trim());
  await api(`/admin/owners/${name}`, {method: "PUT", body: limitFields(form)});
  location.assign(`${KEYS}/owners`);
}

async function deleteOwner(button) {
  const name = button.dataset.deleteOwner;
  const text = gettext("The limits and budgets of %(name)s end; its keys and their usage stay.", {name});
  const title = gettext("Delete the owner's limits?");
  if (!await confirmAction({title, text, action: gettext("Delete"), danger: true})) return;
  await api(`/admin/owners/${encodeURIComponent(name)}`, {method: "DELETE"});
  location.assign(`${KEYS}/owners`);
}

const FORMS = [
  ["[data-own-key-form]", createOwnKey], ["[data-key-id]", changeKey], ["[data-key-form]", createKey], ["[data-rotate]", rotateKey],
  ["[data-disable]", disableKey], ["[data-delete]", deleteKey], ["[data-owner-form]", saveOwner],
];

document.addEventListener("submit", async (event) => {
  const form = event.target;
  const submit = FORMS.find(([selector]) => form.matches(selector))?.[1];
  if (!submit) return;
  event.preventDefault();
  const fault = form.querySelector("[data-fault]");
  if (fault) fault.textContent = "";
  const button = event.submitter;
  if (button) button.disabled = true;
  try {
    await submit(form);
  } catch (error) {
    if (fault) fault.textContent = error.message;
    else notify(error.message, "bad");
    form.closest("dialog[open]")?.close();
  } finally {
    if (button) button.disabled = false;
  }
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const {opens, closes, enable, deleteOwner: owner} = button.dataset;
  if (opens) document.getElementById(opens).showModal();
  if (closes !== undefined) button.closest("dialog").close();
  try {
    if (enable) {
      await api(`/admin/keys/${enable}/enable`, {method: "POST"});
      await refresh("facts");
      notify(gettext("Enabled."));
    }
    if (owner) await deleteOwner(button);
    if (button.dataset.revokeOwn) await revokeOwnKey(button.dataset);
  } catch (error) {
    notify(error.message, "bad");
  }
});

// The fields of each form as the server has sent them.
const initial = new Map();
for (const form of document.querySelectorAll("[data-key-id]")) {
  form.reset(); // a browser fills in what was entered before a reload
  initial.set(form, keyFields(form));
}
