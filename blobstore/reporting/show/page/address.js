// What is shown is in the address, after the #: a link, a reload and the way back lead to the same view.

const address = {
  parts: [],  // each has state(), the settings that are not as at the start, and restore(settings)

  start(...parts) {
    this.parts = parts;
    window.addEventListener("popstate", () => this.restore());
    this.restore();
  },

  restore() {
    const text = location.hash.slice(1);
    const settings = new URLSearchParams(text.includes("=") ? text : "");
    this.restoring = true;
    this.parts.forEach((part) => part.restore(settings));
    this.restoring = false;
  },

  // A step that one may want to take back makes an entry of the history; typing and choosing do not.
  save(step) {
    if (this.restoring || !this.parts.length) return;
    const settings = this.parts.flatMap((part) => Object.entries(part.state()).filter(([, value]) => value));
    const text = settings.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%2F", "/")}`).join("&");
    if (location.hash.slice(1) === text) return;
    try {
      history[step ? "pushState" : "replaceState"](null, "", text ? `#${text}` : `${location.pathname}${location.search}`);
    } catch {}  // some browsers refuse more than a hundred in half a minute; the next one has it all again
  },
};
