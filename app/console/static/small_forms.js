// The forms for embeddings, rerank and score, and the tabs that lead to them.

import {api} from "./api.js";
import {countDown} from "./countdown.js";
import {gettext} from "./language.js";
import {fillModels} from "./playground_settings.js";

const SHOWN_VALUES = 8;

/** Show the forms that at least one model serves. */
export function showSmallForms(models) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const panel = document.getElementById(tab.getAttribute("aria-controls"));
    const serving = models.filter(({forms}) => forms.includes(panel.dataset.form));
    tab.hidden = panel.dataset.form !== "chat" && serving.length === 0;
    const select = panel.querySelector("form > label > select[name=model]");
    if (select) fillModels(select, serving);
  }
}

const ACTIONS = {embeddings: embed, rerank, score};
for (const [name, action] of Object.entries(ACTIONS)) {
  const form = document.getElementById(`form-${name}`);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(form, action);
  });
}

async function run(form, action) {
  const button = form.querySelector("button");
  const output = form.querySelector("output");
  const label = button.textContent;
  let retryAt = null;
  button.disabled = true;
  output.replaceChildren(gettext("Waiting for the model …"));
  try {
    output.replaceChildren(...await action(form.elements));
  } catch (error) {
    if (error.retryAfter) retryAt = Date.now() + error.retryAfter * 1000;
    output.replaceChildren(paragraph(error.message, "fault"));
  } finally {
    countDown(button, label, retryAt);
  }
}

async function embed({model, input}) {
  const body = {model: model.value, input: lines(input.value)};
  const {data, usage} = await api("/v1/embeddings", {method: "POST", body});
  if (!data?.length) return [nothing()];
  const rows = data.map(({embedding}, at) => [
    body.input[at],
    String(embedding.length),
    `${embedding.slice(0, SHOWN_VALUES).map((value) => value.toFixed(4)).join(", ")}${embedding.length > SHOWN_VALUES ? ", …" : ""}`,
    at === 0 ? "–" : cosine(data[0].embedding, embedding).toFixed(4),
  ]);
  return [
    table(gettext("Embeddings"), [gettext("Text"), gettext("Dimensions"), gettext("First values"), gettext("Cosine to the first")], rows, [1, 3]),
    usageLine(usage),
  ];
}

async function rerank({model, query, input}) {
  const documents = lines(input.value);
  const body = {model: model.value, query: query.value, documents};
  const {results, usage} = await api("/v1/rerank", {method: "POST", body});
  if (!results?.length) return [nothing()];
  const rows = [...results]
    .sort((one, other) => other.relevance_score - one.relevance_score)
    .map(({index, relevance_score}) => [documents[index], relevance_score.toFixed(4)]);
  return [table(gettext("Texts by relevance"), [gettext("Text"), gettext("Score")], rows, [1]), usageLine(usage)];
}

async function score({model, query, input}) {
  const texts = lines(input.value);
  const body = {model: model.value, text_1: query.value, text_2: texts};
  const {data, usage} = await api("/v1/score", {method: "POST", body});
  if (!data?.length) return [nothing()];
  const rows = data
    .map((one, at) => [texts[one.index ?? at], one.score])
    .sort((one, other) => other[1] - one[1])
    .map(([text, value]) => [text, value.toFixed(4)]);
  return [table(gettext("Texts by score"), [gettext("Text"), gettext("Score")], rows, [1]), usageLine(usage)];
}

function lines(text) {
  return text.split("\n").filter((line) => line.trim());
}

function cosine(one, other) {
  let dot = 0, first = 0, second = 0;
  one.forEach((value, at) => {
    dot += value * other[at];
    first += value ** 2;
    second += other[at] ** 2;
  });
  return dot / Math.sqrt(first * second);
}

function nothing() {
  return paragraph(gettext("The model answered in a form that this page does not know."), "fault");
}

function usageLine(usage) {
  const tokens = usage?.total_tokens ?? usage?.prompt_tokens;
  return paragraph(tokens === undefined ? "" : gettext("%(number)s tokens", {number: tokens.toLocaleString("en")}), "muted");
}

function paragraph(text, kind) {
  const element = document.createElement("p");
  element.className = kind;
  element.textContent = text;
  return element;
}

function table(caption, heads, rows, numbers) {
  const element = document.createElement("table");
  element.createCaption().textContent = caption;
  const cell = (kind, text, at) => {
    const one = document.createElement(kind);
    one.textContent = text;
    one.className = numbers.includes(at) ? "number" : "text";
    if (kind === "th") one.scope = "col";
    return one;
  };
  element.createTHead().insertRow().append(...heads.map((text, at) => cell("th", text, at)));
  const body = element.createTBody();
  for (const row of rows) body.insertRow().append(...row.map((text, at) => cell("td", text, at)));
  const frame = document.createElement("div");
  frame.className = "scroll";
  frame.tabIndex = 0;
  frame.append(element);
  return frame;
}

// Tabs: arrow keys move between those that are there.
const tabs = [...document.querySelectorAll("[role=tab]")];
function select(tab) {
  for (const one of tabs) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", String(chosen));
    one.tabIndex = chosen ? 0 : -1;
    document.getElementById(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  tab.focus();
}
for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const there = tabs.filter((one) => !one.hidden);
    select(there.at((there.indexOf(tab) + step) % there.length));
  });
}
