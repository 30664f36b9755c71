// Asks for the regions of a page again every few seconds: <… data-refresh="URL">. With data-more the page has
// the first rows only: the others come once these are painted.

import {api} from "./api.js";
import {showConnection, updateRegions} from "./regions.js";

const INTERVAL_MS = 3000;
const shown = document.querySelector("[data-refresh]");
const path = shown.dataset.refresh.replace(/^\/console\/api/, "");
let timer;

async function refresh() {
  try {
    updateRegions(await api(path));
    showConnection(true);
  } catch (error) {
    if (error.status !== 401) showConnection(false);
  }
  schedule();
}

function schedule() {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(refresh, INTERVAL_MS);
}

document.addEventListener("visibilitychange", schedule);
if ("more" in shown.dataset && !document.hidden) requestAnimationFrame(() => setTimeout(refresh));
else schedule();
