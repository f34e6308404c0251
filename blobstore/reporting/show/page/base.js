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
    if (value < 999.5) return unit === "B" ? `${value} B` : `${value.toPrecision(3)} ${unit}`;
    value /= 1000;
  }
  return `${Number(value.toPrecision(3))} TB`;
}

// Whether a text in lower case has all words of a query, and none of those after a minus.
function matcher(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const without = words.filter((word) => /^-./.test(word)).map((word) => word.slice(1));
  const within = words.filter((word) => !/^-./.test(word));
  return (text) => within.every((word) => text.includes(word)) && !without.some((word) => text.includes(word));
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
