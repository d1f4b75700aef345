(() => {
  "use strict";
  let figures;
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

  // As much of a text as is this wide; the rest is in the key above the charts, and under the pointer.
  const fitted = (text, most) => {
    let shown = text;
    while (shown.length > 1 && pen.measureText(shown).width > most) shown = `${shown.slice(0, -2)}…`;
    return shown;
  };
  const plain = (html) => new DOMParser().parseFromString(html, "text/html").documentElement.textContent;
  const escaped = (text) => text.replace(/[&<>]/g, (each) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[each]);

  // Every place on the plot for a box of this size, the nearest to one of the points first.
  const anywhere = (points, w, h, { width, height }) => {
    const found = [];
    for (let y0 = -14; y0 + h <= height; y0 += 6) {
      for (let x0 = 0; x0 + w <= width; x0 += 8) {
        const middle = { x: x0 + w / 2, y: y0 + h / 2 };
        const far = points.map((p) => Math.hypot(p.x - middle.x, p.y - middle.y));
        const away = Math.min(...far);
        found.push({ box: { x0, x1: x0 + w, y0, y1: y0 + h }, to: points[far.indexOf(away)], away });
      }
    }
    return found.sort((a, b) => a.away - b.away);
  };

  // The name of each curve: beside one of its points, the last if it can be; where these have no room, wherever
  // there is some, with a line to a point; and where there is none, upon the curves.
  const labels = (plot, own) => {
    const { xaxis, yaxis, font } = plot._fullLayout;
    const curves = plot._fullData.filter((trace) => trace.type === "scatter" && trace.hoverinfo !== "skip").map((trace) => ({
      trace,
      points: trace.x.map((x, i) => ({ x: xaxis.d2p(x), y: yaxis.d2p(trace.y[i]) })),
    }));
    const taken = inked(curves);
    const named = [];
    const clear = (box) => !taken.some((other) => meets(box, other));
    const apart = (box) => !named.some((other) => meets(box, other));
    const inside = (box) => box.x0 >= 0 && box.x1 <= xaxis._length && box.y0 >= -14 && box.y1 <= yaxis._length;
    pen.font = `bold ${font.size}px ${font.family}`;
    const size = { width: xaxis._length, height: yaxis._length };
    const lines = own.filter((each) => each.yref === "y")
      .map((each) => lineLabel(each, yaxis.d2p(each.y), size, clear, taken));
    const others = own.filter((each) => each.yref !== "y");  // names above the plot
    if (others.length) taken.push({ x0: 0, x1: xaxis._length, y0: -20, y1: 0 });
    const names = curves.map(({ trace, points }) => {
      const text = fitted(plain(trace.name), size.width - 8);
      const w = Math.min(pen.measureText(text).width + 4, size.width), h = 17;
      const { color } = trace.line || trace.marker;
      const label = {
        text: `<b>${escaped(text)}</b>`, font: { color },
        xref: "x domain", yref: "y domain", borderpad: 0,
      };
      const beside = points.toReversed().flatMap((p) => around(p, w, h))
        .find((box) => inside(box) && clear(box));
      if (beside) {
        taken.push(beside);
        named.push(beside);
        return {
          ...label, showarrow: false, xanchor: "left", yanchor: "top",
          x: beside.x0 / size.width, y: 1 - beside.y0 / size.height,
        };
      }
      const places = anywhere(points, w, h, size);
      const { box, to } = places.find((each) => clear(each.box)) || places.find((each) => apart(each.box)) || places[0];
      taken.push(box);
      named.push(box);
      return {
        ...label, bgcolor: css("--page"), showarrow: true, xanchor: "center", yanchor: "middle",
        arrowhead: 0, arrowwidth: 1, arrowcolor: color, standoff: 4,
        x: to.x / size.width, y: 1 - to.y / size.height, ax: (box.x0 + box.x1) / 2 - to.x, ay: (box.y0 + box.y1) / 2 - to.y,
      };
    });
    return [...lines, ...others, ...names];
  };

  // The names above the bars, shortened where the plot is narrow: their numbers are kept.
  const barLabels = (plot, own) => {
    const { xaxis, font } = plot._fullLayout;
    pen.font = `bold ${font.size}px ${font.family}`;
    return own.map((each) => {
      const [, name, told] = each.text.match(/^<b>(.*)<\/b>(.*)$/) || [];
      if (name === undefined) return each;
      return { ...each, text: `<b>${escaped(fitted(plain(name), xaxis._length - pen.measureText(told).width - 8))}</b>${told}` };
    });
  };

  const unpacked = (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (each) => each.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const loaded = async () => {
    figures = JSON.parse(await unpacked("figures"));
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
  };

  const draw = async () => {
    for (const [id, figure] of Object.entries(figures)) {
      const plot = document.getElementById(id);
      const base = layout(plot, themed(figure.layout));
      await Plotly.react(plot, themed(figure.data), base, { displayModeBar: false, responsive: false });
      const placed = plot._fullData[0].type === "scatter" ? labels : barLabels;
      await Plotly.relayout(plot, { annotations: placed(plot, base.annotations) });
    }
    document.documentElement.dataset.charts = "drawn";
  };

  // Browsers that print or make a picture wait for the load event, and that for a frame whose text has no end yet.
  const held = document.createElement("iframe");
  held.hidden = true;
  document.body.append(held);
  held.contentDocument.open();

  let width = 0, last = loaded();
  const again = () => { last = last.then(draw).finally(() => held.remove()); };
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.abs(contentRect.width - width) < 1) return;
    width = contentRect.width;
    again();
  }).observe(document.querySelector(".charts"));
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", again);
  addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
})();
