// The conversation and the settings of each column. They stay in this browser tab.

import {newSettings} from "./chat_request.js";

const PLACE = "playground";
export const MAX_COLUMNS = 4;
export const LETTERS = "ABCD";

export class Conversation {
  /** `owner` is the ID of the session's key: another's conversation is not shown. */
  constructor(owner, storage = sessionStorage) {
    this.owner = owner;
    this.storage = storage;
    this.id = newId();
    this.columns = [newSettings()];
    this.turns = []; // {text, images, answers}; answers[column] is a list of answers
    this.#load();
  }

  #load() {
    let kept;
    try {
      kept = JSON.parse(this.storage.getItem(PLACE));
    } catch { /* damaged: begin anew */ }
    if (kept?.owner !== this.owner) {
      this.storage.removeItem(PLACE);
      return;
    }
    this.#take(kept);
  }

  #take({id, columns, turns}) {
    this.id = id ?? newId();
    this.columns = columns.map((settings) => ({...newSettings(), ...settings}));
    this.turns = turns;
    for (const answer of this.answers()) {
      if (answer.state === "waiting" || answer.state === "streaming") answer.state = "stopped";
    }
  }

  /** Keep it; without its images if there is no room for them. */
  save() {
    const {id, owner, columns, turns} = this;
    const slim = turns.map((turn) => ({...turn, images: []}));
    for (const attempt of [turns, slim, []]) {
      try {
        this.storage.setItem(PLACE, JSON.stringify({id, owner, columns, turns: attempt}));
        return;
      } catch { /* the browser's bound, about 5 MB */ }
    }
  }

  /** Go on with a conversation that was kept; null: begin a new one with the settings of now. */
  open(chat) {
    this.#take(chat ?? {columns: this.columns, turns: []});
    this.save();
  }

  * answers() {
    for (const turn of this.turns) for (const steps of turn.answers) yield* steps ?? [];
  }

  /** Add a column like the last one. */
  addColumn() {
    this.columns.push({...this.columns.at(-1)});
    this.save();
  }

  removeColumn(column) {
    this.columns.splice(column, 1);
    for (const turn of this.turns) turn.answers.splice(column, 1);
    this.save();
  }

  /** Replace what follows the first `count` turns by a message; return its turn. */
  ask(count, text, images) {
    const turn = {text, images, answers: this.columns.map(() => [])};
    this.turns = [...this.turns.slice(0, count), turn];
    return turn;
  }
}

function newId() {
  return `${Date.now()}-${Math.random().toString(36).slice(2)}`;
}
