// What the map shows, level by level: the folders, files, modules and blobs that the data has.

class Tree {
  // Rows of the data say how many rows before them is what they are in, a label, and of a file or a blob how much greater
  // its number is than the last one.
  constructor(files, folders, blobs, when = "") {
    this.files = files;
    this.nodes = [];
    this.leaves = new Map();  // from the number of a blob to the node that shows it
    this.root = this.add(null, `all files${when && ` ${when}`}`);
    this.grow(this.root, folders, (node, f) => { if (f !== undefined) this.fill(node, f, blobs); });
    this.sum(this.root);
    for (const leaf of this.inside(this.root)) this.leaves.set(leaf.blob.id, leaf);
  }

  grow(top, rows, dress) {
    const made = [top];
    let last = 0;
    for (const [back, label, more] of rows) {
      const node = this.add(made[made.length - back], label);
      made.push(node);
      if (more !== undefined) last += more;
      dress(node, more === undefined ? undefined : last);
    }
  }

  // A file, whose blobs may have other findings after a command.
  fill(top, f, blobs) {
    const file = this.files[f];
    Object.assign(top, { file: file.format, filter: file.name, parameters: file.parameters });
    this.grow(top, file.inside, (node, id) => {
      if (id === undefined) {
        const above = node.parent.module;
        Object.assign(node, { module: above === undefined ? node.label : `${above}.${node.label}`, of: f });
        return;
      }
      const now = blobs[id];
      const blob = now.file === f && !file.goes ? now : { ...now, file: f, goes: file.goes ? file.goes[id] || {} : now.goes };
      node.mix = { ...blob.goes };
      const rest = Object.values(blob.goes).reduce((left, nbytes) => left - nbytes, blob.nbytes);
      node.mix[blob.kind === "structure" ? "structure" : "stays"] = rest;
      Object.assign(node, { value: blob.nbytes, blob });
    });
  }

  add(parent, label) {
    const node = { id: this.nodes.length, parent, label, children: [], value: 0, mix: {}, files: 0 };
    if (parent) parent.children.push(node);
    this.nodes.push(node);
    return node;
  }

  // Sizes and colors from the bottom up.
  sum(node) {
    for (const child of node.children) {
      this.sum(child);
      node.value += child.value;
      node.files += child.files;
      for (const kind in child.mix) node.mix[kind] = (node.mix[kind] || 0) + child.mix[kind];
    }
    if (node.file) node.files = 1;
    node.children.sort((a, b) => b.value - a.value);
    this.gather(node);
  }

  // A long tail becomes one tile that opens: what is after forty and below a sixth of the whole, or after four hundred.
  gather(node) {
    let keep = node.children.length;
    let tail = 0;
    while (keep > 40 && (keep > 400 || tail + node.children[keep - 1].value <= node.value / 6)) {
      keep -= 1;
      tail += node.children[keep].value;
    }
    const gone = node.children.slice(keep);
    if (gone.length < 2) return;
    node.children.length = keep;
    const rest = Object.assign(this.add(null, `${gone.length} smaller ones`), { parent: node, tail: true });
    node.children.push(rest);
    rest.children = gone;
    for (const child of gone) {
      child.parent = rest;
      rest.value += child.value;
      rest.files += child.files;
      for (const [kind, nbytes] of Object.entries(child.mix)) rest.mix[kind] = (rest.mix[kind] || 0) + nbytes;
    }
    this.gather(rest);
    node.children.sort((a, b) => b.value - a.value);
  }

  // The nodes of all blobs in a node, in the order in which they are drawn.
  inside(node) {
    const leaves = [];
    const visit = (at) => {
      if (at.blob && !at.children.length) leaves.push(at);
      at.children.forEach(visit);
    };
    visit(node);
    return leaves;
  }

  // The nodes from the root, without it, to a node.
  way(node) {
    const steps = [];
    for (let at = node; at.parent; at = at.parent) steps.unshift(at);
    return steps;
  }

  // The steps from the root to a node as text, and back; equal labels in one place are numbered.
  path(node) {
    return this.way(node).map((at) => this.step(at)).join("/");
  }

  step(node) {
    const same = node.parent.children.filter((child) => child.label === node.label);
    const number = same.length > 1 ? `~${same.indexOf(node) + 1}` : "";
    return (node.label.replace(/[%/~]/g, (c) => `%${c.charCodeAt(0).toString(16)}`) || "%") + number;
  }

  // The node of a path, or as much of it as there is.
  find(path) {
    let at = this.root;
    for (const step of path ? path.split("/") : []) {
      const next = at.children.find((child) => this.step(child) === step);
      if (!next) break;
      at = next;
    }
    return at;
  }
}
