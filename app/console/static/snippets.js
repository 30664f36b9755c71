// A request as a command or a program that sends exactly it. Pure.

// Fields that OpenAI's Python package takes by name; it sends all others as `extra_body`.
const NAMED = new Set([
  "model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed",
  "stop", "presence_penalty", "frequency_penalty", "response_format", "tools", "tool_choice",
]);
const INDENT = "  ";

/** Return a command for a POSIX shell. The key is in the environment, as API_KEY. */
export function curlOf(url, body) {
  // The end of a quoted here-document is a line that JSON cannot have; nothing in it is expanded.
  return [
    `curl -N ${shellQuoted(url)} \\`,
    `${INDENT}-H "Authorization: Bearer $API_KEY" \\`,
    `${INDENT}-H 'Content-Type: application/json' \\`,
    `${INDENT}--data-binary @- <<'JSON'`,
    JSON.stringify(body, null, INDENT),
    "JSON",
    "",
  ].join("\n");
}

/** Return a program for OpenAI's Python package. */
export function pythonOf(url, body) {
  const named = Object.entries(body).filter(([name]) => NAMED.has(name));
  const extra = Object.entries(body).filter(([name]) => !NAMED.has(name));
  if (extra.length) named.push(["extra_body", Object.fromEntries(extra)]);
  const given = named.map(([name, value]) => `    ${name}=${pythonLiteral(value, "    ")},`);
  const base = url.replace(/\/chat\/completions$/, "");
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${pythonLiteral(base)}, api_key=os.environ["API_KEY"])`,
    "stream = client.chat.completions.create(",
    ...given,
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
    "print()",
    "",
  ].join("\n");
}

/** Return a module for Node.js. */
export function javascriptOf(url, body) {
  return [
    `const response = await fetch(${JSON.stringify(url)}, {`,
    `${INDENT}method: "POST",`,
    `${INDENT}headers: {`,
    `${INDENT}${INDENT}"Authorization": \`Bearer \${process.env.API_KEY}\`,`,
    `${INDENT}${INDENT}"Content-Type": "application/json",`,
    `${INDENT}},`,
    `${INDENT}body: JSON.stringify(${JSON.stringify(body, null, INDENT).replaceAll("\n", `\n${INDENT}`)}),`,
    "});",
    "if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);",
    "for await (const text of response.body.pipeThrough(new TextDecoderStream())) {",
    `${INDENT}process.stdout.write(text);`,
    "}",
    "",
  ].join("\n");
}

/** Return a text as one word of a POSIX shell. */
export function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Return a JSON value as Python writes it. */
export function pythonLiteral(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value); // JSON's escapes are Python's too
  const inner = `${indent}    `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const items = Array.isArray(value)
    ? value.map((item) => pythonLiteral(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${pythonLiteral(item, inner)}`);
  if (!items.length) return open + close;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}
