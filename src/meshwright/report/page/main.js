// Starts the page: unpacks, draws, and marks when everything stands (`meshwright:drawn`).

async function start() {
  const blocks = new Map();
  for (const name of ["run", "target"]) { // a page of measurements has the first only
    const data = await unpack(`data-${name}`);
    if (data) blocks.set(name, data);
  }
  performance.mark("meshwright:unpacked");
  const timeline = new Timeline(byId("timeline-box"), () => { table.later(); table.tell(); });
  const table = new SpanTable(timeline);
  const rows = byId("rows-shown");

  function open(name) {
    timeline.open(blocks.get(name));
    for (const option of rows.options) option.hidden = option.value !== "all" && option.value !== "step" && !timeline.data.rows.some((row) => row.role === option.value);
    const used = [...new Set(timeline.data.category)].map((c) => timeline.data.categories[c]);
    const entries = used.map((kind) => make("li", null, {}, [swatch(kind), ` ${kind}`]));
    if (used.some(isHatched)) entries.push(make("li", "hatched: communication"));
    entries.push(make("li", "empty: idle"));
    byId("legend").replaceChildren(...entries);
    byId("timeline-notes").textContent = timeline.data.notes.map((note) => `${note}.`).join(" ");
    byId("spans").classList.toggle("single", new Set(timeline.data.rows.map((row) => row.origin)).size < 2);
    timeline.draw();
    table.fill();
    table.tell();
  }

  const many = [...blocks.values()].some((data) => data.rows.length > 16);
  if (many) timeline.only = rows.value = "step";
  open(blocks.keys().next().value);

  const view = byId("view");
  if (view) view.addEventListener("change", () => open(view.value));
  rows.addEventListener("change", () => {
    timeline.only = rows.value;
    timeline.arrange();
    timeline.request();
  });
  byId("find").addEventListener("input", (event) => timeline.find(event.target.value));
  byId("find").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    const found = table.longest(table.visible(), 1)[0];
    if (found !== undefined) timeline.choose(found, true);
  });
  const span = () => timeline.to - timeline.from;
  const buttons = {
    "zoom-in": () => timeline.zoom(0.5), "zoom-out": () => timeline.zoom(2), "zoom-all": () => timeline.show(0, timeline.data.end),
    "pan-left": () => timeline.show(timeline.from - span() / 3, timeline.to - span() / 3),
    "pan-right": () => timeline.show(timeline.from + span() / 3, timeline.to + span() / 3),
  };
  for (const [id, action] of Object.entries(buttons)) byId(id).addEventListener("click", action);

  const transfers = await unpack("data-transfers");
  if (transfers) new Stepper(transfers);
  colorBars();

  const redraw = () => timeline.draw();
  new ResizeObserver(redraw).observe(timeline.box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  printing(redraw);
  requestAnimationFrame(() => setTimeout(() => { // when the frame with all of it has been painted
    document.documentElement.dataset.ready = "yes";
    performance.mark("meshwright:drawn");
  }));
}

// Bars and their keys were written without colours: the palette is here alone.
function colorBars() {
  for (const part of document.querySelectorAll("rect.phase")) part.setAttribute("fill", part.classList.contains("idle") ? "none" : colorOf(kindOf(part)));
  for (const part of document.querySelectorAll("span.swatch")) if (!part.classList.contains("idle")) part.replaceWith(swatch(kindOf(part)));
}

function kindOf(element) {
  return [...element.classList].find((name) => name in KINDS) || "other";
}

// On paper: light, and everything that is folded away unfolded.
function printing(redraw) {
  const folded = [];
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printing");
    for (const part of document.querySelectorAll("details:not([open])")) {
      part.open = true;
      folded.push(part);
    }
    redraw();
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    for (const part of folded.splice(0)) part.open = false;
    redraw();
  });
}

start().catch((error) => {
  byId("timeline-status").textContent = `The page's data cannot be shown: ${error.message}`;
  throw error;
});
