// The page's own logic: where it is, when it asks the server, how it moves in its address.
"use strict";

(function () {
    const SILENCE_MS = 20000;   // no beat for so long: the badge says so
    const STALE_MS = 25000;     // after so long the page asks, whether there is news or not
    const PATIENCE_MS = 20000;  // an answer that has not come by then is given up
    const set = (id, props) => window.dash_clientside.set_props(id, props);
    const same = () => window.dash_clientside.no_update;
    const triggered = () => (window.dash_clientside.callback_context.triggered[0] || {prop_id: ""}).prop_id;

    const state = {
        place: null,
        asked: {n: 0, key: null, at: 0, open: false},
        pushed: 0,   // when the websocket last pushed
        beat: null,
        shown: null,
    };

    function parse(pathname, search) {
        const path = pathname || "/";
        const query = search || "";
        if (path === "/") {
            return {page: "runs", run: null, query};
        }
        const match = path.match(/^\/runs\/([^/]+)\/?$/);
        if (!match) {
            return {page: "lost", run: null, query};
        }
        try {
            return {page: "run", run: decodeURIComponent(match[1]), query};
        } catch (error) {
            return {page: "lost", run: null, query};
        }
    }

    function route(pathname, search) {
        const place = parse(pathname, search);
        const before = state.place;
        state.place = place;
        if (before && (before.page !== place.page || before.run !== place.run)) {
            set("scene", {data: null});
            set("run-empty", {children: []});
            window.scrollTo(0, 0);
        }
        document.title = place.page === "run" ? place.run + " · fp8scope" : "fp8scope";
        if (place.page !== "run") {
            set("crumb", {children: ""});
        }
        return [place, place.page !== "runs", place.page !== "run", place.page !== "lost"];
    }

    function send(key) {
        const asked = state.asked;
        Object.assign(asked, {n: asked.n + 1, key, at: Date.now(), open: true});
        const theme = document.documentElement.dataset.theme;
        set(state.place.page === "run" ? "ask-run" : "ask-runs",
            {data: {n: asked.n, run: state.place.run, query: state.place.query, theme}});
    }

    // A person's own step (another view, a command, a theme) asks at once.
    function askNow(place) {
        if (place && place.page !== "lost") {
            send(state.asked.key);
        }
    }

    // A new version asks when the last answer is there, so that a slow collector never gathers a queue.
    function askNext(live, doneRuns, doneRun) {
        const {place, asked} = state;
        if (!place || place.page === "lost") {
            return;
        }
        const done = place.page === "run" ? doneRun : doneRuns;
        if (done && done.n === asked.n) {
            asked.open = false;
        }
        if (live && live.beat !== state.beat) {
            state.beat = live.beat;
            state.pushed = Date.now();
        }
        if (asked.n === 0 || (asked.open && Date.now() - asked.at < PATIENCE_MS)) {
            return;
        }
        const follows = live && live.run === place.run && live.version !== null;
        const key = follows ? JSON.stringify([live.run, live.version]) : null;
        if (key !== null && key !== asked.key) {
            send(key);
        } else if (triggered() === "pulse.n_intervals" && Date.now() - asked.at > STALE_MS && !document.hidden) {
            send(asked.key);  // nothing new, but "active" and "2 min ago" age; and the websocket may be away
        }
    }

    // Sets the controls to a new view, and only what is new: a person may just be changing the rest.
    function controls(shown) {
        const before = state.shown || {options: {}};
        state.shown = shown;
        if (!shown) {
            return;
        }
        for (const key of ["metric", "role", "orientation", "format", "window", "layer"]) {
            const props = {};
            if (key in shown.options && JSON.stringify(shown.options[key]) !== JSON.stringify(before.options[key])) {
                props.options = shown.options[key];
            }
            if (shown[key] !== before[key]) {
                props.value = shown[key] || null;
            }
            if (Object.keys(props).length) {
                set(key, props);
            }
        }
        set("unzoom", {hidden: shown.window !== ""});
        for (const key of ["orientation", "format"]) {
            set(key + "-field", {hidden: shown.options[key].length < 2});
        }
    }

    function badge(live, doneRuns, doneRun, place) {
        const done = place && place.page === "run" ? doneRun : doneRuns;
        const here = live && place && live.run === place.run;
        const problem = (here && live.problem) || (done && done.problem) || "";
        const silent = Date.now() - state.pushed > SILENCE_MS;
        let words = "connected";
        let look = "live on";
        if (problem) {
            [words, look] = ["no connection", "live off"];
        } else if (silent) {
            [words, look] = [state.pushed ? "slow updates" : "connecting", "live wait"];
        } else if (here && live.last_step !== null && place.page === "run") {
            words = "connected · step " + live.last_step.toLocaleString("en").replaceAll(",", "\u2009");
        }
        return [words, look, problem, !problem];
    }

    function theme(clicks) {
        const root = document.documentElement;
        if (clicks) {
            root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
            try {
                localStorage.setItem("fp8scope-theme", root.dataset.theme);
            } catch (error) {
                // not remembered, that is all
            }
        }
        return root.dataset.theme;
    }

    function go(change) {
        const params = new URLSearchParams(window.location.search);
        for (const [key, value] of Object.entries(change)) {
            if (value === null || value === "") {
                params.delete(key);
            } else {
                params.set(key, value);
            }
        }
        const text = params.toString();
        const search = text ? "?" + text : "";
        if (search !== window.location.search) {
            set("url", {href: window.location.pathname + search});
        }
    }

    // Controls also change when the server shows another view; only a difference to `shown` is a person's.
    function navigate(metric, role, orientation, format, window_, layer, pick, zoom, unzoom, shown) {
        if (!shown) {
            return;
        }
        const cause = triggered();
        if (cause === "pick.data" && pick) {
            go({layer: pick.layer});
        } else if (cause === "zoom.data" && zoom) {
            go({first: zoom.first, last: zoom.last, window: null});
        } else if (cause === "unzoom.n_clicks" && unzoom) {
            go({first: null, last: null});
        } else {
            const values = {metric, role, orientation, format, window: window_, layer};
            const key = cause.replace(/\.value$/, "");
            if (!(key in values) || (values[key] || "") === shown[key]) {
                return;
            }
            const change = {[key]: values[key] || null};
            go(key === "window" ? {...change, first: null, last: null} : change);
        }
    }

    function wish(toBf16, toFp8, shown, place) {
        const cause = triggered();
        const clicks = cause.startsWith("to-bf16") ? toBf16 : toFp8;
        if (!clicks || !shown || !shown.layer || !place.run) {
            return [same(), same(), same(), same()];
        }
        const precision = cause.startsWith("to-bf16") ? "bf16" : "fp8";
        const target = precision.toUpperCase();
        const text = precision === "bf16"
            ? "The layer computes in BF16 from the next steps on. Its FP8 error is still measured where it can be, so that you see when a return is safe."
            : "The layer computes in FP8 again from the next steps on.";
        set("confirm-problem", {children: ""});
        document.getElementById("confirm").showModal();
        return [{run: place.run, layer: shown.layer, precision}, "Switch " + shown.layer + " to " + target + "?", text, ""];
    }

    function close() {
        const dialog = document.getElementById("confirm");
        if (dialog && dialog.open && triggered() !== "") {
            dialog.close();
        }
    }

    document.addEventListener("click", (event) => {
        const element = event.target.closest("[data-layer]");
        if (element && element.dataset.layer) {
            set("pick", {data: {layer: element.dataset.layer, at: Date.now()}});
        }
    });

    document.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && event.target.id === "reason") {
            document.getElementById("confirm-yes").click();
        }
    });

    window.dash_clientside = window.dash_clientside || {};
    window.dash_clientside.fp8scope = Object.assign(window.dash_clientside.fp8scope || {}, {
        route, askNow, askNext, controls, badge, theme, navigate, wish, close,
    });
})();
