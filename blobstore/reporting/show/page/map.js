// The treemap of a tree, one level at a time.

const HEAD = 17;  // the height of a container's name
const LINE = 15;
const CHIP = 56;  // pixels of height for each line that hides stripes
const ROOMY = 40000;  // square pixels that a tile needs for what is in it, if it is deep already
const SHARES = 12;  // of a tile that several groups of copies are in, at least
const STRIPE = 8;  // pixels of width for each of more

const map = {
  start(data) {
    this.data = data;
    this.order = [...Object.keys(data.words), "structure", "stays"];
    this.trees = { "": new Tree(data.files, data.folders, data.blobs) };
    this.now = this.trees[""].root.value;
    this.tree = this.trees[""];
    this.level = this.tree.root;
    this.chosen = null;
    this.when = "";
    this.usual = copies.tellMore() ? "copies" : "kind";
    this.colors = this.usual;
    this.match = null;  // what the search went to; it may be deep in the chosen tile
    $("map-colors").hidden = !copies.groups.length;
    this.listen();
    this.fillWhen();
    new ResizeObserver(() => { if (!this.paper) this.draw(); }).observe($("map"));
  },

  // The tree of the files as they are (""), or after a command, by its number, or after "all".
  treeOf(when) {
    if (!this.trees[when]) {
      const after = this.data.after[when];
      const files = [...after.still.map((f) => this.data.files[f]), ...after.files.map((file) => ({ ...file, goes: after.goes }))];
      const name = when === "all" ? "after all commands" : `after command ${when}`;
      this.trees[when] = new Tree(files, after.folders, this.data.blobs, name);
    }
    return this.trees[when];
  },

  fillWhen() {
    const names = Object.keys(this.data.after);
    if (!names.length) return;
    const button = (when, text) => {
      const made = element("button", text, { type: "button", "data-when": when });
      made.addEventListener("click", () => this.showWhen(when));
      return made;
    };
    $("map-when").append(button("", `Now: ${size(this.now)}`), ...names.map((when) =>
      button(when, `After ${when}: ${size(this.data.after[when].bytes)}`)));
    $("map-when").hidden = false;
  },

  showWhen(when) {
    this.when = when;
    this.tree = this.treeOf(when);
    search.run(this.tree);
    this.open(this.tree.root);
  },

  // Rectangles of areas in proportion to the values, near to squares (Bruls, Huizing, van Wijk).
  squarify(nodes, x, y, width, height) {
    const placed = [];
    let left = nodes.reduce((sum, node) => sum + node.value, 0);
    let at = 0;
    while (at < nodes.length && width > 0 && height > 0 && left > 0) {
      const scale = (width * height) / left;
      const side = Math.min(width, height);
      let row = 0;
      let end = at;
      let worst = Infinity;
      while (end < nodes.length) {
        const sum = row + nodes[end].value;
        const thick = (sum * scale) / side;
        const bad = Math.max(...[nodes[at].value, nodes[end].value].map((value) => {
          const long = (value * scale) / thick;
          return Math.max(thick / long, long / thick);
        }));
        if (bad > worst) break;
        worst = bad;
        row = sum;
        end += 1;
      }
      const thick = (row * scale) / side;
      let along = 0;
      for (; at < end; at += 1) {
        const long = (nodes[at].value * scale) / thick;
        placed.push(width >= height
          ? { node: nodes[at], x, y: y + along, width: thick, height: long }
          : { node: nodes[at], x: x + along, y, width: long, height: thick });
        along += long;
      }
      if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
      left -= row;
    }
    return placed;
  },

  draw() {
    const box = this.paper || $("map").getBoundingClientRect();
    const focused = $("map").contains(document.activeElement);
    this.font = getComputedStyle(document.body).fontFamily;
    this.drawn = new Map();
    // after a command a byte has the area that it has now, so that what was saved stays empty
    const part = this.level === this.tree.root && this.now ? Math.min(this.level.value / this.now, 1) : 1;
    const depth = this.level.children.length > 1 ? 1 : 0;
    const tiles = this.squarify(this.level.children, 0, 0, box.width * part, box.height);
    $("map").replaceChildren(...tiles.map((place) => this.tile(place, depth, true)));
    if (part < 1) $("map").append(this.saved(box.width * part, box.width * (1 - part)));
    this.mark(focused);
  },

  saved(left, width) {
    const made = element("div", width > 60 ? `${size(this.now - this.level.value)} saved` : "", { class: "saved" });
    Object.assign(made.style, { left: `${left}px`, width: `${width}px` });
    return made;
  },

  tile(place, depth, top = false) {
    const { node, width, height } = place;
    const opens = node.children.length > 0;
    const made = element(top ? "button" : "span", undefined, { class: opens ? "tile opens" : "tile", "data-id": node.id });
    this.drawn.set(node, made);
    made.classList.toggle("dim", search.misses(node));
    Object.assign(made.style, {
      left: `${place.x}px`, top: `${place.y}px`, width: `${width}px`, height: `${height}px` });
    if (top) {
      made.type = "button";
      made.setAttribute("aria-label", this.describe(node));
    }
    const inner = { x: 2, y: HEAD, width: width - 4, height: height - HEAD - 2 };
    if (opens && width >= 84 && height >= 64 && (depth < 3 || width * height >= ROOMY)) {
      made.append(this.words(node, width, 1, "head"));
      for (const child of this.squarify(node.children, inner.x, inner.y, inner.width, inner.height)) {
        if (child.width * child.height >= 6) made.append(this.tile(child, depth + 1));
      }
      return made;
    }
    const solid = this.paint(made, node, width);
    const most = solid ? 3 : Math.ceil(height / CHIP);  // what is behind it is striped, and is to be seen
    const lines = Math.min(3, most, Math.floor((height - 4) / LINE));
    if (lines > 0 && width >= 30) made.append(this.words(node, width, lines, solid ? "" : "chip"));
    return made;
  },

  // The name, the shape and the size, in lines or side by side; nothing where nothing fits.
  words(node, width, lines, kind) {
    const made = element("span", undefined, { class: `words ${kind}` });
    pen.font = `${kind === "head" ? "600 " : ""}12px ${this.font}`;
    const room = width - 11;
    const nbytes = size(node.value);
    if (lines === 1) {
      const beside = room - wide(`  ${nbytes}`);
      const label = wide(node.label) <= beside || kind === "head" ? this.label(node, beside) : "";
      made.append(label || this.label(node, room));
      if (label) made.append(element("i", `  ${nbytes}`));
      return made.textContent ? made : "";
    }
    const blob = node.children.length ? undefined : node.blob;
    const shape = blob && blob.shape ? `${blob.shape} ${blob.type}` : "";
    const below = lines === 2 && shape && wide(`${shape}  ${nbytes}`) <= room ? [`${shape}  ${nbytes}`]
      : lines === 2 ? [nbytes] : [shape, nbytes].filter(Boolean);
    const label = this.label(node, room);
    made.append(label);
    let first = !label;
    for (const text of below.filter((line) => wide(line) <= room)) {
      made.append(first ? "" : "\n", element("i", text));
      first = false;
    }
    return made.textContent ? made : "";
  },

  // As much of a name as there is room for: a file's own without what all of its format end in.
  label(node, room) {
    const text = node.file && wide(node.label) > room ? node.label.replace(/\.[a-z]+$/, "") : node.label;
    return short(text, room);
  },

  // One color for one kind, or group of copies; of several, as much of the width as each has of the bytes.
  paint(tile, node, width) {
    const parts = this.shares(node, Math.max(SHARES, Math.floor(width / STRIPE)));
    const main = parts.find(([, share]) => share >= 0.985);
    if (main) {
      const kind = main[0];
      tile.style.background = this.color(kind);
      tile.style.color = typeof kind === "string" ? `var(--i-${kind})` : `var(--i-${kind.stays ? "pale" : "full"})`;
      return true;
    }
    let from = 0;
    const stops = parts.map(([kind, share]) => {
      const stop = `${this.color(kind)} ${(from * 100).toFixed(2)}% ${((from + share) * 100).toFixed(2)}%`;
      from += share;
      return stop;
    });
    tile.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    return false;
  },

  color(kind) {
    return typeof kind === "string" ? `var(--c-${kind})` : copies.color(kind.group, kind.stays);
  },

  // What a node consists of, with the share of each; during a search, of what was found, and of the rest.
  shares(node, most) {
    const parts = this.colors === "kind" ? this.byKind(node) : this.byCopies(node, most);
    const rest = 1 - parts.reduce((sum, [, share]) => sum + share, 0);
    return search.on && rest > 1e-9 ? [...parts, ["rest", rest]] : parts;
  },

  byKind(node) {
    const mix = search.mix(node);
    return this.order.filter((kind) => mix[kind]).map((kind) => [kind, mix[kind] / node.value]);
  },

  byCopies(node, most) {
    const plain = {};
    const grouped = new Map();
    for (const leaf of this.tree.inside(node)) {
      if (search.misses(leaf)) continue;
      const group = copies.of.get(leaf.blob.id);
      if (group) {
        const stays = (leaf.mix.stays || 0) * 2 > leaf.value;
        const key = `${group.id} ${stays}`;
        const sum = grouped.get(key) || { kind: { group, stays }, nbytes: 0 };
        sum.nbytes += leaf.value;
        grouped.set(key, sum);
      } else {
        for (const [kind, nbytes] of Object.entries(leaf.mix)) plain[kind] = (plain[kind] || 0) + nbytes;
      }
    }
    const sums = [...grouped.values()].sort((a, b) => b.nbytes - a.nbytes);
    sums.splice(most).forEach((sum) => { plain.many = (plain.many || 0) + sum.nbytes; });
    const parts = sums.map((sum) => [sum.kind, sum.nbytes / node.value]);
    for (const kind of ["many", ...this.order]) if (plain[kind]) parts.push([kind, plain[kind] / node.value]);
    return parts;
  },

  describe(node) {
    const goes = Object.keys(this.data.words).filter((kind) => node.mix[kind]);
    const waste = goes.map((kind) => `${this.data.words[kind]} ${size(node.mix[kind])}`).join(", ") || "all of it stays";
    const blob = node.children.length ? undefined : node.blob;
    const inside = blob ? blob.file : node.of;
    const within = inside === undefined ? "" : `${this.tree.files[inside].name}: `;
    const label = blob ? blob.name : node.module !== undefined ? node.module : node.label;
    const facts = [size(node.value)];
    if (blob) facts.push(this.data.regions[blob.kind], [blob.type, blob.shape].filter(Boolean).join(" "));
    else if (node.file) facts.push(node.file, node.parameters || "");
    else if (node.files) facts.push(`${node.files} file${node.files === 1 ? "" : "s"}`);
    if (!node.parent) return `${node.label}: ${facts.join(", ")}`;  // the legend has the rest
    const others = blob && !this.when ? copies.describe(blob) : "";
    return `${within}${label}: ${facts.filter(Boolean).join(", ")}; ${waste}${others}`;
  },

  // The way from the root to the level that is shown, each step a button.
  showPath() {
    const focused = $("map-path").contains(document.activeElement);
    $("map-path").replaceChildren(...[this.tree.root, ...this.tree.way(this.level)].map((node) => {
      const button = element("button", node.label, { type: "button" });
      if (node === this.level) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => this.open(node));
      return button;
    }));
    if (focused) $("map-path").lastChild.focus();
    $("map-when").querySelectorAll("button")
      .forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.when === this.when)));
    $("map-table").hidden = Boolean(this.when);  // the table has the files as they are
  },

  open(level, chosen = null) {
    this.show(level, chosen, null);
    address.save(true);
  },

  show(level, chosen, match) {
    Object.assign(this, { level, chosen, match });
    this.draw();
    this.showPath();
    this.tell();
  },

  // Of all tiles one takes part in the order of Tab; it is the chosen one, or else the first.
  mark(focus) {
    const tiles = [...$("map").querySelectorAll(":scope > .tile")];
    const chosen = this.drawn.get(this.chosen);
    tiles.forEach((tile, i) => {
      tile.tabIndex = (chosen ? tile === chosen : i === 0) ? 0 : -1;
      tile.classList.toggle("chosen-tile", tile === chosen && !this.match);
    });
    if (this.drawn.has(this.match)) this.drawn.get(this.match).classList.add("chosen-tile");
    this.lit = null;
    this.light(this.match || this.chosen);
    if (focus && tiles.length) (chosen || tiles[0]).focus({ preventScroll: true });
  },

  choose(node) {
    this.chosen = node;
    this.match = null;
    this.mark(true);
    this.tell();
    address.save(false);
  },

  tell(node) {
    $("map-chosen").textContent = this.describe(node || this.match || this.chosen || this.level);
  },

  // What is under the pointer, or what is chosen if it is nowhere.
  point(node) {
    this.light(node || this.match || this.chosen);
    this.tell(node);
  },

  // Light up what belongs to a tile: the innermost tiles that are drawn and show its copies.
  light(node) {
    if (this.lit === node) return;
    this.lit = node;
    $("map").querySelectorAll(".copy").forEach((tile) => tile.classList.remove("copy"));
    const own = node && this.drawn.get(node);
    if (!own) return;
    own.title = this.describe(node);
    for (const id of copies.related(this.tree.inside(node).map((leaf) => leaf.blob))) {
      let at = this.tree.leaves.get(id);
      while (at && !this.drawn.has(at)) at = at.parent;
      const tile = at && this.drawn.get(at);
      if (tile && !tile.contains(own) && !own.contains(tile)) tile.classList.add("copy");
    }
  },

  // The next of what was found, in its file, or as many levels deeper as it takes to be a tile.
  next(step) {
    const match = search.next(step);
    if (!match) return;
    const way = this.tree.way(match);
    let at = way.findIndex((node) => node.file);
    do {
      this.show(way[at], way[at + 1], match);
      at += 1;
    } while (!this.drawn.has(match));
    address.save(true);
  },

  find(text) {
    search.find(text, this.tree);
    this.match = null;
    this.draw();
    address.save(false);
  },

  // ---- colors

  showColors(colors) {
    this.colors = colors;
    for (const name of ["kind", "copies"]) $(`color-${name}`).setAttribute("aria-pressed", String(name === colors));
    $("legend").hidden = colors !== "kind";
    $("legend-copies").hidden = colors !== "copies";
    if (colors === "copies" && !$("legend-copies").children.length) $("legend-copies").append(...copies.legend());
  },

  // ---- events

  key(event) {
    const tiles = this.level.children;
    const at = tiles.indexOf(this.chosen);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) this.choose(tiles[at < 0 ? (step > 0 ? 0 : tiles.length - 1) : (at + step + tiles.length) % tiles.length]);
    else if (event.key === "Home" || event.key === "End") this.choose(tiles.at(event.key === "Home" ? 0 : -1));
    else if ((event.key === "Backspace" || event.key === "Escape") && this.level.parent) this.open(this.level.parent, this.level);
    else return;
    event.preventDefault();
  },

  nodeAt(event, selector) {
    const tile = event.target.closest(selector);
    return tile ? this.tree.nodes[Number(tile.dataset.id)] : null;
  },

  listen() {
    $("map").addEventListener("keydown", (event) => this.key(event));
    $("map").addEventListener("click", (event) => {
      const node = this.nodeAt(event, "#map > .tile");  // a step at a time, however deep the pointer is
      if (!node) return;
      if (node.children.length) this.open(node);
      else this.choose(node);
    });
    $("map").addEventListener("mouseover", (event) => this.point(this.nodeAt(event, "#map .tile")));
    $("map").addEventListener("mouseleave", () => this.point(null));
    $("map").addEventListener("focusin", (event) => this.light(this.match || this.nodeAt(event, "#map > .tile")));
    $("map-search").addEventListener("input", () => this.find($("map-search").value));
    $("map-search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape" && $("map-search").value) {
        $("map-search").value = "";
        this.find("");
      } else return;
      event.preventDefault();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
      $("map-search").focus();
      event.preventDefault();
    });
    for (const name of ["kind", "copies"]) {
      $(`color-${name}`).addEventListener("click", () => {
        this.showColors(name);
        this.draw();
        address.save(true);
      });
    }
    $("map-table").addEventListener("click", () => this.listInTable());
  },

  listInTable() {
    const node = this.match || this.chosen || this.level;
    if (node.blob) table.find(`${this.tree.files[node.blob.file].name} ${node.blob.name}`);
    else if (node.module !== undefined) table.find(`${this.tree.files[node.of].name} ${node.module}.`);
    else if (node.filter !== undefined) table.find(node.filter);
    else {
      const path = this.tree.way(node).filter((step) => !step.tail).map((step) => step.label);
      table.find(path.length ? `${path.join("/")}${node.file ? "" : "/"}` : "");
    }
  },

  // ---- the part of the address that is the map's

  state() {
    return {
      after: this.when,
      at: this.tree.path(this.level),
      tile: this.chosen && this.chosen.parent === this.level ? this.tree.step(this.chosen) : "",
      find: search.text,
      match: this.match ? String(search.at + 1) : "",
      color: this.colors === this.usual ? "" : this.colors,
    };
  },

  restore(settings) {
    const when = settings.get("after") || "";
    this.when = Object.hasOwn(this.data.after, when) ? when : "";
    this.tree = this.treeOf(this.when);
    const colors = settings.get("color");
    this.showColors(["kind", "copies"].includes(colors) ? colors : this.usual);
    $("map-search").value = settings.get("find") || "";
    search.find($("map-search").value, this.tree);
    const match = search.go(Number(settings.get("match")) - 1);
    const level = this.tree.find(settings.get("at") || "");
    const tile = settings.get("tile");
    this.show(level, (tile && level.children.find((child) => this.tree.step(child) === tile)) || null, match);
  },
};
