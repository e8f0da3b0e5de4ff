// Keys, wheel, mouse and fingers on the timeline. The plain wheel scrolls the page; with Ctrl it zooms.

class Gestures {
  constructor(timeline) {
    this.timeline = timeline;
    this.pointers = new Map();
    this.tip = make("div", "", { id: "tip", role: "tooltip" });
    this.tip.hidden = true;
    timeline.box.append(this.tip);
    this.listen();
  }

  listen() {
    this.timeline.scroll.addEventListener("scroll", () => this.timeline.request());
    this.timeline.box.addEventListener("keydown", (event) => this.key(event));
    this.timeline.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.timeline.canvas.addEventListener("pointerdown", (event) => this.press(event));
    this.timeline.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.timeline.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    for (const name of ["pointerup", "pointercancel"]) this.timeline.canvas.addEventListener(name, (event) => this.release(event));
    this.timeline.canvas.addEventListener("dblclick", (event) => this.timeline.zoom(0.4, this.place(event).time));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const span = this.timeline.to - this.timeline.from;
    const actions = {
      ArrowLeft: () => this.timeline.show(this.timeline.from - span / 5, this.timeline.to - span / 5),
      ArrowRight: () => this.timeline.show(this.timeline.from + span / 5, this.timeline.to + span / 5),
      ArrowUp: () => this.timeline.toRow(-1),
      ArrowDown: () => this.timeline.toRow(1),
      "+": () => this.timeline.zoom(0.5),
      "=": () => this.timeline.zoom(0.5),
      "-": () => this.timeline.zoom(2),
      Home: () => this.timeline.show(0, span),
      End: () => this.timeline.show(this.timeline.data.end - span, this.timeline.data.end),
      "0": () => this.timeline.show(0, this.timeline.data.end),
      ",": () => this.timeline.neighbour(-1),
      ".": () => this.timeline.neighbour(1),
      Enter: () => { if (this.timeline.chosen >= 0) this.timeline.choose(this.timeline.chosen, "zoom"); },
      Escape: () => this.timeline.choose(-1),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  place(event) {
    const box = this.timeline.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    return { x, y, time: this.timeline.from + ((x - this.timeline.gutter) / this.timeline.width) * (this.timeline.to - this.timeline.from) };
  }

  // The span under a place, or the nearest within three pixels; -1.
  hit({ x, y, time }) {
    if (x < this.timeline.gutter || y < AXIS) return -1;
    const at = y + this.timeline.scroll.scrollTop;
    const line = this.timeline.lines.find((l) => l.row && at >= l.y && at < l.y + l.height);
    if (!line || line.row.first === line.row.last) return -1;
    const near = ((this.timeline.to - this.timeline.from) / this.timeline.width) * 3;
    const i = this.timeline.firstAfter(line.row, time - near);
    return i < line.row.last && this.timeline.data.start[i] <= time + near ? i : -1;
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.timeline.zoom(Math.exp(Math.max(-40, Math.min(event.deltaY, 40)) / 100), this.place(event).time);
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const moved = (event.deltaX / this.timeline.width) * (this.timeline.to - this.timeline.from);
      this.timeline.show(this.timeline.from + moved, this.timeline.to + moved);
    }
  }

  press(event) {
    this.pointers.set(event.pointerId, event);
    this.pressed = { x: event.clientX, from: this.timeline.from, to: this.timeline.to, moved: false };
    if (this.pointers.size === 2) this.pinched = this.fingers();
    this.timeline.canvas.setPointerCapture(event.pointerId);
  }

  fingers() {
    const [a, b] = [...this.pointers.values()];
    return { apart: Math.max(Math.abs(a.clientX - b.clientX), 8), middle: this.place({ clientX: (a.clientX + b.clientX) / 2, clientY: 0 }).time,
      from: this.timeline.from, to: this.timeline.to };
  }

  move(event) {
    if (!this.pointers.has(event.pointerId)) {
      this.hover(event);
      return;
    }
    this.pointers.set(event.pointerId, event);
    if (this.pointers.size === 2) {
      const factor = this.pinched.apart / this.fingers().apart;
      const { middle, from, to } = this.pinched;
      this.timeline.show(middle - (middle - from) * factor, middle + (to - middle) * factor);
      this.pressed.moved = true;
      return;
    }
    const moved = event.clientX - this.pressed.x;
    if (Math.abs(moved) > 4) this.pressed.moved = true;
    const ticks = (moved / this.timeline.width) * (this.pressed.to - this.pressed.from);
    if (this.pressed.moved) this.timeline.show(this.pressed.from - ticks, this.pressed.to - ticks);
  }

  release(event) {
    this.pointers.delete(event.pointerId);
    if (event.type === "pointerup" && this.pressed && !this.pressed.moved) this.timeline.choose(this.hit(this.place(event)));
  }

  hover(event) {
    const place = this.place(event);
    const i = this.hit(place);
    this.tip.hidden = i < 0;
    if (i < 0) return;
    this.tip.textContent = `${this.timeline.nameOf(i)}: ${secondsText(this.timeline.data.duration[i] * this.timeline.data.tick_s)}`;
    const box = this.timeline.box.getBoundingClientRect();
    const left = Math.min(event.clientX - box.left + 12, box.width - this.tip.offsetWidth - 4);
    this.tip.style.transform = `translate(${Math.max(left, 4)}px, ${event.clientY - box.top + 16}px)`;
  }
}
