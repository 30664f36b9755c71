// Sends a request for an answer, and fills the answer while it arrives.

import {addEvent} from "./answer.js";
import {ApiError, send} from "./api.js";
import {bodyOf} from "./chat_request.js";
import {gettext} from "./language.js";
import {eventsOf} from "./sse.js";

/** Ask for an answer; `update` is called as it grows. Throws nothing: the answer says how it ended. */
export async function ask(turns, column, answer, signal, update) {
  answer.times.start = performance.now();
  try {
    const body = bodyOf(turns, column, answer);
    const response = await send("/v1/chat/completions", {method: "POST", body, signal});
    answer.servedBy = decodeURIComponent(response.headers.get("x-gateway-model") ?? "");
    await read(response, answer, update);
    answer.state = "done";
  } catch (error) {
    if (error.name === "AbortError") {
      answer.state = "stopped";
    } else {
      answer.state = "failed";
      answer.fault = faultOf(error, answer);
    }
  }
  answer.times.end = performance.now();
}

async function read(response, answer, update) {
  for await (const data of eventsOf(response)) {
    answer.state = "streaming";
    if (!addEvent(answer, data, performance.now())) return;
    update();
  }
  throw new Error(gettext("the connection ended before its end."));
}

function faultOf(error, answer) {
  // What fetch says while it reads differs by browser, and says nothing.
  let message = error instanceof TypeError ? gettext("the connection was lost.") : error.message;
  if (error instanceof ApiError && error.status === 413) message += ` ${gettext("Leave out an image or older messages.")}`;
  if (!(error instanceof ApiError)) message = gettext("The answer was interrupted: %(reason)s", {reason: message});
  const wait = error.retryAfter ?? null;
  return {message, retryAt: wait === null ? null : Date.now() + wait * 1000};
}
