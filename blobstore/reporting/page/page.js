"use strict";
// Everything on this page comes from the report: its text above, and the block of packed data.

const PAGE_ROWS = matchMedia("(max-width: 40rem)").matches ? 15 : 50;
const PRINTED_ROWS = 5000;
const PAPER = { width: 680, height: 453 };  // 180 by 120 mm, as the style sheet prints the map
const $ = (id) => document.getElementById(id);

async function unpack(id) {
  const raw = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;  // text only: nothing in a key is ever markup
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function size(nbytes) {
  let value = nbytes;
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (value < 999.5) return unit === "B" ? `${value} B` : `${Number(value.toPrecision(3))} ${unit}`;
    value /= 1000;
  }
  return `${Number(value.toPrecision(3))} TB`;
}

const pen = document.createElement("canvas").getContext("2d");

function wide(text) {
  return pen.measureText(text).width;
}

// Both ends of a name that is too long, since the end tells a parameter and the start a file; nothing if little is left.
function short(text, width) {
  if (text.length < 400 && wide(text) <= width) return text;
  let most = Math.min(text.length - 1, Math.floor(width / 4));
  for (; most >= 8; most -= 1) {
    const tail = Math.ceil((most - 1) / 2);
    const cut = `${text.slice(0, most - 1 - tail)}\u2026${text.slice(text.length - tail)}`;
    if (wide(cut) <= width) return cut;
  }
  return "";
}

// ---------------------------------------------------------------------------------------------------- commands

const command = {
  // A button that copies, and one that unfolds what is longer than a line or two.
  dress(box) {
    const code = box.querySelector("code");
    const tools = element("div", undefined, { class: "tools" });
    const copy = element("button", "Copy", { type: "button", class: "copy" });
    copy.addEventListener("click", async () => {
      copy.textContent = (await this.copy(code)) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    });
    tools.append(copy);
    if (code.textContent.length > 160) {
      const fold = element("button", "Show all", { type: "button", class: "fold", "aria-expanded": "false" });
      box.classList.add("folded");
      fold.addEventListener("click", () => {
        const folded = box.classList.toggle("folded");
        fold.setAttribute("aria-expanded", String(!folded));
        fold.textContent = folded ? "Show all" : "Fold";
      });
      tools.append(fold);
    }
    box.append(tools);
  },

  async copy(code) {
    try {
      await navigator.clipboard.writeText(code.textContent);
      return true;
    } catch {  // not allowed, or no clipboard without a secure origin
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      return document.execCommand("copy");
    }
  },
};

// ----------------------------------------------------------------------------------------------------- treemap

const HEAD = 17;  // the height of a container's name
const GROUPED = 12;  // the tensors of a file with more are grouped by modules
const MODULES = 8;  // of which a name may be in this many
const CONTENT = /^tensor\.[0-9a-f]{32}/;

