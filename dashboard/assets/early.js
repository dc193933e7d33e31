// Runs before the first paint: the theme must not flash.
(function () {
  var kept = null;
  try { kept = localStorage.getItem("lanterne-theme"); } catch (e) { kept = null; }
  var dark = window.matchMedia && matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = kept === "dark" || kept === "light" ? kept : dark ? "dark" : "light";
})();
