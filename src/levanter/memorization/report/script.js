"use strict";
// Draws the heat strips of each book and keeps strip, axis, text and passages on the same stretch of it (the view).
(() => {
  const READABLE = 4000, NARROWEST = 40, LIGHTEST = 0.1, LEVELS = 100, UNSCORED = 255, FLOOR = -8;
  const number = new Intl.NumberFormat("en-US").format;

  // Runs of (length as a varint, level) to one level per character.
  function decode(encoded, characters) {
    const bytes = atob(encoded), levels = new Uint8Array(characters);
    for (let at = 0, position = 0; at < bytes.length;) {
      let length = 0, shift = 0, byte;
      do { byte = bytes.charCodeAt(at++); length += (byte & 127) << shift; shift += 7; } while (byte & 128);
      levels.fill(bytes.charCodeAt(at++), position, position += length);
    }
    return levels;
  }

  // log p_z of a level: 1 … 100 from the threshold up, 101 … 200 from below it down to the floor (by the token), 0 and
  // what was not scored: nothing.
  function logOf(run, level) {
    if (level === 0 || level > 2 * LEVELS) return -Infinity;
    const part = ((level - 1) % LEVELS) / (LEVELS - 1), top = run.logThreshold / run.tokens;
    return level <= LEVELS ? run.logThreshold * (1 - part) : (top + part * (FLOOR - top)) * run.tokens;
  }

  // How levels map to ink.
  function inkTable(run, scale) {
    return Float64Array.from({ length: UNSCORED + 1 }, (_, level) => {
      const log = logOf(run, level);
      if (scale === "linear") return Math.exp(log);
      if (scale === "token") return Math.max(0, 1 - log / run.tokens / FLOOR);
      return level > 0 && level <= LEVELS ? LIGHTEST + (1 - LIGHTEST) * (level - 1) / (LEVELS - 1) : 0;
    });
  }

  function sums(levels, table) {
    const running = new Float64Array(levels.length + 1);
    for (let i = 0; i < levels.length; i++) running[i + 1] = running[i] + table[levels[i]];
    return running;
  }

  const at = (running, x) => {
    const i = Math.min(running.length - 2, Math.floor(x));
    return running[i] + (x - i) * (running[i + 1] - running[i]);
  };

  function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function rgb(hex) { return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)); }
  function mixed(stops, part) {
    const x = Math.min(0.999999, Math.max(0, part)) * (stops.length - 1), i = Math.floor(x);
    return stops[i].map((c, k) => Math.round(c + (x - i) * (stops[i + 1][k] - c)));
  }
  let palette;
  function readPalette() {
    palette = {
      ramp: css("--ramp").split(/\s+/).map(rgb), minus: rgb(css("--minus")), plus: rgb(css("--plus")),
      flip: Number(css("--flip")), faint: css("--faint"), text: css("--text"), accent: css("--accent"),
    };
  }

  function percent(logP) {
    const p = Math.exp(logP);
    return p >= 1e-4 ? (100 * p).toPrecision(3) + " %" : p.toExponential(1);
  }

  class Book {
    constructor(section) {
      this.section = section;
      const data = JSON.parse(section.querySelector("script[type='application/json']").textContent);
      this.characters = data.characters;
      this.text = data.text;
      this.unit = data.unit;
      // Positions count full characters; a text beyond the basic plane is split into them once.
      if (this.text !== null && this.text.length !== this.characters) this.points = Array.from(this.text);
      this.runs = data.runs.map(run => ({ ...run, levels: decode(run.levels, this.characters) }));
      this.view = [0, this.characters];
      this.marked = null;
      this.chosen = 0;
      this.find();
      this.listen();
      this.rescale();
    }

    find() {
      const one = selector => this.section.querySelector(selector);
      this.whole = [...this.section.querySelectorAll(".whole canvas.strip")];
      this.zoomed = [...this.section.querySelectorAll(".zoomed canvas.strip")];
      this.difference = [one(".whole canvas.difference"), one(".zoomed canvas.difference")];
      [this.scale, this.link, this.reader, this.where] = ["canvas.scale", ".link path", ".reader", ".where"].map(one);
      [this.inkChoice, this.runChoice, this.first, this.second] =
        ["select.ink", "select.run", "select.first", "select.second"].map(one);
      this.announcement = one(".announcement");
      this.navigator = one(".navigator");
    }

    listen() {
      const actions = { in: () => this.zoom(0.5), out: () => this.zoom(2), left: () => this.pan(-0.25),
                        right: () => this.pan(0.25), all: () => this.show(0, this.characters) };
      for (const button of this.section.querySelectorAll("button[data-do]"))
        button.addEventListener("click", () => actions[button.dataset.do]());
      const keys = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "in", ArrowDown: "out", "+": "in", "=": "in",
                     "-": "out", "0": "all", Escape: "all" };
      this.navigator.addEventListener("keydown", event => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        const width = this.view[1] - this.view[0];
        if (event.key === "Home") this.show(0, width);
        else if (event.key === "End") this.show(this.characters - width, this.characters);
        else if (keys[event.key]) actions[keys[event.key]]();
        else return;
        event.preventDefault();
      });
      for (const canvas of [...this.whole, this.difference[0]].filter(Boolean)) this.selectable(canvas);
      for (const canvas of [...this.zoomed, this.difference[1]].filter(Boolean)) this.draggable(canvas);
      this.inkChoice.addEventListener("change", () => this.rescale());
      for (const choice of [this.first, this.second].filter(Boolean))
        choice.addEventListener("change", () => this.rescale());
      this.runChoice?.addEventListener("change", () => { this.chosen = Number(this.runChoice.value); this.read(); });
      for (const button of this.section.querySelectorAll("button[data-start]"))
        button.addEventListener("click", () => this.goTo(button));
      new ResizeObserver(() => this.draw()).observe(this.navigator);
    }

    // Dragging over the upper strip selects a stretch of it; a click moves there.
    selectable(canvas) {
      let from = null;
      const character = event => {
        const box = canvas.getBoundingClientRect();
        return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * this.characters;
      };
      canvas.addEventListener("pointerdown", event => { from = [character(event), event.clientX]; canvas.setPointerCapture(event.pointerId); });
      canvas.addEventListener("pointermove", event => {
        if (from !== null && Math.abs(event.clientX - from[1]) > 3) {
          const to = character(event);
          this.show(Math.min(from[0], to), Math.max(from[0], to));
        } else this.hover(canvas, event, character(event));
      });
      canvas.addEventListener("pointerup", event => {
        if (from !== null && Math.abs(event.clientX - from[1]) <= 3) {
          const width = this.view[1] - this.view[0], now = width > this.characters * 0.9 ? this.characters / 12 : width;
          this.show(from[0] - now / 2, from[0] + now / 2);
        }
        from = null;
      });
      canvas.addEventListener("pointercancel", () => { from = null; });
    }

    // Dragging the zoomed strip moves it; a double click zooms in there, and so does the wheel with Ctrl.
    draggable(canvas) {
      let from = null;
      const box = () => canvas.getBoundingClientRect();
      const character = event => this.view[0] + (event.clientX - box().left) / box().width * (this.view[1] - this.view[0]);
      canvas.addEventListener("pointerdown", event => { from = [event.clientX, ...this.view]; canvas.setPointerCapture(event.pointerId); });
      canvas.addEventListener("pointermove", event => {
        if (from === null) return this.hover(canvas, event, character(event));
        const by = (from[0] - event.clientX) / box().width * (from[2] - from[1]);
        this.show(from[1] + by, from[2] + by);
      });
      for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { from = null; });
      canvas.addEventListener("dblclick", event => this.zoom(0.25, character(event)));
      canvas.addEventListener("wheel", event => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, character(event));
      }, { passive: false });
    }

    hover(canvas, event, character) {
      const run = this.runs[Number(canvas.dataset.run ?? this.chosen)];
      const position = Math.min(this.characters - 1, Math.max(0, Math.floor(character)));
      canvas.title = `${this.unit.slice(0, -1)} ${number(position)}: ${this.words(run, run.levels[position])}`;
    }

    words(run, level) {
      if (level === UNSCORED) return "not scored";
      const log = logOf(run, level), below = level === 0 || level > LEVELS ? "below the threshold" : "";
      if (log === -Infinity) return below;
      const token = `${(log / run.tokens).toFixed(2)} nats per token`;
      return below ? `${below}, ${token}` : `p_z ≈ ${percent(log)}, ${token}`;
    }

    goTo(button) {
      const [start, stop] = [Number(button.dataset.start), Number(button.dataset.stop)];
      this.marked = [start, stop];
      this.chosen = Number(button.dataset.run ?? 0);
      if (this.runChoice) this.runChoice.value = String(this.chosen);
      this.show(start - 600, stop + 600);
      this.navigator.focus({ preventScroll: true });
      this.section.querySelector(".strips").scrollIntoView({ block: "start" });
      const mark = this.reader?.querySelector("mark");
      if (mark) this.reader.scrollTop += mark.getBoundingClientRect().top - this.reader.getBoundingClientRect().top - 60;
    }

    zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
      const [a, b] = this.view, width = Math.min(this.characters, Math.max(NARROWEST, (b - a) * factor));
      const start = around - (around - a) / (b - a) * width;
      this.show(start, start + width);
    }

    pan(part) {
      const by = (this.view[1] - this.view[0]) * part;
      this.show(this.view[0] + by, this.view[1] + by);
    }

    show(start, stop) {
      const width = Math.min(this.characters, Math.max(Math.min(NARROWEST, this.characters), Math.round(stop - start)));
      const first = Math.min(this.characters - width, Math.max(0, Math.round(start)));
      this.view = [first, first + width];
      this.draw();
    }

    rescale() {
      this.inks = this.runs.map(run => sums(run.levels, inkTable(run, this.inkChoice.value)));
      const unknown = Float64Array.from({ length: UNSCORED + 1 }, (_, level) => Number(level === UNSCORED));
      this.unknown = this.runs.map(run => sums(run.levels, unknown));
      this.draw();
    }

    draw() {
      const [a, b] = this.view;
      this.section.dataset.start = a;
      this.section.dataset.stop = b;
      this.whole.forEach((canvas, run) => {
        this.paint(canvas, 0, this.characters, x => this.colour(run, x));
        this.hatch(canvas, run, 0, this.characters);
      });
      this.zoomed.forEach((canvas, run) => {
        this.paint(canvas, a, b, x => this.colour(run, x));
        this.hatch(canvas, run, a, b);
      });
      this.difference.forEach((canvas, zoomed) => {
        if (canvas) this.paint(canvas, zoomed ? a : 0, zoomed ? b : this.characters, x => this.contrast(x));
      });
      for (const canvas of [...this.whole, this.difference[0]].filter(Boolean)) this.frame(canvas);
      const [left, right] = [a / this.characters * 100, b / this.characters * 100];
      this.link.setAttribute("d", `M${left} 0L${right} 0L100 16L0 16Z`);
      this.axis();
      this.read();
      const text = `${this.unit} ${number(a)} – ${number(b)} of ${number(this.characters)}`;
      this.where.textContent = text;
      clearTimeout(this.saying);
      this.saying = setTimeout(() => { this.announcement.textContent = text; }, 400);
    }

    colour(run, [from, to]) {
      return mixed(palette.ramp, (at(this.inks[run], to) - at(this.inks[run], from)) / (to - from));
    }

    contrast([from, to]) {
      const mean = run => (at(this.inks[run], to) - at(this.inks[run], from)) / (to - from);
      const by = mean(Number(this.first.value)) - mean(Number(this.second.value));
      return mixed([palette.ramp[0], by < 0 ? palette.minus : palette.plus], Math.abs(by));
    }

    paint(canvas, start, stop, colour) {
      const [width, height] = this.sized(canvas);
      if (width === 0) return;
      const context = canvas.getContext("2d"), row = context.createImageData(width, 1);
      for (let x = 0; x < width; x++) {
        const range = [start + x / width * (stop - start), start + (x + 1) / width * (stop - start)];
        const [r, g, b] = colour(range);
        row.data.set([r, g, b, 255], 4 * x);
      }
      context.putImageData(row, 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(canvas, 0, 0, width, 1, 0, 0, width, height);
    }

    // Slanted lines over what no window covers: nothing is known about it, and white would mean that it is not memorized.
    hatch(canvas, run, start, stop) {
      const { width, height } = canvas, ratio = devicePixelRatio || 1, context = canvas.getContext("2d");
      if (width === 0) return;
      const missing = x => at(this.unknown[run], start + (x + 1) / width * (stop - start)) -
        at(this.unknown[run], start + x / width * (stop - start)) > 0.5 * (stop - start) / width;
      context.save();
      context.strokeStyle = palette.faint;
      context.lineWidth = ratio;
      context.beginPath();
      for (let from = 0; from < width;) {
        let to = from;
        while (to < width && missing(to)) to++;
        if (to > from) context.rect(from, 0, to - from, height);
        from = to + 1;
      }
      context.clip();
      context.beginPath();
      for (let x = -height; x < width; x += 7 * ratio) { context.moveTo(x, height); context.lineTo(x + height, 0); }
      context.stroke();
      context.restore();
    }

    // A frame around the part of the book that is in view.
    frame(canvas) {
      const context = canvas.getContext("2d"), ratio = devicePixelRatio || 1;
      const [left, right] = this.view.map(x => x / this.characters * canvas.width);
      if (right - left > canvas.width - 1) return;
      const width = Math.max(3 * ratio, right - left);
      context.strokeStyle = css("--minus");
      context.lineWidth = 2 * ratio;
      context.strokeRect(Math.min(left, canvas.width - width) + ratio / 2, ratio, width - ratio, canvas.height - 2 * ratio);
    }

    sized(canvas) {
      const ratio = devicePixelRatio || 1;
      const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
      if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
      return [width, height];
    }

    axis() {
      const [width] = this.sized(this.scale), [a, b] = this.view, ratio = devicePixelRatio || 1;
      if (width === 0) return;
      const context = this.scale.getContext("2d");
      context.clearRect(0, 0, this.scale.width, this.scale.height);
      context.fillStyle = palette.faint;
      context.font = `${12 * ratio}px system-ui, sans-serif`;
      const rough = (b - a) / Math.max(2, width / ratio / 120), power = 10 ** Math.floor(Math.log10(rough));
      const step = Math.max(1, [1, 2, 5, 10].map(m => m * power).find(s => s >= rough));
      for (let x = Math.ceil(a / step) * step; x <= b; x += step) {
        const pixel = (x - a) / (b - a) * width, label = number(x), half = context.measureText(label).width / 2;
        context.fillRect(Math.min(width - ratio, pixel), 0, ratio, 4 * ratio);
        context.fillText(label, Math.min(width - 2 * half, Math.max(0, pixel - half)), 16 * ratio);
      }
    }

    slice(start, stop) { return this.points ? this.points.slice(start, stop).join("") : this.text.slice(start, stop); }

    // The text in view, every stretch of one level (and of one side of the mark's ends) as one element.
    read() {
      if (!this.reader || this.text === null) return;
      const [a, b] = this.view, stop = Math.min(b, a + READABLE), run = this.runs[this.chosen];
      const cuts = this.marked ? this.marked.filter(x => x > a && x < stop) : [];
      const parts = [], scale = this.inkChoice.value, table = inkTable(run, scale === "linear" ? "log" : scale);
      for (let from = a; from < stop;) {
        let to = from + 1;
        while (to < stop && run.levels[to] === run.levels[from] && !cuts.includes(to)) to++;
        const inMark = this.marked && from >= this.marked[0] && from < this.marked[1];
        const element = document.createElement(inMark ? "mark" : "span"), level = run.levels[from];
        const inner = inMark ? element.appendChild(document.createElement("span")) : element;
        inner.textContent = this.slice(from, to);
        const part = table[level];
        if (level === UNSCORED) {
          inner.classList.add("unscored");
          inner.title = this.words(run, level);
        } else if (part > 0) {
          inner.style.background = `rgb(${mixed(palette.ramp, part).join(" ")})`;
          inner.title = this.words(run, level);
          inner.classList.toggle("dark", part * 100 >= palette.flip);
        }
        parts.push(element);
        from = to;
      }
      this.reader.replaceChildren(...parts);
      if (stop < b) {
        const more = document.createElement("p");
        more.className = "note more";
        more.textContent = `… ${number(stop - a)} of ${number(b - a)} characters in view are shown; zoom in or move to read on.`;
        this.reader.append(more);
      }
    }
  }

  document.documentElement.classList.add("scripted");
  readPalette();
  const books = [...document.querySelectorAll("section.book")].map(section => new Book(section));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readPalette(); books.forEach(book => book.draw()); });
})();
