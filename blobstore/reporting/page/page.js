"use strict";
// Everything on this page comes from the two blocks of text above: the report, and the plotting library.

const PAGE_ROWS = 50;
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

// The plotting library reads a little markup in its labels.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
// Both ends of a long name: the end tells a parameter, the start a file.
const short = (text, most) => (text.length > most ? `${text.slice(0, most / 2 - 1)}\u2026${text.slice(-most / 2)}` : text);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---------------------------------------------------------------------------------------------------- colors

const COLORS = {
  duplicate_files: "#d55e00", duplicate_methods: "#e69f00", duplicate_tied: "#cc79a7", duplicate_payload: "#a3472a",
  other_layout: "#0072b2", other_dtype: "#56b4e9", constant: "#009e73", contained: "#8f6bc9",
  near_duplicate: "#e3d33b", padding: "#8c8c8c", unreferenced: "#6b6b6b",
};

function color(kind) {
  if (kind === "") return style("--stays");
  if (kind === "structure") return style("--structure");
  return COLORS[kind];
}

// Black or white, whichever is read more easily on a color.
function ink(fill) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const part = parseInt(fill.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

// --------------------------------------------------------------------------------------------------- treemap

const map = {
  build(data) {
    // 0 is the root, then the files, then what is in them; beyond a number, small blobs of one kind are one
    const most = Math.max(40, Math.floor(2400 / Math.max(data.files.length, 1)));
    this.nodes = [{ label: "all files", parent: "", value: data.total, kind: "", text: data.headline, children: [] }];
    const add = (node) => {
      const id = this.nodes.push({ children: [], ...node }) - 1;
      this.nodes[node.parent].children.push(id);
      return id;
    };
    const files = data.files.map((file) => add({
      label: file.name, parent: 0, value: file.size, kind: "", text: `${file.format}, ${size(file.size)}` }));
    const blobs = data.files.map(() => []);
    data.blobs.forEach((blob) => blobs[blob.file].push(blob));
    blobs.forEach((of_file, f) => {
      of_file.sort((a, b) => b.nbytes - a.nbytes);
      const rest = new Map();
      of_file.forEach((blob, i) => {
        const kind = blob.finding || (blob.kind === "structure" ? "structure" : "");
        if (i < most) {
          const layout = blob.layout ? `, ${blob.layout}` : "";
          const text = `${size(blob.nbytes)} of ${data.regions[blob.kind]}${layout}; ${data.words[kind]}`;
          add({ label: blob.name, parent: files[f], value: blob.nbytes, kind, text });
        } else {
          const sum = rest.get(kind) || { number: 0, value: 0 };
          rest.set(kind, { number: sum.number + 1, value: sum.value + blob.nbytes });
        }
      });
      for (const [kind, sum] of rest) {
        const text = `${size(sum.value)}; ${data.words[kind]}`;
        add({ label: `${sum.number} smaller ones`, parent: files[f], value: sum.value, kind, text });
      }
    });
    this.nodes.forEach((node) => node.children.sort((a, b) => this.nodes[b].value - this.nodes[a].value));
    this.level = 0;
    this.chosen = -1;
    const used = new Set(this.nodes.filter((node) => node.children.length === 0).map((node) => node.kind));
    for (const kind of Object.keys(data.words)) {
      if (!used.has(kind)) continue;
      const item = element("li");
      item.append(element("span", "", { class: "swatch", "data-kind": kind }), element("span", data.words[kind]));
      $("legend").append(item);
    }
  },

  draw() {
    const nodes = this.nodes;
    const line = style("--back");
    const fills = nodes.map((node) => (node.children.length ? style("--stays") : color(node.kind)));
    const trace = {
      type: "treemap", branchvalues: "total", ids: nodes.map((_, i) => String(i)),
      labels: nodes.map((node) => plain(short(node.label, 22))), values: nodes.map((node) => node.value),
      parents: nodes.map((node) => String(node.parent)), customdata: nodes.map((node) => `<b>${plain(node.label)}</b><br>${plain(node.text)}`),
      hovertemplate: "%{customdata}<extra></extra>", texttemplate: nodes.map((_, i) => (i ? "%{label}<br>%{text}" : "")), textfont: { color: fills.map(ink) }, text: nodes.map((node) => size(node.value)),
      level: String(this.level), maxdepth: 3, tiling: { pad: 2 }, pathbar: { visible: false },
      marker: {
        colors: fills,
        line: {
          width: nodes.map((_, i) => (i === this.chosen ? 5 : 1)),
          color: nodes.map((_, i) => (i === this.chosen ? style("--text") : line)),
        },
      },
    };
    const layout = {
      margin: { l: 4, r: 4, t: 4, b: 4 }, uniformtext: { minsize: 10, mode: "hide" }, paper_bgcolor: "rgba(0,0,0,0)", font: { family: "inherit", size: 13 },
    };
    Plotly.react("map", [trace], layout, { displaylogo: false, displayModeBar: false, responsive: true });
    document.querySelectorAll(".swatch").forEach((swatch) => { swatch.style.background = color(swatch.dataset.kind); });
  },

  // The way from the root to the level that is shown, each step a button.
  showPath() {
    const path = [];
    for (let at = this.level; at !== ""; at = this.nodes[at].parent) path.unshift(at);
    $("map-path").replaceChildren(...path.map((at) => {
      const button = element("button", this.nodes[at].label, { type: "button" });
      if (at === this.level) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => this.open(at));
      return button;
    }));
  },

  open(level, chosen = -1) {
    this.level = level;
    this.chosen = chosen;
    this.draw();
    this.showPath();
    this.tell();
  },

  tell() {
    const node = this.nodes[this.chosen < 0 ? this.level : this.chosen];
    const within = node.parent === "" || node.parent === 0 ? "" : `${this.nodes[node.parent].label}: `;
    $("map-chosen").textContent = `${within}${node.label}: ${node.text}`;
  },

  key(event) {
    const siblings = this.nodes[this.level].children;
    const at = siblings.indexOf(this.chosen);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && siblings.length) {
      this.chosen = siblings[at < 0 ? (step > 0 ? 0 : siblings.length - 1) : (at + step + siblings.length) % siblings.length];
    } else if (event.key === "Enter" && at >= 0 && this.nodes[this.chosen].children.length) {
      this.open(this.chosen);
    } else if ((event.key === "Backspace" || event.key === "Escape") && this.level !== 0) {
      this.open(this.nodes[this.level].parent, this.level);
    } else {
      return;
    }
    event.preventDefault();
    if (step) {
      this.draw();
      this.tell();
    }
  },

  listen() {
    $("map").addEventListener("keydown", (event) => this.key(event));
    $("map").on("plotly_treemapclick", (event) => {
      if (event.nextLevel !== undefined) {
        this.level = Number(event.nextLevel);
        this.chosen = -1;
        this.showPath();
      } else if (event.points && event.points.length) {
        this.chosen = Number(event.points[0].id);
      }
      this.tell();
    });
  },
};

