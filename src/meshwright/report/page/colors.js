// Colours of kinds of work. Communication is hatched too, and every span that has room carries its name: colour is never alone.

const KINDS = {
  "forward": ["#6f9fd8", false],
  "backward": ["#4fae85", false],
  "optimizer": ["#b286c2", false],
  "tensor-parallel": ["#ee8a75", true],
  "gradient": ["#d6b443", true],
  "pipeline": ["#5fc1d6", true],
  "send": ["#d6b443", true],
  "receive": ["#5fc1d6", true],
  "receive and add": ["#ee8a75", true],
  "receive and send on": ["#4fae85", true],
  "copy": ["#6f9fd8", false],
  "loss": ["#8f8fd0", false],
  "load data": ["#c98f5a", false],
  "communication": ["#d6b443", true],
  "host": ["#b9b3a4", false],
  "link": ["#8fb3c9", true],
  "critical path": ["#9aa4b2", false],
  "other": ["#a8a8a8", false],
};

function colorOf(category) {
  return (KINDS[category] || KINDS.other)[0];
}

function isHatched(category) {
  return (KINDS[category] || KINDS.other)[1];
}

const patterns = new Map();

function fillOf(context, category) {
  if (!isHatched(category)) return colorOf(category);
  if (!patterns.has(category)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.fillStyle = colorOf(category);
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = "rgba(255,255,255,0.42)";
    pen.lineWidth = 1.6;
    pen.beginPath();
    for (const offset of [-8, 0, 8]) {
      pen.moveTo(offset - 1, 9);
      pen.lineTo(offset + 9, -1);
    }
    pen.stroke();
    patterns.set(category, context.createPattern(tile, "repeat"));
  }
  return patterns.get(category);
}

// A colour of the page's style, for the canvas.
function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function swatch(category) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("viewBox", "0 0 14 12");
  svg.setAttribute("aria-hidden", "true");
  const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [key, value] of Object.entries({ width: 14, height: 12, fill: colorOf(category) })) box.setAttribute(key, value);
  svg.append(box);
  if (isHatched(category)) {
    const lines = document.createElementNS("http://www.w3.org/2000/svg", "path");
    lines.setAttribute("d", "M-2 8L8 -2M2 14L16 0M-2 14L14 -2");
    lines.setAttribute("stroke", "rgba(255,255,255,0.6)");
    svg.append(lines);
  }
  return svg;
}
