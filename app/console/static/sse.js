// Server-Sent Events from pieces of text, as they arrive.

export class SseParser {
  #rest = ""; // a line that is not complete
  #data = []; // of the event that is not complete

  /** Take a piece of a stream; return the data of the events that it completes. Comments are skipped. */
  push(piece) {
    const text = this.#rest + piece;
    const events = [];
    let start = 0;
    for (let end = nextBreak(text, start); end !== -1; end = nextBreak(text, start)) {
      this.#line(text.slice(start, end), events);
      start = end + (text.startsWith("\r\n", end) ? 2 : 1);
    }
    this.#rest = text.slice(start);
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length) events.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

// A carriage return at the end may be half of a line break: it waits for the next piece.
function nextBreak(text, start) {
  for (let at = start; at < text.length; at++) {
    if (text[at] === "\n") return at;
    if (text[at] === "\r") return at + 1 < text.length ? at : -1;
  }
  return -1;
}

/** Yield the data of each event of a Response, decoded as UTF-8. */
export async function* eventsOf(response) {
  const parser = new SseParser();
  // Read here, without a TextDecoderStream: a connection that breaks empties the queue between both,
  // and with it the event that says why.
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, {stream: true}));
    }
  } finally {
    await reader.cancel().catch(() => {}); // a reader that is let go ends the request
  }
}
