// The reverse of report/page/packed.py: base64 of gzip, columns of delta-coded byte planes, lists of lines.

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function inflated(bytes, length) {
  const out = new Uint8Array(length);
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")).getReader();
  let at = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    out.set(value, at);
    at += value.length;
  }
  if (at !== length) throw new Error(`the page's data has ${at} bytes instead of ${length}`);
  return out;
}

function wholeNumbers(bytes, at, length) {
  const out = new Int32Array(length);
  const second = at + length;
  const third = second + length;
  const fourth = third + length;
  let value = 0;
  for (let i = 0; i < length; i++) {
    value = (value + (bytes[at + i] | (bytes[second + i] << 8) | (bytes[third + i] << 16) | (bytes[fourth + i] << 24))) | 0;
    out[i] = value;
  }
  return out;
}

function floats(bytes, at, length) {
  const view = new DataView(bytes.buffer, at, 8 * length);
  return Float64Array.from({ length }, (_, i) => view.getFloat64(8 * i, true));
}

// The content of the data element `id` with its columns and texts unpacked into it; null if the page has no such element.
async function unpack(id) {
  const element = byId(id);
  if (!element) return null;
  const content = JSON.parse(element.textContent);
  const packed = content.packed;
  const bytes = await inflated(bytesOf(packed.data), packed.bytes);
  for (const { name, kind, length, at } of packed.columns) {
    content[name] = kind === "i4" ? wholeNumbers(bytes, at, length) : floats(bytes, at, length);
  }
  for (const { name, length, at, bytes: size } of packed.texts) {
    const lines = new TextDecoder().decode(bytes.subarray(at, at + size)).split("\n");
    content[name] = lines.slice(0, length);
  }
  delete content.packed;
  element.textContent = "";
  return content;
}
