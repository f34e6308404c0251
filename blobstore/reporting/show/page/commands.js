// The commands at the top and in the table.

const command = {
  // A button that copies, and one that unfolds what is longer than a line or two.
  dress(box) {
    const code = box.querySelector("code");
    const words = code.textContent.split(" ").map((word) => element("span", word));  // a path does not break at its hyphens
    code.replaceChildren(...words.flatMap((word, i) => (i ? [" ", word] : [word])));
    const tools = element("div", undefined, { class: "tools" });
    const copy = element("button", "Copy", { type: "button", class: "copy" });
    copy.addEventListener("click", async () => {
      copy.textContent = (await this.copy(code)) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    });
    tools.append(copy);
    if (code.textContent.length > 90) {
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
