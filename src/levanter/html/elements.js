"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);
// Appends an element to `parent`. Its content is set as text, never as HTML.
const put = (parent, tag, text, className) => {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
};
// A bar of 260 by 18 in a table row; `parts` are pairs of an SVG tag and its attributes.
const bar = (label, parts) => {
  const NS = "http://www.w3.org/2000/svg", svg = document.createElementNS(NS, "svg");
  svg.setAttribute("class", "bar"); svg.setAttribute("viewBox", "0 0 260 18"); svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  for (const [tag, attributes] of parts) {
    const element = document.createElementNS(NS, tag);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    svg.append(element);
  }
  return svg;
};
document.title = data.title;
at("title").textContent = data.title;
for (const [name, value] of Object.entries(data.facts)) { put(at("facts"), "dt", name); put(at("facts"), "dd", value); }
