// One answer of a model: what a stream has brought so far, and its times. No page in here.

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
    throw new Error("The gateway sent something that is not JSON.");
  }
  if (event.error) throw new Error(event.error.message ?? "The model failed.");
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
  if (state === "streaming" && !text) return "Thinking …";
  const took = (times.thought ?? times.first) - times.first;
  const tokens = usage?.completion_tokens_details?.reasoning_tokens;
  const found = `Thought${took >= 1000 * MIN_DECODING_S ? ` for ${(took / 1000).toFixed(1)} s` : ""}`;
  return tokens ? `${found}, ${number(tokens)} tokens` : found;
}

/** Return the figures that are read most, for one line. */
export function statisticsOf(answer, price) {
  const found = new Map(figuresOf(answer, price));
  const named = [["First token", "to the first token"], ["Total", "in all"], ["Speed", ""], ["Cost", "cost"]];
  const parts = named.filter(([name]) => found.has(name)).map(([name, text]) => `${found.get(name)} ${text}`.trim());
  const {usage} = answer;
  if (usage) parts.push(`${number(usage.prompt_tokens ?? 0)} → ${number(usage.completion_tokens ?? 0)} tokens`);
  return parts.join(" · ");
}

/** Return what is known of an answer as [name, value] pairs to show. */
export function figuresOf(answer, price) {
  const {usage, times} = answer;
  const found = [];
  if (times.first !== null) found.push(["First token", seconds(times.first - times.start)]);
  if (times.end !== null) found.push(["Total", seconds(times.end - times.start)]);
  const produced = usage?.completion_tokens ?? 0;
  const decoding = (times.last - times.first) / 1000;
  if (times.first !== null && produced > 1 && decoding >= MIN_DECODING_S) {
    found.push(["Speed", `${number((produced - 1) / decoding)} tokens/s`]);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const reasoning = usage.completion_tokens_details?.reasoning_tokens;
    found.push(["Prompt", `${number(usage.prompt_tokens ?? 0)} tokens${cached ? `, ${number(cached)} cached` : ""}`]);
    found.push(["Answer", `${number(produced)} tokens${reasoning ? `, ${number(reasoning)} of thought` : ""}`]);
  }
  const cost = costOf(usage, price);
  if (cost !== null) found.push(["Cost", String(Number(cost.toPrecision(3)))]);
  return found;
}

const ENDS = {
  length: "The answer was cut off: it reached the maximum of tokens.",
  content_filter: "The answer was cut off by a content filter.",
};

/** Return what to say about how an answer ended; empty if it ended as it should. */
export function endOf(answer) {
  if (answer.state === "stopped") return "Stopped.";
  return ENDS[answer.finish] ?? "";
}

function seconds(ms) {
  return ms < 999.5 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

function number(value) {
  return value.toLocaleString("en", {maximumFractionDigits: value < 100 ? 1 : 0});
}