// ---------------------------------------------------------------------------------------------------- matrix

const matrix = {
  build(data) {
    this.names = data.matrix.names;
    this.values = data.matrix.values;
    if (this.names.length < 1 || !this.values.some((row) => row.some((value) => value))) {
      $("matrix-section").hidden = true;
      return;
    }
    if (data.matrix.left_out) {
      $("matrix-hint").append(` The ${this.names.length} files with most in common; ${data.matrix.left_out} are left out.`);
    }
    const head = element("tr");
    head.append(element("td"));
    this.names.forEach((name) => head.append(element("th", name, { scope: "col", class: "number" })));
    $("matrix-table").append(head);
    this.names.forEach((name, i) => {
      const row = element("tr");
      row.append(element("th", name, { scope: "row" }));
      this.values[i].forEach((value) => row.append(element("td", value ? size(value) : "-", { class: "number" })));
      $("matrix-table").append(row);
    });
  },

  draw() {
    if ($("matrix-section").hidden) return;
    const n = this.names.length;
    const text = this.values.map((row) => row.map((value) => (value ? size(value) : "")));
    const ticks = [...this.names.keys()];
    const names = this.names.map((name) => plain(short(name, 34)));
    const trace = {
      type: "heatmap", z: this.values, text, x: ticks, y: ticks, xgap: 2, ygap: 2, showscale: false,
      texttemplate: n <= 16 ? "%{text}" : "", colorscale: [[0, style("--back")], [1, "#d55e00"]],
      customdata: this.values.map((row, i) => row.map((_, j) => (i === j ? `within ${names[i]}` : `${names[i]} and ${names[j]}`))),
      hovertemplate: "%{customdata}<br>%{text}<extra></extra>",
    };
    const axis = { tickvals: ticks, ticktext: names, automargin: true, showgrid: false, zeroline: false, fixedrange: true };
    const layout = {
      height: Math.min(220 + 44 * n, 900), margin: { l: 10, r: 10, t: 10, b: 10 }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("--text"), size: 13 },
      xaxis: { ...axis, side: "bottom" }, yaxis: { ...axis, autorange: "reversed" },
    };
    Plotly.react("matrix", [trace], layout, { displaylogo: false, displayModeBar: false, responsive: true });
  },
};

