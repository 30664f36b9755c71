// Messages and answers of the playground as elements. Everything of a model is set as text.

import {endOf, figuresOf, prettyArguments} from "./answer.js";
import {countDown} from "./countdown.js";
import {LETTERS} from "./conversation.js";
import {renderMarkdown} from "./markdown.js";

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
  element.querySelector("h2").textContent = `Message ${at + 1}`;
  part(element, "text").textContent = turn.text;
  part(element, "images").replaceChildren(...turn.images.map((url, index) => image(url, index)));
  part(element, "answers").dataset.columns = turn.answers.length;
  return element;
}

/** Return an image from a data: URL. */
export function image(url, index) {
  const shown = document.createElement("img");
  shown.src = url;
  shown.alt = `Image ${index + 1}`;
  return shown;
}

/** Shows one answer while it arrives and afterwards. */
export class AnswerView {
  #answer;
  #pending = 0;
  #thoughtShown = 0;
  #textShown = 0;
  #callsShown = "";

  /** `described()` returns {served, price, last}: of the model, and whether it is the last answer. */
  constructor(answer, column, described) {
    this.#answer = answer;
    this.described = described;
    this.element = answerTemplate.content.firstElementChild.cloneNode(true);
    this.element.querySelector("h3").textContent = `${LETTERS[column]} · ${answer.model}`;
    this.#show("thought-text").append("");
    this.#show("text").append("");
    this.finish();
  }

  #show(name) {
    return part(this.element, name);
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
    this.#show("thought-text").firstChild.appendData(answer.thought.slice(this.#thoughtShown));
    this.#thoughtShown = answer.thought.length;
    this.#show("text").firstChild.appendData(answer.text.slice(this.#textShown));
    this.#textShown = answer.text.length;
    this.#drawCalls(answer.calls);
    this.#show("state").textContent = stateOf(answer);
    this.#show("state").hidden = stateOf(answer) === "";
    this.element.setAttribute("aria-busy", String(runs(answer)));
    if (follow && runs(answer)) scrollTo(0, document.documentElement.scrollHeight);
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
    const {served, price, last} = this.described();
    const notes = [served, endOf(answer)].filter(Boolean).join(" ");
    this.#show("note").textContent = notes;
    this.#show("note").hidden = notes === "";
    this.#show("fault").hidden = !answer.fault;
    this.#show("fault").textContent = answer.fault?.message ?? "";
    this.#show("figures").replaceChildren(...figuresOf(answer, price).map(pair));
    this.#show("actions").hidden = runs(answer);
    this.#show("again").hidden = !last;
    this.#show("results").hidden = !last || !answer.calls.length || runs(answer);
    countDown(this.#show("again"), "Try again", answer.fault?.retryAt);
  }

  /** Turn the text into Markdown; it stays as it is where that takes too much. */
  async format() {
    const content = await renderMarkdown(this.#answer.text);
    if (content === null) return;
    const place = this.#show("text");
    place.replaceChildren(content);
    place.classList.remove("plain");
    place.classList.add("markdown");
  }
}

/** Return whether an answer is not complete yet. */
export function runs(answer) {
  return answer.state === "waiting" || answer.state === "streaming";
}

function stateOf(answer) {
  if (answer.state === "waiting") return "waiting …";
  if (answer.state === "streaming") return answer.text ? "answering …" : "thinking …";
  return answer.state === "failed" ? "failed" : "";
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
