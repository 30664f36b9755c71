// Runs behind axe-core, and spares it what it has seen: rows of a table that differ in their values only,
// and colors of elements that look the same, in this document or an earlier one.
//
// A look is what contrast comes from: the styles of an element, of its pseudo-elements and of all that
// it is in, and of what is placed over or below these. What has failed is measured wherever it is, and
// every other rule is checked on every page.
(() => {
  const COLORS = ["color-contrast", "link-in-text-block"];
  // Backgrounds that axe cannot measure, wherever they are.
  const UNMEASURABLE = ["bgGradient", "imgNode"];
  const STYLE = ["color", "backgroundColor", "backgroundImage", "opacity", "fontSize", "fontWeight"];
  STYLE.push("textDecorationLine", "textShadow", "webkitTextStroke", "filter", "mixBlendMode", "position");
  // Attributes whose values say nothing of how a row is built.
  const VALUES = "href|id|for|name|title|value|datetime|aria-label|aria-labelledby|aria-describedby|data-[\\w-]+"
    + "|x|y|width|height|d|points";
  const VALUE = new RegExp(` (${VALUES})="[^"]+"`, "g");
  let passed, added; // looks, by check
  let measured; // of each element, what its colors were checked for
  let styles, placed, looks; // of elements

  const remembered = (map, key, make) => {
    if (!map.has(key)) map.set(key, make(key));
    return map.get(key);
  };

  const valuesOf = (style) => STYLE.map((name) => style[name]).join("|");

  const styleOf = (element) => remembered(styles, element, () => {
    const parts = [element.localName, element.getAttribute("class"), valuesOf(getComputedStyle(element))];
    for (const pseudo of ["::before", "::after"]) {
      const style = getComputedStyle(element, pseudo);
      if (style.content !== "none") parts.push(pseudo, style.content, valuesOf(style));
    }
    return parts.join("|");
  });

  // Of the elements that may lie over or below others in an element.
  const placedIn = (parent) => remembered(placed, parent, () => {
    const found = [...parent.children].filter((one) => getComputedStyle(one).position !== "static");
    return [...new Set(found.map(styleOf))].join("|");
  });

  const lookOf = (element) => remembered(looks, element, () => {
    const parent = element.parentElement;
    return hash(parent ? `${lookOf(parent)} ${placedIn(parent)} ${styleOf(element)}` : styleOf(element));
  });

  const hash = (text) => {
    let [one, other] = [0xdeadbeef, 0x41c6ce57];
    for (let at = 0; at < text.length; at++) {
      one = Math.imul(one ^ text.charCodeAt(at), 2654435761);
      other = Math.imul(other ^ text.charCodeAt(at), 1597334677);
    }
    return `${(one >>> 0).toString(36)}.${(other >>> 0).toString(36)}`;
  };

  for (const name of COLORS) {
    const check = axe._audit.checks[name];
    const {evaluate} = check;
    check.evaluate = function (element, ...rest) {
      const look = `${name}:${lookOf(element)}`;
      measured.get(element)?.add(name);
      if (passed.has(look)) return true;
      let reason;
      const report = {...this, data: (value) => {
        reason = value?.messageKey;
        this.data(value);
      }};
      const passes = evaluate.call(report, element, ...rest);
      if (passes || UNMEASURABLE.includes(reason)) {
        passed.add(look);
        added.push(look);
      }
      return passes;
    };
  }

  // Elements that were there for the run before, all of whose colors have passed since.
  const colorsHavePassed = () => [...document.querySelectorAll("*")].every((element) => {
    const names = measured.get(element);
    return names && [...names].every((name) => passed.has(`${name}:${lookOf(element)}`));
  });

  const markupOf = (row) => row.outerHTML
    .replace(VALUE, ' $1="…"').replace(/>\s+</g, "><").replace(/>[^<]+</g, ">…<");

  // Rows whose markup is that of an earlier one.
  const twinsIn = (body) => {
    const kinds = new Set();
    return [...body.rows].filter((row) => kinds.size === kinds.add(markupOf(row)).size);
  };

  /**
   * Return the violations of all rules, or of those of colors, and the looks that have passed.
   *
   * The rules of colors alone are for a document that has had all: only its colors may have changed.
   */
  globalThis.runAxe = async (colorsOnly, looksBefore) => {
    [passed, added] = [new Set(looksBefore), []];
    [styles, placed, looks] = [new Map(), new Map(), new Map()];
    if (colorsOnly && colorsHavePassed()) return {violations: [], passed: []};
    if (!colorsOnly) measured = new Map();
    for (const element of document.querySelectorAll("*")) remembered(measured, element, () => new Set());
    const exclude = [...document.querySelectorAll("tbody")].flatMap(twinsIn);
    const options = {resultTypes: ["violations"], preload: false};
    if (colorsOnly) options.runOnly = {type: "rule", values: COLORS};
    const {violations} = await axe.run({include: [document.documentElement], exclude}, options);
    return {violations, passed: added};
  };
})();
