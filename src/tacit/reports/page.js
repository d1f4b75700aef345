(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // "var(--name)" anywhere in a figure becomes the colour of the present theme.
  const themed = (value) => {
    if (typeof value === "string") return value.replace(/^var\((--[\w-]+)\)$/, (_, name) => css(name));
    if (Array.isArray(value)) return value.map(themed);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, themed(inner)]));
  };

  const axis = (own) => ({
    gridcolor: css("--grid"), linecolor: css("--rule"), zeroline: false, automargin: true, ticks: "", ...own,
    title: { ...own.title, font: { size: 13 } },
  });

  const layout = (plot, own) => ({
    ...own,
    width: plot.clientWidth,
    height: plot.clientHeight,
    xaxis: axis(own.xaxis),
    yaxis: axis(own.yaxis),
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--dim") },
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--rule"), font: { color: css("--ink") } },
    margin: { l: 8, r: 12, t: 28, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    showlegend: false,
    hovermode: "closest",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    annotations: (own.annotations || []).slice(),
  });

  const pen = document.createElement("canvas").getContext("2d");
  const meets = (a, b) => a.x0 < b.x1 && b.x0 < a.x1 && a.y0 < b.y1 && b.y0 < a.y1;

  // What labels must keep clear of: points every few pixels along the curves.
  const inked = (curves) => curves.flatMap((curve) => curve.points.flatMap((p, i) => {
    const q = curve.points[i + 1];
    if (!q) return [{ x0: p.x - 5, x1: p.x + 5, y0: p.y - 5, y1: p.y + 5 }];
    const n = Math.max(1, Math.ceil(Math.hypot(q.x - p.x, q.y - p.y) / 4));
    return Array.from({ length: n }, (_, k) => {
      const x = p.x + (q.x - p.x) * k / n, y = p.y + (q.y - p.y) * k / n, r = k ? 2 : 5;
      return { x0: x - r, x1: x + r, y0: y - r, y1: y + r };
    });
  }));

  const around = (p, w, h) => [
    [p.x + 10, p.y - h / 2], [p.x - w / 2, p.y - h - 8], [p.x - w / 2, p.y + 8],
    [p.x + 6, p.y - h - 6], [p.x + 6, p.y + 6], [p.x - w - 6, p.y - h - 6], [p.x - w - 6, p.y + 6],
    [p.x - w - 10, p.y - h / 2],
  ].map(([x, y]) => ({ x0: x, x1: x + w, y0: y, y1: y + h }));

  // The label of a line across the plot: at whichever end, above or below, is clear of the curves; else as a key
  // in the lower right corner, where curves of accuracy seldom are.
  const lineLabel = (label, y, { width, height }, clear, taken) => {
    const w = pen.measureText(label.text).width + 6;
    const ends = [[0, "left"], [1, "right"]].flatMap(([x, xanchor]) => [["bottom", -20, 0], ["top", 0, 20]].map(
      ([yanchor, up, down]) => ({
        place: { x, xanchor, yanchor },
        box: { x0: x * (width - w), x1: x * (width - w) + w, y0: y + up, y1: y + down },
      })));
    const corner = {
      place: { x: 1, xanchor: "right", y: 0, yref: "y domain", yanchor: "bottom", text: `- - ${label.text}` },
      box: { x0: width - w - 30, x1: width, y0: height - 22, y1: height },
    };
    const { place, box } = [...ends, corner].find((each) => clear(each.box)) || ends[0];
    taken.push(box);
    for (let x = 0; x < width; x += 4) taken.push({ x0: x, x1: x + 4, y0: y - 1, y1: y + 1 });
    return { ...label, ...place };
  };

  // The name of each curve beside one of its points, the last if it can be; none where there is no room.
  const labels = (plot, own) => {
    const { xaxis, yaxis, font } = plot._fullLayout;
    const curves = plot._fullData.filter((trace) => trace.type === "scatter").map((trace) => ({
      trace,
      points: trace.x.map((x, i) => ({ x: xaxis.d2p(x), y: yaxis.d2p(trace.y[i]) })),
    }));
    const taken = inked(curves);
    const clear = (box) => !taken.some((other) => meets(box, other));
    const inside = (box) => box.x0 >= 0 && box.x1 <= xaxis._length && box.y0 >= -14 && box.y1 <= yaxis._length;
    pen.font = `600 ${font.size}px ${font.family}`;
    const size = { width: xaxis._length, height: yaxis._length };
    const lines = own.filter((each) => each.yref === "y")
      .map((each) => lineLabel(each, yaxis.d2p(each.y), size, clear, taken));
    const others = own.filter((each) => each.yref !== "y");  // names above the plot
    if (others.length) taken.push({ x0: 0, x1: xaxis._length, y0: -20, y1: 0 });
    const names = curves.flatMap(({ trace, points }) => {
      const raw = new DOMParser().parseFromString(trace.name, "text/html").documentElement.textContent;
      const w = pen.measureText(raw).width + 4;
      const free = points.toReversed().flatMap((p) => around(p, w, 17))
        .find((box) => inside(box) && clear(box));
      if (!free) return [];
      taken.push(free);
      return [{
        text: `<b>${trace.name}</b>`, showarrow: false, font: { color: trace.line.color },
        xref: "x domain", yref: "y domain", xanchor: "left", yanchor: "top", borderpad: 0,
        x: free.x0 / xaxis._length, y: 1 - free.y0 / yaxis._length,
      }];
    });
    return [...lines, ...others, ...names];
  };

  const draw = async () => {
    for (const [id, figure] of Object.entries(figures)) {
      const plot = document.getElementById(id);
      const base = layout(plot, themed(figure.layout));
      await Plotly.react(plot, themed(figure.data), base, { displayModeBar: false, responsive: false });
      if (plot._fullData[0].type === "scatter") {
        await Plotly.relayout(plot, { annotations: labels(plot, base.annotations) });
      }
    }
    document.documentElement.dataset.charts = "drawn";
  };

  let width = 0, last = Promise.resolve();
  const again = () => { last = last.then(draw); };
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.abs(contentRect.width - width) < 1) return;
    width = contentRect.width;
    again();
  }).observe(document.querySelector(".charts"));
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", again);
  addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
})();
