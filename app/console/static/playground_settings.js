// The columns of the playground: a model and its settings in each.

import {NUMBERS, SettingFault, fieldsOf} from "./chat_request.js";
import {LETTERS, MAX_COLUMNS} from "./conversation.js";
import {gettext} from "./language.js";
import {startText} from "./models.js";

const list = document.getElementById("columns");
const template = document.getElementById("column-template");

/** Show the columns of a conversation; `changed(kind)` is called after each change. */
export function showColumns(conversation, models, changed) {
  const open = [...list.children].map(openGroups);
  list.replaceChildren(...conversation.columns.map((settings, at) => {
    const column = columnOf(settings, at, models, () => {
      conversation.save();
      changed("settings");
    });
    openThese(column, open[at] ?? open.at(-1), settings);
    const remove = column.querySelector("[data-do=remove]");
    remove.setAttribute("aria-label", gettext("Remove column %(letter)s", {letter: LETTERS[at]}));
    remove.addEventListener("click", () => {
      conversation.removeColumn(at);
      changed("columns");
    });
    return column;
  }));
  list.dataset.columns = conversation.columns.length;
  document.getElementById("add-column").disabled = conversation.columns.length >= MAX_COLUMNS;
}

/** Show anew what is known of the models of the columns. */
export function showModelNotes(conversation, models) {
  for (const [at, column] of [...list.children].entries()) showNotes(column, conversation.columns[at], models);
}

function openGroups(column) {
  return [...column.querySelectorAll("details[open]")].map(({dataset}) => dataset.group);
}

// A group is open as it was, and where it has a setting.
function openThese(column, groups, settings) {
  for (const details of column.querySelectorAll("details")) {
    const set = [...details.querySelectorAll("[name]")].some(({name}) => settings[name]);
    details.open = set || (groups ? groups.includes(details.dataset.group) : details.open);
  }
}

function columnOf(settings, at, models, changed) {
  const column = template.content.firstElementChild.cloneNode(true);
  const title = gettext("Column %(letter)s", {letter: LETTERS[at]});
  column.setAttribute("aria-label", title);
  column.querySelector("h2").textContent = title;
  column.querySelector("[data-part=numbers]").append(...NUMBERS.map(numberInput));
  for (const slider of column.querySelectorAll("[type=range]")) {
    slider.addEventListener("input", (event) => {
      event.stopPropagation(); // the field says it
      const field = fieldOf(slider);
      field.value = slider.value;
      field.dispatchEvent(new Event("input", {bubbles: true}));
    });
  }
  const select = column.querySelector("select");
  fillModels(select, models);
  if (!models.some(({name}) => name === settings.model)) settings.model = models[0]?.name ?? "";
  for (const input of column.querySelectorAll("[name]")) input.value = settings[input.name];
  showNotes(column, settings, models);
  column.addEventListener("input", (event) => {
    settings[event.target.name] = event.target.value;
    showNotes(column, settings, models);
    changed();
  });
  return column;
}

/** Fill a select with models. */
export function fillModels(select, models) {
  select.replaceChildren(...models.map(({name, alias_of}) => (
    new Option(alias_of ? `${name} (${alias_of})` : name, name)
  )));
}

// Without a setting and a default of the model, a slider is at that of vLLM.
const NEUTRAL = {temperature: 1, top_p: 1};
// Numbers of few steps have a slider, too.
const MOST_STEPS = 150;

function numberInput([name, label, step, min, max]) {
  const wrapper = document.createElement("label");
  const input = document.createElement("input");
  input.name = name;
  input.inputMode = step === 1 ? "numeric" : "decimal";
  input.autocomplete = "off";
  wrapper.append(gettext(label), input);
  if ((max - min) / step <= MOST_STEPS) wrapper.append(sliderOf(step, min, max));
  return wrapper;
}

// For the pointer: the keyboard has the field.
function sliderOf(step, min, max) {
  const slider = document.createElement("input");
  Object.assign(slider, {type: "range", min, max, step, tabIndex: -1, ariaHidden: "true"});
  return slider;
}

function fieldOf(slider) {
  return slider.parentElement.querySelector("[name]");
}

// What a model needs before it answers, its own settings, and what cannot be sent.
function showNotes(column, settings, models) {
  const model = models.find(({name}) => name === settings.model);
  const notes = [];
  if (model?.max_model_len) notes.push(gettext("Context of %(number)s tokens.", {number: model.max_model_len.toLocaleString("en")}));
  if (model?.starting) notes.push(gettext("Starting: %(progress)s.", {progress: startText(model.starting)}));
  else if (model && !model.ready) notes.push(model.on_demand ? gettext("Not loaded: the first answer waits for it.") : gettext("No engine is ready."));
  column.querySelector("[data-part=note]").textContent = notes.join(" ");
  for (const [name] of NUMBERS) {
    column.querySelector(`[name=${name}]`).placeholder = model?.defaults?.[name] ?? gettext("default");
  }
  for (const slider of column.querySelectorAll("[type=range]")) {
    const {name, value, placeholder} = fieldOf(slider);
    const number = Number(value || placeholder);
    slider.value = Number.isFinite(number) ? number : NEUTRAL[name] ?? 0;
  }
  showFault(column, faultOf(settings));
}

/** Return what cannot be sent of settings, as SettingFault; null if all is well. */
export function faultOf(settings) {
  try {
    fieldsOf(settings);
  } catch (error) {
    if (error instanceof SettingFault) return error;
    throw error;
  }
  return null;
}

function showFault(column, fault) {
  const place = column.querySelector("[data-part=fault]");
  place.textContent = fault?.message ?? "";
  place.hidden = fault === null;
  for (const input of column.querySelectorAll("[name]")) {
    input.toggleAttribute("aria-invalid", fault?.field === input.name);
    if (fault?.field === input.name) input.setAttribute("aria-invalid", "true");
  }
}

/** Open the settings of a column, at what cannot be sent. */
export function revealFault(at, fault) {
  const field = list.children[at].querySelector(`[name=${fault.field}]`);
  const settings = document.getElementById("settings");
  if (!settings.checkVisibility()) settings.showPopover();
  const group = field.closest("details");
  if (group) group.open = true;
  field.focus();
}
