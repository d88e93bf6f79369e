'use strict';
// Everything is on the page without this; it shows one target at a time and tells about an array under the pointer.
document.documentElement.classList.add('js');
const panels = [...document.querySelectorAll('.panel')];
const tabs = [...document.querySelectorAll('nav.targets a')];

function choose(id) {
  const chosen = panels.some(panel => panel.id === id) ? id : panels[0].id;
  for (const panel of panels) panel.hidden = panel.id !== chosen;
  for (const tab of tabs) {
    const selected = tab.hash === '#' + chosen;
    tab.setAttribute('aria-selected', selected);
    tab.tabIndex = selected ? 0 : -1;
  }
}

// Moves within a row of elements by the arrow keys; one of them at a time can be reached by Tab.
function arrows(elements, event, reached) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const at = elements.indexOf(event.target);
  let to = null;
  if (step !== undefined && at >= 0) to = elements[(at + step + elements.length) % elements.length];
  if (event.key === 'Home') to = elements[0];
  if (event.key === 'End') to = elements[elements.length - 1];
  if (!to) return;
  event.preventDefault();
  for (const element of elements) element.tabIndex = element === to ? 0 : -1;
  to.focus();
  if (reached) reached(to);
}

if (tabs.length > 1) {
  const bar = tabs[0].parentElement;
  bar.setAttribute('role', 'tablist');
  for (const tab of tabs) {
    tab.setAttribute('role', 'tab');
    tab.setAttribute('aria-controls', tab.hash.slice(1));
    tab.addEventListener('click', event => {
      // Following the link would scroll, and take the focus from the row of tabs.
      event.preventDefault();
      if (location.hash !== tab.hash) history.pushState(null, '', tab.hash);
      choose(tab.hash.slice(1));
    });
  }
  for (const panel of panels) panel.setAttribute('role', 'tabpanel');
  bar.addEventListener('keydown', event => arrows(tabs, event, tab => tab.click()));
  for (const event of ['hashchange', 'popstate']) addEventListener(event, () => choose(location.hash.slice(1)));
  choose(location.hash.slice(1));
}

for (const map of document.querySelectorAll('.map')) {
  const cells = [...map.children];
  const detail = map.nextElementSibling;
  const hint = detail.textContent;
  let kept = null;
  const tell = cell => { detail.textContent = cell ? cell.dataset.about : hint; };
  for (const cell of cells) {
    cell.dataset.about = cell.title;
    cell.removeAttribute('title');
    cell.addEventListener('mouseenter', () => tell(cell));
    cell.addEventListener('mouseleave', () => tell(kept));
    cell.addEventListener('focus', () => tell(cell));
    cell.addEventListener('blur', () => tell(kept));
    cell.addEventListener('click', () => {
      if (kept) kept.classList.remove('on');
      kept = kept === cell ? null : cell;
      if (kept) kept.classList.add('on');
      tell(kept || cell);
    });
  }
  if (cells.length) cells[0].tabIndex = 0;
  map.addEventListener('keydown', event => arrows(cells, event));
}
