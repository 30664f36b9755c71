// One answer of a model: what a stream has brought so far, and its times. No page in here.

import {gettext, noop} from "./language.js";

// An answer that arrived at once says nothing about speed.
const MIN_DECODING_S = 0.05;

/** Make an answer to a request; `settings` is what was sent with the messages. */
export function newAnswer(model, settings) {
  return {
    model, settings,
    servedBy: "", thought: "", text: "", calls: [],
    state: "waiting", // streaming, done, stopped, failed
    fault: null, // {message, retryAfter, retryAt}
    finish: null, usage: null,
    times: {start: 0, first: null, last: null, thought: null, end: null}, // milliseconds
    asked: Date.now(),
  };
}

/** Add one event of the stream to an answer; return false after its last one. */
export function addEvent(answer, data, now) {
  if (data === "[DONE]") return false;
  let event;
  try {
    event = JSON.parse(data);
  } catch {
    throw new Error(gettext("The gateway sent something that is not JSON."));
  }
  if (event.error) throw new Error(event.error.message ?? gettext("The model failed."));
  if (event.usage) answer.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return true;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  if (addDelta(answer, choice.delta ?? {})) {
    answer.times.first ??= now;
    answer.times.last = now;
    if (!answer.text) answer.times.thought = now;
  }
  return true;
}

function addDelta(answer, delta) {
  const thought = delta.reasoning ?? delta.reasoning_content ?? "";
  const text = (delta.content ?? "") + (delta.refusal ?? "");
  answer.thought += thought;
  answer.text += text;
  for (const part of delta.tool_calls ?? []) addCall(answer.calls, part);
  return Boolean(thought || text || delta.tool_calls?.length);
}

// The first part of a call has its name; its arguments arrive in parts, as text.
function addCall(calls, part) {
  const at = part.index ?? calls.length;
  calls[at] ??= {id: "", name: "", arguments: "", result: ""};
  if (part.id) calls[at].id = part.id;
  calls[at].name += part.function?.name ?? "";
  calls[at].arguments += part.function?.arguments ?? "";
}

/** Return the arguments of a call with line breaks; as they are if they are not JSON. */
export function prettyArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Return the cost of an answer in the configuration's currency, by prices of a million tokens; null if it is not known. */
export function costOf(usage, price) {
  if (!usage || !price) return null;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const fresh = (usage.prompt_tokens ?? 0) - cached;
  const nano = fresh * price.prompt + cached * price.cached + (usage.completion_tokens ?? 0) * price.completion;
  return nano / 1e6 / 1e9;
}

/** Return what a thought took, as `Thought for 0.4 s, 59 tokens`. */
export function thoughtOf({times, usage, text, state}) {
  if (state === "streaming" && !text) return gettext("Thinking …");
  const took = (times.thought ?? times.first) - times.first;
  const tokens = usage?.completion_tokens_details?.reasoning_tokens;
  const known = took >= 1000 * MIN_DECODING_S;
  const found = known ? gettext("Thought for %(seconds)s s", {seconds: (took / 1000).toFixed(1)}) : gettext("Thought");
  return tokens ? `${found}, ${tokensText(tokens)}` : found;
}

/** Return the figures that are read most, for one line. */
export function statisticsOf(answer, price) {
  const found = new Map(figuresOf(answer, price));
  const named = [
    [gettext("First token"), (value) => gettext("%(duration)s to the first token", {duration: value})],
    [gettext("Total"), (value) => gettext("%(duration)s in all", {duration: value})],
    [gettext("Speed"), (value) => value],
    [gettext("Cost"), (value) => gettext("%(amount)s cost", {amount: value})],
  ];
  const parts = named.filter(([name]) => found.has(name)).map(([name, say]) => say(found.get(name)));
  const {usage} = answer;
  if (usage) parts.push(tokensText(usage.prompt_tokens ?? 0, usage.completion_tokens ?? 0));
  return parts.join(" · ");
}

/** Return what is known of an answer as [name, value] pairs to show. */
export function figuresOf(answer, price) {
  const {usage, times} = answer;
  const found = [];
  if (times.first !== null) found.push([gettext("First token"), seconds(times.first - times.start)]);
  if (times.end !== null) found.push([gettext("Total"), seconds(times.end - times.start)]);
  const produced = usage?.completion_tokens ?? 0;
  const decoding = (times.last - times.first) / 1000;
  if (times.first !== null && produced > 1 && decoding >= MIN_DECODING_S) {
    found.push([gettext("Speed"), gettext("%(number)s tokens/s", {number: number((produced - 1) / decoding)})]);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const reasoning = usage.completion_tokens_details?.reasoning_tokens;
    const reused = cached ? `, ${gettext("%(number)s cached", {number: number(cached)})}` : "";
    const thought = reasoning ? `, ${gettext("%(number)s of thought", {number: number(reasoning)})}` : "";
    found.push([gettext("Prompt"), tokensText(usage.prompt_tokens ?? 0) + reused]);
    found.push([gettext("Answer"), tokensText(produced) + thought]);
  }
  const cost = costOf(usage, price);
  if (cost !== null) found.push([gettext("Cost"), String(Number(cost.toPrecision(3)))]);
  return found;
}

const ENDS = {
  length: noop("The answer was cut off: it reached the maximum of tokens."),
  content_filter: noop("The answer was cut off by a content filter."),
};

/** Return what to say about how an answer ended; empty if it ended as it should. */
export function endOf(answer) {
  if (answer.state === "stopped") return gettext("Stopped.");
  const end = ENDS[answer.finish];
  return end ? gettext(end) : "";
}

function seconds(ms) {
  return ms < 999.5 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

// A number of tokens, or those before and after an arrow.
function tokensText(...counts) {
  return gettext("%(number)s tokens", {number: counts.map(number).join(" → ")});
}

function number(value) {
  return value.toLocaleString("en", {maximumFractionDigits: value < 100 ? 1 : 0});
}
