// In a page whose frames each show one report: what a reader could not read, as JSON in <pre id="flaws">.

// Line boxes of text are taller than their glyphs, and neighbours may touch.
const SHRINK = 0.2, TOUCH = 1;

function lines(page) {
  const found = [], walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, text = node.data.trim(), parent = node.parentElement;
    if (!text || parent.closest("style, title, script")) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width < 1 || box.height < 1) continue;
      const inset = SHRINK * box.height;
      found.push({
        text: text.slice(0, 60), scrolls: parent.closest(".scroll, pre"),
        left: box.left, right: box.right, top: box.top + inset, bottom: box.bottom - inset,
      });
    }
  }
  return found;
}

function flaws(frame) {
  const page = frame.contentDocument, width = page.documentElement.clientWidth, found = [];
  page.querySelectorAll("details").forEach((one) => (one.open = true));
  if (page.documentElement.scrollWidth > width) found.push("the page scrolls sideways");
  const all = lines(page).sort((a, b) => a.top - b.top);
  all.forEach((a, index) => {
    if (!a.scrolls && (a.left < 0 || a.right > width)) found.push(`cut: ${a.text}`);
    for (const b of all.slice(index + 1)) {
      if (b.top >= a.bottom) break;
      const over = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const hidden = a.scrolls !== b.scrolls && (a.right > width || b.right > width);
      if (over > TOUCH && !hidden) found.push(`overlap: ${a.text} | ${b.text}`);
    }
  });
  return { width, texts: all.length, flaws: found };
}

addEventListener("load", () => {
  const measured = [...document.querySelectorAll("iframe")].map(flaws);
  document.getElementById("flaws").textContent = JSON.stringify(measured);
});
