"use strict";
const page = (() => {
  const root = document.documentElement;
  root.classList.add("js");
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const nearest = (xs, x) => xs.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(xs[best] - x) ? i : best), 0);
  const shown = (value, share) => (share ? `${Number((100 * value).toPrecision(4))}%` : String(Number(value.toPrecision(4))));

  // Charts: a pointer over one reads all of them at the same step.
  let charts = [];
  function read(step) {
    for (const { svg, from, to, left, right, lines, unit, said, cursor } of charts) {
      unit.textContent = said;
      cursor.setAttribute("d", "");
      if (step === null || step < from || step > to) continue;
      const at = left + ((step - from) / (to - from)) * (right - left);
      cursor.setAttribute("d", `M${at.toFixed(1)} 10V${svg.viewBox.baseVal.height - 24}`);
      unit.textContent = `step ${step}: `;
      for (const style of new Set(lines.map((line) => line.style))) {  // the mean of several seeds
        const values = lines.filter((line) => line.style === style && step <= line.x.at(-1)).map(({ x, y }) => y[nearest(x, step)]);
        const value = document.createElement("b");
        value.className = `value ${style}`;
        const mean = values.reduce((sum, each) => sum + each, 0) / values.length;
        value.textContent = values.length ? `${shown(mean, said === "%")} ` : "– ";
        unit.append(value);
      }
    }
  }
  let showSamples = () => {};  // shows the kept step nearest to one
  function readCharts() {
    charts = all(".chart svg").map((svg) => {
      const [from, to, left, right] = ["from", "to", "left", "right"].map((name) => Number(svg.dataset[name]));
      const lines = all(".line[data-x]", svg).map((line) => ({
        x: line.dataset.x.split(" ").map(Number), y: line.dataset.y.split(" ").map(Number), style: line.classList[1],
      }));
      const unit = svg.parentElement.querySelector("figcaption span");
      return { svg, from, to, left, right, lines, unit, said: unit.textContent, cursor: svg.querySelector(".cursor") };
    }).filter((chart) => chart.lines.length);
    for (const { svg, from, to, left, right } of charts) {
      const stepAt = ({ clientX }) => {
        const box = svg.getBoundingClientRect();
        const at = ((clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
        const step = Math.round(from + ((at - left) / (right - left)) * (to - from));
        return Math.min(to, Math.max(from, step));
      };
      svg.addEventListener("pointermove", (event) => read(stepAt(event)));
      svg.addEventListener("pointerleave", () => read(null));
      svg.addEventListener("click", (event) => showSamples(stepAt(event)));
    }
  }

  // Samples: what shades their tokens, and one moment of one run at a time, in each column where there are several.
  const section = document.getElementById("samples");
  const press = (buttons, chosen) => buttons.forEach((b) => b.setAttribute("aria-pressed", String(b === chosen)));
  if (section) {
    const modes = all(".modes button", section);
    const shade = (button) => {
      press(modes, button);
      section.classList.toggle("by-w", button.dataset.mode === "by-w");
    };
    modes.forEach((button) => button.addEventListener("click", () => shade(button)));
    shade(modes[0]);
    const names = ["p", "entropy", "exploration weight", "advantage"];
    section.addEventListener("pointerover", ({ target }) => {
      const facts = (target.dataset.f ?? "").split(";").map((fact, i) => fact && `${names[i]} ${fact}`);
      if (target.dataset.f) target.title = facts.filter(Boolean).join(", ");
    });
  }
  const picked = new Map();  // by column: what a reader chose; none: the newest
  function pickIn(column) {
    const moments = all(".moment", column), key = column.dataset.column;
    const runs = [...new Set(moments.map((moment) => moment.dataset.run))];
    const rows = runs.map((run) => {
      const row = document.createElement("p");
      row.className = "picker";
      row.append(runs.length > 1 ? `${run}: ` : "");
      for (const moment of moments.filter((m) => m.dataset.run === run)) {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = moment.dataset.moment;
        button.addEventListener("click", () => choose(button, moment));
        row.append(button);
      }
      return row;
    });
    moments[0].before(...rows);
    const buttons = all(".picker button", column);
    const name = (moment) => `${moment.dataset.run}, ${moment.dataset.moment}`;
    function choose(button, moment) {
      press(buttons, button);
      moments.forEach((m) => m.classList.toggle("on", m === moment));
      if (moment === moments.at(-1)) picked.delete(key);
      else picked.set(key, name(moment));
    }
    const before = moments.findIndex((m) => name(m) === picked.get(key));
    choose(buttons.at(before), moments.at(before));
    const steps = moments.filter((m) => m.dataset.step);
    return (step) => {  // shows samples of the run that is shown, if it has any
      if (!steps.length) return;
      const now = moments.find((m) => m.classList.contains("on")).dataset.run;
      const own = steps.filter((m) => m.dataset.run === now);
      const among = own.length ? own : steps;
      const moment = among[nearest(among.map((m) => Number(m.dataset.step)), step)];
      choose(buttons[moments.indexOf(moment)], moment);
    };
  }
  function pickSamples() {
    if (!section) return;
    const columns = all(".column", section).filter((column) => column.querySelector(".moment")).map(pickIn);
    showSamples = (step) => {
      if (!section.querySelector("[data-step]")) return;
      columns.forEach((show) => show(step));
      section.scrollIntoView();
    };
  }
  readCharts();
  pickSamples();

  // Paper has nothing folded, and nothing pointed at.
  addEventListener("beforeprint", () => {
    read(null);
    all("details").forEach((details) => { details.open = true; });
  });
  return { readCharts, pickSamples };
})();
