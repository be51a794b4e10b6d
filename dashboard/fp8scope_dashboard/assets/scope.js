// Draws the scene of a run: loss, heat map, the probe's overhead and events over one axis of steps, and the legend.
"use strict";

(function () {
    const {Hover, element, text} = window.fp8scope;
    const SVG = "http://www.w3.org/2000/svg";
    const LABEL_PX = 15;
    const MAP_PX = 480;
    const LEGEND = {missing: "not measured", bf16: "layer in BF16", saturated: "saturated", inf: "Inf", nan: "NaN"};

    let parts = null;   // the drawing's elements, made once
    let hover = null;
    let address = null; // of the picture on the screen
    let loading = false;
    let waiting = null; // the scene whose picture comes next

    function lane(name, className) {
        const row = element("div", "lane " + className);
        const label = element("div", "lane-label", name);
        const plot = element("div", "lane-plot");
        row.append(label, plot);
        return {row, label, plot};
    }

    // A lane with one line; its cursor follows the map's.
    function curveLane(className) {
        const curve = lane("", className);
        curve.svg = document.createElementNS(SVG, "svg");
        curve.svg.setAttribute("viewBox", "0 0 1000 100");
        curve.svg.setAttribute("preserveAspectRatio", "none");
        curve.svg.setAttribute("role", "img");
        curve.plot.append(curve.svg, element("div", "cursor"));
        return curve;
    }

    function build(root) {
        const loss = curveLane("loss-lane");
        const overhead = curveLane("overhead-lane");
        const map = lane("", "map-lane");
        const events = lane("events", "event-lane");
        const axis = lane("step", "axis-lane");
        const view = element("div", "view");
        view.tabIndex = 0;
        view.setAttribute("role", "group");
        view.setAttribute("aria-label", "Heat map. Arrow keys move over its cells, Enter chooses the layer.");
        const image = element("img", "picture");
        image.alt = "";
        const blank = element("p", "blank", "No samples in these steps");
        const row = element("div", "row-mark");
        const chosen = element("div", "chosen-marks");
        const zoom = element("div", "zoom-mark");
        view.append(image, blank, chosen, row, element("div", "cursor"), zoom);
        map.plot.append(view);
        events.plot.append(element("div", "event-marks"), element("div", "cursor"));
        const scroller = element("div", "map-scroll");
        scroller.append(map.row);
        const legend = element("div", "legend");
        const say = element("p", "hidden-text");
        say.setAttribute("aria-live", "polite");
        const tip = element("div", "tip");
        tip.setAttribute("role", "tooltip");
        root.replaceChildren(loss.row, scroller, overhead.row, events.row, axis.row, legend, say);
        document.body.append(tip);
        const column = [...root.querySelectorAll(".cursor")];
        for (const hidden of [row, zoom, tip, blank, ...column]) {
            hidden.hidden = true;
        }
        return {root, loss, overhead, map, events, axis, view, image, blank, row, chosen, zoom, column, scroller, legend,
            say, tip, plot: view};
    }

    const across = (scene, step) => (step + 0.5 - scene.first) / (scene.last + 1 - scene.first);

    function drawCurve(scene, name, curve) {
        const {steps, values} = scene[name];
        const inside = steps.map((step, i) => [step, values[i]])
            .filter(([step, value]) => step >= scene.first && step <= scene.last && value !== null && value !== undefined);
        curve.row.hidden = !inside.length && name !== "loss";
        const finite = inside.filter(([, value]) => typeof value === "number");
        const bad = inside.filter(([, value]) => typeof value === "string");
        let low = Math.min(...finite.map(([, value]) => value));
        let high = Math.max(...finite.map(([, value]) => value));
        if (!finite.length) {
            [low, high] = [0, 1];
        } else if (low === high) {
            [low, high] = [low - 0.5 * Math.abs(low) - 1e-9, high + 0.5 * Math.abs(high) + 1e-9];
        }
        const point = ([step, value]) =>
            (1000 * across(scene, step)).toFixed(2) + " " + (94 - 88 * (value - low) / (high - low)).toFixed(2);
        const path = document.createElementNS(SVG, "path");
        path.setAttribute("class", name + "-line");
        path.setAttribute("d", finite.length ? "M" + finite.map(point).join("L") : "");
        const marks = bad.map(([step]) => {
            const mark = document.createElementNS(SVG, "path");
            mark.setAttribute("class", name + "-bad");
            mark.setAttribute("d", "M" + 1000 * across(scene, step) + " 0V100");
            return mark;
        });
        curve.svg.replaceChildren(...marks, path);
        const newest = inside.length ? text(inside[inside.length - 1][1], "value") : "no data";
        const title = name[0].toUpperCase() + name.slice(1);
        curve.svg.setAttribute("aria-label", finite.length
            ? title + " between " + text(low) + " and " + text(high) + ", now " + newest + (bad.length ? ", with non-finite values" : "")
            : title + ": " + newest);
        const brief = (value) => String(Number(value.toPrecision(4)));
        curve.label.replaceChildren(element("span", "tick high", finite.length ? brief(high) : ""),
            element("span", "lane-name", name), element("span", "tick low", finite.length ? brief(low) : ""));
    }

    function drawRows(scene) {
        const count = scene.rows.length;
        const each = Math.max(3, Math.min(26, Math.floor(MAP_PX / Math.max(1, count))));
        const height = Math.max(60, each * count);
        parts.view.style.height = height + "px";
        parts.map.label.style.height = height + "px";
        const pitch = height / Math.max(1, count);
        const every = Math.max(1, Math.ceil(LABEL_PX / pitch));
        const labels = [];
        const marks = [];
        scene.rows.forEach((row, i) => {
            const chosen = row.module !== "" && row.module === scene.layer;
            if (chosen) {
                const mark = element("div", "chosen-mark");
                mark.style.top = 100 * i / count + "%";
                mark.style.height = 100 / count + "%";
                marks.push(mark);
            }
            if (i % every === 0 || (chosen && every > 1)) {
                const middle = Math.max(LABEL_PX / 2, Math.min(height - LABEL_PX / 2, pitch * (i + 0.5)));
                labels.push(rowLabel(row, chosen, middle));
            }
        });
        parts.map.label.replaceChildren(...labels);
        parts.chosen.replaceChildren(...marks);
        parts.root.style.setProperty("--scrollbar", parts.scroller.offsetWidth - parts.scroller.clientWidth + "px");
    }

    function rowLabel(row, chosen, middle) {
        const label = element("div", "row-label" + (chosen ? " chosen" : ""));
        label.style.top = middle + "px";
        label.title = row.name;
        if (row.bf16) {
            label.append(element("span", "mini-chip", "BF16"));
        }
        const name = element("span", "row-name");
        name.append(element("bdi", "", row.name));
        label.append(name);
        if (row.module) {
            label.dataset.layer = row.module;
        }
        return label;
    }

    function drawEvents(scene) {
        const marks = scene.events.filter((one) => one.step >= scene.first && one.step <= scene.last).map((one) => {
            const mark = element("span", "event-mark look-" + one.look, one.glyph);
            mark.style.left = 100 * across(scene, one.step) + "%";
            mark.title = "step " + one.step + " · " + one.kind + " · " + (one.name ? one.name + ": " : "") + one.text;
            return mark;
        });
        const lane = parts.events.plot.querySelector(".event-marks");
        lane.replaceChildren(...marks);
        lane.setAttribute("role", "img");
        lane.setAttribute("aria-label", marks.length + " events in these steps; they are listed below");
    }

    function niceStep(span) {
        const rough = span / 8;
        const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
        return Math.max(1, [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || power);
    }

    function drawAxis(scene) {
        const span = scene.last + 1 - scene.first;
        const by = niceStep(span);
        const ticks = [];
        for (let step = Math.ceil(scene.first / by) * by; step <= scene.last; step += by) {
            const tick = element("span", "axis-tick", text(step, "count"));
            tick.style.left = 100 * across(scene, step) + "%";
            ticks.push(tick);
        }
        parts.axis.plot.replaceChildren(...ticks);
    }

    function drawLegend(scene) {
        const {low, high, log, unit, colours} = scene.scale;
        const brief = (value) => Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3)
            ? value.toExponential(0).replace("e+", "e") : String(Number(value.toPrecision(3)));
        const bar = element("span", "bar");
        bar.style.background = "linear-gradient(to right, " + colours.join(", ") + ")";
        const scale = element("span", "scale");
        scale.append(element("span", "", brief(low)), bar,
            element("span", "", brief(high) + (unit && unit !== "ratio" ? " " + unit : "") + (log ? ", log" : "")));
        const items = Object.entries(LEGEND).filter(([name]) => scene.legend[name]).map(([name, words]) => {
            const item = element("span", "item");
            const swatch = element("span", "swatch");
            swatch.style.background = scene.legend[name];
            item.append(swatch, words);
            return item;
        });
        parts.legend.replaceChildren(scale, ...items);
    }

    // One picture at a time, and of those that are waiting only the newest: on a slow collector pictures
    // come late, but they come.
    async function drawPicture(scene) {
        waiting = scene;
        if (loading) {
            return;
        }
        loading = true;
        while (waiting) {
            const next = waiting;
            waiting = null;
            await loadPicture(next);
        }
        loading = false;
    }

    // By fetch and not by the element's src: the browser then revalidates by ETag, and the old picture stays
    // until the new one is decoded.
    async function loadPicture(scene) {
        parts.blank.hidden = scene.picture !== null;
        parts.image.hidden = scene.picture === null;
        parts.image.alt = scene.summary;
        if (scene.picture === null) {
            return;
        }
        try {
            const reply = await fetch(scene.picture, {cache: "no-cache"});
            if (!reply.ok) {
                return;
            }
            const next = URL.createObjectURL(await reply.blob());
            const decoded = new Image();
            decoded.src = next;
            await decoded.decode();
            parts.image.src = next;
            if (address) {
                URL.revokeObjectURL(address);
            }
            address = next;
        } catch (error) {
            // no connection: the old picture stays and the banner says why
        }
    }

    function draw(scene, catalogue) {
        const root = document.getElementById("scope");
        if (!root || !scene) {
            return "";
        }
        if (!parts || parts.root !== root) {
            parts = build(root);
            hover = new Hover(parts);
        }
        drawRows(scene);
        drawCurve(scene, "loss", parts.loss);
        drawCurve(scene, "overhead", parts.overhead);
        drawEvents(scene);
        drawAxis(scene);
        drawLegend(scene);
        drawPicture(scene);
        hover.show(scene, catalogue || {});
        return scene.picture || "";
    }

    window.dash_clientside = window.dash_clientside || {};
    window.dash_clientside.fp8scope = Object.assign(window.dash_clientside.fp8scope || {}, {draw});
})();
