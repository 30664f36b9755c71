// Requests of the console's pages to the gateway, with the session and its token.

import {CONSOLE, loginHere} from "./addresses.js";
import {gettext} from "./language.js";

const token = document.querySelector('meta[name="csrf-token"]').content;

export class ApiError extends Error {
  constructor(status, message, code, retryAfter) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter; // seconds, or null
  }
}

/** Send a request below /console/api; return the Response. Throws ApiError. */
export async function send(path, {method = "GET", body, signal} = {}) {
  const headers = {"x-csrf-token": token};
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(`${CONSOLE}/api${path}`, {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, gettext("The gateway does not answer. Try again in a moment."), "unreachable", null);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Send a request below /console/api; return the JSON of the response. Throws ApiError. */
export async function api(path, options) {
  const response = await send(path, options);
  return response.status === 204 ? null : response.json();
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch { /* not JSON: the status says it */ }
  const wait = Number.parseInt(response.headers.get("retry-after"), 10);
  const message = error.message ?? gettext("The gateway answered with status %(status)s.", {status: response.status});
  if (response.status === 401 || error.code === "permission_denied" && /out of date/.test(message)) {
    offerLogin();
  }
  return new ApiError(response.status, message, error.code ?? "", Number.isNaN(wait) ? null : wait);
}

/** Say something in the corner of the page. */
export function notify(text, kind = "") {
  const notice = document.createElement("p");
  notice.className = `notice ${kind}`;
  notice.textContent = text;
  document.getElementById("notices").replaceChildren(notice);
  setTimeout(() => notice.remove(), kind === "bad" ? 15000 : 5000);
}

let offered = false;
function offerLogin() {
  if (offered) return;
  offered = true;
  const notice = document.createElement("p");
  notice.className = "notice bad";
  const link = document.createElement("a");
  link.href = loginHere();
  link.textContent = gettext("Log in again");
  notice.append(gettext("The session has ended."), " ", link, ".");
  document.getElementById("content").prepend(notice);
}
