// Conversations that stay on this device, where the visitor wants that: in IndexedDB, for each key apart.

const DATABASE = "vllm-gateway";
const STORE = "chats";

export class KeptChats {
  /** `owner` is the ID of the session's key: another's conversations are not shown. */
  constructor(owner) {
    this.owner = owner;
  }

  get #choice() {
    return `keep-chats ${this.owner}`;
  }

  get wanted() {
    return localStorage.getItem(this.#choice) === "yes";
  }

  /** Keep conversations from now on, or no longer: then those that were kept are deleted. */
  async want(yes) {
    if (yes) {
      localStorage.setItem(this.#choice, "yes");
      return;
    }
    localStorage.removeItem(this.#choice);
    for (const {id} of await this.list()) await this.remove(id);
  }

  /** Return all of this key, the newest first. */
  async list() {
    const all = await this.#run("readonly", (store) => store.getAll());
    return all.filter(({owner}) => owner === this.owner).sort((one, other) => other.at - one.at);
  }

  /** Keep a conversation, in place of an earlier state of it. */
  put({id, columns, turns}) {
    const chat = {id, owner: this.owner, at: Date.now(), columns, turns};
    return this.#run("readwrite", (store) => store.put(structuredClone(chat)));
  }

  remove(id) {
    return this.#run("readwrite", (store) => store.delete(id));
  }

  async #run(mode, action) {
    const opening = indexedDB.open(DATABASE, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, {keyPath: "id"});
    const database = await settled(opening);
    try {
      return await settled(action(database.transaction(STORE, mode).objectStore(STORE)));
    } finally {
      database.close();
    }
  }
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
