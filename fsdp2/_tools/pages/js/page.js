// The page: its contents, its theme, and printing.

const values = JSON.parse(document.getElementById("values").textContent);
const paperWidth = 700; // A4 or Letter between margins, in CSS pixels

for (const [name, show] of [["units", showUnits], ["memory", showMemory], ["times", showTimes]]) {
  const section = document.getElementById(name);
  if (section) show(section, values[name]);
}

const theme = document.getElementById("theme");

function drawAll(how) {
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", `${theme.textContent} colours`);
  Picture.all.forEach((picture) => picture.draw(how));
}

theme.hidden = false;
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  drawAll();
});
asks.addEventListener("change", () => drawAll());

// Only changes of width require a redraw: drawing sets the height itself.
new ResizeObserver(() => {
  if (isOnPaper()) return;
  const stale = Picture.all.filter(({host, width}) => host.clientWidth && host.clientWidth !== width);
  requestAnimationFrame(() => stale.forEach((picture) => picture.draw()));
}).observe(document.body);

window.addEventListener("beforeprint", () => {
  document.documentElement.classList.add("on-paper");
  drawAll({width: paperWidth, ratio: 2});
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("on-paper");
  drawAll();
});

drawAll();
