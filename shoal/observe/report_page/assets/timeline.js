"use strict";
// Spans on a canvas: culled by binary search; what is narrower than a pixel is drawn as the kind
// that takes most of that pixel.
const KINDS = {
  forward: "#0072b2", backward: "#009e73", "weight gradient": "#e69f00", update: "#cc79a7",
  reduce: "#d55e00", gather: "#b5651d", send: "#56b4e9", receive: "#3a86b0", push: "#d55e00",
  pull: "#8a6fc0", mix: "#a0522d", load: "#8a8d00", evaluate: "#7b5ea7", checkpoint: "#5d7a5d",
  injected: "#c1121f", computing: "#0072b2", step: "#8d99a6",
};
const HEIGHTS = { main: 20, steps: 12 };
const ROW = 12, GAP = 7, AXIS = 22;

function colorOf(kind) {
  if (kind === "wait") return getComputedStyle(document.documentElement).getPropertyValue("--wait");
  return KINDS[kind] || "#777";
}

function showTime(us) {
  const size = Math.abs(us);
  if (size >= 1e6) return `${(us / 1e6).toFixed(size >= 1e7 ? 2 : 3)} s`;
  return size >= 1e3 ? `${(us / 1e3).toFixed(2)} ms` : `${Math.round(us)} µs`;
}

class Timeline {
  constructor(item, label) {
    this.item = item;
    this.kinds = item.kinds;
    let top = AXIS, process = null;
    this.rows = item.rows.map((row) => {
      if (row.process !== process && process !== null) top += GAP;
      process = row.process;
      const start = Float64Array.from(row.start), end = new Float64Array(start.length);
      const reach = new Float64Array(start.length);  // the latest end so far: sorted, for searches
      for (let i = 0, most = -Infinity; i < start.length; i++) {
        end[i] = start[i] + row.length[i];
        reach[i] = most = Math.max(most, end[i]);
      }
      const height = HEIGHTS[row.track] || ROW;
      const made = { ...row, start, end, reach, top, height };
      top += height + 1;
      return made;
    });
    this.height = top + 4;
    const of = this.rows.filter((row) => row.start.length);
    this.whole = [Math.min(...of.map((r) => r.start[0])), Math.max(...of.map((r) => r.reach[r.reach.length - 1]))];
    this.training = item.view[1] > item.view[0] ? item.view : this.whole;
    const margin = (this.training[1] - this.training[0]) * 0.01;
    this.training = [this.training[0] - margin, this.training[1] + margin];
    const steps = this.rows.find((row) => row.track === "steps");
    const isStep = (i) => this.kinds[steps.kind[i]] === "step";
    this.steps = steps ? [...steps.start.keys()].filter(isStep).map((i) => [steps.start[i], steps.end[i]]) : [];
    this.zero = item.view[0];  // times are told from the first step on
    this.view = [...this.training];
    this.build(label);
  }

