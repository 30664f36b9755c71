// The log of an engine: followed line by line, searched and filtered in the page.
// Lines are only ever text, and as many and as long as a page can bear.

import {send} from "./api.js";
import {gettext} from "./language.js";
import {LineReader, levelOf, shortened} from "./log_lines.js";

const MAX_LINES = 2000;
const FIRST_LINES = 500;
const MAX_PAUSE_MS = 30000;
const RANKS = {info: 0, warning: 1, error: 2};

const box = document.getElementById("log");
const state = document.getElementById("log-state");
const search = document.getElementById("log-search");
const level = document.getElementById("log-level");
const follow = document.getElementById("log-follow");

let waiting = []; // lines that the page does not show yet
let lastLevel = "info";
let found = 0;
let connection = "";
let abort;

function add(lines) {
  for (const line of lines) waiting.push(line);
  if (waiting.length > MAX_LINES) waiting = waiting.slice(-MAX_LINES);
  // A hidden page draws nothing; its lines wait, no more than it can show.
  if (waiting.length && !document.hidden) requestAnimationFrame(draw);
}

function draw() {
  if (!waiting.length) return;
  const rows = document.createDocumentFragment();
  for (const line of waiting) rows.append(rowOf(line));
  waiting = [];
  box.append(rows);
  while (box.childElementCount > MAX_LINES) {
    if (!box.firstElementChild.hidden) found -= 1;
    box.firstElementChild.remove();
  }
  showCount();
  if (follow.checked) box.scrollTop = box.scrollHeight;
}

function rowOf(line) {
  const row = document.createElement("div");
  lastLevel = levelOf(line, lastLevel);
  row.className = `line ${lastLevel}`;
  row.dataset.level = lastLevel;
  row.textContent = shortened(line) || " ";
  row.hidden = !matches(row);
  if (!row.hidden) found += 1;
  return row;
}

function matches(row) {
  return RANKS[row.dataset.level] >= RANKS[level.value]
    && row.textContent.toLowerCase().includes(search.value.toLowerCase());
}

function filter() {
  found = 0;
  for (const row of box.children) {
    row.hidden = !matches(row);
    if (!row.hidden) found += 1;
  }
  showCount();
  if (follow.checked) box.scrollTop = box.scrollHeight;
}

function showCount() {
  const all = box.childElementCount;
  const lines = found === all ? gettext("%(number)s lines", {number: all})
    : gettext("%(part)s of %(all)s lines", {part: found, all});
  state.textContent = connection ? `${lines}. ${connection}` : lines;
}

function say(text) {
  connection = text;
  showCount();
}

/** Follow the log until the connection ends; throws ApiError and TypeError. */
async function read(lines) {
  abort = new AbortController();
  const name = encodeURIComponent(box.dataset.engine);
  const path = `/admin/engines/${name}/log?follow=true&lines=${lines}`;
  const response = await send(path, {signal: abort.signal});
  say("");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const split = new LineReader();
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    add(split.push(value));
  }
}

async function run() {
  let pause = 1000;
  for (;;) {
    if (document.hidden) await visible();
    const began = performance.now();
    waiting = [];
    box.replaceChildren();
    found = 0;
    lastLevel = "info";
    try {
      await read(FIRST_LINES);
      say(gettext("The connection has ended. Trying again …"));
    } catch (error) {
      if (error.name !== "AbortError") say(`${error.message ?? gettext("The connection broke.")} ${gettext("Trying again …")}`);
      if (error.status === 401 || error.status === 403 || error.status === 404 || error.status === 409) {
        say(error.message);
        return;
      }
    }
    if (performance.now() - began > 10000) pause = 1000;
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, MAX_PAUSE_MS);
  }
}

function visible() {
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, {once: true});
  });
}

// Followers are few: a page that nobody sees leaves its place to another.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) abort?.abort();
});
search.addEventListener("input", filter);
level.addEventListener("change", filter);
// Who scrolls up reads; at the end again, the page follows.
box.addEventListener("scroll", () => {
  follow.checked = box.scrollHeight - box.scrollTop - box.clientHeight < 8;
});
follow.addEventListener("change", () => {
  if (follow.checked) box.scrollTop = box.scrollHeight;
});
run();
