// The models that the key may use, and how far those are that start.

import {api} from "./api.js";
import {gettext} from "./language.js";

const AGAIN_MS = 2000;

export class Models {
  #pending = null;

  /** `changed()` is called after each reading that differs from the one before. */
  constructor(changed) {
    this.rows = [];
    this.changed = changed;
  }

  find(name) {
    return this.rows.find((model) => model.name === name);
  }

  get chat() {
    return this.rows.filter(({forms}) => forms.includes("chat"));
  }

  /** Read the models; again later, while one of them starts. Throws ApiError. */
  async load() {
    const {models} = await api("/playground/models");
    const differs = JSON.stringify(models) !== JSON.stringify(this.rows);
    this.rows = models;
    clearTimeout(this.#pending);
    if (models.some(({starting}) => starting)) this.#pending = setTimeout(() => this.#try(), AGAIN_MS);
    if (differs) this.changed();
  }

  async #try() {
    try {
      await this.load();
    } catch { /* the gateway restarts, or the session has ended: a request says so */ }
  }

  /**
   * Return once a request to a model need not fail because it starts; read how far it is, while `waits()`.
   * A model on demand is loaded by the request itself, so that is sent meanwhile.
   */
  async untilStarted(name, waits) {
    while (waits()) {
      await this.#try();
      const model = this.find(name);
      if (!model || model.ready || (!model.starting && !model.on_demand)) return;
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }
}

/** Return how far the start of a model is, as text. */
export function startText({phase, step, left_s}) {
  const left = left_s === null || left_s < 0 ? "" : gettext("about %(duration)s left", {duration: `${Math.ceil(left_s)} s`});
  return [phase, step, left].filter(Boolean).join(", ");
}
