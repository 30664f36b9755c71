// The playground: a conversation with one to four models side by side.

import {PUBLIC_URL} from "./addresses.js";
import {notify} from "./api.js";
import {ask} from "./chat.js";
import {ChatList} from "./chat_list.js";
import {askWith, bodyOf} from "./chat_request.js";
import {copyText} from "./clipboard.js";
import {Composer, sendsOnEnter} from "./composer.js";
import {Conversation, MAX_COLUMNS} from "./conversation.js";
import {hideExamples, showExamples} from "./examples.js";
import {gettext} from "./language.js";
import {Models} from "./models.js";
import {AnswerView, part, runs, turnElement} from "./playground_view.js";
import {faultOf, revealFault, showColumns, showModelNotes} from "./playground_settings.js";
import {curlOf, javascriptOf, pythonOf} from "./snippets.js";
import {showSmallForms} from "./small_forms.js";

const CHAT_URL = `${PUBLIC_URL}/v1/chat/completions`;
const MAX_SPOKEN = 1000;
const SNIPPETS = {curl: curlOf, Python: pythonOf, JavaScript: javascriptOf};

const root = document.getElementById("playground");
const turnList = document.getElementById("turns");
const stopButton = document.getElementById("stop");
const sendButton = document.getElementById("send");
const spoken = document.getElementById("spoken");

const conversation = new Conversation(root.dataset.owner);
const running = new Map(); // answers that arrive: AbortController of each
const models = new Models(modelsChanged);
const chats = new ChatList(root.dataset.owner, openChat);
const composer = new Composer((text, images) => askAll(conversation.turns.length, text, images));

// What is known of the model of an answer: who answered for it, and at what price.
function described(answer, turn) {
  return () => {
    const asked = models.find(answer.model);
    const other = answer.servedBy && answer.servedBy !== (asked?.alias_of ?? answer.model);
    return {
      served: other ? gettext("Answered by %(model)s.", {model: answer.servedBy}) : "",
      price: (other ? models.find(answer.servedBy) : asked)?.price ?? null,
      starting: asked?.starting ?? null,
      last: turn === conversation.turns.at(-1) && turn.answers.some((steps) => steps?.at(-1) === answer),
    };
  };
}

function showTurns() {
  turnList.replaceChildren(...conversation.turns.map(elementOf));
  turnList.dataset.columns = conversation.columns.length;
  if (conversation.turns.length) hideExamples();
  else showExamples(models.find(conversation.columns[0].model), chooseExample);
}

function chooseExample({text, settings}) {
  for (const column of conversation.columns) Object.assign(column, settings);
  conversation.save();
  drawColumns();
  composer.fill(text);
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
  const view = new AnswerView(answer, turn.answers.length > 1 ? column : null, described(answer, turn));
  const act = (name, action) => part(view.element, name).addEventListener("click", action);
  act("again", () => again(turn, column));
  act("results", () => start(turn, column));
  act("copy", () => copyText(answer.text, gettext("Answer")));
  for (const [language, snippetOf] of Object.entries(SNIPPETS)) {
    act(language, () => copyText(snippetOf(CHAT_URL, requestOf(turn, column, answer)), gettext("Request as %(language)s", {language})));
  }
  if (!runs(answer)) view.format();
  return view;
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
  running.set(answer, {controller, view});
  showRunning();
  await whenStarted(answer, controller.signal);
  await ask(turnsTo(turn), column, answer, controller.signal, () => view.update());
  running.delete(answer);
  conversation.save();
  chats.show(conversation);
  showRunning();
  view.finish();
  announce(answer);
  await view.format();
}

// A model that starts gets the message when it is ready; one on demand is loaded by the message itself.
async function whenStarted(answer, signal) {
  const model = models.find(answer.model);
  if (!model || model.ready) return;
  const started = models.untilStarted(answer.model, () => answer.state === "waiting" && !signal.aborted);
  if (model.starting && !model.on_demand) await started;
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
    notify(gettext("This key may use no model that answers messages."), "bad");
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
  stopButton.hidden = running.size === 0;
  sendButton.hidden = running.size > 0;
  sendButton.disabled = false;
  for (const button of document.querySelectorAll(".no-change")) button.disabled = running.size > 0;
  document.getElementById("add-column").disabled = running.size > 0 || conversation.columns.length >= MAX_COLUMNS;
}

function stop() {
  for (const {controller} of running.values()) controller.abort();
}

function openChat(chat) {
  conversation.open(chat);
  drawColumns();
  showTurns();
  chats.show(conversation);
  composer.fill("");
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

function drawColumns() {
  showColumns(conversation, models.chat, columnsChanged);
}

function columnsChanged(kind) {
  if (kind === "settings") {
    if (!conversation.turns.length) showTurns();
    return;
  }
  drawColumns();
  showTurns();
}

function modelsChanged() {
  showModelNotes(conversation, models.chat);
  for (const {view} of running.values()) view.update();
}

stopButton.addEventListener("click", stop);
document.getElementById("add-column").addEventListener("click", () => {
  conversation.addColumn();
  columnsChanged("columns");
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open, .menu[open]")) stop();
  if (event.key === "Escape") document.querySelector(".menu[open]")?.removeAttribute("open");
  if (!sendsOnEnter(event)) return;
  event.preventDefault();
  event.target.closest("form")?.requestSubmit();
});
// A menu closes when something else is pressed.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll(".menu[open]")) {
    if (!menu.contains(event.target) || event.target.closest("button")) menu.open = false;
  }
});

async function load() {
  const fault = document.getElementById("fault");
  try {
    await models.load();
  } catch (error) {
    fault.hidden = false;
    part(fault, "message").textContent = error.message;
    return;
  }
  fault.hidden = true;
  const wanted = new URLSearchParams(location.search).get("model");
  if (models.find(wanted)) {
    conversation.columns[0].model = wanted;
    history.replaceState(null, "", location.pathname); // a choice made later stays at a reload
  }
  drawColumns();
  showTurns();
  chats.show(conversation);
  showRunning();
  showSmallForms(models.rows);
}
part(document.getElementById("fault"), "again").addEventListener("click", load);
load();
