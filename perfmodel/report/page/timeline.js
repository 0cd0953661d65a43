"use strict";
// The timeline of a page: one canvas, rows by stream, spans in picoseconds. Draws only what is in view, one rectangle a pixel.
(() => {
  const classes = JSON.parse(document.getElementById("spans").textContent);
  const canvas = document.getElementById("canvas"), told = document.getElementById("told");
  const COLOURS = { host: "#E69F00", sync: "#8a5a00", kernel: "#0072B2", copy: "#CC79A7", collective: "#D55E00" };
  const ROW = 34, HEAD = 24, SIDE = 6, BAR = 20;
  let cls, rows, begin, end, from, to, chosen = -1, queued = false;

  const PREFIX = [[1e12, "s"], [1e9, "ms"], [1e6, "us"], [1e3, "ns"], [1, "ps"]];
  function time(ps) {
    if (ps === 0) return "0";
    const [scale, unit] = PREFIX.find(([s]) => Math.abs(ps) >= s) || PREFIX[4];
    return `${Number((ps / scale).toPrecision(4))} ${unit}`;
  }
  function load(number) {
    cls = classes[number];
    begin = 0; end = 0;
    rows = cls.streams.map((s) => ({ name: s.name, spans: [] }));
    const row = new Map(cls.streams.map((s, i) => [s.id, i]));
    cls.start.forEach((start, i) => { rows[row.get(cls.stream[i])].spans.push(i); begin = Math.min(begin, start); end = Math.max(end, start + cls.length[i]); });
    for (const r of rows) r.spans.sort((a, b) => cls.start[a] - cls.start[b]);
    cls.path = cls.start.map((_, i) => i).filter((i) => cls.critical[i]).sort((a, b) => cls.start[a] - cls.start[b]);
    chosen = -1; all();
  }
  function show(a, b) {
    const edge = (end - begin) * 0.01, span = Math.min(Math.max(b - a, 1000), end - begin + 2 * edge);
    from = Math.min(Math.max(a, begin - edge), end + edge - span); to = from + span;
    if (!queued) { queued = true; requestAnimationFrame(draw); }
  }
  const all = () => show(begin - end, 2 * end);
  const width = () => canvas.clientWidth - 2 * SIDE;
  const at = (ps) => SIDE + (ps - from) / (to - from) * width();
  const ps = (x) => from + (x - SIDE) / width() * (to - from);
  function firstEndingAfter(spans, when) {
    let low = 0, high = spans.length;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (cls.start[spans[mid]] + cls.length[spans[mid]] < when) low = mid + 1; else high = mid;
    }
    return low;
  }
  function draw() {
    queued = false;
    const ratio = window.devicePixelRatio || 1, height = HEAD + rows.length * (ROW + 14) + 8;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(canvas.clientWidth * ratio); canvas.height = Math.round(height * ratio);
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = "#fff"; g.fillRect(0, 0, canvas.clientWidth, height);
    ticks(g, height);
    const only = document.getElementById("only").checked, word = document.getElementById("find").value.trim().toLowerCase();
    if (begin < 0) { const x = Math.round(at(0)) + 0.5; g.strokeStyle = "#000"; g.setLineDash([4, 3]); g.beginPath(); g.moveTo(x, 0); g.lineTo(x, height); g.stroke(); g.setLineDash([]); }
    let drawn = 0, matches = 0;
    rows.forEach((row, number) => {
      const y = HEAD + number * (ROW + 14);
      g.fillStyle = "#444"; g.font = "12px system-ui,sans-serif"; g.fillText(row.name, SIDE, y + 11);
      let filled = -1;
      for (let k = firstEndingAfter(row.spans, from); k < row.spans.length; k++) {
        const i = row.spans[k];
        if (cls.start[i] > to) break;
        if (only && !cls.critical[i]) continue;
        const match = word && cls.names[cls.name[i]].toLowerCase().includes(word);
        if (match) matches++;
        const x = at(cls.start[i]), w = Math.max(at(cls.start[i] + cls.length[i]) - x, 0.6);
        if (x + w <= filled && i !== chosen && !match) continue;
        box(g, i, x, y + 16, w, { dim: word && !match, chosen: i === chosen });
        filled = Math.max(filled, w < 1 ? Math.floor(x) + 1 : x + w - 0.5); drawn++;
      }
    });
    canvas.dataset.drawn = drawn; canvas.dataset.from = Math.round(from); canvas.dataset.to = Math.round(to); canvas.dataset.matches = matches;
  }
  function box(g, i, x, y, w, state) {
    g.globalAlpha = state.dim ? 0.18 : 1;
    g.fillStyle = COLOURS[cls.kinds[cls.kind[i]]] || "#777";
    g.fillRect(x, y, w, BAR);
    if (cls.critical[i]) { g.fillStyle = "#000"; g.fillRect(x, y + BAR - 4, w, 4); if (w > 3) { g.strokeStyle = "#000"; g.lineWidth = 1.2; g.strokeRect(x + 0.6, y + 0.6, w - 1.2, BAR - 1.2); } }
    if (state.chosen) { g.strokeStyle = "#F0E442"; g.lineWidth = 3; g.strokeRect(x - 1.5, y - 1.5, w + 3, BAR + 3); }
    if (w > 42) {
      g.fillStyle = cls.kinds[cls.kind[i]] === "host" || cls.kinds[cls.kind[i]] === "copy" ? "#000" : "#fff";
      g.font = "11px system-ui,sans-serif"; g.save(); g.beginPath(); g.rect(x, y, w - 3, BAR); g.clip();
      g.fillText(cls.names[cls.name[i]], Math.max(x, 0) + 4, y + 13); g.restore();
    }
    g.globalAlpha = 1;
  }
  function ticks(g, height) {
    const raw = (to - from) / Math.max(width() / 110, 1), power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((f) => power * f >= raw);
    g.font = "11px system-ui,sans-serif";
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const x = Math.round(at(t)) + 0.5;
      g.strokeStyle = "#e6e6e6"; g.lineWidth = 1; g.beginPath(); g.moveTo(x, 16); g.lineTo(x, height); g.stroke();
      g.fillStyle = "#555"; g.fillText(time(Math.abs(t) < step / 2 ? 0 : t), Math.min(x + 3, canvas.clientWidth - 58), 12);
    }
  }
  function find(x, y) {
    const number = Math.floor((y - HEAD) / (ROW + 14)), row = rows[number];
    if (!row) return -1;
    const when = ps(x), reach = (to - from) / width() * 2;
    for (let k = Math.max(firstEndingAfter(row.spans, when - reach), 0); k < row.spans.length; k++) {
      const i = row.spans[k];
      if (cls.start[i] > when + reach) break;
      if (cls.start[i] - reach <= when && when <= cls.start[i] + cls.length[i] + reach) return i;
    }
    return -1;
  }
  function tell(i) {
    if (i < 0) return;
    chosen = i;
    told.textContent = `${cls.names[cls.name[i]]} (${cls.kinds[cls.kind[i]]}): ${time(cls.length[i])}, from ${time(cls.start[i])}` + (cls.critical[i] ? ", on the critical path" : "");
    show(from, to);
  }
  function zoom(factor, x = SIDE + width() / 2) {
    const middle = ps(x), span = (to - from) * factor, share = (middle - from) / (to - from);
    show(middle - span * share, middle + span * (1 - share));
  }
  const move = (share) => show(from + (to - from) * share, to + (to - from) * share);
  function step(way) {
    if (!cls.path.length) return;
    let k = cls.path.indexOf(chosen);
    k = k < 0 ? (way > 0 ? 0 : cls.path.length - 1) : Math.min(Math.max(k + way, 0), cls.path.length - 1);
    const i = cls.path[k], span = Math.min(to - from, Math.max(cls.length[i] * 12, (end - begin) / 400));
    const middle = cls.start[i] + cls.length[i] / 2;
    show(middle - span / 2, middle + span / 2);
    tell(i);
  }
  const KEYS = {
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
    0: all, Home: all, n: () => step(1), p: () => step(-1),
  };
  canvas.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || !KEYS[e.key]) return;
    e.preventDefault(); KEYS[e.key]();
  });
  canvas.addEventListener("wheel", (e) => {
    if (e.ctrlKey || e.metaKey) { e.preventDefault(); zoom(Math.exp(e.deltaY * 0.004), e.offsetX); }
    else if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) { e.preventDefault(); move(e.deltaX / width()); }
  }, { passive: false });
  const pointers = new Map();
  let moved = false;
  canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); pointers.set(e.pointerId, e.offsetX); moved = false; });
  canvas.addEventListener("pointermove", (e) => {
    if (!pointers.has(e.pointerId)) { const i = find(e.offsetX, e.offsetY); if (i >= 0 && i !== chosen) tell(i); return; }
    const before = pointers.get(e.pointerId);
    if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== e.pointerId)[1];
      const old = Math.abs(before - other), now = Math.abs(e.offsetX - other);
      if (old > 8 && now > 8) zoom(old / now, (e.offsetX + other) / 2);
    } else { move(-(e.offsetX - before) / width()); }
    if (Math.abs(e.offsetX - before) > 2) moved = true;
    pointers.set(e.pointerId, e.offsetX);
  });
  for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (e) => {
    pointers.delete(e.pointerId);
    if (!moved) { const i = find(e.offsetX, e.offsetY); if (i >= 0) tell(i); }
  });
  canvas.addEventListener("dblclick", (e) => zoom(0.35, e.offsetX));
  const press = (id, does) => document.getElementById(id).addEventListener("click", does);
  press("in", () => zoom(0.6)); press("out", () => zoom(1 / 0.6)); press("all", all); press("next", () => step(1)); press("prev", () => step(-1));
  document.getElementById("only").addEventListener("change", () => show(from, to));
  document.getElementById("find").addEventListener("input", () => show(from, to));
  document.getElementById("rank").addEventListener("change", (e) => load(Number(e.target.value)));
  window.addEventListener("resize", () => show(from, to));
  window.addEventListener("beforeprint", () => { all(); draw(); });
  load(0);
})();
