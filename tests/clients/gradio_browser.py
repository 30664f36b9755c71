"""Acts as a browser with two messages in Gradio's chat; runs in Gradio's environment.

The events are those of the page, in their order, the state between them is the server's, as when
somebody types. The chat's public API cannot be used for this: in Gradio 6 it keeps no history of
multimodal messages.
"""

import json
import sys
from typing import Any

from gradio_client import Client

# What follows when Enter is pressed: take the text, show it, ask the model, keep the conversation.
TAKE_TEXT, SHOW, ASK, KEEP = range(4)


def main(url: str, *messages: str) -> None:
    client = Client(url, verbose=False)
    chat: list[dict[str, Any]] = []
    for message in messages:
        client.predict({"text": message, "files": []}, fn_index=TAKE_TEXT)
        client.predict(chat, fn_index=SHOW)
        chat = client.predict(fn_index=ASK)
        client.predict(chat, fn_index=KEEP)
    print(json.dumps([["".join(p["text"] for p in m["content"]), m["role"]] for m in chat]))


main(*sys.argv[1:])
