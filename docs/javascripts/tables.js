/* A table that is wider than the screen scrolls in a box of its own, and says so. */
addEventListener("load", () => {
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
