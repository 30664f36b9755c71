// Live regions: the server sends the HTML of those that changed, rendered by its own templates.

import {CONSOLE, loginHere} from "./addresses.js";
import {showConnection, updateRegions} from "./regions.js";

const page = document.querySelector("[data-live-page]").dataset.livePage;
let source;

function open() {
  source?.close();
  source = new EventSource(`${CONSOLE}/api/events/${page}`);
  source.addEventListener("regions", (event) => {
    updateRegions(JSON.parse(event.data));
  });
  source.addEventListener("open", () => showConnection(true));
  source.addEventListener("error", () => {
    showConnection(false);
    if (source.readyState === EventSource.CLOSED) setTimeout(retry, 2000);
  });
}

// An EventSource gives up after a response that is not a stream, such as 401 or 503.
async function retry() {
  if (document.hidden) return;
  const response = await fetch(`${CONSOLE}/api/session`).catch(() => null);
  if (response?.status === 401) location.assign(loginHere());
  else if (response?.ok) open();
  else setTimeout(retry, 2000);
}

// A hidden page needs nothing, and a browser that slept finds its way back.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else open();
});
if (!document.hidden) open();
