"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);
// An element of `parent`; what stands in it is text, never HTML.
const put = (parent, tag, text, name) => {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (name) made.className = name;
  parent.append(made);
  return made;
};
// A row's bar, 260 by 18: what its parts are is the page's.
const bar = (label, parts) => {
  const NS = "http://www.w3.org/2000/svg", svg = document.createElementNS(NS, "svg");
  svg.setAttribute("class", "bar"); svg.setAttribute("viewBox", "0 0 260 18"); svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  for (const [tag, given] of parts) {
    const made = document.createElementNS(NS, tag);
    for (const key in given) made.setAttribute(key, given[key]);
    svg.append(made);
  }
  return svg;
};
document.title = data.title;
at("title").textContent = data.title;
for (const [name, value] of Object.entries(data.facts)) { put(at("facts"), "dt", name); put(at("facts"), "dd", value); }
