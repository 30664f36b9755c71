// The list of the conversations that are kept on this device.

import {notify} from "./api.js";
import {confirmAction} from "./dialogs.js";
import {KeptChats} from "./kept_chats.js";
import {gettext} from "./language.js";
import {part} from "./playground_view.js";

const list = document.getElementById("chat-list");
const keep = document.getElementById("keep-chats");
const template = document.getElementById("chat-template");
const TITLE = 60; // characters

export class ChatList {
  #kept;
  #opened;

  /** `opened(chat)` is called for one that was chosen, with null for a new one. */
  constructor(owner, opened) {
    this.#kept = new KeptChats(owner);
    this.#opened = opened;
    keep.checked = this.#kept.wanted;
    keep.addEventListener("change", () => this.#choose());
    document.getElementById("new-chat").addEventListener("click", () => this.#open(null));
  }

  /** Keep the present state of a conversation, if that is wanted, and show all. */
  async show(current) {
    try {
      if (this.#kept.wanted && current.turns.length) await this.#kept.put(current);
      const chats = this.#kept.wanted ? await this.#kept.list() : [];
      list.replaceChildren(...chats.map((chat) => this.#item(chat, current)));
    } catch {
      notify(gettext("This browser cannot keep conversations: they end with this tab."), "bad");
    }
    this.current = current;
  }

  #item(chat, current) {
    const item = template.content.firstElementChild.cloneNode(true);
    const title = chat.turns[0].text.slice(0, TITLE) || gettext("An image");
    part(item, "open").textContent = title;
    if (chat.id === current.id) part(item, "open").setAttribute("aria-current", "true");
    part(item, "open").addEventListener("click", () => this.#open(chat));
    part(item, "delete").setAttribute("aria-label", gettext("Delete %(name)s", {name: title}));
    part(item, "delete").addEventListener("click", async () => {
      await this.#kept.remove(chat.id);
      if (chat.id === this.current.id) this.#open(null);
      else this.show(this.current);
    });
    return item;
  }

  #open(chat) {
    document.getElementById("chats").hidePopover();
    this.#opened(chat);
  }

  async #choose() {
    const text = gettext("Those that were kept are deleted from this device.");
    const title = gettext("Keep no conversations?");
    if (!keep.checked && !await confirmAction({title, text, action: gettext("Delete them"), danger: true})) {
      keep.checked = true;
      return;
    }
    await this.#kept.want(keep.checked);
    await this.show(this.current);
  }
}
