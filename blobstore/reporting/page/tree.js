// Folders, files, the modules of a model, and blobs: what the map shows, level by level.

const GROUPED = 12;  // the tensors of a file with more are grouped by modules
const MODULES = 8;  // of which a name may be in this many
const CONTENT = /^tensor\.[0-9a-f]{32}/;

class Tree {
  // Files with a name, a size and a format, and blobs with the index of their file; of the files now, or after commands.
  constructor(files, blobs, when = "") {
    this.files = files;
    this.nodes = [];
    this.leaves = new Map();  // from the number of a blob to the node that shows it
    this.root = this.add(null, `all files${when && ` ${when}`}`);
    const folders = new Map([["", this.root]]);
    const folder = (path) => {
      if (!folders.has(path)) {
        const cut = path.lastIndexOf("/");
        folders.set(path, this.add(folder(path.slice(0, Math.max(cut, 0))), path.slice(cut + 1)));
      }
      return folders.get(path);
    };
    const made = files.map((file) => {
      const cut = file.name.lastIndexOf("/");
      const node = this.add(folder(file.name.slice(0, Math.max(cut, 0))), file.name.slice(cut + 1));
      return Object.assign(node, { file: file.format, filter: file.name });
    });
    const many = new Map();
    blobs.forEach((blob) => many.set(blob.file, (many.get(blob.file) || 0) + 1));
    // layers.0.attention.weight is in layers.0.attention, and so on; keys made of contents have no parts
    const module = (file, above, part) => {
      above.modules ??= new Map();
      if (!above.modules.has(part)) {
        const node = this.add(above, part);
        above.modules.set(part, node);
        Object.assign(node, { module: above.module === undefined ? part : `${above.module}.${part}`, of: file });
      }
      return above.modules.get(part);
    };
    blobs.forEach((blob) => {
      const { file, name } = blob;
      const split = many.get(file) > GROUPED && !CONTENT.test(name) && !name.split(".").includes("");
      const parts = split ? name.split(".", MODULES + 1) : [name];
      const last = parts.pop();
      const node = this.add(parts.reduce((above, part) => module(file, above, part), made[file]),
        parts.length === MODULES ? name : last);
      node.mix = { ...blob.goes };
      let rest = blob.nbytes;
      for (const kind in blob.goes) rest -= blob.goes[kind];
      node.mix[blob.kind === "structure" ? "structure" : "stays"] = rest;
      Object.assign(node, { value: blob.nbytes, blob });
    });
    this.sum(this.root);
    for (const leaf of this.inside(this.root)) this.leaves.set(leaf.blob.id, leaf);
  }

  add(parent, label) {
    const node = { id: this.nodes.length, parent, label, children: [], value: 0, mix: {}, files: 0 };
    if (parent) parent.children.push(node);
    this.nodes.push(node);
    return node;
  }

  // Sizes and colors from the bottom up. A folder with nothing but a folder in it becomes one with that, as does a
  // module with what is alone in it.
  sum(node) {
    while (node.parent && !node.file && node.children.length === 1 && !node.children[0].file) {
      const only = node.children[0];
      node.label = `${node.label}${node.module === undefined ? "/" : "."}${only.label}`;
      node.children = only.children;
      node.children.forEach((child) => { child.parent = node; });
      if (only.module !== undefined) node.module = only.module;
      if (only.blob) Object.assign(node, { blob: only.blob, value: only.value, mix: only.mix });
      only.blob = undefined;
    }
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
