// What happens over the heat map: exact values of the cell under the pointer or the keyboard's cursor,
// choosing a layer, zooming into steps. Names and values only ever become text nodes.
"use strict";

(function () {
    const HOVER_MS = 50;
    const DRAG_PX = 6;
    const CELLS_KEPT = 500;
    const set = (id, props) => window.dash_clientside.set_props(id, props);

    function text(value, kind) {
        if (value === null || value === undefined) {
            return "not measured";
        }
        if (typeof value === "string") {
            return {Infinity: "+Inf", "-Infinity": "−Inf"}[value] || value;
        }
        if (kind === "count") {
            return value.toLocaleString("en").replaceAll(",", "\u2009");
        }
        const exact = Number(value.toPrecision(7));
        return exact !== 0 && Math.abs(exact) < 1e-4 ? exact.toExponential() : String(exact);
    }

    function element(tag, className, content) {
        const made = document.createElement(tag);
        made.className = className || "";
        if (content !== undefined) {
            made.textContent = content;
        }
        return made;
    }

    function precisionWords(precision) {
        return {fp8: "FP8", bf16: "BF16", shadow: "BF16, FP8 still measured"}[precision] || precision;
    }

    function fill(tip, cell, scene, catalogue) {
        const series = cell.series;
        tip.replaceChildren(
            element("div", "tip-name", series.name),
            element("div", "tip-kind", [series.role.replace("_", " "), series.orientation, series.format,
                series.scaling, series.policy + " scales"].join(" · ")),
            element("div", "tip-step", "step " + text(cell.step, "count") + " · computes in " +
                precisionWords(cell.precision)),
        );
        const main = element("div", "tip-main");
        main.append(element("span", "", scene.metric.replaceAll("_", " ")), valueOf(cell, scene.metric, catalogue));
        const list = element("dl", "tip-list");
        for (const key of Object.keys(catalogue)) {
            if (key in cell.metrics && key !== scene.metric) {
                list.append(element("dt", "", key.replaceAll("_", " ")), valueOf(cell, key, catalogue, "dd"));
            }
        }
        tip.append(main, list, ...bars(cell.histogram));
    }

    // Counts of floor(log2 |x / scale|), from 2^-24 to 2^15; both end bars hold what lies beyond.
    function bars(histogram) {
        if (!histogram || !histogram.length) {
            return [];
        }
        const most = Math.max(1, ...histogram);
        const chart = element("div", "tip-bars");
        for (const count of histogram) {
            const bar = document.createElement("i");
            bar.style.height = 100 * Math.sqrt(count / most) + "%";  // a root, so that a thin tail is seen
            chart.append(bar);
        }
        const ends = element("div", "tip-ends");
        ends.append(element("span", "", "2⁻²⁴"), element("span", "", "exponents, square-root scale"),
            element("span", "", "2¹⁵"));
        return [chart, ends];
    }

    function valueOf(cell, key, catalogue, tag) {
        const value = cell.metrics[key];
        const about = catalogue[key] || {unit: "", kind: "value"};
        const shown = element(tag || "b", typeof value === "string" ? "tip-bad" : "", text(value, about.kind));
        shown.dataset.metric = key;
        if (value !== null && value !== undefined) {
            shown.dataset.value = String(value);
        }
        return shown;
    }

    class Hover {
        constructor(parts) {
            this.parts = parts;
            this.scene = null;
            this.catalogue = {};
            this.cells = new Map();
            this.at = null;          // {row, step}
            this.drag = null;
            this.timer = 0;
            this.request = null;
            this.listen();
        }

        show(scene, catalogue) {
            const moved = !this.scene || this.scene.cell !== scene.cell;
            this.scene = scene;
            this.catalogue = catalogue;
            this.cells.clear();      // late data may have changed them
            if (moved || !scene.picture || (this.at && this.at.row >= scene.rows.length)) {
                this.leave();
            } else if (this.at) {
                this.mark();
            }
        }

        get span() {
            return this.scene.last + 1 - this.scene.first;
        }

        listen() {
            const view = this.parts.view;
            view.addEventListener("pointermove", (event) => this.move(event));
            view.addEventListener("pointerleave", () => this.drag || this.leave());
            view.addEventListener("pointerdown", (event) => this.press(event));
            view.addEventListener("pointerup", (event) => this.release(event));
            view.addEventListener("pointercancel", () => this.endDrag());
            view.addEventListener("dblclick", () => set("zoom", {data: {first: null, last: null, at: Date.now()}}));
            view.addEventListener("keydown", (event) => this.key(event));
            view.addEventListener("blur", () => this.leave());
        }

        place(event) {
            const box = this.parts.plot.getBoundingClientRect();
            const x = Math.min(0.999999, Math.max(0, (event.clientX - box.left) / box.width));
            const y = Math.min(0.999999, Math.max(0, (event.clientY - box.top) / box.height));
            return {step: this.scene.first + Math.floor(x * this.span), row: Math.floor(y * this.scene.rows.length)};
        }

        move(event) {
            if (!this.scene || !this.scene.picture) {
                return;
            }
            const at = this.place(event);
            if (this.drag && Math.abs(event.clientX - this.drag.x) > DRAG_PX) {
                this.drag.to = at.step;
                this.markZoom();
            }
            this.go(at, event.clientX, event.clientY);
        }

        press(event) {
            if (event.button === 0 && this.scene && this.scene.picture) {
                this.drag = {x: event.clientX, from: this.place(event).step, to: null};
                this.parts.view.setPointerCapture(event.pointerId);
            }
        }

        release(event) {
            const drag = this.drag;
            this.endDrag();
            if (!drag || !this.scene || !this.scene.picture) {
                return;
            }
            if (drag.to === null) {
                this.choose(this.place(event).row);
            } else if (drag.to !== drag.from) {
                const [first, last] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
                set("zoom", {data: {first, last, at: Date.now()}});
            }
        }

        endDrag() {
            this.drag = null;
            this.parts.zoom.hidden = true;
        }

        markZoom() {
            const [first, last] = [Math.min(this.drag.from, this.drag.to), Math.max(this.drag.from, this.drag.to)];
            const style = this.parts.zoom.style;
            style.left = 100 * (first - this.scene.first) / this.span + "%";
            style.width = 100 * (last + 1 - first) / this.span + "%";
            this.parts.zoom.hidden = false;
        }

        choose(row) {
            const series = this.scene.rows[row];
            if (series && series.module) {
                set("pick", {data: {layer: series.module, at: Date.now()}});
            }
        }

        key(event) {
            if (!this.scene || !this.scene.picture) {
                return;
            }
            const at = this.at || {row: 0, step: this.scene.last};
            const far = event.shiftKey ? 10 : 1;
            const stride = Math.max(1, this.scene.stride || 1) * far;
            const moves = {ArrowLeft: [-stride, 0], ArrowRight: [stride, 0], ArrowUp: [0, -far], ArrowDown: [0, far],
                Home: [-this.span, 0], End: [this.span, 0]};
            if (event.key === "Escape") {
                this.leave();
            } else if (event.key === "Enter" && this.at) {
                this.choose(at.row);
            } else if (event.key in moves) {
                const [steps, rows] = moves[event.key];
                const next = {
                    step: Math.min(this.scene.last, Math.max(this.scene.first, at.step + (this.at ? steps : 0))),
                    row: Math.min(this.scene.rows.length - 1, Math.max(0, at.row + (this.at ? rows : 0))),
                };
                const box = this.parts.plot.getBoundingClientRect();
                this.go(next, box.left + box.width * (next.step + 0.5 - this.scene.first) / this.span,
                    box.top + box.height * (next.row + 0.5) / this.scene.rows.length);
            } else {
                return;
            }
            event.preventDefault();
        }

        go(at, x, y) {
            this.pointer = {x, y};
            if (this.at && at.row === this.at.row && at.step === this.at.step) {
                this.put();
                return;
            }
            this.at = at;
            this.mark();
            clearTimeout(this.timer);
            this.timer = setTimeout(() => this.fetch(at), HOVER_MS);
        }

        mark() {
            const {column, row} = this.parts;
            const rows = this.scene.rows.length;
            const left = 100 * (this.at.step + 0.5 - this.scene.first) / this.span;
            for (const line of column) {
                line.style.left = left + "%";
                line.hidden = left < 0 || left > 100;
            }
            row.style.top = 100 * this.at.row / rows + "%";
            row.style.height = 100 / rows + "%";
            row.hidden = false;
        }

        async fetch(at) {
            const series = this.scene.rows[at.row];
            const address = this.scene.cell + "?series=" + series.index + "&step=" + at.step;
            let cell = this.cells.get(address);
            if (!cell) {
                if (this.request) {
                    this.request.abort();
                }
                this.request = new AbortController();
                try {
                    const reply = await fetch(address, {signal: this.request.signal});
                    if (!reply.ok) {
                        this.parts.tip.hidden = true;
                        return;
                    }
                    cell = await reply.json();
                } catch (error) {
                    return;          // aborted, or no connection: the banner says so
                }
                if (this.cells.size >= CELLS_KEPT) {
                    this.cells.clear();
                }
                this.cells.set(address, cell);
            }
            if (this.at === at) {
                this.tell(cell);
            }
        }

        tell(cell) {
            const {tip, say} = this.parts;
            fill(tip, cell, this.scene, this.catalogue);
            tip.hidden = false;
            this.put();
            const about = this.catalogue[this.scene.metric] || {kind: "value"};
            say.textContent = cell.series.name + ", step " + cell.step + ": " + this.scene.metric.replaceAll("_", " ") +
                " " + text(cell.metrics[this.scene.metric], about.kind);
        }

        put() {
            const tip = this.parts.tip;
            if (tip.hidden) {
                return;
            }
            const box = tip.getBoundingClientRect();
            const right = this.pointer.x + 18;
            const left = right + box.width > innerWidth - 8 ? this.pointer.x - 18 - box.width : right;
            tip.style.left = Math.max(8, left) + "px";
            tip.style.top = Math.max(8, Math.min(innerHeight - box.height - 8, this.pointer.y - box.height / 3)) + "px";
        }

        leave() {
            clearTimeout(this.timer);
            if (this.request) {
                this.request.abort();
            }
            this.at = null;
            this.parts.tip.hidden = true;
            this.parts.row.hidden = true;
            for (const line of this.parts.column) {
                line.hidden = true;
            }
        }
    }

    window.fp8scope = Object.assign(window.fp8scope || {}, {Hover, element, text});
})();
