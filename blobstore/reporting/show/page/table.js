// All findings, or all bytes.

const FINDINGS = [
  { name: "Kind", text: (row) => row.words, class: "kind", kind: (row) => row.kind, detail: (row) => row.detail },
  { name: "Adds to total", number: (row) => row.counted },
  { name: "Saves alone", number: (row) => row.saves },
  { name: "Type", text: (row) => row.type, class: "fact" },
  { name: "Shape", text: (row) => row.shape, class: "fact" },
  { name: "Where", text: (row) => row.where.join("\n"), class: "places" },
  { name: "What to do", class: "advice", text: (row) => row.command || row.advice, code: (row) => row.is_code },
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
    this.usual = data.findings.length ? "findings" : "blobs";
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
    $("filter").addEventListener("input", () => { this.fill(); address.save(false); });
    $("kind").addEventListener("change", () => { this.fill(); address.save(true); });
    for (const name of ["findings", "blobs"]) {
      $(`show-${name}`).addEventListener("click", () => { this.show(name); address.save(true); });
    }
    $("more").addEventListener("click", () => this.append(PAGE_ROWS));
  },

  // The part of the address that is the table's.
  state() {
    const { sort, down } = this.set;
    return {
      table: this.name === this.usual ? "" : this.name,
      filter: $("filter").value,
      kind: $("kind").value === "all" ? "" : $("kind").value || "none",
      sort: sort === 1 && down ? "" : `${down ? "-" : ""}${this.set.columns[sort].name}`,
    };
  },

  restore(settings) {
    const name = ["findings", "blobs"].includes(settings.get("table")) ? settings.get("table") : this.usual;
    const sort = settings.get("sort") || "";
    const column = this.sets[name].columns.findIndex((one) => one.name === sort.replace(/^-/, ""));
    Object.assign(this.sets[name], column < 0 ? { sort: 1, down: true } : { sort: column, down: sort.startsWith("-") });
    $("filter").value = settings.get("filter") || "";
    const kind = settings.get("kind") || "all";
    $("kind").value = kind === "none" ? "" : kind;
    if ($("kind").selectedIndex < 0) $("kind").value = "all";
    this.show(name);
  },

  show(name) {
    this.name = name;
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
        address.save(true);
      });
      cell.append(button);
      row.append(cell);
    });
    $("rows").tHead.replaceChildren(row);
    this.fill();
  },

  // All bytes of something in the map.
  find(text) {
    $("filter").value = text.replace(/(^|\s)-+/g, "$1");  // a name may begin with a minus, which would mean not
    $("kind").value = "all";
    this.show("blobs");
    address.save(true);
    $("table").scrollIntoView();
    $("table").focus({ preventScroll: true });
  },

  fill() {
    const set = this.set;
    const matches = matcher($("filter").value);
    const kind = $("kind").value;
    const value = set.columns[set.sort].number || set.columns[set.sort].text;
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    this.found = set.rows
      .filter((row) => matches(row.search) && (kind === "all" || set.kind(row) === kind))
      .sort((a, b) => compare(value(a), value(b)) * (set.down ? -1 : 1));
    [...$("rows").tHead.rows[0].cells].forEach((cell, i) => {
      if (i === set.sort) cell.setAttribute("aria-sort", set.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    $("rows").tBodies[0].replaceChildren();
    this.append(PAGE_ROWS);
    $("none").hidden = this.found.length > 0;
    $("none").textContent = set.rows.length ? "Nothing matches the filter." : "There are no findings.";
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
