// "/" goes to the search box, "b" shows and hides boxes. Whether boxes are shown is remembered in this browser.
"use strict";
const remembered = "visiond-boxes";

function showBoxes(shown) {
  document.body.classList.toggle("with-boxes", shown);
  for (const box of document.querySelectorAll("#boxes")) box.checked = shown;
  localStorage.setItem(remembered, shown ? "1" : "");
}

document.addEventListener("change", (event) => {
  if (event.target.id === "boxes") showBoxes(event.target.checked);
  else if (event.target.closest(".search fieldset")) event.target.form.requestSubmit();
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

showBoxes(localStorage.getItem(remembered) === "1");
