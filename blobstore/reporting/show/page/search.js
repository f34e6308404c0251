// The search in the map: what has all words, in its file, name, type, shape or finding.

const search = {
  start(data) { this.data = data; },

  text: "",
  at: -1,  // which of the matches was gone to
  matches: [],  // leaves of the tree
  mixes: new Map(),  // of each of them and of what holds it: the bytes that were found, by kind

  get on() { return this.text !== ""; },

  find(text, tree) {
    this.text = text.trim();
    this.run(tree);
  },

  run(tree) {
    this.at = -1;
    this.matches = [];
    this.mixes = new Map();
    if (this.on) {
      const matches = matcher(this.text);
      this.matches = [...tree.leaves.values()].filter((leaf) => matches(this.said(leaf, tree)));
      this.matches.forEach((leaf) => this.add(leaf));
    }
    this.count();
  },

  said(leaf, tree) {
    if (leaf.said === undefined) {
      const { blob } = leaf;
      const kinds = Object.keys(blob.goes).map((kind) => this.data.words[kind]);
      const facts = [tree.files[blob.file].name, blob.name, blob.type, blob.shape, this.data.regions[blob.kind], ...kinds];
      leaf.said = facts.join("\n").toLowerCase();
    }
    return leaf.said;
  },

  add(leaf) {
    for (let at = leaf; at; at = at.parent) {
      if (!this.mixes.has(at)) this.mixes.set(at, {});
      const mix = this.mixes.get(at);
      for (const [kind, nbytes] of Object.entries(leaf.mix)) mix[kind] = (mix[kind] || 0) + nbytes;
    }
  },

  count() {
    const nbytes = this.matches.reduce((sum, leaf) => sum + leaf.value, 0);
    const at = this.at < 0 ? "" : `${(this.at + 1).toLocaleString("en")} of `;
    $("map-count").textContent = this.on ? `${at}${this.matches.length.toLocaleString("en")} found, ${size(nbytes)}` : "";
  },

  // Of a node the bytes that count, by kind.
  mix(node) { return this.on ? this.mixes.get(node) || {} : node.mix; },

  misses(node) { return this.on && !this.mixes.has(node); },

  next(step) {
    const number = this.matches.length;
    const from = this.at < 0 && step < 0 ? 0 : this.at;
    return this.go(number ? (from + step + number) % number : -1);
  },

  // A match by its number; null if there is no such.
  go(at) {
    this.at = at in this.matches ? at : -1;
    this.count();
    return this.matches[this.at] || null;
  },
};
