// Elements, built once and updated in place. Text and attributes only: nothing is parsed as markup.

/** Build an element. Children are nodes, text, nested lists of them, or nothing. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Build an element of SVG. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

const some = (children) =>
  children.flat(9).filter((child) => child !== null && child !== undefined && child !== false);

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else attr(element, name, value);
  }
  element.append(...some(children));
  return element;
}

/** Set an attribute, or take it away for null and false, if that changes anything. */
export function attr(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** Set the text of an element if it is another one. */
export function put(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

/** Set a property of an element's style through CSSOM, which the CSP permits. */
export function style(element, name, value) {
  if (element.style.getPropertyValue(name) !== value) element.style.setProperty(name, value);
}

/** Put children in the place of those that are there; the same nodes and texts stay. */
export function swap(element, ...children) {
  const next = some(children);
  const now = element.childNodes;
  const same = (child, i) => now[i] === child || (now[i].nodeType === 3 && now[i].data === child);
  if (now.length === next.length && next.every(same)) return;
  element.replaceChildren(...next);
}

/**
 * Keep the children of an element equal to a list: matched by key, moved, built and dropped.
 *
 * make(item) builds a child, update(child, item, index) sets what changed. A child that stays keeps
 * its focus and its selection.
 */
export function rows(parent, items, key, make, update) {
  const kept = parent.rowsByKey ?? (parent.rowsByKey = new Map());
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const seen = new Set(items.map(key));
  for (const [name, child] of kept) {
    if (seen.has(name)) continue;
    child.remove();
    kept.delete(name);
  }
  let at = parent.firstElementChild;
  items.forEach((item, index) => {
    const name = key(item, index);
    let child = kept.get(name);
    if (!child) kept.set(name, (child = make(item)));
    update(child, item, index);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  });
  // A browser takes the focus from what is moved.
  if (focused?.isConnected && document.activeElement !== focused) {
    focused.focus({ preventScroll: true });
  }
}

/** Say words to readers of screens. */
export function say(text) {
  put(document.getElementById("live"), text);
}

/** A group of buttons of which one is pressed; `set` changes options and value. */
export function segmented(label, pick) {
  const element = h("div", { class: "segmented", role: "group", "aria-label": label });
  let value;
  const make = ([key]) =>
    h("button", { type: "button", "data-key": key, onclick: () => key !== value && pick(key) });
  return {
    element,
    set(options, chosen) {
      value = chosen;
      rows(element, options, ([key]) => key, make, (button, [key, text]) => {
        put(button, text);
        attr(button, "aria-pressed", String(key === chosen));
      });
      element.hidden = options.length < 2;
    },
  };
}

const tipBox = h("div", { class: "tip", "aria-hidden": "true", hidden: true });

/** The box beside the pointer. */
export const tip = {
  show(x, y, ...children) {
    if (!tipBox.isConnected) document.body.append(tipBox);
    swap(tipBox, ...children);
    tipBox.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tipBox;
    const left = Math.max(4, Math.min(x + 14, innerWidth - width - 12));
    const top = y + height + 28 > innerHeight ? y - height - 12 : y + 16;
    style(tipBox, "left", `${left}px`);
    style(tipBox, "top", `${top}px`);
  },
  hide() {
    tipBox.hidden = true;
  },
};

/** A button that copies text; where the browser forbids it, a dialog shows the text selected. */
export function copyButton(label, title, text) {
  const button = h("button", { type: "button", title, onclick: copy }, label);
  let timer;
  async function copy() {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      showText(title, text());
      return;
    }
    put(button, "Copied");
    say("Copied");
    clearTimeout(timer);
    timer = setTimeout(() => put(button, label), 1600);
  }
  return button;
}

function showText(title, text) {
  const area = h("textarea", { readonly: true, rows: 6, "aria-label": title });
  area.value = text;
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const dialog = h("dialog", { "aria-label": title },
    h("h2", null, title), area, h("div", { class: "bar" }, close));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  area.select();
}

/** Grey lines that stand for content on its way; they appear after 150 ms by CSS. */
export const ghost = (lines = 4) =>
  h("div", { class: "card ghost-card", "aria-hidden": "true" },
    Array.from({ length: lines }, () => h("div", { class: "ghost-line" })));

/** A card with a heading, words, and what else helps. */
export const message = (heading, words, ...more) =>
  h("section", { class: "card message" }, h("h1", null, heading),
    some([words]).map((one) => (one instanceof Node ? one : h("p", null, one))), more);
