// Texts of scripts in the language of the page. English is as they are written here; what others have is
// made of the same catalogue as the server's (app/console/translations).

const LANGUAGE = document.documentElement.lang;
const texts = LANGUAGE === "en" ? {} : (await import(`./texts.${LANGUAGE}.js`)).default;

/** For dates and times: in English, the browser's own way to write them. */
export const LOCALE = LANGUAGE === "en" ? undefined : LANGUAGE;

/** Return a text with its values: `%(name)s` is one. */
export function gettext(message, values = {}) {
  return filled(texts[message] ?? message, values);
}

/** Return the text for a number of things. */
export function ngettext(one, many, number, values = {}) {
  return filled(texts[one] ?? (number === 1 ? one : many), values);
}

/** Return a text as it is: one for the catalogue, which `gettext` is given where it is shown. */
export function noop(message) {
  return message;
}

function filled(text, values) {
  return text.replace(/%\((\w+)\)s/g, (_, name) => values[name]);
}
