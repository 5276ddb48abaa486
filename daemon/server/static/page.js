// "/" goes to the search box, "b" shows and hides boxes. Both choices below are remembered in this browser.
"use strict";
const BOXES = "visiond-boxes";
const KEYS = "visiond-keys";
const NO = "0";

function recall(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // this browser keeps nothing
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // this browser keeps nothing
  }
}

function tick(id, ticked) {
  for (const box of document.querySelectorAll(`#${id}`)) box.checked = ticked;
}

function showBoxes(shown) {
  document.body.classList.toggle("with-boxes", shown);
  tick("boxes", shown);
}

document.addEventListener("change", ({ target }) => {
  if (target.id === "boxes") {
    showBoxes(target.checked);
    remember(BOXES, target.checked ? "1" : NO);
  } else if (target.id === "keys") {
    remember(KEYS, target.checked ? "1" : NO);
  }
});

document.addEventListener("keydown", (event) => {
  if (recall(KEYS) === NO || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input:not([type=checkbox]), select, textarea")) return;
  if (event.key === "/") {
    const box = document.getElementById("q");
    if (!box) return;
    box.focus();
    event.preventDefault();
  } else if (event.key === "b") {
    const shown = !document.body.classList.contains("with-boxes");
    showBoxes(shown);
    remember(BOXES, shown ? "1" : NO);
  }
});

// What is not chosen does not go into the address.
document.addEventListener("htmx:configRequest", ({ detail }) => {
  const { formData } = detail;
  for (const [name, value] of [...formData.entries()]) if (!value) formData.delete(name);
});

// What has not changed is not exchanged, so that the keyboard's focus stays.
const seen = new WeakMap();
document.addEventListener("htmx:beforeSwap", (event) => {
  const { target, serverResponse } = event.detail;
  if (seen.get(target) === serverResponse) event.detail.shouldSwap = false;
  seen.set(target, serverResponse);
});

// The size of the cards is in a cookie, so that the page comes with it and nothing moves.
function choosePageSize() {
  const box = document.getElementById("size");
  const home = document.querySelector(".home");
  box?.addEventListener("change", () => {
    for (const { value } of box.options) document.body.classList.toggle(`size-${value}`, value === box.value);
    document.cookie = `visiond-size=${box.value}; path=${home.pathname}; max-age=31536000; samesite=strict`;
  });
}
choosePageSize();

document.body.classList.add("has-script");
showBoxes(recall(BOXES) === "1");
tick("keys", recall(KEYS) !== NO);
