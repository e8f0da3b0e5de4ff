// The whole step in one strip per timeline: over time, how many of its rows are at which kind of work. The window that is shown below is framed.

const STRIP = 34;

class Overview {
  constructor(canvas, timeline) {
    this.canvas = canvas;
    this.timeline = timeline;
    this.drag = null;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { this.drag = null; });
  }

  // Ticks of every kind in every pixel column, of the rows that compute (of all, where none does).
  counted(data, origin, width) {
    const compute = data.rows.some((row) => row.origin === origin && row.role === "compute");
    const rows = data.rows.filter((row) => row.origin === origin && row.role !== "path" && row.role !== "link" && (!compute || row.role === "compute"));
    const bins = Array.from(data.categories, () => new Float64Array(width + 1));
    const scale = width / data.end;
    for (const row of rows) {
      for (let i = row.first; i < row.last; i++) {
        const bin = bins[data.category[i]];
        const whole = data.duration[i] || 1;
        const share = Math.min(this.timeline.busy(i) / whole, 1);
        const from = data.start[i] * scale;
        const to = (data.start[i] + data.duration[i]) * scale;
        const last = Math.min(Math.floor(to), width - 1);
        for (let x = Math.floor(from); x <= last; x++) bin[x] += share * (Math.min(to, x + 1) - Math.max(from, x));
      }
    }
    return { bins, rows: rows.length };
  }

  draw(width) {
    const { data } = this.timeline;
    const origins = [...new Set(data.rows.map((row) => row.origin))].sort().reverse(); // predicted above measured
    const left = this.timeline.gutter;
    this.picture = document.createElement("canvas");
    const context = sized(this.picture, width, origins.length * (STRIP + 4) + 2);
    sized(this.canvas, width, origins.length * (STRIP + 4) + 2);
    const wide = Math.max(Math.floor(width - left), 1);
    origins.forEach((origin, k) => {
      const { bins, rows } = this.counted(data, origin, wide);
      const bottom = k * (STRIP + 4) + STRIP;
      context.fillStyle = themed("--row");
      context.fillRect(left, bottom - STRIP, wide, STRIP);
      const height = new Float64Array(wide);
      data.categories.forEach((category, c) => {
        if (category === "critical path" || category === "link") return;
        context.fillStyle = colorOf(category);
        for (let x = 0; x < wide; x++) {
          const tall = (bins[c][x] / Math.max(rows, 1)) * STRIP;
          if (tall < 0.05) continue;
          context.fillRect(left + x, bottom - height[x] - tall, 1, tall);
          height[x] += tall;
        }
      });
      context.fillStyle = themed("--text");
      context.font = FONT;
      context.textBaseline = "middle";
      context.fillText(this.timeline.narrow ? origin.slice(0, 9) : origin, 4, bottom - STRIP / 2, left - 8);
    });
    this.frame();
  }

  // The window over the picture that `draw` made.
  frame() {
    const { data, from, to, gutter } = this.timeline;
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    context.drawImage(this.picture, 0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    const wide = this.canvas.clientWidth - gutter;
    const x = gutter + (from / data.end) * wide;
    const w = Math.max(((to - from) / data.end) * wide, 2);
    const tall = this.canvas.clientHeight;
    context.fillStyle = themed("--shade");
    context.fillRect(gutter, 0, x - gutter, tall);
    context.fillRect(x + w, 0, gutter + wide - x - w, tall);
    context.strokeStyle = themed("--accent");
    context.lineWidth = 2;
    context.strokeRect(x, 1, w, tall - 2);
  }

  time(event) {
    const box = this.canvas.getBoundingClientRect();
    const { data, gutter } = this.timeline;
    return ((event.clientX - box.left - gutter) / Math.max(box.width - gutter, 1)) * data.end;
  }

  // Outside the window: go there. Inside: take it along.
  press(event) {
    const { from, to } = this.timeline;
    const at = this.time(event);
    if (at < from || at > to) this.timeline.show(at - (to - from) / 2, at + (to - from) / 2);
    this.drag = at - this.timeline.from;
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (this.drag === null) return;
    const start = this.time(event) - this.drag;
    this.timeline.show(start, start + this.timeline.to - this.timeline.from);
  }
}
