// Asks for the regions of a page again every few seconds: <… data-refresh="URL">.

import {api} from "./api.js";
import {showConnection, updateRegions} from "./regions.js";

const INTERVAL_MS = 3000;
const path = document.querySelector("[data-refresh]").dataset.refresh.replace(/^\/console\/api/, "");
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
schedule();
