
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const settings = {responsive: true, displayModeBar: "hover", displaylogo: false, showSendToCloud: false, modeBarButtonsToRemove: ["select2d", "lasso2d"]};
const drawings = Object.entries(figures).map(([id, figure]) => Plotly.newPlot(id, figure.data, figure.layout, settings));
Promise.all(drawings).then(() => { document.documentElement.dataset.drawn = String(drawings.length); });
