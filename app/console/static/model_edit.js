// The form of a model, checked while it is filled in; the button asks vLLM's own parser, too.

const form = document.querySelector("[data-model-form]");
let pending = null;

/** Put the findings of the server's page in place of those shown. */
function show(page) {
  const found = page.getElementById("findings");
  if (!found) return;
  document.getElementById("findings").replaceChildren(...found.childNodes);
  for (const fault of form.querySelectorAll("[data-fault-of]")) {
    fault.textContent = page.getElementById(fault.id)?.textContent ?? "";
    const field = document.getElementById(fault.id.replace(/-fault$/, ""));
    if (fault.textContent) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

async function validate() {
  pending?.abort();
  // What is still to be filled in is no fault yet; fields of the other kind of engine are not shown.
  if ([...form.querySelectorAll("[data-required]")].some((one) => !one.value && one.offsetParent)) return;
  const mine = pending = new AbortController();
  const body = new URLSearchParams(new FormData(form));
  body.set("step", "validate");
  try {
    const response = await fetch(form.action, {method: "POST", body, signal: mine.signal});
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    if (!mine.signal.aborted) show(page);
  } catch { /* the button checks again */ }
}

form.addEventListener("change", () => {
  // What was checked is not what the form now has.
  for (const button of form.querySelectorAll("button[value=apply]")) button.remove();
  form.querySelector("button[value=check]").className = "primary";
  validate();
});
// A model of this machine fills in the form, and leaves the rest of it as it is.
form.addEventListener("click", (event) => {
  const chosen = event.target.closest("[data-local]");
  if (!chosen) return;
  event.preventDefault();
  const [name, model] = ["name", "engines.0.model"].map((id) => document.getElementById(id));
  model.value = chosen.dataset.local;
  name.value ||= chosen.dataset.name;
  model.dispatchEvent(new Event("change", {bubbles: true}));
  model.focus();
});
form.addEventListener("submit", ({submitter}) => {
  pending?.abort();
  if (["check", "apply"].includes(submitter?.value)) document.getElementById("checking").hidden = false;
});
