"use strict";
// Schedules that are stepped through: frames of a drawing, with buttons and a slider.
const SVG = "http://www.w3.org/2000/svg";

function drawn(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function animated(item, frames, word, svg, show) {
  const element = make("div", {});
  make("h4", {}, element, item.title);
  const controls = make("div", { class: "buttons" }, element);
  const button = (text, title, act) => {
    const made = make("button", { type: "button", "aria-label": title, title }, controls, text);
    made.onclick = act;
    return made;
  };
  button("◀", "back", () => go(now - 1));
  const play = button("play", "play", () => (timer ? stop() : start()));
  button("▶", "forward", () => go(now + 1));
  const slider = make("input", { type: "range", min: 0, max: frames - 1, value: 0, "aria-label": word }, controls);
  const told = make("span", { class: "note", style: "margin:0", "aria-live": "polite" }, controls);
  let now = 0, timer = null;
  function go(to) {
    now = Math.min(frames - 1, Math.max(0, to));
    slider.value = now;
    const words = show(now);
    told.textContent = `${word} ${now + 1} of ${frames}${words ? `: ${words}` : ""}`;
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "play";
  }
  function start() {
    if (now === frames - 1) go(0);
    play.textContent = "pause";
    timer = setInterval(() => { go(now + 1); if (now === frames - 1) stop(); }, 700);
  }
  slider.oninput = () => go(Number(slider.value));
  make("div", { class: "scroll" }, element).append(svg);
  make("p", { class: "note" }, element, item.note);
  go(0);
  return element;
}

function pipeline(item) {
  const unit = Math.max(22, Math.min(40, 900 / item.end)), left = 62, high = 30;
  const width = left + item.end * unit + 8, height = item.rows.length * (high + 6) + 4;
  const svg = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": item.title, style: `max-width:100%;min-width:${0.7 * width}px;height:auto` });
  const boxes = [];
  item.rows.forEach((row, stage) => {
    const y = stage * (high + 6) + 2;
    drawn("text", { x: 2, y: y + 19 }, svg, `stage ${stage}`);
    for (const [name, color, start, end] of row) {
      const group = drawn("g", {}, svg), wide = (end - start) * unit;
      drawn("rect", { x: left + start * unit, y, width: wide - 1.5, height: high, rx: 3, fill: color }, group);
      if (wide > 7 * name.length) drawn("text", { x: left + (start + end) * unit / 2, y: y + 19, class: "one" }, group, name);
      boxes.push({ group, start, end });
    }
  });
  const moments = [...new Set(boxes.map((box) => box.start))].sort((a, b) => a - b);
  return animated(item, moments.length, "moment", svg, (frame) => {
    for (const { group, start, end } of boxes) {
      const t = moments[frame];
      group.setAttribute("opacity", start > t ? 0.12 : end > t ? 1 : 0.5);
    }
  });
}

function rounds(item) {
  const size = 360, count = item.names.length, radius = 135, dot = count > 24 ? 9 : 17;
  const svg = drawn("svg", { viewBox: `0 0 ${size} ${size}`, width: size, height: size, role: "img", "aria-label": item.title, style: "max-width:100%;height:auto" });
  const mark = drawn("marker", { id: `tip${rounds.made = (rounds.made || 0) + 1}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, drawn("defs", {}, svg));
  drawn("path", { d: "M0 0L8 4L0 8z", fill: "#d55e00" }, mark);
  const places = item.names.map((_, i) => {
    const turn = (2 * Math.PI * i) / count - Math.PI / 2;
    return [size / 2 + radius * Math.cos(turn), size / 2 + radius * Math.sin(turn)];
  });
  const arrows = drawn("g", {}, svg);
  const fills = item.names.map((name, i) => {
    drawn("circle", { cx: places[i][0], cy: places[i][1], r: dot, class: "rank" }, svg);
    const fill = drawn("circle", { cx: places[i][0], cy: places[i][1], r: dot, class: "level", opacity: 0 }, svg);
    drawn("text", { x: places[i][0], y: places[i][1] + 4, "text-anchor": "middle" }, svg, name);
    return fill;
  });
  return animated(item, item.rounds.length, "round", svg, (frame) => {
    arrows.replaceChildren();
    if (item.levels) fills.forEach((fill, i) => fill.setAttribute("opacity", item.levels[frame][i]));
    const told = new Set(item.rounds[frame].map((one) => one[2]));  // one word for all: told once
    for (const [src, dst, words] of item.rounds[frame]) {
      const [a, b] = [places[src], places[dst]], length = Math.hypot(b[0] - a[0], b[1] - a[1]) || 1;
      const along = [(b[0] - a[0]) / length, (b[1] - a[1]) / length], side = [-along[1] * 6, along[0] * 6];
      const from = [a[0] + along[0] * dot + side[0], a[1] + along[1] * dot + side[1]];
      const to = [b[0] - along[0] * (dot + 2) + side[0], b[1] - along[1] * (dot + 2) + side[1]];
      drawn("path", { d: `M${from}L${to}`, class: "arrow", "marker-end": `url(#${mark.id})` }, arrows);
      if (told.size > 1 && item.rounds[frame].length <= 40) drawn("text", { x: (from[0] + to[0]) / 2 + 2 * side[0], y: (from[1] + to[1]) / 2 + side[1] + 4, class: "told", "text-anchor": "middle" }, arrows, words);
    }
    return item.told ? item.told[frame] : told.size === 1 ? [...told][0] : "";
  });
}
