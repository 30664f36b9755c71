// The field for messages: its images, and the keys that send.

import {notify} from "./api.js";
import {gettext} from "./language.js";
import {image} from "./playground_view.js";

const MAX_IMAGE_BYTES = 8 * 2 ** 20;

export class Composer {
  #form = document.getElementById("composer");
  #thumbnails = document.getElementById("images");
  #images = [];

  /** `send(text, images)` returns whether the message was taken. */
  constructor(send) {
    const form = this.#form;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = form.elements.message.value;
      if (!text.trim() && !this.#images.length) return;
      if (!send(text, this.#images)) return;
      this.#images = [];
      this.#show();
      this.fill("");
    });
    form.elements.image.addEventListener("change", (event) => {
      this.#add(event.target.files);
      event.target.value = "";
    });
    form.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.#add(event.clipboardData.files);
    });
    // Dropped anywhere on the page: a browser would open the file in its place.
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      this.#add(event.dataTransfer.files);
    });
  }

  /** Set the text, and the cursor behind it. */
  fill(text) {
    const {message} = this.#form.elements;
    message.value = text;
    message.focus();
  }

  #add(files) {
    for (const file of files) {
      if (!file.type.startsWith("image/") || file.size > MAX_IMAGE_BYTES) {
        notify(gettext("%(name)s: an image of up to 8 MiB, please.", {name: file.name}), "bad");
        continue;
      }
      const reader = new FileReader();
      reader.addEventListener("load", () => {
        this.#images.push(reader.result);
        this.#show();
      });
      reader.readAsDataURL(file);
    }
  }

  #show() {
    this.#thumbnails.replaceChildren(...this.#images.map((url, at) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "thumbnail";
      button.setAttribute("aria-label", gettext("Remove image %(number)s", {number: at + 1}));
      button.append(image(url, at));
      button.addEventListener("click", () => {
        this.#images.splice(at, 1);
        this.#show();
      });
      return button;
    }));
  }
}

/** Enter in a message sends it; with Shift it breaks the line, and it belongs to an input method that composes. */
export function sendsOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target.tagName !== "TEXTAREA") return false;
  return ["message", "text"].includes(event.target.name) || event.ctrlKey || event.metaKey;
}
