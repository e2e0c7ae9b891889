"use strict";
// The sections of the page, from the data that the page holds. Text is set as text, never as HTML.
const SHARES = {
  computing: "#0072b2", exposed: "#d55e00", waiting: "#8d99a6", bubble: "#b9a5d6", loading: "#8a8d00",
  injected: "#c1121f", other: "#5b6b7b",
};
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc4778", "#56b4e9", "#d55e00", "#7b5ea7", "#8a8d00"];
const charts = [];

function make(name, attributes = {}, parent = null, text) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== "" || key === "hidden") element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

const DRAW = {
  facts(item) {
    const list = make("dl");
    for (const [name, value] of item.rows) {
      make("dt", {}, list, name);
      make("dd", {}, list, value);
    }
    return list;
  },
  timeline(item, run) {
    const made = new Timeline(item, run);
    (window.timelines = window.timelines || []).push(made);
    return made.element;
  },
  shares(item) {
    const block = make("div"), grid = make("div", { class: "shares" }, block);
    for (const row of item.rows) {
      make("span", {}, grid, row.name);
      const told = item.parts.map((part, i) => `${part} ${(100 * row.values[i]).toFixed(1)}%`).join(", ");
      const hidden = row.hidden >= 5e-4 ? `, communication hidden behind computing ${(100 * row.hidden).toFixed(1)}%` : "";
      const stack = make("div", { class: "stack", role: "img", title: told + hidden, "aria-label": `${row.name}: ${told}${hidden}` }, grid);
      item.parts.forEach((part, i) => {
        const share = row.values[i];
        if (share < 5e-4) return;
        const piece = make("span", {}, stack, share > 0.07 ? `${Math.round(100 * share)}%` : "");
        piece.style.cssText = `flex:0 0 ${100 * share}%;background:${SHARES[part]}`;
      });
      make("span", {}, grid, row.seconds);
    }
    const legend = make("div", { class: "legend" }, block);
    for (const part of item.parts) {
      const one = make("span", {}, legend);
      make("i", {}, one).style.background = SHARES[part];
      one.append(part);
    }
    return block;
  },
  matrix(item) {
    const table = make("table", { class: "matrix" }), head = make("tr", {}, make("thead", {}, table));
    make("th", { class: "left" }, head, item.corner);
    for (const name of item.names) make("th", { scope: "col" }, head, name);
    const most = Math.max(...item.rows.flat()) || 1, body = make("tbody", {}, table);
    item.rows.forEach((values, i) => {
      const row = make("tr", {}, body);
      make("th", { scope: "row", class: "left" }, row, item.names[i]);
      values.forEach((value, j) => {
        const cell = make("td", {}, row, item.texts[i][j]);
        if (value) cell.style.background = `color-mix(in srgb, var(--accent) ${Math.round(8 + 42 * value / most)}%, transparent)`;
      });
    });
    return scrolling(table);
  },
  table(item) {
    const table = make("table"), head = make("tr", {}, make("thead", {}, table)), body = make("tbody", {}, table);
    const side = (i) => ({ class: i < (item.left || 0) ? "left" : "" });
    item.heads.forEach((text, i) => make("th", side(i), head, text));
    item.rows.forEach((cells, number) => {
      const row = make("tr", { class: item.sums && number === item.rows.length - 1 ? "sum" : "" }, body);
      cells.forEach((text, i) => make("td", side(i), row, text));
    });
    return scrolling(table);
  },
  bars(item) {
    const grid = make("div", { class: "bars" }), most = Math.max(...item.rows.map((row) => row[1])) || 1;
    for (const [name, value, text] of item.rows) {
      make("span", {}, grid, name);
      make("div", { class: "bar", style: `width:${Math.max(0, 100 * value / most)}%` }, make("div", {}, grid));
      make("span", {}, grid, text);
    }
    return grid;
  },
  lines(item) {
    const holder = make("div", { class: "charts" });
    chart(make("div", {}, holder), item.x, item.y, item.lines);
    return holder;
  },
  picture(item) {
    const frame = make("div", { class: "picture scroll" });
    make("img", { src: `data:image/svg+xml;base64,${item.svg}`, alt: item.text }, frame);
    return frame;
  },
  pipeline: (item) => pipeline(item),
  rounds: (item) => rounds(item),
};

