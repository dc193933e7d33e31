// The page's own behaviour in the browser. No library, nothing from elsewhere, no state but theme and pause.
(function () {
  "use strict";
  var none = function () { return window.dash_clientside.no_update; };
  var live = true;

  function query(search) { return new URLSearchParams(search || ""); }
  function written(found) { var text = found.toString(); return text ? "?" + text : ""; }
  function put(found, key, value) { if (value === "" || value === null || value === undefined) { found.delete(key); } else { found.set(key, value); } }

  // What a figure stands on. A zoom draws the zoomed figure at once and the others when the hand rests.
  var HEAT = ["from", "to", "from_rank", "to_rank", "heat"], SPAN = ["from", "to"], CURVES = ["from", "to", "smooth", "log", "axis", "series"];
  var REST_MS = 400, drawn = null, zoomed = null, waiting = {};
  function key(search, names) {
    var found = query(search);
    return names.map(function (n) { return n + "=" + (found.get(n) || ""); }).join("&");
  }
  function ask(stores, at) {
    stores.forEach(function (id) { window.dash_clientside.set_props(id, { data: at }); });
  }
  function later(what, stores, at, now) {
    var path = location.pathname;
    clearTimeout(waiting[what]);
    waiting[what] = setTimeout(function () { if (location.pathname === path) { ask(stores, at); } }, now ? 0 : REST_MS);
  }

  function ranges(view) {
    // The window of a zoom: {from, to, from_rank, to_rank}; empty strings after a double click; null for anything else.
    if (!view) { return null; }
    if (view["xaxis.autorange"] || view["yaxis.autorange"]) { return { from: "", to: "", from_rank: "", to_rank: "" }; }
    var x = ["xaxis.range[0]", "xaxis.range[1]"], y = ["yaxis.range[0]", "yaxis.range[1]"];
    if (!(x[0] in view) && !(y[0] in view)) { return null; }
    var found = {};
    if (x[0] in view && typeof view[x[0]] === "number") {
      found.from = Math.max(0, Math.floor(view[x[0]]));
      found.to = Math.max(found.from + 1, Math.ceil(view[x[1]]));
    }
    if (y[0] in view) {
      var low = Math.min(view[y[0]], view[y[1]]), high = Math.max(view[y[0]], view[y[1]]);
      found.from_rank = Math.max(0, Math.floor(low + 0.5));
      found.to_rank = Math.max(found.from_rank, Math.floor(high));
    }
    return found;
  }

  var ASKED = ["fleet", "job", "incident", "incidents"].map(function (n) { return "#" + n + "-live[data-dash-is-loading=true]"; }).join(",");
  function ages() {
    document.querySelectorAll("time.ago").forEach(function (t) {
      var s = Math.round((Date.now() - Date.parse(t.dateTime)) / 1000), text = t.firstChild;
      if (!text || isNaN(s)) { return; }
      var two = function (n) { return (n < 10 ? "0" : "") + n; };
      text.nodeValue = s < 1 ? "just now" : (s < 60 ? s + " s" : s < 3600 ? Math.floor(s / 60) + " min " + two(s % 60) + " s"
        : s < 86400 ? Math.floor(s / 3600) + " h " + two(Math.floor(s % 3600 / 60)) + " min"
        : Math.floor(s / 86400) + " d " + Math.floor(s % 86400 / 3600) + " h") + (t.classList.contains("since") ? "" : " ago");
    });
  }
  function name(prop) {
    // "heat" or a curve's name from the property that changed; null for the button.
    if (prop.indexOf("heat.") === 0) { return "heat"; }
    try { return JSON.parse(prop.slice(0, prop.lastIndexOf("."))).name; } catch (e) { return null; }
  }

  function segments(search) {
    // Which of the choices stands in the address.
    var found = query(search);
    document.querySelectorAll("button.segment").forEach(function (b) {
      var own = found.has(b.dataset.key) ? found.get(b.dataset.key) : b.dataset.default;
      b.setAttribute("aria-pressed", String(own === b.dataset.value));
    });
  }
  function choose(b) {
    var found = query(location.search);
    put(found, b.dataset.key, b.dataset.value === b.dataset.default ? "" : b.dataset.value);
    window.dash_clientside.set_props("url", { search: written(found) });
  }

  function arrive() {
    // The live page is drawn: what the document brought along gives way to it.
    var first = document.getElementById("first");
    if (!first) { return; }
    requestAnimationFrame(function () {
      // What was opened stays open, and the focus stays where it was.
      var names = "details,a,button,input,summary,[tabindex]", at = document.activeElement;
      var old = first.querySelectorAll(names), own = document.querySelectorAll("#react-entry-point :is(" + names + ")");
      var same = function (i) { return own[i] && own[i].tagName === old[i].tagName; }, focus = null;
      old.forEach(function (e, i) {
        if (!same(i)) { return; }
        if (e.open) { own[i].open = true; }
        if (e === at) { focus = own[i]; }
      });
      first.remove();
      if (focus) { focus.focus({ preventScroll: true }); }
      if (!live) { label(); }
    });
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    lanterne: {
      pulse: function (n, before) {
        var heard = document.getElementById("heard");
        if (heard) { heard.textContent = ""; }
        if (!live || document.hidden || !n || document.querySelector(ASKED)) { return none(); }
        return (before || 0) + 1;
      },
      title: function (title) {
        if (title) { document.title = title; }
        arrive();
        mark();
        var main = document.getElementById("page");
        ages();
        if (main && document.activeElement === document.body) { main.focus({ preventScroll: true }); }
        return none();
      },
      control: function (values, ids, search) {
        var found = query(search);
        ids.forEach(function (id, i) {
          var value = values[i] === null || values[i] === undefined ? "" : String(values[i]);
          put(found, id.key, value === id.default ? "" : value);
        });
        var text = written(found);
        return text === (search || "") ? none() : text;
      },
      views: function (search, curves) {
        // The heat map is told only of what it shows; the curves one by one.
        var before = drawn, first = zoomed, at = { path: location.pathname, heat: key(search, HEAT), span: key(search, SPAN), curves: key(search, CURVES) };
        drawn = at;
        zoomed = null;
        segments(search);
        if (!before || before.path !== at.path) { return; }
        if (before.heat !== at.heat) { later("heat", ["heat-view"], at.heat, !first || first === "heat"); }
        if (before.span !== at.span) { later("span", ["span-view"], at.span, false); }
        if (before.curves !== at.curves) {
          var own = curves.filter(function (id) { return id.name === first; });
          var rest = curves.filter(function (id) { return id.name !== first; });
          ask(own, at.curves);
          later("curves", rest, at.curves, !first);
        }
      },
      zoom: function (heat, curves, reset, search) {
        var why = (window.dash_clientside.callback_context.triggered || [])[0];
        if (!why || !why.value) { return none(); }
        var found = query(search), asked;
        if (why.prop_id.indexOf("reset-zoom") === 0) {
          asked = { from: "", to: "", from_rank: "", to_rank: "" };
        } else {
          asked = ranges(why.value);
          if (asked && why.prop_id.indexOf("heat.") !== 0) { delete asked.from_rank; delete asked.to_rank; }
        }
        if (!asked || !Object.keys(asked).length) { return none(); }
        zoomed = name(why.prop_id);
        Object.keys(asked).forEach(function (k) { put(found, k, asked[k]); });
        var text = written(found);
        if (text === (search || "")) { zoomed = null; return none(); }
        return text;
      }
    }
  });

  document.addEventListener("DOMContentLoaded", ages);
  setInterval(ages, 1000);

  // --- theme, pause, link, help ---------------------------------------------------------------

  function theme() {
    var root = document.documentElement, next = root.dataset.theme === "dark" ? "light" : "dark";
    root.dataset.theme = next;
    try { localStorage.setItem("lanterne-theme", next); } catch (e) { /* private mode: for this page only */ }
  }
  function pause() {
    live = !live;
    label();
  }
  function label() {
    var b = document.getElementById("live");
    if (b) { b.setAttribute("aria-pressed", String(live)); b.textContent = live ? "Live" : "Paused"; }
  }
  function say(text) { var h = document.getElementById("heard"); if (h) { h.textContent = text; } }
  function copyLink() {
    var address = location.href;
    if (navigator.clipboard && window.isSecureContext) {
      navigator.clipboard.writeText(address).then(function () { say("link copied"); }, function () { say(address); });
    } else { say(address); }
  }
  function save(button) {
    // What a table shows, as a file; a cell that a spreadsheet would run as a formula gets a quote before it.
    var table = button.parentElement.querySelector("table"), caption = table.caption ? table.caption.textContent : "table";
    var lines = Array.from(table.rows).map(function (row) {
      return Array.from(row.cells).map(function (cell) {
        var text = cell.innerText.replace(/\s+/g, " ").trim();
        return '"' + (/^[=+\-@]/.test(text) && isNaN(Number(text)) ? "'" + text : text).replace(/"/g, '""') + '"';
      }).join(",");
    });
    var link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
    link.download = caption.toLowerCase().replace(/[^a-z0-9]+/g, "-") + ".csv";
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000);
  }
  function help() {
    var d = document.getElementById("keys");
    if (d && d.showModal) { if (d.open) { d.close(); } else { d.showModal(); } }
  }
  function mark() {
    var at = location.pathname;
    document.querySelectorAll("a.nav").forEach(function (a) {
      var to = a.getAttribute("href");
      var here = to === "/" ? at === "/" || at.indexOf("/jobs") === 0 : at.indexOf(to) === 0;
      if (here) { a.setAttribute("aria-current", "page"); } else { a.removeAttribute("aria-current"); }
    });
    document.querySelectorAll("a.sub.here").forEach(function (a) { a.setAttribute("aria-current", "page"); });
  }
  function press(selector) { var a = document.querySelector(selector); if (a) { a.click(); } }

  document.addEventListener("click", function (event) {
    var t = event.target.closest ? event.target.closest("#theme,#live,#help,#copy-link,button.segment,button.save") : null;
    if (!t) { return; }
    if (t.classList.contains("segment")) { choose(t); return; }
    if (t.classList.contains("save")) { save(t); return; }
    ({ theme: theme, live: pause, help: help, "copy-link": copyLink })[t.id]();
  });

  var after = "";
  document.addEventListener("keydown", function (event) {
    if (event.ctrlKey || event.metaKey || event.altKey) { return; }
    if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName || "") && event.target.type !== "radio") {
      if (event.key === "Escape") { event.target.blur(); }
      return;
    }
    var go = { f: "#nav-fleet", i: "#nav-incidents", p: "#nav-policies", s: "#nav-settings" };
    if (after === "g") { after = ""; if (go[event.key]) { press(go[event.key]); } return; }
    if (event.key === "g") { after = "g"; setTimeout(function () { after = ""; }, 1000); return; }
    if (event.key === "/") {
      var find = document.querySelector('input[type="search"]');
      if (find) { event.preventDefault(); find.focus(); }
    } else if (event.key === "t") { theme(); } else if (event.key === "l") { pause(); }
    else if (event.key === "?") { help(); }
    else if (event.key === "[") { press("#step-before"); } else if (event.key === "]") { press("#step-after"); }
  });
})();
