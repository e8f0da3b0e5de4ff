// Numbers for people, as the tables of the page have them.

const thin = new Intl.NumberFormat("en-US");

function digits(value, significant) {
  return String(Number(value.toPrecision(significant)));
}

function secondsText(seconds) {
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]) {
    if (Math.abs(seconds) >= scale) return `${digits(seconds / scale, 4)} ${unit}`;
  }
  return seconds ? `${digits(seconds / 1e-9, 3)} ns` : "0 s";
}

function bytesText(bytes) {
  for (const [scale, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (Math.abs(bytes) >= scale) return `${digits(bytes / scale, 3)} ${unit}`;
  }
  return `${bytes} B`;
}

// The end of a long name is what tells it from others: the middle is left out.
function shortened(text, limit) {
  if (text.length <= limit) return text;
  const tail = Math.floor(limit / 3);
  return `${text.slice(0, limit - tail - 1)}…${text.slice(text.length - tail)}`;
}

function plural(count, word) {
  return `${thin.format(count)} ${word}${count === 1 ? "" : "s"}`;
}

function byId(id) {
  return document.getElementById(id);
}

// An element with text and children; text never becomes markup.
function make(name, text, attributes = {}, children = []) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A cell with a long text shortened and the whole of it as a title.
function longCell(text, limit) {
  const made = make("td", shortened(text, limit));
  if (text.length > limit) made.title = text;
  return made;
}
