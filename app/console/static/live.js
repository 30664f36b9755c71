// Live regions: the server sends the HTML of those that changed, rendered by its own templates.

const regions = new Map(
  [...document.querySelectorAll("[data-live]")].map((element) => [element.dataset.live, element]),
);
const page = document.querySelector("[data-live-page]").dataset.livePage;
const state = document.getElementById("connection");
let source;

function open() {
  source = new EventSource(`/console/api/events/${page}`);
  source.addEventListener("regions", (event) => {
    for (const [name, html] of Object.entries(JSON.parse(event.data))) {
      const element = regions.get(name);
      if (element) swap(element, html);
    }
  });
  source.addEventListener("open", () => { if (state) state.hidden = true; });
  source.addEventListener("error", () => {
    if (state) state.hidden = false;
    if (source.readyState === EventSource.CLOSED) setTimeout(retry, 2000);
  });
}

// An EventSource gives up after a response that is not a stream, such as 401 or 503.
async function retry() {
  if (document.hidden) return;
  const response = await fetch("/console/api/session").catch(() => null);
  if (response?.status === 401) location.assign(`/console/login?next=${encodeURIComponent(location.pathname)}`);
  else if (response?.ok) open();
  else setTimeout(retry, 2000);
}

function swap(element, html) {
  const template = document.createElement("template");
  template.innerHTML = html; // made by our templates, which escape everything
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.replaceChildren(template.content);
  if (focused) document.getElementById(focused)?.focus({preventScroll: true});
}

// A hidden page needs nothing, and a browser that slept finds its way back.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else open();
});
if (!document.hidden) open();
