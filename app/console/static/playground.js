// The playground: a conversation with one to four models side by side.

import {api, notify} from "./api.js";
import {ask} from "./chat.js";
import {askWith, bodyOf} from "./chat_request.js";
import {copyText} from "./clipboard.js";
import {Conversation, MAX_COLUMNS} from "./conversation.js";
import {confirmAction} from "./dialogs.js";
import {AnswerView, image, part, runs, turnElement} from "./playground_view.js";
import {faultOf, revealFault, showColumns} from "./playground_settings.js";
import {curlOf, javascriptOf, pythonOf} from "./snippets.js";
import {showSmallForms} from "./small_forms.js";

const MAX_IMAGE_BYTES = 8 * 2 ** 20;
const MAX_SPOKEN = 1000;
const SNIPPETS = {curl: curlOf, Python: pythonOf, JavaScript: javascriptOf};

const root = document.getElementById("playground");
const turnList = document.getElementById("turns");
const composer = document.getElementById("composer");
const message = composer.elements.message;
const stopButton = document.getElementById("stop");
const sendButton = document.getElementById("send");
const spoken = document.getElementById("spoken");

const conversation = new Conversation(root.dataset.owner);
const running = new Map(); // answers that arrive: AbortController of each
let models = [];
let images = [];

function modelOf(name) {
  return models.find((model) => model.name === name);
}

function chatModels() {
  return models.filter(({forms}) => forms.includes("chat"));
}

// What is known of the model of an answer: who answered for it, and at what price.
function described(answer, turn) {
  return () => {
    const asked = modelOf(answer.model);
    const other = answer.servedBy && answer.servedBy !== (asked?.alias_of ?? answer.model);
    return {
      served: other ? `Answered by ${answer.servedBy}.` : "",
      price: (other ? modelOf(answer.servedBy) : asked)?.price ?? null,
      last: turn === conversation.turns.at(-1) && turn.answers.some((steps) => steps?.at(-1) === answer),
    };
  };
}

function showTurns() {
  turnList.replaceChildren(...conversation.turns.map(elementOf));
}

function elementOf(turn, at) {
  const element = turnElement(turn, at);
  part(element, "answers").append(...turn.answers.map((steps, column) => {
    const cell = document.createElement("div");
    for (const answer of steps ?? []) cell.append(viewOf(turn, column, answer).element);
    return cell;
  }));
  part(element, "edit").addEventListener("click", () => editTurn(turn, element));
  return element;
}

function viewOf(turn, column, answer) {
  const view = new AnswerView(answer, column, described(answer, turn));
  const act = (name, action) => part(view.element, name).addEventListener("click", action);
  act("again", () => again(turn, column));
  act("results", () => start(turn, column));
  act("copy", () => copyText(answer.text, "Answer"));
  for (const [language, snippetOf] of Object.entries(SNIPPETS)) {
    act(language, () => copyText(snippetOf(publicUrl(), requestOf(turn, column, answer)), `Request as ${language}`));
  }
  if (!runs(answer)) view.format();
  return view;
}

function publicUrl() {
  return `${location.origin}/v1/chat/completions`;
}

function requestOf(turn, column, answer) {
  return bodyOf(turnsTo(turn), column, answer);
}

function turnsTo(turn) {
  return conversation.turns.slice(0, conversation.turns.indexOf(turn) + 1);
}

// Ask for the next answer of a column to a message.
async function start(turn, column) {
  const answer = askWith(conversation.columns[column]);
  turn.answers[column] = [...(turn.answers[column] ?? []), answer];
  const cell = part(turnList.children[conversation.turns.indexOf(turn)], "answers").children[column];
  for (const button of cell.querySelectorAll("[data-part=results], [data-part=again]")) button.hidden = true;
  const view = viewOf(turn, column, answer);
  cell.append(view.element);
  const controller = new AbortController();
  running.set(answer, controller);
  showRunning();
  await ask(turnsTo(turn), column, answer, controller.signal, () => view.update());
  running.delete(answer);
  conversation.save();
  showRunning();
  view.finish();
  announce(answer);
  await view.format();
}

// Screen readers hear an answer once, when it is complete.
function announce(answer) {
  const said = answer.fault?.message ?? answer.text;
  spoken.textContent = `${answer.model}: ${said.slice(0, MAX_SPOKEN)}`;
}

