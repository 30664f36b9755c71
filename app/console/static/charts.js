// Charts to point at: one crosshair for all, values in the legends, and the requests behind a moment.
// The server draws the charts; what is read here are the coordinates of its lines.

import {CONSOLE} from "./addresses.js";
import {LOCALE} from "./language.js";
import {refresh} from "./page_parts.js";

const place = document.getElementById("charts");
const SVG = "http://www.w3.org/2000/svg";
const TOP = 5; // as app/console/charts.py
const REFRESH_MS = 10_000;
// Made once: each takes a millisecond.
const DAY = new Intl.DateTimeFormat(LOCALE, {day: "2-digit", month: "short"});
const TIME = new Intl.DateTimeFormat(LOCALE, {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
let shown = null; // the moment of the crosshair, from 0 to 1
let since = null; // the other end of a time that is selected, likewise

/** Return the points of a line as [x from 0 to 1, value]. */
export function pointsOf(path, box, top) {
  const [, , width, height] = box.split(" ").map(Number);
  return [...path.matchAll(/(-?[\d.]+),(-?[\d.]+)/g)].map(([, x, y]) => (
    [x / width, (height - y) / (height - TOP) * top]
  ));
}

/** Return the value of the point that is next to x, where one is near. */
export function valueAt(points, x) {
  let next = null;
  for (const point of points) {
    if (next === null || Math.abs(point[0] - x) < Math.abs(next[0] - x)) next = point;
  }
  return next && Math.abs(next[0] - x) < 0.02 ? next[1] : null;
}

/** Return a value as app/console/formats.py has it. */
export function valueText(value, {seconds, whole}) {
  if (value === null) return "–";
  if (seconds !== undefined) return value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
  if (whole !== undefined) return Math.round(value).toLocaleString("en");
  return value.toLocaleString("en", {maximumSignificantDigits: 3}); // as exact as the lines are drawn
}

function momentAt({begin, end}, x) {
  return new Date((Number(begin) + x * (end - begin)) * 1000);
}

function clock(date, span) {
  const shown = {hour: "2-digit", minute: "2-digit", hourCycle: "h23"};
  if (span > 90_000) shown.weekday = "short";
  if (span < 4000) shown.second = "2-digit";
  return date.toLocaleString(LOCALE, shown);
}

// A moment of a chart in words, or the time that is selected up to it.
function timeText(dataset, x) {
  const ends = since === null ? [x] : [Math.min(since, x), Math.max(since, x)];
  return ends.map((end) => clock(momentAt(dataset, end), dataset.end - dataset.begin)).join(" – ");
}

// Put the crosshair at a moment of all charts; null: the legends have the newest values again.
function show(x) {
  shown = x;
  if (x === null) since = null;
  for (const plot of place.querySelectorAll(".plot")) {
    for (const old of plot.querySelectorAll(".crosshair, .now, .selected")) old.remove();
    const values = plot.closest("figure").querySelectorAll(".legend strong");
    const lines = [...plot.querySelectorAll("path.line")].reverse(); // the first is above the others
    const texts = lines.map((line, at) => {
      values[at].dataset.last ??= values[at].textContent;
      const points = x === null ? [] : pointsOf(line.getAttribute("d"), line.parentNode.getAttribute("viewBox"), plot.dataset.top);
      values[at].textContent = x === null ? values[at].dataset.last : valueText(valueAt(points, x), plot.dataset);
      return values[at].parentNode.textContent.trim();
    });
    if (x === null) continue;
    const at = timeText(plot.dataset, x);
    const height = plot.querySelector(".base").getAttribute("y1");
    if (since !== null) {
      plot.append(shape("rect", {class: "selected", x: `${Math.min(since, x) * 100}%`, width: `${Math.abs(x - since) * 100}%`, height}));
    }
    plot.append(shape("line", {class: "crosshair", x1: `${x * 100}%`, x2: `${x * 100}%`, y2: height}));
    const label = shape("text", {class: "now", x: `${Math.min(Math.max(x, 0.06), 0.94) * 100}%`, y: Number(height) + 17});
    label.textContent = at;
    plot.append(label);
    plot.setAttribute("aria-valuenow", Math.round(x * 100));
    plot.setAttribute("aria-valuetext", `${at}: ${texts.join(", ")}`);
  }
}

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// The requests between two moments: of a hundredth of the chart's time at least, and of a minute.
function openRequests({dataset}, x, other) {
  const span = dataset.end - dataset.begin;
  const half = Math.max(Math.abs(x - other) * span, span / 100, 60) * 500;
  const middle = momentAt(dataset, (x + other) / 2).getTime();
  const query = new URLSearchParams({from: iso(middle - half), to: iso(middle + half)});
  if (dataset.status) query.set("status", dataset.status);
  location.assign(`${CONSOLE}/requests?${query}`);
}

function iso(ms) {
  return new Date(ms).toISOString().replace(/\.\d+Z/, "Z");
}

function placeOf(event) {
  const box = event.target.closest(".plot")?.getBoundingClientRect();
  return box ? Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) : null;
}

// What the server sends anew gets its local times and its crosshair.
function prepare() {
  for (const text of place.querySelectorAll(".at:not([data-local])")) {
    const {begin, end} = text.closest(".plot").dataset;
    const date = new Date(text.dataset.at * 1000);
    text.dataset.local = "";
    text.textContent = (end - begin > 90_000 ? DAY : TIME).format(date);
  }
  for (const plot of place.querySelectorAll(".plot[role=img]")) {
    plot.setAttribute("role", "slider");
    plot.setAttribute("aria-valuenow", "100");
    plot.setAttribute("aria-valuetext", plot.querySelector("desc").textContent);
  }
  if (shown !== null) show(shown);
}

const STEPS = {ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: 0.1, PageDown: -0.1, Home: -1, End: 1};
place.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  since = placeOf(event);
  if (since !== null) event.target.closest(".plot").setPointerCapture(event.pointerId);
});
place.addEventListener("pointermove", (event) => {
  if (!event.buttons) since = null;
  show(placeOf(event));
});
place.addEventListener("pointerup", (event) => {
  const x = placeOf(event);
  if (x !== null && since !== null) openRequests(event.target.closest(".plot"), x, since);
});
place.addEventListener("pointerleave", () => show(null));
place.addEventListener("keydown", (event) => {
  const plot = event.target.closest(".plot");
  if (!plot) return;
  if (event.key in STEPS) {
    event.preventDefault();
    since = event.shiftKey ? since ?? shown ?? 1 : null;
    show(Math.min(Math.max((shown ?? 1) + STEPS[event.key], 0), 1));
  } else if (event.key === "Enter") {
    openRequests(plot, shown ?? 1, since ?? shown ?? 1);
  } else if (event.key === "Escape") {
    show(null);
  }
});
// A press gives the focus from one chart to another.
place.addEventListener("focusout", (event) => place.contains(event.relatedTarget) || show(null));
new MutationObserver(prepare).observe(place, {childList: true});
prepare();
if ("refresh" in place.dataset) setInterval(() => document.hidden || refresh("charts"), REFRESH_MS);
