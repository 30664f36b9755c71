// The body of a chat request, from the settings of a column and its conversation. No page in here.

import {newAnswer} from "./answer.js";
import {gettext, noop} from "./language.js";

/** The numbers that a request may have: name, label, step, smallest and largest value. */
export const NUMBERS = [
  ["temperature", noop("Temperature"), 0.1, 0, 2],
  ["top_p", noop("Top p"), 0.05, 0, 1],
  ["top_k", noop("Top k"), 1, -1, 1000000],
  ["min_p", noop("Min p"), 0.01, 0, 1],
  ["max_tokens", noop("Maximum tokens"), 1, 1, 10000000],
  ["seed", noop("Seed"), 1, -9007199254740991, 9007199254740991],
  ["presence_penalty", noop("Presence penalty"), 0.1, -2, 2],
  ["frequency_penalty", noop("Frequency penalty"), 0.1, -2, 2],
  ["repetition_penalty", noop("Repetition penalty"), 0.05, 0, 10],
];

/** The settings of a new column: texts, as the form has them. Empty: not sent. */
export function newSettings(model = "") {
  const empty = {model, system: "", stop: "", schema: "", tools: "", other: ""};
  for (const [name] of NUMBERS) empty[name] = "";
  return empty;
}

/** What a form says that cannot be sent; `field` is the name of the setting. */
export class SettingFault extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Return the fields that settings add to a request. Throws SettingFault. */
export function fieldsOf(settings) {
  const fields = {};
  for (const [name, title, step, least, most] of NUMBERS) {
    const text = settings[name].trim();
    if (text === "") continue;
    const value = Number(text);
    const label = gettext(title);
    if (Number.isNaN(value)) throw new SettingFault(name, gettext("%(label)s is not a number.", {label}));
    if (value < least || value > most) {
      throw new SettingFault(name, gettext("%(label)s must be from %(least)s to %(most)s.", {label, least, most}));
    }
    if (step === 1 && !Number.isInteger(value)) {
      throw new SettingFault(name, gettext("%(label)s must be a whole number.", {label}));
    }
    fields[name] = value;
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length) fields.stop = stop;
  const schema = parsed(settings.schema, "schema", gettext("The JSON schema"), isObject);
  if (schema !== null) {
    fields.response_format = {type: "json_schema", json_schema: {name: "answer", schema}};
  }
  const tools = parsed(settings.tools, "tools", gettext("Tools"), Array.isArray);
  if (tools?.length) fields.tools = tools;
  const other = parsed(settings.other, "other", gettext("Other fields"), isObject);
  return {...fields, ...(other ?? {})};
}

function parsed(text, field, label, fits) {
  if (text.trim() === "") return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new SettingFault(field, gettext("%(label)s: not valid JSON (%(reason)s).", {label, reason: error.message}));
  }
  if (fits(value)) return value;
  if (fits === isObject) throw new SettingFault(field, gettext("%(label)s must be an object in JSON.", {label}));
  throw new SettingFault(field, gettext("%(label)s must be a list in JSON.", {label}));
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Make an answer that is about to be asked for with a column's settings. Throws SettingFault. */
export function askWith(settings) {
  return newAnswer(settings.model, {system: settings.system, fields: fieldsOf(settings)});
}

/**
 * Return the body of the request behind an answer: `turns` up to its own, in one column.
 * Each turn has {text, images, answers}; answers[column] is a list, longer than one after tool calls.
 */
export function bodyOf(turns, column, answer) {
  const messages = [];
  if (answer.settings.system.trim()) messages.push({role: "system", content: answer.settings.system});
  for (const turn of turns) {
    const steps = turn.answers[column] ?? [];
    const asked = steps.includes(answer);
    const answered = steps.slice(0, asked ? steps.indexOf(answer) : undefined).flatMap(messagesOf);
    // A message that this column has not answered is not part of its conversation.
    if (asked || answered.length) messages.push({role: "user", content: contentOf(turn)}, ...answered);
  }
  return {
    model: answer.model, messages, stream: true, stream_options: {include_usage: true},
    ...answer.settings.fields,
  };
}

function contentOf({text, images}) {
  if (!images?.length) return text;
  const parts = images.map((url) => ({type: "image_url", image_url: {url}}));
  return text ? [...parts, {type: "text", text}] : parts;
}

// The thought is left out, as templates of chat models do with those of earlier answers.
function messagesOf({text, calls}) {
  if (!calls.length) return text ? [{role: "assistant", content: text}] : [];
  const tool_calls = calls.map(({id, name, arguments: given}) => (
    {id, type: "function", function: {name, arguments: given}}
  ));
  const results = calls.map(({id, result}) => ({role: "tool", tool_call_id: id, content: result}));
  return [{role: "assistant", content: text || null, tool_calls}, ...results];
}