// ----------------------------------------------------------------------------------------------------- table

const FINDINGS = [
  { name: "Kind", text: (row) => row.words, kind: (row) => row.kind, detail: (row) => row.detail },
  { name: "Adds to total", number: (row) => row.counted },
  { name: "Saves alone", number: (row) => row.saves },
  { name: "Where", text: (row) => row.where.join("\n") },
  { name: "What to do", text: (row) => row.command || row.advice, code: (row) => row.is_code },
];
const BLOBS = [
  { name: "Name", text: (row) => row.name },
  { name: "Bytes", number: (row) => row.nbytes },
  { name: "File", text: (row) => row.path },
  { name: "At byte", number: (row) => row.start, exact: true },
  { name: "What", text: (row) => row.what },
  { name: "Layout", text: (row) => row.layout },
  { name: "Finding", text: (row) => row.words, kind: (row) => row.finding },
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
      row.words = row.finding ? data.words[row.finding] : "";
    });
    data.findings.forEach((row) => { row.words = data.words[row.kind]; });
    for (const set of Object.values(this.sets)) {
      set.rows.forEach((row) => {
        const texts = set.columns.filter((column) => column.text).map((column) => column.text(row));
        row.search = `${texts.join("\n")}\n${row.detail || ""}`.toLowerCase();
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
    $("more").addEventListener("click", () => this.append());
    this.show("findings");
  },

  show(name) {
    this.set = this.sets[name];
    for (const other of Object.keys(this.sets)) $(`show-${other}`).setAttribute("aria-pressed", String(other === name));
    const row = element("tr");
    this.set.columns.forEach((column, i) => {
      const cell = element("th", undefined, { scope: "col", class: column.number ? "number" : "" });
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
    this.append();
    const bytes = this.found.reduce((sum, row) => sum + (row.counted ?? row.nbytes), 0);
    $("count").textContent = `${this.found.length.toLocaleString("en")} of ${set.rows.length.toLocaleString("en")}, ${size(bytes)}`;
  },

  append() {
    const body = $("rows").tBodies[0];
    const from = body.rows.length;
    for (const row of this.found.slice(from, from + PAGE_ROWS)) {
      const line = element("tr");
      for (const column of this.set.columns) {
        const cell = element("td", undefined, { class: column.number ? "number" : column.kind ? "kind" : "" });
        if (column.number) {
          const value = column.number(row);
          cell.textContent = column.exact ? value.toLocaleString("en") : size(value);
          cell.title = `${value.toLocaleString("en")} bytes`;
        } else if (column.kind) {
          if (column.kind(row)) {
            const swatch = element("span", "", { class: "swatch" });
            swatch.style.background = color(column.kind(row));
            cell.append(swatch, " ");
          }
          cell.append(column.text(row));
          if (column.detail && column.detail(row)) cell.append(element("span", column.detail(row), { class: "detail" }));
        } else if (column.code && column.code(row)) {
          cell.append(element("code", column.text(row)));
        } else {
          column.text(row).split("\n").forEach((text, i) => cell.append(...(i ? [element("br"), text] : [text])));
        }
        line.append(cell);
      }
      body.append(line);
    }
    $("more").hidden = body.rows.length >= this.found.length;
  },
};

// ----------------------------------------------------------------------------------------------------- start

async function start() {
  const data = JSON.parse(await unpack("data"));
  table.start(data);
  map.build(data);
  matrix.build(data);
  document.head.append(element("script", await unpack("plotly")));
  const draw = () => { map.draw(); matrix.draw(); };
  draw();
  map.listen();
  map.showPath();
  map.tell();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  const notice = element("p", `This browser cannot draw the report: ${error}`, { class: "notice" });
  document.querySelector("main").prepend(notice);
  throw error;
});
