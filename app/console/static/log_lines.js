// Lines of an engine's log: split from pieces of text, their level, and their length. Pure.

import {gettext} from "./language.js";

// A longer line is cut: the page shows its beginning.
const MAX_LINE = 4000;
// vLLM: "(APIServer pid=1) WARNING 11-23 09:00:00 [file.py:1] text"; uvicorn: "INFO:     text".
const LEVEL = /^(?:\([^)]{0,120}\)\s*)?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b[: ]/;
const FAULT = /^(?:\([^)]{0,120}\)\s*)?(?:Traceback \(most recent call last\)|[\w.]{1,120}(?:Error|Exception)\b(?::|$))/;
const LEVELS = {DEBUG: "info", INFO: "info", WARN: "warning", WARNING: "warning", ERROR: "error", CRITICAL: "error"};

/** Splits a stream of text into lines; keeps no more of an unfinished line than is shown of it. */
export class LineReader {
  #rest = "";

  push(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop().slice(0, MAX_LINE + 1);
    return lines;
  }
}

/** Return info, warning or error; a line that continues another has the level of that one. */
export function levelOf(line, before) {
  const found = LEVEL.exec(line);
  if (found) return LEVELS[found[1]];
  if (FAULT.test(line)) return "error";
  return /^\s/.test(line) ? before : "info";
}

/** Return a line as the page shows it: bounded, and with control characters made visible. */
export function shortened(line) {
  const text = line.length > MAX_LINE ? `${line.slice(0, MAX_LINE)}… (${gettext("%(number)s characters", {number: line.length})})` : line;
  // The pictures of control characters: U+2400 and on.
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
}
