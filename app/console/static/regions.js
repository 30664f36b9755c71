// Regions of a page whose HTML the server renders again: <… data-live="NAME">. Where regions come and
// go, they are in a <… data-live-items="PREFIX"> that has those whose names begin like this.

const regions = new Map(
  [...document.querySelectorAll("[data-live]")].map((element) => [element.dataset.live, element]),
);
const items = document.querySelector("[data-live-items]");
const connection = document.getElementById("connection");

/** Put new HTML into regions, by name; what has the focus keeps it. */
export function updateRegions(changed) {
  for (const [name, html] of Object.entries(changed)) {
    const element = regions.get(name) ?? addItem(name, html);
    if (element) swap(element, html);
    if (!html) removeItem(name);
  }
}

/** Show whether the gateway answers. */
export function showConnection(works) {
  if (connection) connection.hidden = works;
}

function addItem(name, html) {
  if (!html || !items || !name.startsWith(items.dataset.liveItems)) return null;
  const element = document.createElement("section");
  element.className = "card";
  items.append(element);
  regions.set(name, element);
  return element;
}

function removeItem(name) {
  if (!items?.contains(regions.get(name))) return;
  regions.get(name).remove();
  regions.delete(name);
}

function swap(element, html) {
  const template = document.createElement("template");
  template.innerHTML = html; // made by our templates, which escape everything
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.replaceChildren(template.content);
  if (focused) document.getElementById(focused)?.focus({preventScroll: true});
}
