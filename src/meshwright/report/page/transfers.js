// Stepping through messages: a step is a moment at which something arrives. The picture of the fabric shows what arrives and what is under way.

const SVG = "http://www.w3.org/2000/svg";
const LISTED = 40;
const METERS = 64;

class Stepper {
  constructor(data) {
    this.data = data;
    this.moving = byId("moving");
    this.slider = byId("step-slider");
    this.marker();
    const kinds = [...new Set(data.category)].map((c) => data.categories[c]);
    const choice = byId("step-kind");
    choice.append(...kinds.map((kind) => make("option", kind, { value: kind })));
    choice.closest("label").hidden = kinds.length < 2;
    choice.addEventListener("change", () => this.filter(choice.value));
    this.slider.addEventListener("input", () => this.to(Number(this.slider.value)));
    const buttons = { "step-first": () => 0, "step-back": () => this.at - 1, "step-forward": () => this.at + 1, "step-last": () => this.moments.length };
    for (const [id, place] of Object.entries(buttons)) byId(id).addEventListener("click", () => this.to(place()));
    byId("step-play").addEventListener("click", () => this.play());
    this.filter("all");
  }

  // Messages in order of arrival, and the first of each moment.
  filter(kind) {
    const { data } = this;
    this.all = kind === "all";
    this.chosen = [];
    for (let i = 0; i < data.end.length; i++) {
      if (this.all || data.categories[data.category[i]] === kind) this.chosen.push(i);
    }
    this.moments = [];
    this.chosen.forEach((i, k) => { if (!k || data.end[i] !== data.end[this.chosen[k - 1]]) this.moments.push(k); });
    this.slider.max = this.moments.length;
    this.to(0);
  }

  // Step 0 is before the first arrival; step k is the k-th moment.
  to(step) {
    this.at = Math.min(Math.max(step, 0), this.moments.length);
    this.slider.value = this.at;
    const first = this.at ? this.moments[this.at - 1] : 0;
    const last = this.at ? this.moments[this.at] ?? this.chosen.length : 0;
    const arriving = this.chosen.slice(first, last);
    const now = arriving.length ? this.data.end[arriving[0]] : 0;
    const under = [];
    for (let k = last; k < this.chosen.length && under.length < 400; k++) {
      if (this.data.start[this.chosen[k]] <= now) under.push(this.chosen[k]);
    }
    this.draw(arriving, under);
    this.list(arriving);
    this.progress(last);
    const said = this.at
      ? `Step ${thin.format(this.at)} of ${thin.format(this.moments.length)}, at ${secondsText(now * this.data.tick_s)}: `
        + `${plural(arriving.length, "message")} arrive${arriving.length === 1 ? "s" : ""}, ${under.length >= 400 ? "400 or more" : under.length} under way`
      : `Before the first of ${plural(this.moments.length, "step")}: ${plural(this.chosen.length, "message")} to come`;
    byId("step-status").textContent = said;
    this.slider.setAttribute("aria-valuetext", said);
  }

  play() {
    if (this.timer) {
      clearInterval(this.timer);
      this.timer = null;
    } else {
      if (this.at >= this.moments.length) this.to(0);
      const each = Math.max(Math.round(this.moments.length / 100), 1);
      this.timer = setInterval(() => {
        this.to(this.at + each);
        if (this.at >= this.moments.length) this.play();
      }, 250);
    }
    byId("step-play").textContent = this.timer ? "stop" : "play";
  }

  marker() {
    const defs = document.createElementNS(SVG, "defs");
    const marker = document.createElementNS(SVG, "marker");
    const settings = { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" };
    for (const [key, value] of Object.entries(settings)) marker.setAttribute(key, value);
    const head = document.createElementNS(SVG, "path");
    head.setAttribute("d", "M0 0L8 4L0 8z");
    head.setAttribute("class", "arrow");
    marker.append(head);
    defs.append(marker);
    this.moving.before(defs);
  }

  draw(arriving, under) {
    const lines = new Map();
    for (const [messages, kind] of [[under, "under"], [arriving, "arriving"]]) {
      for (const i of messages) for (const link of this.data.routes[this.data.route[i]]) lines.set(link, kind);
    }
    const made = [];
    for (const [link, kind] of lines) {
      const ends = this.data.links[link];
      if (!ends) continue;
      const [x1, y1, x2, y2] = ends;
      const length = Math.hypot(x2 - x1, y2 - y1) || 1;
      const [dx, dy] = [(x2 - x1) / length, (y2 - y1) / length];
      const cut = Math.min(18, length / 4); // the two directions stand beside each other, and end before the node
      const line = document.createElementNS(SVG, "line");
      const places = { x1: x1 - dy * 4 + dx * cut, y1: y1 + dx * 4 + dy * cut, x2: x2 - dy * 4 - dx * cut, y2: y2 + dx * 4 - dy * cut };
      for (const [key, value] of Object.entries(places)) line.setAttribute(key, value.toFixed(1));
      line.setAttribute("class", kind);
      line.setAttribute("marker-end", "url(#arrow)");
      made.push(line);
    }
    this.moving.replaceChildren(...made);
    this.moving.parentNode.classList.toggle("stepping", this.at > 0);
  }

  route(i) {
    const links = this.data.routes[this.data.route[i]].map((k) => this.data.link_names[k]);
    return links.length ? [links[0][0], ...links.map((link) => link[1])].join(" → ") : "";
  }

  name(actor) {
    const { ranks, actors } = this.data;
    return actor < ranks ? `rank ${actor} (${actors[actor]})` : `switch ${actors[actor]}`;
  }

  list(arriving) {
    const { data } = this;
    const rows = arriving.slice(0, LISTED).map((i) => make("tr", null, {}, [
      longCell(this.name(data.src[i]), 32), longCell(this.name(data.dst[i]), 32), longCell(data.whats[data.what[i]], 60),
      make("td", bytesText(data.size[i]), { class: "number" }), longCell(this.route(i), 72),
    ]));
    if (arriving.length > LISTED) rows.push(make("tr", null, {}, [make("td", `and ${arriving.length - LISTED} more`, { colspan: 5 })]));
    byId("step-body").replaceChildren(...rows);
    byId("step-table").hidden = rows.length === 0;
  }

  // How much every rank has received of all that it will.
  progress(last) {
    const { data } = this;
    const box = byId("step-progress");
    const shown = Math.min(data.actors.length, METERS);
    const whole = new Float64Array(data.actors.length);
    const have = new Float64Array(data.actors.length);
    if (this.all) whole.set(data.received_bytes);
    this.chosen.forEach((i, k) => {
      if (!this.all) whole[data.dst[i]] += data.size[i];
      if (k < last) have[data.dst[i]] += data.size[i];
    });
    if (box.childElementCount === 0) {
      for (let r = 0; r < shown; r++) {
        const meter = make("meter", "", { min: 0, max: 1, id: `received-${r}` });
        box.append(make("label", null, { for: `received-${r}` }, [make("span", ""), meter]));
      }
      if (data.actors.length > shown) box.append(make("p", `and ${data.actors.length - shown} more`, { class: "note" }));
    }
    for (let r = 0; r < shown; r++) {
      const label = box.children[r];
      label.hidden = whole[r] === 0;
      label.firstChild.textContent = `${shortened(this.name(r), 30)}: ${bytesText(have[r])} of ${bytesText(whole[r])}`;
      label.lastChild.value = whole[r] ? have[r] / whole[r] : 0;
    }
  }
}
