// Which blobs belong together: those that a finding says are the same, or follow from each other.

const HUES = 8;  // of the palette, each in three steps of lightness
const LEVELS = 3;
const APART = 16;  // groups of a family that follow each other in size have different colors, so that neighbors differ
const LISTED = 6;  // groups in the legend
const CONTENT = /^tensor\.[0-9a-f]{32}/;  // a key that is made of contents
const CONNECTING = 4096;  // bytes in common that make two files a family; fewer are equal by accident

// Sets that are joined step by step: root(one) is the same for all of a set.
class Sets {
  constructor(number) { this.above = Array.from({ length: number }, (_, one) => one); }

  root(one) {
    let at = one;
    while (this.above[at] !== at) at = this.above[at] = this.above[this.above[at]];
    return at;
  }

  join(one, other) { this.above[this.root(one)] = this.root(other); }
}

const copies = {
  start(data) {
    this.data = data;
    this.findings = data.blobs.map(() => []);  // of each blob those it is in with others
    const together = new Sets(data.blobs.length);
    const families = new Sets(data.files.length);
    data.findings.forEach((finding) => {
      if (finding.places.length < 2) return;
      finding.places.forEach((id) => {
        this.findings[id].push(finding);
        together.join(id, finding.places[0]);
        if (finding.saves >= CONNECTING) families.join(data.blobs[id].file, data.blobs[finding.places[0]].file);
      });
    });
    const groups = new Map();
    data.blobs.forEach((blob) => {
      if (!this.findings[blob.id].length) return;
      const first = together.root(blob.id);
      if (!groups.has(first)) groups.set(first, { blobs: [], nbytes: 0, family: families.root(blob.file) });
      groups.get(first).blobs.push(blob);
      groups.get(first).nbytes += blob.nbytes;
    });
    this.groups = [...groups.values()].sort((a, b) => b.nbytes - a.nbytes);
    this.of = new Map();
    this.paint();
  },

  // Each group has the color that fewest have, of those that the last ones of its family of files do not have; and of these
  // the one that is furthest from the last.
  paint() {
    const uses = new Array(HUES * LEVELS).fill(0);
    const lasts = new Map();  // by the family, the colors of its last groups
    this.groups.forEach((group, number) => {
      if (!lasts.has(group.family)) lasts.set(group.family, []);
      const last = lasts.get(group.family);
      let best = -1;
      for (let color = 0; color < uses.length; color += 1) {
        if (last.includes(color)) continue;
        const better = best < 0 ? -1 : uses[color] - uses[best] || this.apart(best, last.at(-1)) - this.apart(color, last.at(-1));
        if (better < 0) best = color;
      }
      uses[best] += 1;
      last.push(best);
      if (last.length >= APART) last.shift();
      group.blobs.forEach((blob) => this.of.set(blob.id, group));
      group.id = number;
      group.hue = 30 + (360 / HUES) * (best % HUES);
      group.level = Math.floor(best / HUES);
    });
  },

  // How far two colors of the palette are from each other.
  apart(one, other = 0) {
    const turn = Math.abs((one % HUES) - (other % HUES));
    return Math.min(turn, HUES - turn) + Math.abs(Math.floor(one / HUES) - Math.floor(other / HUES));
  },

  // Whether kinds of findings say little, since most of the bytes can go and nearly all for the same reason.
  tellMore() {
    const goes = {};
    let all = 0;
    this.data.blobs.forEach((blob) => {
      all += blob.nbytes;
      for (const [kind, nbytes] of Object.entries(blob.goes)) goes[kind] = (goes[kind] || 0) + nbytes;
    });
    const sums = Object.values(goes);
    const total = sums.reduce((sum, nbytes) => sum + nbytes, 0);
    return this.groups.length > 1 && total >= all / 2 && Math.max(...sums) >= 0.9 * total;
  },

  // The numbers of the blobs that any of these belong to, without these.
  related(blobs) {
    const own = new Set();
    const seen = new Set();
    const found = new Set();
    for (const blob of blobs) {
      own.add(blob.id);
      for (const finding of this.findings[blob.id]) {
        if (seen.has(finding)) continue;
        seen.add(finding);
        finding.places.forEach((id) => found.add(id));
      }
    }
    own.forEach((id) => found.delete(id));
    return found;
  },

  // Where else a blob is, in a few words.
  describe(blob) {
    const names = new Set();
    for (const id of this.related([blob])) {
      const other = this.data.blobs[id];
      const file = this.data.files[other.file].name;
      names.add(other.file === blob.file ? other.name : other.name === blob.name ? file : `${file}: ${other.name}`);
    }
    const shown = [...names].slice(0, 3).join(", ");
    const more = names.size > 3 ? ` and ${names.size - 3} more` : "";
    return names.size ? `; also in ${shown}${more}` : "";
  },

  // The largest groups and their colors, and what the other colors mean.
  legend() {
    const item = (background, text, faint = "") => {
      const made = element("li");
      const swatch = element("span", undefined, { class: "swatch" });
      swatch.style.background = background;
      const words = element("span", `${text} `);
      words.append(element("span", faint, { class: "faint" }));
      made.append(...(background ? [swatch] : []), words);
      return made;
    };
    const items = this.groups.slice(0, LISTED).map((group) => {
      const largest = group.blobs.reduce((a, b) => (b.nbytes > a.nbytes ? b : a));
      const named = group.blobs.find((blob) => blob.shape && !CONTENT.test(blob.name)) || largest;
      const name = named.name.length > 40 ? `${named.name.slice(0, 16)}…${named.name.slice(-22)}` : named.name;
      return item(this.color(group, false), name, `${group.blobs.length} x ${size(largest.nbytes)}, ${this.where(group)}`);
    });
    const rest = this.groups.length - items.length;
    if (rest > 0) items.push(item("", "", `and ${rest.toLocaleString("en")} more groups, in the same ${HUES * LEVELS} colors`));
    if (rest > 0) items.push(item("var(--c-many)", "small groups together"));
    if (this.groups.length) {
      const [full, pale] = [this.color(this.groups[0], false), this.color(this.groups[0], true)];
      items.push(item(`linear-gradient(to right, ${full} 50%, ${pale} 50%)`, "full: can go; pale: stays"));
    }
    return [...items, item("var(--c-stays)", "in no group, and stays"), item("var(--c-structure)", "headers and tables")];
  },

  // The file of a group, or the innermost folder that has most of its files.
  where(group) {
    const names = [...new Set(group.blobs.map((blob) => this.data.files[blob.file].name))];
    if (names.length === 1) return `in ${names[0]}`;
    const files = new Map();
    for (const name of names) {
      for (let cut = name.lastIndexOf("/"); cut > 0; cut = name.lastIndexOf("/", cut - 1)) {
        const folder = name.slice(0, cut);
        files.set(folder, (files.get(folder) || 0) + 1);
      }
    }
    const most = [...files].filter(([, number]) => 2 * number > names.length).sort(([a], [b]) => b.length - a.length)[0];
    if (!most) return `in ${names.length} files`;
    return `${most[1] === names.length ? "in" : "most in"} ${most[0]}`;
  },

  color(group, stays) {
    return `oklch(var(--${stays ? "pale" : "full"}${group.level}) ${group.hue})`;
  },
};
