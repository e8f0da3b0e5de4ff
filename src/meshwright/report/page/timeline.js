// The timeline: rows of spans on a canvas, from packed columns. Spans too narrow to see are drawn as one block that says how many it holds,
// and as tall as they fill its time, so that every scale shows what can be read at it. Of a step that was predicted and measured, the two are found by step and iteration.

const FONT = "12px system-ui, sans-serif";
const ROW = 20;
const HEAD = 20;
const AXIS = 20;
const NARROWEST = 3; // pixels of a span that stands alone

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

class Timeline {
  constructor(box, onChange) {
    this.box = box;
    this.scroll = byId("rows-scroll");
    this.canvas = byId("rows");
    this.onChange = onChange;
    this.overview = new Overview(byId("overview"), this);
    this.chosen = -1;
    this.only = "all";
    this.found = null;
    this.gestures = new Gestures(this);
  }

  open(data) {
    this.data = data;
    data.rows = data.rows.map((row) => Array.isArray(row)
      ? { group: row[0], origin: row[1], lane: row[2], role: row[3], first: row[4], last: row[5] } : row);
    this.from = 0;
    this.to = data.end = Math.max(data.end, 1);
    this.chosen = -1;
    this.arrange();
  }

  // Which rows are shown and where: a line with the name above the rows of every rank.
  arrange() {
    const step = this.only === "step";
    const known = this.data.rows.some((row) => row.role === this.only);
    const { alike } = this.data;
    const like = new Map();
    for (const first of alike) like.set(first, (like.get(first) || 0) + 1);
    this.lines = [];
    let y = AXIS;
    let group = -1;
    for (const row of this.data.rows) {
      if (step && (row.role === "link" || alike[row.group] !== row.group)) continue;
      if (known && row.role !== this.only && row.role !== "path") continue;
      if (row.group !== group) {
        group = row.group;
        const others = step ? like.get(group) - 1 : 0;
        const also = others ? ` and ${thin.format(others)} alike` : "";
        this.lines.push({ y, height: HEAD, text: this.data.groups[group] + also });
        y += HEAD;
      }
      this.lines.push({ y, height: ROW, row });
      y += ROW;
    }
    this.height = y + 4;
    byId("rows-height").style.height = `${this.height}px`;
    this.measure();
    this.shown = this.lines.filter((line) => line.row).map((line) => line.row);
  }

  get width() {
    return this.canvas.clientWidth - this.gutter;
  }

  // Pixels left of the spans: as wide as the longest label is, within limits.
  measure() {
    const context = this.canvas.getContext("2d");
    context.font = FONT;
    const labels = new Set(this.lines.filter((line) => line.row).map((line) => this.label(line.row)));
    this.widest = Math.max(0, ...[...labels].slice(0, 2000).map((text) => context.measureText(text).width));
  }

  get gutter() {
    return this.narrow ? 74 : Math.min(Math.max(Math.ceil(this.widest || 0) + 26, 120), 340);
  }

  get narrow() {
    return this.box.clientWidth < 640;
  }

  end(i) {
    return this.data.start[i] + this.data.duration[i];
  }

  count(i) {
    return this.data.count ? this.data.count[i] : 1;
  }

  busy(i) {
    return this.data.busy ? this.data.busy[i] : this.data.duration[i];
  }