const map = {
  build(data) {
    this.data = data;
    this.order = [...Object.keys(data.words), "structure", "stays"];
    this.nodes = [];
    const root = this.add(null, "all files");
    const folders = new Map([["", root]]);
    const folder = (path) => {
      if (!folders.has(path)) {
        const cut = path.lastIndexOf("/");
        folders.set(path, this.add(folder(path.slice(0, Math.max(cut, 0))), path.slice(cut + 1)));
      }
      return folders.get(path);
    };
    const files = data.files.map((file) => {
      const cut = file.name.lastIndexOf("/");
      const made = this.add(folder(file.name.slice(0, Math.max(cut, 0))), file.name.slice(cut + 1));
      return Object.assign(made, { file: file.format, filter: file.name });
    });
    const many = new Map();
    data.blobs.forEach((blob) => many.set(blob.file, (many.get(blob.file) || 0) + 1));
    const modules = new Map();
    // layers.0.attention.weight is in layers.0.attention, and so on; keys made of contents have no parts
    const module = (file, parts) => {
      if (!parts.length) return files[file];
      const path = `${file} ${parts.join(".")}`;
      if (!modules.has(path)) {
        const made = this.add(module(file, parts.slice(0, -1)), parts.at(-1));
        modules.set(path, Object.assign(made, { module: parts.join("."), of: file }));
      }
      return modules.get(path);
    };
    data.blobs.forEach((blob) => {
      const split = many.get(blob.file) > GROUPED && !CONTENT.test(blob.name);
      const parts = split ? blob.name.split(".", MODULES + 1) : [blob.name];
      const last = parts.pop();
      const made = this.add(module(blob.file, parts), parts.length === MODULES ? blob.name : last);
      const rest = blob.nbytes - Object.values(blob.goes).reduce((sum, nbytes) => sum + nbytes, 0);
      made.mix = { ...blob.goes, [blob.kind === "structure" ? "structure" : "stays"]: rest };
      Object.assign(made, { value: blob.nbytes, blob });
    });
    this.sum(root);
    this.open(root);
    const draw = () => { if (!this.paper) this.draw(); };
    new ResizeObserver(draw).observe($("map"));
  },

  add(parent, label) {
    const node = { id: this.nodes.length, parent, label, children: [], value: 0, mix: {}, files: 0 };
    if (parent) parent.children.push(node);
    this.nodes.push(node);
    return node;
  },

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
    }
    for (const child of node.children) {
      this.sum(child);
      node.value += child.value;
      node.files += child.files;
      for (const [kind, nbytes] of Object.entries(child.mix)) node.mix[kind] = (node.mix[kind] || 0) + nbytes;
    }
    if (node.file) node.files = 1;
    node.children.sort((a, b) => b.value - a.value);
    this.gather(node);
  },

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
    const rest = Object.assign(this.add(null, `${gone.length} smaller ones`), { parent: node });
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
    const tiles = this.squarify(this.level.children, 0, 0, box.width, box.height)
      .map((place) => this.tile(place, 1));
    $("map").replaceChildren(...tiles);
    this.mark(focused);
  },

  tile(place, depth) {
    const { node, width, height } = place;
    const opens = node.children.length > 0;
    const made = element(depth === 1 ? "button" : "span", undefined, { class: opens ? "tile opens" : "tile", "data-id": node.id });
    if (depth === 1) made.type = "button";
    made.title = this.describe(node);
    Object.assign(made.style, {
      left: `${place.x}px`, top: `${place.y}px`, width: `${width}px`, height: `${height}px` });
    if (depth === 1) made.setAttribute("aria-label", this.describe(node));
    const inner = { x: 2, y: HEAD, width: width - 4, height: height - HEAD - 2 };
    if (opens && depth < 3 && width >= 84 && height >= 64) {
      made.append(this.words(node, width, 1, "head"));
      for (const child of this.squarify(node.children, inner.x, inner.y, inner.width, inner.height)) {
        if (child.width * child.height >= 6) made.append(this.tile(child, depth + 1));
      }
      return made;
    }
    const solid = this.paint(made, node);
    const lines = height >= 34 ? 2 : height >= 16 ? 1 : 0;
    if (lines && width >= 30) made.append(this.words(node, width, lines, solid ? "" : "chip"));
    return made;
  },

  // The name, and the size in the next line or behind it; nothing where nothing fits.
  words(node, width, lines, kind) {
    const made = element("span", undefined, { class: `words ${kind}` });
    pen.font = `${kind === "head" ? "600 " : ""}12px ${this.font}`;
    const room = width - 9;
    const nbytes = size(node.value);
    if (lines === 1) {
      const beside = room - wide(`  ${nbytes}`);
      const label = wide(node.label) <= beside || kind === "head" ? short(node.label, beside) : "";
      made.append(label || short(node.label, room));
      if (label) made.append(element("i", `  ${nbytes}`));
    } else {
      const label = short(node.label, room);
      made.append(label);
      if (wide(nbytes) <= room) made.append(label ? "\n" : "", element("i", nbytes));
    }
    return made.textContent ? made : "";
  },

  // One color for one kind; of several, as much of the width as each has of the bytes.
  paint(tile, node) {
    const parts = this.order.filter((kind) => node.mix[kind]).map((kind) => [kind, node.mix[kind] / node.value]);
    const main = parts.find(([, share]) => share >= 0.985);
    if (main) {
      tile.style.background = `var(--c-${main[0]})`;
      tile.style.color = `var(--i-${main[0]})`;
      return true;
    }
    let from = 0;
    const stops = parts.map(([kind, share]) => {
      const stop = `var(--c-${kind}) ${(from * 100).toFixed(2)}% ${((from + share) * 100).toFixed(2)}%`;
      from += share;
      return stop;
    });
    tile.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    return false;
  },

  describe(node) {
    const goes = Object.keys(this.data.words).filter((kind) => node.mix[kind]);
    const waste = goes.map((kind) => `${this.data.words[kind]} ${size(node.mix[kind])}`).join(", ") || "all of it stays";
    const inside = node.blob ? node.blob.file : node.of;
    const within = inside === undefined ? "" : `${this.data.files[inside].name}: `;
    const label = node.blob ? node.blob.name : node.module !== undefined ? node.module : node.label;
    const facts = [size(node.value)];
    if (node.blob) facts.push(this.data.regions[node.blob.kind], [node.blob.type, node.blob.shape].filter(Boolean).join(" "));
    else if (node.file) facts.push(node.file);
    else if (node.files) facts.push(`${node.files} file${node.files === 1 ? "" : "s"}`);
    if (!node.parent) return `${node.label}: ${facts.join(", ")}`;  // the legend has the rest
    return `${within}${label}: ${facts.filter(Boolean).join(", ")}; ${waste}`;
  },

  // The way from the root to the level that is shown, each step a button.
  showPath() {
    const path = [];
    for (let at = this.level; at; at = at.parent) path.unshift(at);
    $("map-path").replaceChildren(...path.map((node) => {
      const button = element("button", node.label, { type: "button" });
      if (node === this.level) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => this.open(node));
      return button;
    }));
  },

  open(level, chosen = null) {
    this.level = level;
    this.chosen = chosen;
    this.draw();
    this.showPath();
    this.tell();
  },

  // Of all tiles one takes part in the order of Tab; it is the chosen one, or else the first.
  mark(focus) {
    const tiles = [...$("map").children];
    const chosen = tiles.find((tile) => this.chosen && Number(tile.dataset.id) === this.chosen.id);
    tiles.forEach((tile, i) => {
      tile.tabIndex = (chosen ? tile === chosen : i === 0) ? 0 : -1;
      tile.classList.toggle("chosen-tile", tile === chosen);
    });
    if (focus && tiles.length) (chosen || tiles[0]).focus({ preventScroll: true });
  },

  choose(node, focus) {
    this.chosen = node;
    this.mark(focus);
    this.tell();
  },

  tell() {
    const node = this.chosen || this.level;
    $("map-chosen").textContent = this.describe(node);
  },

  key(event) {
    const tiles = this.level.children;
    const at = tiles.indexOf(this.chosen);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) this.choose(tiles[at < 0 ? (step > 0 ? 0 : tiles.length - 1) : (at + step + tiles.length) % tiles.length], true);
    else if (event.key === "Home" || event.key === "End") this.choose(tiles.at(event.key === "Home" ? 0 : -1), true);
    else if ((event.key === "Backspace" || event.key === "Escape") && this.level.parent) this.open(this.level.parent, this.level);
    else return;
    event.preventDefault();
  },

  listen() {
    $("map").addEventListener("keydown", (event) => this.key(event));
    $("map").addEventListener("click", (event) => {
      const tile = event.target.closest("#map > .tile");  // a step at a time, however deep the pointer is
      if (!tile) return;
      const node = this.nodes[Number(tile.dataset.id)];
      if (node.children.length) this.open(node);
      else this.choose(node, true);
    });
    $("map-table").addEventListener("click", () => {
      const node = this.chosen || this.level;
      if (node.blob) table.find(`${this.data.files[node.blob.file].name} ${node.blob.name}`);
      else if (node.module !== undefined) table.find(`${this.data.files[node.of].name} ${node.module}.`);
      else if (node.filter !== undefined) table.find(node.filter);
      else {
        const path = [];
        for (let at = node; at.parent; at = at.parent) if (!at.label.endsWith(" smaller ones")) path.unshift(at.label);
        table.find(path.length ? `${path.join("/")}${node.file ? "" : "/"}` : "");
      }
    });
  },
};

