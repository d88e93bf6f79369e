"use strict";
// What the model writes is text of nodes, never markup: nothing here makes HTML of a string.
const $ = id => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const KEPT = [...NUMBERS, "stop_at", "system", "mode"];
const HINT = $("about").textContent;
let messages = load("messages", []), running = null, model = null, last = null;

function load(name, otherwise) {
  try { return JSON.parse(sessionStorage.getItem(name)) ?? otherwise; } catch { return otherwise; }
}
function keep(name, value) {
  try { sessionStorage.setItem(name, JSON.stringify(value)); } catch { /* private windows have none */ }
}
function node(tag, text, ...classes) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.classList.add(...classes);
  return made;
}
function headers() {
  const key = load("key", "");
  return key ? {"Authorization": `Bearer ${key}`} : {};
}

// --- messages
function shown(message) {
  const box = node("div", "", "message", message.role);
  box.append(node("span", {user: "you", assistant: model ?? "model", error: "not answered"}[message.role] ?? message.role, "who"));
  if (message.role === "assistant") {
    box.tabIndex = 0;
    for (const piece of message.pieces ?? [{text: message.content}]) box.append(span(piece));
  } else box.append(node("span", message.content));
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
  return box;
}
function span(piece) {
  const made = node("span", piece.text, "token");
  if (piece.tokens?.length) {
    const least = Math.exp(Math.min(...piece.tokens.map(token => token.logprob)));
    made.classList.add(least > .9 ? "p0" : least > .5 ? "p1" : least > .2 ? "p2" : least > .05 ? "p3" : "p4");
    made.piece = piece;
  }
  return made;
}
const percent = logprob => `${(100 * Math.exp(logprob)).toPrecision(3)} %`;
const quoted = text => JSON.stringify(text);
function about(at) {
  for (const other of document.querySelectorAll(".at")) other.classList.remove("at");
  if (!at?.piece) { $("about").textContent = HINT; return; }
  at.classList.add("at");
  $("about").textContent = at.piece.tokens.map(token => {
    const others = token.top.filter(([text]) => text !== token.text).map(([text, logprob]) => `${quoted(text)} ${percent(logprob)}`);
    return `${quoted(token.text)} ${percent(token.logprob)}${others.length ? `; else ${others.join(", ")}` : ""}`;
  }).join("\n");
}
$("log").addEventListener("pointerover", event => { if (event.target.piece) about(event.target); });
$("log").addEventListener("keydown", event => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], box = event.target.closest(".assistant");
  if (!step || !box) return;
  const spans = [...box.querySelectorAll(".token")].filter(each => each.piece);
  const at = spans.findIndex(each => each.classList.contains("at"));
  if (spans.length) about(spans[Math.max(0, Math.min(spans.length - 1, at < 0 ? 0 : at + step))]);
  event.preventDefault();
});
function drawn() {
  $("log").replaceChildren();
  messages.forEach(shown);
  $("again").disabled = !messages.length || running !== null;
}

