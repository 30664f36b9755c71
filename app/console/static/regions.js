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
  keepOrder(element, template.content);
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.replaceChildren(template.content);
  if (focused) document.getElementById(focused)?.focus({preventScroll: true});
}

// A table that is sorted stays so: the server sends it to all pages in the same order.
function keepOrder(shown, fresh) {
  const heading = shown.querySelector("th[aria-sort]");
  const target = fresh.querySelector("thead tr")?.cells[heading?.cellIndex];
  if (!target || fresh.querySelector("th[aria-sort]")) return;
  target.replaceWith(heading.cloneNode(true));
  const body = fresh.querySelector("tbody");
  const down = heading.getAttribute("aria-sort") === "descending" ? -1 : 1;
  const text = (row) => row.cells[heading.cellIndex].textContent.trim();
  const number = (row) => Number(text(row).replaceAll(",", ""));
  body.append(...[...body.rows].sort((a, b) => {
    const [one, other] = [number(a), number(b)];
    if (Number.isNaN(one) || Number.isNaN(other)) return down * text(a).localeCompare(text(b));
    return down * (one - other);
  }));
}