  // First span of a row that ends after `time`: spans of a row do not overlap.
  firstAfter(row, time) {
    let low = row.first;
    let high = row.last;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end(middle) < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  show(from, to) {
    const least = Math.min(20, this.data.end);
    const span = Math.min(Math.max(to - from, least), this.data.end);
    const start = Math.min(Math.max(from + (to - from - span) / 2, 0), this.data.end - span);
    this.from = start;
    this.to = start + span;
    this.request();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  request() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.drawRows();
      this.overview.frame();
      this.onChange();
    });
  }

  draw() {
    this.overview.draw(this.box.clientWidth);
    this.drawRows();
  }

  drawRows() {
    const width = this.scroll.clientWidth;
    const tall = Math.min(this.height, this.scroll.clientHeight || this.height);
    const context = sized(this.canvas, width, tall);
    const top = this.scroll.scrollTop;
    context.font = FONT;
    context.textBaseline = "middle";
    context.save();
    context.translate(0, -top);
    for (const line of this.lines) {
      if (line.y + line.height < top + AXIS || line.y > top + tall) continue;
      if (line.row) this.drawLine(context, line, width);
      else this.drawHead(context, line, width);
    }
    this.drawJoin(context);
    context.restore();
    this.drawAxis(context, width);
  }

  drawHead(context, line, width) {
    context.fillStyle = themed("--text");
    context.font = `600 ${FONT}`;
    context.fillText(shortened(line.text, Math.floor(width / 7)), 4, line.y + HEAD / 2 + 1);
    context.font = FONT;
  }

  label(row) {
    if (!this.narrow) return shortened(`${row.origin} ${row.lane}`, 54);
    const lane = row.lane.replace("compute", "comp").replace("comm ", "").replace("from rank ", "←").replace("to rank ", "→");
    return shortened(row.lane ? `${row.origin.slice(0, 1).toUpperCase()} ${lane}` : row.origin, 11);
  }

  drawLine(context, line, width) {
    const { row } = line;
    const measured = row.origin.startsWith("measured");
    context.fillStyle = themed(measured ? "--row-measured" : "--row");
    context.fillRect(this.gutter, line.y + 1, width - this.gutter, ROW - 2);
    context.fillStyle = themed("--muted");
    context.fillText(this.label(row), measured ? 14 : 8, line.y + ROW / 2, this.gutter - 12);
    context.save();
    context.beginPath();
    context.rect(this.gutter, line.y, width - this.gutter, ROW);
    context.clip();
    this.drawSpans(context, row, line.y + 2, ROW - 4);
    context.restore();
  }

  drawSpans(context, row, y, height) {
    const { data } = this;
    const scale = this.width / (this.to - this.from);
    const left = this.gutter - this.from * scale;
    let i = this.firstAfter(row, this.from);
    while (i < row.last && data.start[i] < this.to) {
      const x = left + data.start[i] * scale;
      let right = left + this.end(i) * scale;
      if (right - x >= NARROWEST) {
        if (this.count(i) > 1) this.drawBlock(context, i, this.count(i), x, y, right - x, height, this.busy(i) / this.data.duration[i]);
        else this.drawSpan(context, i, x, y, right - x, height);
        i++;
        continue;
      }
      let held = this.count(i);
      let busy = this.busy(i);
      let longest = i;
      let j = i + 1;
      while (j < row.last && data.start[j] < this.to) {
        const begins = left + data.start[j] * scale;
        const ends = left + this.end(j) * scale;
        if (ends - begins >= NARROWEST || begins - right > 1) break;
        if (right - x >= 1.5 && data.category[j] !== data.category[longest]) break;
        if (data.duration[j] > data.duration[longest]) longest = j;
        right = Math.max(right, ends);
        held += this.count(j);
        busy += this.busy(j);
        j++;
      }
      this.drawBlock(context, longest, held, x, y, Math.max(right - x, 0.8), height, (busy * scale) / Math.max(right - x, 1e-9));
      i = j;
    }
  }

  // As tall as the share of its time that its spans fill.
  drawBlock(context, i, held, x, y, width, height, share) {
    const category = this.data.categories[this.data.category[i]];
    const tall = Math.max(Math.min(share, 1) * height, 2);
    context.fillStyle = fillOf(context, category);
    context.fillRect(x, y + height - tall, width, tall);
    if (i === this.chosen || i === this.other) this.frame(context, x, y, width, height);
    if (tall < 12) return;
    if (width > 64) this.write(context, `${category} ×${thin.format(held)}`, x, y, width, height);
  }

  drawSpan(context, i, x, y, width, height) {
    const category = this.data.categories[this.data.category[i]];
    context.fillStyle = fillOf(context, category);
    context.fillRect(x, y, Math.max(width - 0.6, 0.6), height);
    if (this.found && !this.found.has(this.data.name[i])) {
      context.fillStyle = themed("--veil");
      context.fillRect(x, y, width, height);
    }
    if (i === this.chosen || i === this.other) this.frame(context, x, y, width, height);
    if (width > 14) this.write(context, this.nameOf(i), x, y, width, height);
  }

  frame(context, x, y, width, height) {
    context.strokeStyle = themed("--text");
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, Math.max(width - 2.6, 1), height - 2);
  }

  write(context, text, x, y, width, height) {
    const begin = Math.max(x, this.gutter);
    const room = Math.floor((x + width - begin - 5) / 6.6);
    const brief = text.replace(/^(\S+)(.* micro-batch (\d+))?.*$/, "$1$3"); // `B stage 2 micro-batch 7` is B7 where there is little room
    const said = text.length <= room ? text : brief.length + 14 < room ? shortened(text, room) : brief;
    if (said.length > room) return;
    context.fillStyle = "#10151c";
    context.fillText(said, begin + 3, y + height / 2 + 0.5);
  }

  // From the chosen span to the same step's span in the other timeline.
  drawJoin(context) {
    if (this.chosen < 0 || this.other < 0) return;
    const places = [this.chosen, this.other].map((i) => {
      const line = this.lines.find((l) => l.row && i >= l.row.first && i < l.row.last);
      if (!line) return null;
      const scale = this.width / (this.to - this.from);
      return [this.gutter + (this.data.start[i] + this.data.duration[i] / 2 - this.from) * scale, line.y + ROW / 2];
    });
    if (!places[0] || !places[1]) return;
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.width, this.height);
    context.clip();
    context.strokeStyle = themed("--text");
    context.lineWidth = 1.5;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(...places[0]);
    context.lineTo(...places[1]);
    context.stroke();
    context.restore();
  }

  drawAxis(context, width) {
    context.fillStyle = themed("--panel");
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = themed("--muted");
    context.strokeStyle = themed("--line");
    context.lineWidth = 1;
    const seconds = (this.to - this.from) * this.data.tick_s;
    const wanted = seconds / Math.max(this.width / 110, 2);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const each = [1, 2, 5, 10].map((m) => m * power).find((step) => step >= wanted);
    const scale = this.width / seconds;
    const begin = this.from * this.data.tick_s;
    for (let k = Math.ceil(begin / each); k * each <= begin + seconds; k++) {
      const x = this.gutter + (k * each - begin) * scale;
      context.beginPath();
      context.moveTo(x + 0.5, AXIS - 5);
      context.lineTo(x + 0.5, AXIS);
      context.stroke();
      const text = secondsText(Number((k * each).toPrecision(12)));
      const wide = context.measureText(text).width;
      context.fillText(text, Math.min(Math.max(x - wide / 2, this.gutter), width - wide - 2), AXIS / 2 - 1);
    }
  }

  nameOf(i) {
    const held = this.count(i);
    const name = this.data.names[this.data.name[i]];
    return held > 1 ? `${plural(held, "span")}, longest ${name}` : name;
  }

  rowOf(i) {
    return this.data.rows.find((row) => i >= row.first && i < row.last);
  }

  // The link that a row of messages is of, without how busy it is; "" for rows of ranks.
  linkOf(row) {
    return row.role === "link" ? row.lane.split(" · ")[0].split(" (also")[0] : "";
  }

  // The span of the same step and iteration in the other timeline (of a message: on the same link); -1 if there is none.
  twin(i) {
    const { data } = this;
    const mine = this.rowOf(i);
    if (data.step[i] < 0 || mine.role === "path") return -1;
    for (const row of data.rows) {
      if (row.origin === mine.origin || row.role === "path" || row.group !== mine.group || this.linkOf(row) !== this.linkOf(mine)) continue;
      for (let k = row.first; k < row.last; k++) {
        if (data.step[k] === data.step[i] && data.iteration[k] === data.iteration[i]) return k;
      }
    }
    return -1;
  }

  choose(i, reveal = false) {
    this.chosen = i;
    this.other = i < 0 ? -1 : this.twin(i);
    if (i >= 0 && reveal) {
      const span = Math.max(this.data.duration[i] * 6, (this.to - this.from) * 0.02, 20);
      const inside = this.data.start[i] >= this.from && this.end(i) <= this.to;
      const seen = (this.data.duration[i] / (this.to - this.from)) * this.width > 12;
      if (!inside || !seen || reveal === "zoom") {
        const middle = this.data.start[i] + this.data.duration[i] / 2;
        this.show(middle - span / 2, middle + span / 2);
      }
      const line = this.lines.find((l) => l.row && i >= l.row.first && i < l.row.last);
      if (line) {
        const top = this.scroll.scrollTop;
        if (line.y - AXIS < top) this.scroll.scrollTop = line.y - AXIS - HEAD;
        else if (line.y + ROW > top + this.scroll.clientHeight) this.scroll.scrollTop = line.y + ROW - this.scroll.clientHeight;
      }
    }
    this.request();
  }

  // The span before or after the chosen one in its row; the first visible one where none is chosen.
  neighbour(step) {
    if (this.chosen < 0) {
      const row = this.shown.find((r) => r.last > r.first);
      if (row) this.choose(Math.min(this.firstAfter(row, this.from), row.last - 1), true);
      return;
    }
    const row = this.rowOf(this.chosen);
    this.choose(Math.min(Math.max(this.chosen + step, row.first), row.last - 1), true);
  }

  // To the row above or below, at the same time.
  toRow(step) {
    if (this.chosen < 0) return this.neighbour(0);
    const at = this.shown.indexOf(this.rowOf(this.chosen));
    const row = this.shown[Math.min(Math.max(at + step, 0), this.shown.length - 1)];
    const middle = this.data.start[this.chosen] + this.data.duration[this.chosen] / 2;
    if (row && row.last > row.first) this.choose(Math.min(this.firstAfter(row, middle), row.last - 1), true);
  }

  find(text) {
    const wanted = text.trim().toLowerCase();
    this.found = null;
    if (wanted) {
      this.found = new Set();
      this.data.names.forEach((name, k) => { if (name.toLowerCase().includes(wanted)) this.found.add(k); });
    }
    this.request();
  }
}
