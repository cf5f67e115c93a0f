
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const settings = {responsive: true, displayModeBar: "hover", displaylogo: false, showSendToCloud: false, modeBarButtonsToRemove: ["select2d", "lasso2d"]};
const dark = matchMedia("(prefers-color-scheme: dark)");

function style() {
  const [words, lines] = dark.matches ? ["#d1d7e0", "#3d444d"] : ["#2a3f5f", "#e6ebf1"];
  const axis = {gridcolor: lines, linecolor: lines, zerolinecolor: lines, automargin: true, title: {standoff: 12}};
  const clear = "rgba(0,0,0,0)";
  return {layout: {paper_bgcolor: clear, plot_bgcolor: clear, font: {color: words}, xaxis: axis, yaxis: axis,
    hoverlabel: {bgcolor: dark.matches ? "#212830" : "#ffffff"}, modebar: {bgcolor: clear}}};
}

const drawings = Object.entries(figures).map(
  ([id, figure]) => Plotly.newPlot(id, figure.data, {template: style(), ...figure.layout}, settings));
dark.addEventListener("change", () => Object.keys(figures).forEach((id) => Plotly.relayout(id, {template: style()})));
Promise.all(drawings).then(() => { document.documentElement.dataset.drawn = String(drawings.length); });
