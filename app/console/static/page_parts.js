// Parts of a page as the server now renders them.

/** Replace the content of elements by what the page now has, by their IDs. */
export async function refresh(...ids) {
  const response = await fetch(location.href, {headers: {accept: "text/html"}});
  if (!response.ok) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const id of ids) {
    const found = page.getElementById(id);
    const shown = document.getElementById(id);
    if (!found || !shown) continue;
    const focused = shown.contains(document.activeElement);
    shown.replaceChildren(...found.childNodes);
    if (focused) {
      shown.tabIndex = -1;
      shown.focus({preventScroll: true});
    }
  }
}