function again(turn, column) {
  if (reportFault([conversation.columns[column]], column)) return;
  turn.answers[column] = turn.answers[column].slice(0, -1);
  const cell = part(turnList.children[conversation.turns.indexOf(turn)], "answers").children[column];
  cell.lastElementChild.remove();
  start(turn, column);
}

function askAll(count, text, given) {
  if (running.size || reportFault(conversation.columns)) return false;
  if (!conversation.columns.every(({model}) => model)) {
    notify("This key may use no model that answers messages.", "bad");
    return false;
  }
  const turn = conversation.ask(count, text, given);
  showTurns();
  conversation.columns.forEach((_, column) => start(turn, column));
  turnList.lastElementChild.scrollIntoView({block: "nearest"});
  return true;
}

// Say what of the settings cannot be sent; return whether there is such a thing.
function reportFault(columns, first = 0) {
  const at = columns.findIndex((settings) => faultOf(settings) !== null);
  if (at === -1) return false;
  const fault = faultOf(columns[at]);
  notify(fault.message, "bad");
  revealFault(first + at, fault);
  return true;
}

function showRunning() {
  stopButton.disabled = running.size === 0;
  sendButton.disabled = running.size > 0;
  for (const button of document.querySelectorAll(".no-change")) button.disabled = running.size > 0;
  document.getElementById("add-column").disabled = running.size > 0 || conversation.columns.length >= MAX_COLUMNS;
}

function stop() {
  for (const controller of running.values()) controller.abort();
}

function editTurn(turn, element) {
  const form = document.getElementById("edit-template").content.firstElementChild.cloneNode(true);
  const shown = part(element, "asked");
  form.elements.text.value = turn.text;
  shown.replaceWith(form);
  form.elements.text.focus();
  const cancel = () => {
    form.replaceWith(shown);
    part(shown, "edit").focus();
  };
  part(form, "cancel").addEventListener("click", cancel);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!form.elements.text.value.trim() && !turn.images.length) return;
    askAll(conversation.turns.indexOf(turn), form.elements.text.value, turn.images);
  });
}

function showImages() {
  document.getElementById("images").replaceChildren(...images.map((url, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "thumbnail";
    button.setAttribute("aria-label", `Remove image ${at + 1}`);
    button.append(image(url, at));
    button.addEventListener("click", () => {
      images.splice(at, 1);
      showImages();
    });
    return button;
  }));
}

function addImage(file) {
  if (!file.type.startsWith("image/") || file.size > MAX_IMAGE_BYTES) {
    notify(`${file.name}: an image of up to 8 MiB, please.`, "bad");
    return;
  }
  const reader = new FileReader();
  reader.addEventListener("load", () => {
    images.push(reader.result);
    showImages();
  });
  reader.readAsDataURL(file);
}

function columnsChanged(kind) {
  if (kind === "settings") return;
  showColumns(conversation, chatModels(), columnsChanged);
  showTurns();
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!message.value.trim() && !images.length) return;
  if (!askAll(conversation.turns.length, message.value, images)) return;
  message.value = "";
  images = [];
  showImages();
});
composer.elements.image.addEventListener("change", (event) => {
  for (const file of event.target.files) addImage(file);
  event.target.value = "";
});
stopButton.addEventListener("click", stop);
document.getElementById("add-column").addEventListener("click", () => {
  conversation.addColumn();
  columnsChanged("columns");
});
document.getElementById("clear").addEventListener("click", async () => {
  const text = "The messages and the answers of this tab are forgotten. The settings stay.";
  if (conversation.turns.length && !await confirmAction({title: "Clear the conversation?", text, action: "Clear"})) return;
  conversation.clear();
  showTurns();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.closest("form")?.requestSubmit();
});

async function load() {
  const fault = document.getElementById("fault");
  try {
    ({models} = await api("/playground/models"));
  } catch (error) {
    fault.hidden = false;
    part(fault, "message").textContent = error.message;
    return;
  }
  fault.hidden = true;
  showColumns(conversation, chatModels(), columnsChanged);
  showTurns();
  showRunning();
  showSmallForms(models);
}
part(document.getElementById("fault"), "again").addEventListener("click", load);
load();
