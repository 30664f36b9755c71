// Messages and answers of the playground as elements. Everything of a model is set as text.

import {endOf, figuresOf, prettyArguments, statisticsOf, thoughtOf} from "./answer.js";
import {copyText} from "./clipboard.js";
import {countDown} from "./countdown.js";
import {LETTERS} from "./conversation.js";
import {LOCALE, gettext} from "./language.js";
import {renderMarkdown} from "./markdown.js";
import {startText} from "./models.js";

const turnTemplate = document.getElementById("turn-template");
const answerTemplate = document.getElementById("answer-template");
const callTemplate = document.getElementById("call-template");

/** Return the part of an element with a name. */
export function part(element, name) {
  return element.querySelector(`[data-part=${name}]`);
}

/** Return the element of a message, without its answers. */
export function turnElement(turn, at) {
  const element = turnTemplate.content.firstElementChild.cloneNode(true);
  element.dataset.turn = at;
  element.querySelector("h2").textContent = gettext("Message %(number)s", {number: at + 1});
  part(element, "text").textContent = turn.text;
  part(element, "images").replaceChildren(...turn.images.map((url, index) => image(url, index)));
  part(element, "answers").dataset.columns = turn.answers.length;
  return element;
}

/** Return an image from a data: URL. */
export function image(url, index) {
  const shown = document.createElement("img");
  shown.src = url;
  shown.alt = gettext("Image %(number)s", {number: index + 1});
  return shown;
}

/** Shows one answer while it arrives and afterwards. */
export class AnswerView {
  #answer;
  #pending = 0;
  #thoughtShown = 0;
  #thoughtOpen = false;
  #textShown = 0;
  #callsShown = "";

  /**
   * `described()` returns {served, price, starting, last}: of the model, and whether it is the last answer.
   * `column` is null where there is only one.
   */
  constructor(answer, column, described) {
    this.#answer = answer;
    this.described = described;
    this.element = answerTemplate.content.firstElementChild.cloneNode(true);
    const letter = column === null ? "" : `${LETTERS[column]} · `;
    this.element.querySelector("h3").textContent = `${letter}${answer.model}`;
    this.#showTime(answer.asked);
    this.#show("thought-text").append("");
    this.#show("text").append("");
    this.finish();
  }

  #show(name) {
    return part(this.element, name);
  }

  #showTime(asked) {
    if (!asked) return;
    const at = new Date(asked);
    this.#show("time").dateTime = at.toISOString();
    this.#show("time").title = at.toLocaleString(LOCALE);
    this.#show("time").textContent = at.toLocaleTimeString(LOCALE, {hour: "2-digit", minute: "2-digit"});
  }

  /** Show what has arrived, with the next frame. */
  update() {
    this.#pending ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    cancelAnimationFrame(this.#pending);
    this.#pending = 0;
    const answer = this.#answer;
    const follow = innerHeight + scrollY >= document.documentElement.scrollHeight - 120;
    // Only what is new is added: an answer may be long.
    this.#show("thought").hidden = !answer.thought;
    this.#show("thought").querySelector("summary").textContent = thoughtOf(answer);
    this.#show("thought-text").firstChild.appendData(answer.thought.slice(this.#thoughtShown));
    if (answer.state === "streaming") this.#openThought(!answer.text);
    this.#thoughtShown = answer.thought.length;
    this.#show("text").firstChild.appendData(answer.text.slice(this.#textShown));
    this.#textShown = answer.text.length;
    this.#drawCalls(answer.calls);
    this.#drawStart(answer.state === "waiting" ? this.described().starting : null);
    this.#show("state").textContent = stateOf(answer);
    this.#show("state").hidden = stateOf(answer) === "";
    this.element.setAttribute("aria-busy", String(runs(answer)));
    if (follow && runs(answer)) scrollTo(0, document.documentElement.scrollHeight);
  }

  // Open while it arrives, closed when the answer begins: once each, so that what the reader does stays.
  #openThought(open) {
    if (this.#thoughtOpen === open) return;
    this.#thoughtOpen = open;
    this.#show("thought").open = open;
  }

  #drawStart(starting) {
    const place = this.#show("start");
    place.hidden = !starting;
    if (!starting) return;
    place.querySelector("p").textContent = gettext(
      "The model starts: %(progress)s. The message is sent when it is ready.", {progress: startText(starting)},
    );
    const bar = place.querySelector("progress");
    if (starting.share === null) bar.removeAttribute("value");
    else bar.value = starting.share;
  }

  #drawCalls(calls) {
    const text = JSON.stringify(calls.map((call) => [call.name, call.arguments]));
    if (text === this.#callsShown) return;
    this.#callsShown = text;
    this.#show("calls").replaceChildren(...calls.map((call) => {
      const element = callTemplate.content.firstElementChild.cloneNode(true);
      part(element, "name").textContent = call.name;
      part(element, "arguments").textContent = prettyArguments(call.arguments);
      const result = element.querySelector("textarea");
      result.value = call.result;
      result.addEventListener("input", () => { call.result = result.value; });
      return element;
    }));
  }

  /** Show how the answer stands now: at its beginning and at its end. */
  finish() {
    const answer = this.#answer;
    this.#draw();
    if (!runs(answer)) this.#openThought(false);
    const {served, price, last} = this.described();
    const notes = [served, endOf(answer)].filter(Boolean).join(" ");
    this.#show("note").textContent = notes;
    this.#show("note").hidden = notes === "";
    this.#show("fault").hidden = !answer.fault;
    this.#show("fault").textContent = answer.fault?.message ?? "";
    this.#show("statistics").textContent = statisticsOf(answer, price);
    this.#show("statistics").hidden = runs(answer) || !statisticsOf(answer, price);
    this.#show("figures").replaceChildren(...figuresOf(answer, price).map(pair));
    this.#show("actions").hidden = runs(answer);
    this.#show("again").hidden = !last;
    this.#show("results").hidden = !last || !answer.calls.length || runs(answer);
    countDown(this.#show("again"), gettext("Try again"), answer.fault?.retryAt);
  }

  /** Turn the text into Markdown; it stays as it is where that takes too much. */
  async format() {
    const content = await renderMarkdown(this.#answer.text);
    if (content === null) return;
    const place = this.#show("text");
    for (const code of content.querySelectorAll("pre")) addCopyButton(code);
    place.replaceChildren(content);
    place.classList.remove("plain");
    place.classList.add("markdown");
  }
}

function addCopyButton(code) {
  const frame = document.createElement("div");
  frame.className = "code";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small";
  button.textContent = gettext("Copy");
  button.setAttribute("aria-label", gettext("Copy the code"));
  button.addEventListener("click", () => copyText(code.textContent, gettext("Code")));
  code.replaceWith(frame);
  frame.append(code, button);
}

/** Return whether an answer is not complete yet. */
export function runs(answer) {
  return answer.state === "waiting" || answer.state === "streaming";
}

function stateOf(answer) {
  if (answer.state === "waiting") return gettext("waiting …");
  if (answer.state === "streaming") return answer.text ? gettext("answering …") : gettext("thinking …");
  return answer.state === "failed" ? gettext("failed") : "";
}

function pair([name, value]) {
  const group = document.createElement("div");
  const term = document.createElement("dt");
  const detail = document.createElement("dd");
  term.textContent = name;
  detail.textContent = value;
  group.append(term, detail);
  return group;
}
