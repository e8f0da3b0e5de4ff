// The spans in view as a table that keys and screen readers reach, and the chosen span in words beside its twin.


class SpanTable {
  constructor(timeline) {
    this.timeline = timeline;
    this.body = byId("spans-body");
    this.page = 0;
    byId("spans-before").addEventListener("click", () => this.turn(-1));
    byId("spans-after").addEventListener("click", () => this.turn(1));
  }

  get size() {
    return this.timeline.narrow ? 8 : 16;
  }

  turn(by) {
    this.page = Math.max(this.page + by, 0);
    this.fill();
  }

  // Asked for at every change of the view; filled when it rests.
  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { this.page = 0; this.fill(); }, 120);
  }

  visible() {
    const { timeline } = this;
    const { data } = timeline;
    const found = [];
    for (const row of timeline.shown) {
      if (row.role === "path") continue;
      for (let i = timeline.firstAfter(row, timeline.from); i < row.last && data.start[i] <= timeline.to; i++) {
        if (!timeline.found || timeline.found.has(data.name[i])) found.push(i);
      }
    }
    return found;
  }

  // The longest `last` of `found`, sorted: longest first, then by time.
  longest(found, last) {
    const { duration, start } = this.timeline.data;
    const before = (a, b) => duration[b] - duration[a] || start[a] - start[b] || a - b;
    let kept = found;
    if (found.length > 4 * last) {
      const lengths = Int32Array.from(found, (i) => duration[i]).sort();
      const least = lengths[lengths.length - last];
      kept = found.filter((i) => duration[i] > least);
      for (const i of found) {
        if (kept.length >= last) break;
        if (duration[i] === least) kept.push(i);
      }
    }
    return kept.sort(before).slice(0, last);
  }

  fill() {
    const found = this.visible();
    const pages = Math.max(Math.ceil(found.length / this.size), 1);
    this.page = Math.min(this.page, pages - 1);
    const rows = this.longest(found, (this.page + 1) * this.size).slice(this.page * this.size);
    this.body.replaceChildren(...rows.map((i) => this.row(i)));
    byId("spans-page").textContent = `page ${this.page + 1} of ${thin.format(pages)}`;
    byId("spans-before").disabled = this.page === 0;
    byId("spans-after").disabled = this.page >= pages - 1;
    this.say(found.length);
  }

  say(count) {
    const { from, to, data } = this.timeline;
    byId("timeline-status").textContent =
      `${secondsText(from * data.tick_s)} to ${secondsText(to * data.tick_s)}: ${plural(count, "span")} in view`;
  }

  row(i) {
    const { timeline } = this;
    const { data } = timeline;
    const row = timeline.rowOf(i);
    const twin = timeline.twin(i);
    const name = timeline.nameOf(i);
    const button = make("button", shortened(name, 44), { type: "button", class: "plain", title: name });
    button.addEventListener("click", () => { timeline.choose(i, true); this.tell(); });
    const where = `${data.groups[row.group]}, ${row.origin} ${row.lane}`;
    const kind = make("td", null, {}, [swatch(data.categories[data.category[i]]), ` ${data.categories[data.category[i]]}`]);
    return make("tr", null, {}, [
      make("th", null, { scope: "row" }, [button]), kind, longCell(where, 48),
      make("td", secondsText(data.start[i] * data.tick_s), { class: "number" }),
      make("td", secondsText(data.duration[i] * data.tick_s), { class: "number" }),
      make("td", twin < 0 ? "" : secondsText(data.duration[twin] * data.tick_s), { class: "number" }),
    ]);
  }

  // The chosen span in a sentence.
  tell() {
    const { timeline } = this;
    const { data, chosen, other } = timeline;
    const panel = byId("chosen");
    if (chosen < 0) {
      panel.replaceChildren();
      return;
    }
    const said = (i) => {
      const row = timeline.rowOf(i);
      return `${row.origin}: ${secondsText(data.duration[i] * data.tick_s)} from ${secondsText(data.start[i] * data.tick_s)} on`;
    };
    const row = timeline.rowOf(chosen);
    const parts = [make("strong", timeline.nameOf(chosen)), ` on ${data.groups[row.group]}, ${row.lane}. `, said(chosen)];
    if (timeline.count(chosen) > 1) parts.push(`, busy for ${secondsText(timeline.busy(chosen) * data.tick_s)} of it`);
    if (other >= 0) {
      parts.push(`; ${said(other)}`);
      const pair = row.origin.startsWith("predicted") ? [chosen, other] : [other, chosen];
      const [predicted, measured] = pair.map((i) => data.duration[i]);
      if (measured) parts.push(` (prediction ${predicted >= measured ? "+" : ""}${digits((predicted / measured - 1) * 100, 3)} %)`);
    }
    parts.push(".");
    panel.replaceChildren(make("p", null, {}, parts));
  }
}
