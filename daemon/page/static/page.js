// "/" goes to the search box, "b" shows and hides boxes. Whether boxes are shown is remembered in this browser.
"use strict";
const remembered = "visiond-boxes";

function showBoxes(shown) {
  document.body.classList.toggle("with-boxes", shown);
  for (const box of document.querySelectorAll("#boxes")) box.checked = shown;
  try {
    localStorage.setItem(remembered, shown ? "1" : "");
  } catch {
    // this browser keeps nothing
  }
}

document.addEventListener("change", (event) => {
  if (event.target.id === "boxes") showBoxes(event.target.checked);
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "/") {
    const box = document.getElementById("q");
    if (!box) return;
    box.focus();
    event.preventDefault();
  } else if (event.key === "b") {
    showBoxes(!document.body.classList.contains("with-boxes"));
  }
});

// What has not changed is not exchanged, so that the keyboard's focus stays.
const seen = new WeakMap();
document.addEventListener("htmx:beforeSwap", (event) => {
  const { target, serverResponse } = event.detail;
  if (seen.get(target) === serverResponse) event.detail.shouldSwap = false;
  seen.set(target, serverResponse);
});

try {
  showBoxes(localStorage.getItem(remembered) === "1");
} catch {
  showBoxes(false);
}