  build(label) {
    this.element = make("div");
    const buttons = make("div", { class: "buttons" }, this.element);
    const add = (text, title, act) => {
      const button = make("button", { type: "button", title, "aria-label": title }, buttons, text);
      button.onclick = act;
    };
    add("−", "zoom out", () => this.zoom(2));
    add("+", "zoom in", () => this.zoom(0.5));
    add("◀", "pan left", () => this.pan(-0.25));
    add("▶", "pan right", () => this.pan(0.25));
    if (this.steps.length) {
      add("previous step", "previous step", () => this.toStep(-1));
      add("next step", "next step", () => this.toStep(1));
      add("training", "all steps", () => this.show(...this.training));
    }
    add("whole run", "whole run", () => this.show(...this.whole));
    const frame = make("div", { class: "timeline" }, this.element);
    const names = make("div", { class: "names" }, frame);
    make("div", { style: `height:${AXIS}px` }, names);
    let before = null;
    for (const row of this.rows) {
      const gap = before !== null && before !== row.process ? GAP : 0;
      const isMain = row.track === "main" || before !== row.process;
      const style = `height:${row.height + 1 + gap}px;padding-top:${gap}px;line-height:${row.height}px`;
      make("div", { style, class: isMain ? "main" : "" }, names, isMain ? row.process : row.track);
      before = row.process;
    }
    const words = `Timeline of ${label}: arrow keys pan, plus and minus zoom, n and p go to the next and previous step, 0 shows all steps`;
    this.canvas = make("canvas", { tabindex: 0, role: "application", "aria-label": words }, frame);
    this.canvas.style.height = `${this.height}px`;
    const legend = make("div", { class: "legend" }, this.element);
    for (const kind of this.kinds) {
      const one = make("span", {}, legend);
      make("i", {}, one).style.background = kind === "wait" ? "var(--wait)" : colorOf(kind);
      one.append(kind);
    }
    make("p", { class: "note" }, this.element,
      "Wheel, pinch or + and − zoom; drag or arrow keys pan; n and p: next and previous step; 0: all steps.");
    this.tip = make("div", { class: "tip", role: "status", hidden: "" }, document.body);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  listen() {
    const canvas = this.canvas, pointers = new Map();
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const acts = {
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.5),
        "=": () => this.zoom(0.5), "-": () => this.zoom(2), _: () => this.zoom(2), n: () => this.toStep(1),
        p: () => this.toStep(-1), 0: () => this.show(...this.training), Home: () => this.show(...this.whole),
      };
      if (!acts[event.key]) return;
      event.preventDefault();
      acts[event.key]();
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.pan((event.deltaX || event.deltaY) / 1000);
      } else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), this.moment(event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, event.clientX);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (before === undefined) return this.hover(event);
      const wide = canvas.clientWidth;
      if (pointers.size === 2) {  // a pinch: the distance of two fingers
        const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
        const distance = Math.max(10, Math.abs(event.clientX - other));
        this.zoom(Math.max(10, Math.abs(before - other)) / distance, this.moment({ clientX: (event.clientX + other) / 2 }));
      } else this.pan((before - event.clientX) / wide);
      pointers.set(event.pointerId, event.clientX);
      this.tip.hidden = true;
    });
    const leave = (event) => { pointers.delete(event.pointerId); };
    canvas.addEventListener("pointerup", (event) => { leave(event); this.hover(event); });
    canvas.addEventListener("pointercancel", leave);
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  moment(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.view[0] + ((event.clientX - box.left) / box.width) * (this.view[1] - this.view[0]);
  }

  show(from, to) {
    const room = (this.whole[1] - this.whole[0]) * 0.02;
    const length = Math.min(Math.max(to - from, 5), this.whole[1] - this.whole[0] + 2 * room);
    const first = Math.min(Math.max(from, this.whole[0] - room), this.whole[1] + room - length);
    this.view = [first, first + length];
    this.canvas.dataset.view = this.view.map(Math.round).join(" ");
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  pan(share) {
    const by = share * (this.view[1] - this.view[0]);
    this.show(this.view[0] + by, this.view[1] + by);
  }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    this.show(around - (around - this.view[0]) * factor, around + (this.view[1] - around) * factor);
  }

  toStep(by) {
    if (!this.steps.length) return;
    const middle = (this.view[0] + this.view[1]) / 2;
    const shown = this.view[1] - this.view[0] < 3 * (this.steps[0][1] - this.steps[0][0]);
    let now = shown ? this.steps.findIndex(([, end]) => end >= middle) : by > 0 ? -1 : this.steps.length;
    if (now < 0 && shown) now = this.steps.length - 1;
    const [from, to] = this.steps[Math.min(this.steps.length - 1, Math.max(0, now + by))];
    this.show(from - (to - from) * 0.05, to + (to - from) * 0.05);
  }

  draw() {
    const canvas = this.canvas, wide = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!wide) return;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(this.height * ratio);
    const paint = canvas.getContext("2d");
    paint.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    this.axis(paint, wide, style);
    const colors = this.kinds.map(colorOf);
    this.labels = 0;
    for (const row of this.rows) this.drawRow(paint, row, wide, colors, style);
    canvas.dataset.drawn = Math.round(performance.now());
  }

  axis(paint, wide, style) {
    const length = this.view[1] - this.view[0];
    const least = (length * 90) / wide, power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((one) => one >= least);
    paint.font = "11px system-ui, sans-serif";
    for (let t = Math.ceil((this.view[0] - this.zero) / step) * step; t < this.view[1] - this.zero; t += step) {
      const x = ((t + this.zero - this.view[0]) / length) * wide;
      paint.fillStyle = style.getPropertyValue("--line");
      paint.fillRect(x, 14, 1, this.height);
      paint.fillStyle = style.getPropertyValue("--muted");
      if (x < wide - 50) paint.fillText(this.mark(t, step), x + 2, 11);
    }
  }

  mark(t, step) {
    const most = Math.max(Math.abs(this.view[0] - this.zero), Math.abs(this.view[1] - this.zero));
    const [unit, name] = most >= 1e6 ? [1e6, "s"] : most >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    return `${(t / unit).toFixed(Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9)))} ${name}`;
  }

  drawRow(paint, row, wide, colors, style) {
    const [from, to] = this.view, scale = wide / (to - from);
    paint.fillStyle = style.getPropertyValue("--track");
    paint.fillRect(0, row.top, wide, row.height);
    const last = lowerBound(row.start, to), weights = new Float64Array(colors.length);
    let column = -1, most = -1;
    const flush = () => {
      if (most >= 0) {
        paint.fillStyle = colors[most];
        paint.fillRect(column, row.top, 1, row.height);
      }
      weights.fill(0);
      most = -1;
    };
    for (let i = lowerBound(row.reach, from); i < last; i++) {
      if (row.end[i] < from) continue;
      const x = (row.start[i] - from) * scale, size = (row.end[i] - row.start[i]) * scale, kind = row.kind[i];
      if (size < 1) {
        const here = Math.floor(x);
        if (here !== column) { flush(); column = here; }
        weights[kind] += size + 1e-3;
        if (most < 0 || weights[kind] > weights[most]) most = kind;
        continue;
      }
      flush();
      paint.fillStyle = colors[kind];
      const left = Math.max(0, x), right = Math.min(wide, x + size);
      paint.fillRect(left, row.top, Math.max(1, right - left - (size > 4 ? 0.7 : 0)), row.height);
      if (row.height >= ROW && row.track in HEIGHTS && right - left > 26 && this.labels++ < 500) this.label(paint, row, i, left, right, style);
    }
    flush();
  }

  label(paint, row, i, left, right, style) {
    const kind = this.kinds[row.kind[i]];
    const text = this.item.texts[row.text[i]].split(" · ")[0].slice(0, 40) || kind;
    paint.save();
    paint.beginPath();
    paint.rect(left, row.top, right - left - 3, row.height);
    paint.clip();
    paint.fillStyle = kind === "wait" ? style.getPropertyValue("--text") : "#fff";
    paint.fillText(text, left + 4, row.top + row.height / 2 + 4);
    paint.restore();
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect(), y = event.clientY - box.top;
    const row = this.rows.find((one) => y >= one.top && y < one.top + one.height);
    const found = row === undefined ? -1 : this.at(row, this.moment(event), (2 * (this.view[1] - this.view[0])) / box.width);
    this.tip.hidden = found < 0;
    if (found < 0) return;
    const words = this.item.texts[row.text[found]];
    const length = row.end[found] - row.start[found];
    this.tip.textContent = `${row.process}, ${row.track}: ${this.kinds[row.kind[found]]} ${showTime(length)}, ` +
      `at ${showTime(row.start[found] - this.zero)}${words ? `\n${words}` : ""}`;
    const size = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - size.width - 8))}px`;
    this.tip.style.top = `${event.clientY + 18 + size.height > innerHeight ? event.clientY - size.height - 8 : event.clientY + 16}px`;
  }

  at(row, moment, near) {
    for (let i = lowerBound(row.start, moment + near) - 1, looked = 0; i >= 0 && looked < 2000; i--, looked++) {
      if (row.end[i] + near >= moment) return i;  // the innermost begins last
      if (row.reach[i] + near < moment) return -1;
    }
    return -1;
  }
}

function lowerBound(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
