// Messages to begin with, for what a model can do.

import {gettext, noop} from "./language.js";
import {part} from "./playground_view.js";

const place = document.getElementById("examples");
const template = document.getElementById("example-template");
const ANIMAL = {
  type: "object", required: ["name", "legs"],
  properties: {name: {type: "string"}, legs: {type: "integer"}},
};
const WEATHER = [{
  type: "function",
  function: {
    name: "get_weather", description: "The weather of a city now",
    parameters: {type: "object", required: ["city"], properties: {city: {type: "string"}}},
  },
}];

/** Each: title, text, settings that come with it, and whether a model can do it. */
const EXAMPLES = [
  {title: noop("Reason"), text: noop("Which is larger, 9.9 or 9.11?"), settings: {}, fits: () => true},
  {title: noop("Explain"), text: noop("Explain in three sentences how a KV cache works."), settings: {}, fits: () => true},
  {title: noop("Answer as JSON"), text: noop("Describe a spider."), settings: {schema: JSON.stringify(ANIMAL, null, 1)}, fits: () => true},
  {title: noop("Call a tool"), text: noop("What is the weather in Paris?"), settings: {tools: JSON.stringify(WEATHER, null, 1)}, fits: ({tools}) => tools},
];

/** Show the examples that a model can do; `choose(example)` is called for the one that is pressed. */
export function showExamples(model, choose) {
  const fitting = EXAMPLES.filter(({fits}) => model && fits(model));
  place.hidden = fitting.length === 0;
  place.querySelector("ul").replaceChildren(...fitting.map((example) => {
    const item = template.content.firstElementChild.cloneNode(true);
    const text = gettext(example.text);
    part(item, "title").textContent = gettext(example.title);
    part(item, "text").textContent = text;
    item.querySelector("button").addEventListener("click", () => choose({...example, text}));
    return item;
  }));
}

export function hideExamples() {
  place.hidden = true;
}
