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

// One image: arrow keys and swipes lead to the images beside it; the picture grows by buttons, keys, two fingers, a double
// click, and the wheel with Ctrl. It moves as all that scrolls does, and with the mouse.
const MOST_ZOOM = 16;
const FINE_ZOOM = 1.5; // from here on the finer picture is loaded
const SWIPE = 60; // pixels

function showOneImage(frame) {
  const picture = frame.querySelector("img");
  let zoom = 1;

  function zoomTo(wanted, x = frame.clientWidth / 2, y = frame.clientHeight / 2) {
    const before = zoom;
    zoom = Math.min(MOST_ZOOM, Math.max(1, wanted));
    if (zoom === before) return;
    if (before === 1) frame.style.setProperty("height", `${frame.offsetHeight}px`); // what is below stays where it is
    if (zoom === 1) frame.style.removeProperty("height");
    const [left, top] = [frame.scrollLeft, frame.scrollTop];
    frame.style.setProperty("--zoom", zoom);
    frame.classList.toggle("is-near", zoom > 1);
    frame.scrollTo(((left + x) * zoom) / before - x, ((top + y) * zoom) / before - y);
    if (zoom > FINE_ZOOM) loadFine();
  }

  function loadFine() {
    const { fine } = picture.dataset;
    if (!fine) return;
    delete picture.dataset.fine;
    const finer = new Image();
    finer.src = fine;
    finer.decode().then(() => { picture.src = fine; }, () => {}); // without it, the one that is there stays
  }

  function step(way) {
    if (way === "whole") zoomTo(1);
    else zoomTo(way === "in" ? zoom * 1.5 : zoom / 1.5);
  }

  function placeOf({ clientX, clientY }) {
    const { left, top } = frame.getBoundingClientRect();
    return [clientX - left, clientY - top];
  }

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-zoom]");
    if (button) step(button.dataset.zoom);
  });
  document.addEventListener("keydown", (event) => {
    if (recall(KEYS) === NO || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input:not([type=checkbox]), select, textarea, pre, .wide")) return;
    const link = { ArrowLeft: "before", ArrowRight: "after" }[event.key];
    const way = { "+": "in", "=": "in", "-": "out", 0: "whole" }[event.key];
    if (way) step(way);
    else if (link && !(zoom > 1 && event.target === frame)) document.getElementById(link)?.click();
    else return;
    event.preventDefault();
  });
  frame.addEventListener("dblclick", (event) => zoomTo(zoom > 1 ? 1 : 3, ...placeOf(event)));
  frame.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoomTo(zoom * Math.exp(-event.deltaY / 300), ...placeOf(event));
  }, { passive: false });

  frame.addEventListener("pointerdown", ({ pointerType, pointerId, button }) => {
    if (pointerType !== "mouse" || button || zoom === 1) return;
    frame.setPointerCapture(pointerId);
    frame.classList.add("is-held");
  });
  frame.addEventListener("pointermove", ({ movementX, movementY }) => {
    if (frame.classList.contains("is-held")) frame.scrollBy(-movementX, -movementY);
  });
  for (const end of ["pointerup", "pointercancel"]) frame.addEventListener(end, () => frame.classList.remove("is-held"));

  let touched = null; // where one finger began, or how far apart two were
  frame.addEventListener("touchstart", ({ touches }) => {
    const [one, two] = touches;
    if (two) touched = { apart: Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY), zoom };
    else touched = zoom === 1 ? { x: one.clientX, y: one.clientY } : null;
  }, { passive: true });
  frame.addEventListener("touchmove", (event) => {
    const [one, two] = event.touches;
    if (!two || !touched?.apart) return;
    event.preventDefault();
    const apart = Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY);
    const middle = { clientX: (one.clientX + two.clientX) / 2, clientY: (one.clientY + two.clientY) / 2 };
    zoomTo((touched.zoom * apart) / touched.apart, ...placeOf(middle));
  }, { passive: false });
  frame.addEventListener("touchend", ({ changedTouches: [finger], touches }) => {
    if (touches.length || touched?.x === undefined) return;
    const [right, down] = [finger.clientX - touched.x, finger.clientY - touched.y];
    touched = null;
    if (Math.abs(right) > Math.max(SWIPE, 2 * Math.abs(down))) document.getElementById(right > 0 ? "before" : "after")?.click();
  });
}

// Browsers lend the clipboard only to pages that came by TLS or from this machine; elsewhere an older command copies.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

document.addEventListener("click", async ({ target }) => {
  const id = target.dataset?.copy;
  if (!id) return;
  const done = await copy(document.getElementById(id).textContent);
  document.getElementById("copied").textContent = done ? "Copied." : "This browser does not let the page copy.";
  target.focus();
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

// Boxes in the gallery: one ticks all that are shown, and how many are ticked is said.
function countTicked() {
  const form = document.getElementById("tickable");
  if (!form) return;
  const most = Number(form.dataset.most); // downloaded at once
  const boxes = [...form.querySelectorAll("[name=id]")];
  const count = boxes.filter((box) => box.checked).length;
  tick("every", count > 0 && count === boxes.length);
  for (const button of document.querySelectorAll(".ticked [formmethod]")) button.disabled = count > most;
  const limit = count > most ? `, of which ${most} can be downloaded at once` : "";
  for (const line of document.querySelectorAll("#ticked")) line.textContent = count > 0 ? `${count} ticked${limit}:` : "";
}

document.addEventListener("change", ({ target }) => {
  if (target.id === "every") {
    for (const box of target.form.querySelectorAll("[name=id]")) box.checked = target.checked;
  }
  if (target.name === "id" || target.id === "every") countTicked();
});
document.addEventListener("keydown", (event) => {
  // Browsers would press the form's first button.
  if (event.key === "Enter" && event.target.matches("#tickable [type=checkbox]")) event.preventDefault();
});
document.addEventListener("htmx:afterSettle", countTicked); // more have come
window.addEventListener("pageshow", countTicked); // back again, and this browser kept the ticks

choosePageSize();
for (const frame of document.querySelectorAll("#zoom")) showOneImage(frame);
document.body.classList.add("has-script");
showBoxes(recall(BOXES) === "1");
tick("keys", recall(KEYS) !== NO);
