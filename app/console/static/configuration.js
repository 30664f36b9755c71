// What a reload would change, as a diff, and the reload itself.

import {api, notify} from "./api.js";
import {confirmAction} from "./dialogs.js";
import {gettext, noop} from "./language.js";
import {refresh} from "./page_parts.js";

const KINDS = {
  "+": [noop("added"), "good"], "-": [noop("removed"), "bad"],
  "~": [noop("changed"), "warn"], "!": [noop("needs a restart"), ""],
};
const plan = document.getElementById("plan");
const reload = document.getElementById("reload");
const compare = document.getElementById("compare");
let effects = [];

function element(name, className, ...children) {
  const one = document.createElement(name);
  one.className = className;
  one.append(...children);
  return one;
}

/** A line of the diff: its sign as a word, and its text. */
function row(line) {
  const [word, kind] = KINDS[line[0]] ?? ["", ""];
  const text = word ? line.slice(2) : line;
  return element("li", "change", element("span", `badge ${kind}`, gettext(word)), " ", element("span", "mono", text));
}

function list(lines) {
  const items = element("ul", "changes");
  items.append(...lines.map(row));
  return items;
}

function showFault(error) {
  const box = element("div", "notice bad");
  box.setAttribute("role", "alert");
  // The faults of an invalid file come one on a line.
  box.append(...error.message.split("\n").map((line) => element("p", "wrap", line)));
  plan.replaceChildren(box);
}

async function showPlan() {
  compare.disabled = true;
  reload.disabled = true;
  try {
    const report = await api("/admin/reload", {method: "POST", body: {dry_run: true}});
    effects = report.effects;
    if (report.difference.length) {
      plan.replaceChildren(list(report.difference), element("p", "", effects.join(" ")));
      reload.disabled = false;
    } else {
      plan.replaceChildren(element("p", "muted", gettext("Nothing differs: the file and the environment are what is in force.")));
    }
  } catch (error) {
    showFault(error);
  } finally {
    compare.disabled = false;
  }
}

async function runReload() {
  const confirmed = await confirmAction({
    title: gettext("Reload the configuration?"), text: effects.join(" "), action: gettext("Reload"),
  });
  reload.focus();
  if (!confirmed) return;
  reload.disabled = true;
  compare.disabled = true;
  plan.replaceChildren(element("p", "muted", gettext("Reloading. This takes until the engines that change are ready …")));
  try {
    const report = await api("/admin/reload", {method: "POST", body: {}});
    const result = report.lines.at(-1);
    notify(gettext("Reloaded: %(result)s.", {result}), report.ok ? "" : "bad");
    await refresh("in-force");
    await showPlan();
    const outcomes = report.lines.slice(report.difference.length);
    plan.prepend(...outcomes.map((line) => element("p", `notice ${report.ok ? "" : "bad"}`, line)));
  } catch (error) {
    showFault(error);
  } finally {
    compare.disabled = false;
    compare.focus();
  }
}

compare.addEventListener("click", showPlan);
reload.addEventListener("click", runReload);
showPlan();