// ------------------------------------------------------------------------------------------------------- table

const FINDINGS = [
  { name: "Kind", text: (row) => row.words, class: "kind", kind: (row) => row.kind, detail: (row) => row.detail },
  { name: "Adds to total", number: (row) => row.counted },
  { name: "Saves alone", number: (row) => row.saves },
  { name: "Type", text: (row) => row.type, class: "fact" },
  { name: "Shape", text: (row) => row.shape, class: "fact" },
  { name: "Where", text: (row) => row.where.join("\n"), class: "places" },
  { name: "What to do", text: (row) => row.command || row.advice, code: (row) => row.is_code },
];
const BLOBS = [
  { name: "Name", text: (row) => row.name },
  { name: "Bytes", number: (row) => row.nbytes },
  { name: "Type", text: (row) => row.type, class: "fact" },
  { name: "Shape", text: (row) => row.shape, class: "fact" },
  { name: "File", text: (row) => row.path },
  { name: "At byte", number: (row) => row.start, exact: true },
  { name: "What", text: (row) => row.what },
  { name: "Finding", text: (row) => row.words, class: "kind", kind: (row) => row.finding },
];

const table = {
  start(data) {
    this.sets = {
      findings: { columns: FINDINGS, rows: data.findings, kind: (row) => row.kind, sort: 1, down: true },
      blobs: { columns: BLOBS, rows: data.blobs, kind: (row) => row.finding, sort: 1, down: true },
    };
    data.blobs.forEach((row) => {
      row.path = data.files[row.file].name;
      row.what = data.regions[row.kind];
      row.finding = Object.keys(data.words).find((kind) => row.goes[kind]) || "";
      row.words = row.finding ? data.words[row.finding] : "";
    });
    data.findings.forEach((row) => { row.words = data.words[row.kind]; });
    for (const set of Object.values(this.sets)) {
      set.rows.forEach((row) => {
        const texts = set.columns.filter((column) => column.text).map((column) => column.text(row));
        // a row of a finding names a few of its places and is found by all
        const places = row.files ? [...row.keys, ...row.files.map((f) => data.files[f].name)] : [];
        row.search = [...texts, row.detail || "", ...places].join("\n").toLowerCase();
      });
    }
    $("kind").append(element("option", "all", { value: "all" }));
    for (const kind of Object.keys(data.words)) {
      if (data.findings.some((row) => row.kind === kind)) $("kind").append(element("option", data.words[kind], { value: kind }));
    }
    $("kind").append(element("option", "no finding", { value: "" }));
    $("filter").addEventListener("input", () => this.fill());
    $("kind").addEventListener("change", () => this.fill());
    $("show-findings").addEventListener("click", () => this.show("findings"));
    $("show-blobs").addEventListener("click", () => this.show("blobs"));
    $("more").addEventListener("click", () => this.append(PAGE_ROWS));
    this.show("findings");
  },

  show(name) {
    this.set = this.sets[name];
    for (const other of Object.keys(this.sets)) $(`show-${other}`).setAttribute("aria-pressed", String(other === name));
    const row = element("tr");
    this.set.columns.forEach((column, i) => {
      const cell = element("th", undefined, { scope: "col", class: column.number ? "number" : "", "data-name": column.name });
      const button = element("button", column.name, { type: "button" });
      button.addEventListener("click", () => {
        const set = this.set;
        [set.down, set.sort] = set.sort === i ? [!set.down, i] : [Boolean(column.number), i];
        this.fill();
      });
      cell.append(button);
      row.append(cell);
    });
    $("rows").tHead.replaceChildren(row);
    this.fill();
  },

  // All bytes of something in the map.
  find(text) {
    $("filter").value = text;
    $("kind").value = "all";
    this.show("blobs");
    $("table").scrollIntoView();
    $("table").focus({ preventScroll: true });
  },

  fill() {
    const set = this.set;
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = $("kind").value;
    const value = set.columns[set.sort].number || set.columns[set.sort].text;
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    this.found = set.rows
      .filter((row) => words.every((word) => row.search.includes(word)) && (kind === "all" || set.kind(row) === kind))
      .sort((a, b) => compare(value(a), value(b)) * (set.down ? -1 : 1));
    [...$("rows").tHead.rows[0].cells].forEach((cell, i) => {
      if (i === set.sort) cell.setAttribute("aria-sort", set.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    $("rows").tBodies[0].replaceChildren();
    this.append(PAGE_ROWS);
    const bytes = this.found.reduce((sum, row) => sum + (row.counted ?? row.nbytes), 0);
    $("count").textContent = `${this.found.length.toLocaleString("en")} of ${set.rows.length.toLocaleString("en")}, ${size(bytes)}`;
  },

  append(number) {
    const body = $("rows").tBodies[0];
    const from = body.rows.length;
    for (const row of this.found.slice(from, from + number)) {
      const line = element("tr");
      for (const column of this.set.columns) {
        const name = column.number ? "number" : column.class || "";
        const cell = element("td", undefined, { class: name, "data-column": column.name });
        if (column.number) {
          const value = column.number(row);
          cell.textContent = column.exact ? value.toLocaleString("en") : size(value);
          cell.title = `${value.toLocaleString("en")} bytes`;
        } else if (column.kind) {
          if (column.kind(row)) {
            const text = element("span");
            const swatch = element("span", "", { class: "swatch" });
            swatch.style.background = `var(--c-${column.kind(row)})`;
            text.append(swatch, " ", column.text(row));
            if (column.detail && column.detail(row)) text.append(element("span", column.detail(row), { class: "detail" }));
            cell.append(text);
          }
        } else if (column.code && column.code(row)) {
          const box = element("div", undefined, { class: "command" });
          const code = element("pre");
          code.append(element("code", column.text(row)));
          box.append(code);
          command.dress(box);
          cell.append(box);
        } else if (column.text(row)) {
          const text = element("span");
          column.text(row).split("\n").forEach((part, i) => text.append(...(i ? [element("br"), part] : [part])));
          cell.append(text);
        }
        line.append(cell);
      }
      body.append(line);
    }
    $("more").hidden = body.rows.length >= this.found.length;
  },
};

// ------------------------------------------------------------------------------------------------------- paper

const paper = {
  // On paper nothing can be opened or scrolled: everything is there.
  begin() {
    map.paper = PAPER;
    map.draw();
    this.shown = $("rows").tBodies[0].rows.length;
    table.append(PRINTED_ROWS - this.shown);
    const left = table.found.length - $("rows").tBodies[0].rows.length;
    $("cut").hidden = left <= 0;
    $("cut").textContent = `and ${left.toLocaleString("en")} more rows, which are in the JSON`;
    this.closed = [...document.querySelectorAll("details:not([open])")];
    this.closed.forEach((details) => { details.open = true; });
  },

  end() {
    map.paper = null;
    map.draw();
    const rows = [...$("rows").tBodies[0].rows];
    rows.slice(this.shown).forEach((row) => row.remove());
    $("more").hidden = rows.length <= this.shown && $("more").hidden;
    $("cut").hidden = true;
    this.closed.forEach((details) => { details.open = false; });
  },
};

// ------------------------------------------------------------------------------------------------------- start

async function start() {
  document.querySelectorAll("header .command").forEach((box) => command.dress(box));
  const data = JSON.parse(await unpack("data"));
  table.start(data);
  if (data.blobs.length) {
    map.build(data);
    map.listen();
  } else {
    $("map-section").hidden = true;
  }
  window.addEventListener("beforeprint", () => { if (map.nodes) paper.begin(); });
  window.addEventListener("afterprint", () => { if (map.nodes) paper.end(); });
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  const notice = element("p", `This browser cannot draw the report: ${error}`, { class: "notice" });
  document.querySelector("main").prepend(notice);
  throw error;
});
