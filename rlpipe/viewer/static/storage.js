// What the browser keeps for the page, until its tab is closed or, in localStorage, for good. A browser may keep nothing
// for a page from a file, or for any; then it is known until the page is left.

const known = new Map();

export function recall(key, area = "sessionStorage") {
  try {
    if (!known.has(key)) known.set(key, window[area].getItem(key));
  } catch { /* nothing is kept */ }
  return known.get(key) ?? null;
}

export function keep(key, value, area = "sessionStorage") {
  known.set(key, value);
  try { window[area].setItem(key, value); } catch { /* nothing is kept */ }
}

export function forget(key, area = "sessionStorage") {
  known.set(key, null);
  try { window[area].removeItem(key); } catch { /* nothing is kept */ }
}
