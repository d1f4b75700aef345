/* A table that is wider than the screen scrolls in a box of its own, and says so. Code in it breaks after a comma or colon. */
addEventListener("load", () => {
  for (const code of document.querySelectorAll(".md-typeset table:not([class]) td code")) {
    if (code.children.length) continue;
    code.replaceChildren(...code.textContent.split(/(?<=[,:])/).flatMap((text) => {
      const part = document.createElement("span");
      part.textContent = text;
      return [part, document.createElement("wbr")];
    }));
  }
  const tables = document.querySelectorAll(".md-typeset table:not([class])");
  const marked = () => {
    for (const table of tables) {
      const box = table.closest(".md-typeset__scrollwrap"); // which the theme puts around it
      if (box) box.classList.toggle("is-cut", box.scrollWidth > box.clientWidth + 1);
    }
    document.documentElement.dataset.tables = "marked";
  };
  marked();
  const observer = new ResizeObserver(marked);
  for (const each of [document.body, ...tables]) observer.observe(each);
});
