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
