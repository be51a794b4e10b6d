// The token comes in the address's fragment, which browsers never send, or from the form. It goes to the
// server in a header and comes back as a cookie that scripts cannot read.
"use strict";

(function () {
    const form = document.getElementById("form");
    const field = document.getElementById("token");
    const message = document.getElementById("message");

    function destination() {
        const next = new URLSearchParams(location.search).get("next") || "/";
        const target = new URL(next, location.origin);
        return target.origin === location.origin && next.startsWith("/") ? target.pathname + target.search : "/";
    }

    async function enter(token) {
        message.textContent = "";
        try {
            const reply = await fetch("/login", {method: "POST", headers: {Authorization: "Bearer " + token}});
            if (reply.ok) {
                location.replace(destination());
                return;
            }
            const problem = await reply.json();
            message.textContent = problem.title;
        } catch (error) {
            message.textContent = "The dashboard does not answer. Is it still running?";
        }
        field.select();
    }

    form.addEventListener("submit", (event) => {
        event.preventDefault();
        enter(field.value.trim());
    });

    const token = decodeURIComponent(location.hash.slice(1));
    if (token) {
        history.replaceState(null, "", location.pathname + location.search);  // out of the history
        enter(token);
    }
})();
