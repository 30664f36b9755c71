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
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.replaceChildren(template.content);
  if (focused) document.getElementById(focused)?.focus({preventScroll: true});
}