function scrolling(element) {
  const frame = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table" });
  frame.append(element);
  return frame;
}

function chart(host, xName, yName, lines) {
  const build = () => {
    const style = getComputedStyle(document.documentElement);
    const axis = { stroke: style.getPropertyValue("--muted"), grid: { stroke: style.getPropertyValue("--line"), width: 1 }, ticks: { stroke: style.getPropertyValue("--line") } };
    const data = uPlot.join(lines.map((line) => [line.x, line.y]));
    const isFew = (line) => line.x.length < 40;
    const series = lines.map((line, i) => ({
      label: line.name, stroke: HUES[(line.hue ?? i) % HUES.length], width: 1.8, spanGaps: true,
      dash: (line.hue ?? i) >= HUES.length ? [6, 4] : undefined,
      points: { show: isFew(line), size: 4 }, value: (_, v) => (v == null ? "–" : v.toPrecision(5)),
    }));
    const wide = Math.max(220, host.clientWidth);
    return new uPlot({
      width: wide, height: 280, scales: { x: { time: false } }, cursor: { focus: { prox: 20 } },
      series: [{ label: xName, value: (_, v) => (v == null ? "–" : String(+v.toFixed(3))) }, ...series],
      axes: [{ ...axis, label: xName, labelSize: 22 }, { ...axis, label: yName, labelSize: 20, size: 52 }],
    }, data, host);
  };
  const entry = { host, build, plot: null };
  charts.push(entry);
  return host;
}

function drawCharts() {
  for (const entry of charts) {
    if (entry.plot) entry.plot.destroy();
    entry.plot = entry.build();
  }
}

function losses(panels, runs) {
  const panel = make("div", { class: "panel" }), holder = make("div", { class: "charts" }, panel), lines = [];
  for (const { run, items } of panels) {
    for (const line of items[0].lines) lines.push(runs.length > 1 ? { ...line, name: `${runs[run]}: ${line.name}`, hue: run } : line);
  }
  for (const [key, words] of [["steps", "step"], ["seconds", "seconds of training"]]) {
    chart(make("div", {}, holder), words, "loss", lines.map((line) => ({ ...line, x: line[key] })));
  }
  const notes = panels.map(({ items }) => items[0].note).filter(Boolean);
  if (notes.length) make("p", { class: "note" }, panel, notes.join(" "));
  return panel;
}

function section(data, { id, title, panels }) {
  const block = make("section", { id, "aria-labelledby": `${id}-title` }, document.querySelector("main"));
  make("h2", { id: `${id}-title` }, block, title);
  const wide = panels.some(({ items }) => items.some((item) => item.type === "timeline" || item.type === "losses"));
  const grid = make("div", { class: wide ? "panels wide" : "panels" }, block);
  if (id === "loss") return void grid.append(losses(panels, data.runs));
  for (const { run, items } of panels) {
    const panel = make("div", { class: "panel" }, grid);
    if (data.runs.length > 1 || id === "runs") make("h3", {}, panel, data.runs[run]);
    for (const item of items) {
      const isTitled = item.title && item.type !== "pipeline" && item.type !== "rounds";
      if (isTitled) make("h4", {}, panel, item.title);
      panel.append(DRAW[item.type](item, data.runs[run]));
      if (item.note && (isTitled || !item.title)) make("p", { class: "note" }, panel, item.note);
    }
  }
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const header = document.querySelector("header");
  make("strong", {}, header, "Shoal");
  const nav = make("nav", { "aria-label": "sections" }, header);
  for (const { id, title } of data.sections) make("a", { href: `#${id}` }, nav, title);
  for (const one of data.sections) section(data, one);
  drawCharts();
  let width = innerWidth, timer = null;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(drawCharts, 100);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.documentElement.dataset.ready = Math.round(performance.now());
  }));
}

start();
