// Addresses of this gateway, which a proxy may serve under a path of its own.

/** Stands before the paths of the gateway's answers; empty without such a proxy. */
export const ROOT_PATH = document.documentElement.dataset.rootPath;
export const CONSOLE = `${ROOT_PATH}/console`;
/** The login that leads back to this page. */
export const loginHere = () => `${CONSOLE}/login?next=${encodeURIComponent(location.pathname + location.search)}`;
/** What clients call: the URL before /v1. */
export const PUBLIC_URL = location.origin + ROOT_PATH;
