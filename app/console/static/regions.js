// Regions of a page whose HTML the server renders again: <… data-live="NAME">.

const regions = new Map(
  [...document.querySelectorAll("[data-live]")].map((element) => [element.dataset.live, element]),
);
const connection = document.getElementById("connection");

/** Put new HTML into regions, by name; what has the focus keeps it. */
export function updateRegions(changed) {
  for (const [name, html] of Object.entries(changed)) {
    const element = regions.get(name);
    if (element) swap(element, html);
  }
}

/** Show whether the gateway answers. */
export function showConnection(works) {
  if (connection) connection.hidden = works;
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
  const text = ({cells}) => cells[heading.cellIndex].dataset.sort ?? cells[heading.cellIndex].textContent.trim();
  const number = (row) => Number(text(row).replaceAll(",", ""));
  // A row and the line below it stay together.
  const rows = [...body.querySelectorAll("tr:not(.more)")].map((row) => [row, row.nextElementSibling]);
  rows.sort(([a], [b]) => {
    const [one, other] = [number(a), number(b)];
    if (Number.isNaN(one) || Number.isNaN(other)) return down * text(a).localeCompare(text(b));
    return down * (one - other);
  });
  body.append(...rows.flatMap(([row, next]) => (next?.matches(".more") ? [row, next] : [row])));
}