// --- asking
function body() {
  const found = {model, stream: true, stream_options: {include_usage: true}};
  for (const name of NUMBERS) if ($(name).value !== "") found[name] = Number($(name).value);
  if ($("stop_at").value) found.stop = [$("stop_at").value];
  const asked = messages.filter(message => message.role !== "error");
  if ($("mode").value === "chat") {
    const system = $("system").value ? [{role: "system", content: $("system").value}] : [];
    found.messages = [...system, ...asked.map(({role, content}) => ({role, content}))];
    if ($("probabilities").checked) Object.assign(found, {logprobs: true, top_logprobs: 5});
    return ["/v1/chat/completions", found];
  }
  found.prompt = asked.map(message => message.content).join("");
  if ($("probabilities").checked) found.logprobs = 5;
  return ["/v1/completions", found];
}
function piecesOf(choice) {
  const there = choice.logprobs;
  if (!there) return [];
  if (there.content) return there.content.map(token => ({
    text: token.token, logprob: token.logprob, top: (token.top_logprobs ?? []).map(each => [each.token, each.logprob]),
  }));
  return (there.tokens ?? []).map((text, n) => ({
    text, logprob: there.token_logprobs[n], top: Object.entries(there.top_logprobs?.[n] ?? {}),
  }));
}
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter(line => line.startsWith("data:")).map(line => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
async function problem(response) {
  if (response.status === 401) { $("access").open = true; $("key").focus(); }
  const said = await response.text();
  try { return JSON.parse(said).error.message; } catch { return `${response.status} ${said.slice(0, 300)}`; }
}
async function answer() {
  const [path, asked] = body(), stopper = new AbortController();
  const message = {role: "assistant", content: "", pieces: []};
  let box = null, tokens = [], count = 0, first = null, failed = null;
  const began = performance.now();
  working(stopper);
  try {
    const response = await fetch(path, {method: "POST", signal: stopper.signal, body: JSON.stringify(asked), headers: {"Content-Type": "application/json", ...headers()}});
    if (!response.ok) throw new Error(await problem(response));
    box = shown(message);
    box.setAttribute("aria-busy", "true");
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) count = event.usage.completion_tokens;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const text = choice.delta ? choice.delta.content ?? "" : choice.text ?? "";
      const found = piecesOf(choice);
      tokens.push(...found);
      if (text || found.length) { first ??= performance.now(); count += found.length || 1; }
      if (text) {
        const piece = {text, tokens};
        tokens = [];
        message.content += text;
        message.pieces.push(piece);
        box.append(span(piece));
        $("log").scrollTop = $("log").scrollHeight;
      }
      if (choice.finish_reason) message.reason = choice.finish_reason;
      told(count, began, first, message.reason);
    }
  } catch (error) {
    if (error.name === "AbortError") message.reason = "stopped here";
    else failed = error.message;
  }
  if (box) {
    box.removeAttribute("aria-busy");
    messages.push(message);
    told(count, began, first, message.reason);
  }
  if (failed !== null) { messages.push({role: "error", content: failed}); shown(messages.at(-1)); }
  keep("messages", messages);
  working(null);
}
function told(count, began, first, reason) {
  const now = performance.now(), rate = first !== null && count > 1 ? (count - 1) / Math.max((now - first) / 1000, 1e-3) : null;
  const parts = [`${count} tokens`];
  if (first !== null) parts.push(`the first after ${((first - began) / 1000).toFixed(2)} s`);
  if (rate !== null) parts.push(`${rate.toFixed(1)} a second`);
  if (reason) parts.push(`ended: ${reason}`);
  $("rate").textContent = parts.join(", ");
}
function working(stopper) {
  running = stopper;
  $("send").disabled = $("again").disabled = $("clear").disabled = stopper !== null;
  $("stop").disabled = stopper === null;
  if (stopper === null) { $("again").disabled = !messages.length; $("text").focus(); } else $("rate").textContent = "waiting…";
}
$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("text").value;
  if (running !== null || !text) return;
  messages.push({role: "user", content: text});
  shown(messages.at(-1));
  keep("messages", messages);
  $("text").value = "";
  answer();
});
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", event => { if (event.key === "Escape") running?.abort(); });
$("again").addEventListener("click", () => {
  while (messages.length && messages.at(-1).role !== "user") messages.pop();
  drawn();
  if (messages.length) answer();
});
$("clear").addEventListener("click", () => { messages = []; keep("messages", messages); drawn(); about(null); $("rate").textContent = ""; $("text").focus(); });

// --- settings
for (const name of KEPT) {
  $(name).value = load(`set:${name}`, $(name).value);
  $(name).addEventListener("change", () => keep(`set:${name}`, $(name).value));
}
$("settings").addEventListener("submit", event => event.preventDefault());
$("unlock").addEventListener("submit", event => {
  event.preventDefault();
  keep("key", $("key").value.trim());
  $("key").value = "";
  planned();
  look();
});

// --- the server
const count = new Intl.NumberFormat("en");
async function look() {
  try {
    const response = await fetch("/status", {headers: headers()});
    if (response.status === 401) { $("state").textContent = "this server asks for a key"; $("access").open = true; return; }
    if (!response.ok) { $("state").textContent = await problem(response); return; }
    const found = await response.json(), load = found.load;
    if (model !== found.model) {
      model = found.model;
      $("model").textContent = model;
      document.title = model;
      if (!running) drawn();
    }
    $("state").textContent = `${found.state}, ${count.format(found.context)} tokens of context, ${found.devices} device${found.devices === 1 ? "" : "s"}`;
    $("rows").max = load.slots; $("rows").value = load.running;
    $("rows_text").textContent = `${load.running} of ${load.slots} running`;
    const used = load.pages - load.pages_free;
    $("pages").max = load.pages; $("pages").value = used;
    $("pages_text").textContent = `${count.format(used)} of ${count.format(load.pages)} held`;
    $("waiting").textContent = `${load.waiting} choices, ${count.format(load.waiting_tokens)} tokens`;
    const now = performance.now(), rate = last ? Math.max(0, found.tokens - last.tokens) / (now - last.at) * 1000 : 0;
    last = {tokens: found.tokens, at: now};
    $("tokens").textContent = `${count.format(found.tokens)}, ${rate.toFixed(1)} a second`;
  } catch { $("state").textContent = "the server does not answer"; }
}
async function planned() {
  try {
    const response = await fetch("/plan", {headers: headers()});
    if (response.ok) $("plan").textContent = (await response.json()).report;
  } catch { /* `look` says that nobody answers */ }
}
drawn();
planned();
look();
setInterval(() => { if (!document.hidden) look(); }, 1000);
$("text").focus();
