// Before the first paint: the chosen theme, else the system's.
"use strict";

(function () {
    const system = matchMedia("(prefers-color-scheme: light)");

    function current() {
        let chosen = null;
        try {
            chosen = localStorage.getItem("fp8scope-theme");
        } catch (error) {
            // storage is closed to this page: the system's theme it is
        }
        return chosen === "dark" || chosen === "light" ? chosen : system.matches ? "light" : "dark";
    }

    document.documentElement.dataset.theme = current();
    system.addEventListener("change", () => {
        document.documentElement.dataset.theme = current();
        if (window.dash_clientside) {
            window.dash_clientside.set_props("theme", {data: current()});
        }
    });
})();
