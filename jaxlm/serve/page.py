"""The page at `/`: a text box for the model of this server. It loads nothing from other origins.

Text of the model is inserted as text nodes alone, so it can contain no markup.
"""

import base64
import hashlib

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
textarea { width: 100%; box-sizing: border-box; font: inherit; padding: .5rem }
#out { white-space: pre-wrap; border: 1px solid #999; padding: .5rem; min-height: 6rem }
#out span.p3 { background: #fff3c4; color: #000 }
#out span.p2 { background: #ffd9a0; color: #000 }
#out span.p1 { background: #ffb3a0; color: #000 }
#curl { white-space: pre-wrap; word-break: break-all; font: 13px monospace }
input { width: 6rem }
"""

SCRIPT = """
"use strict";
const at = (id) => document.getElementById(id);
let running = null;
let isChat = false;

function body() {
  const shared = {max_tokens: Number(at("max").value), temperature: Number(at("heat").value)};
  const text = at("prompt").value;
  return isChat
    ? {messages: [{role: "user", content: text}], logprobs: true, ...shared}
    : {prompt: text, logprobs: 0, ...shared};
}

function path() {
  return isChat ? "/v1/chat/completions" : "/v1/completions";
}

function quoted(text) {
  return "'" + text.split("'").join("'\\\\''") + "'";
}

function showCommand() {
  at("curl").textContent = "curl " + location.origin + path()
    + " -H 'Content-Type: application/json' -d " + quoted(JSON.stringify(body()));
}

function add(text, value) {
  const part = document.createElement("span");
  part.textContent = text;
  if (value !== null) {
    const share = Math.exp(value);
    part.className = share < 0.1 ? "p1" : share < 0.3 ? "p2" : share < 0.6 ? "p3" : "";
    part.title = share.toFixed(3);
  }
  at("out").append(part);
}

function show(choice) {
  const text = isChat ? choice.delta.content : choice.text;
  if (!text) return;
  const scores = choice.logprobs;
  const values = isChat
    ? scores && scores.content.map((each) => each.logprob)
    : scores && scores.token_logprobs;
  const lowest = values && values.length ? Math.min(...values) : null;
  add(text, lowest);
}

async function run() {
  showCommand();
  at("out").replaceChildren();
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  try {
    const answer = await fetch(path(), {
      method: "POST",
      headers: {"Content-Type": "application/json"},
      body: JSON.stringify({...body(), stream: true}),
      signal: running.signal,
    });
    if (!answer.ok) {
      add((await answer.json()).error.message, null);
      return;
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      const events = (rest + value).split("\\n\\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.slice("data: ".length);
        if (data === "[DONE]") continue;
        const parsed = JSON.parse(data);
        if (parsed.error) add(parsed.error.message, null);
        else parsed.choices.forEach(show);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") add(String(error), null);
  } finally {
    at("send").disabled = false;
    at("stop").disabled = true;
  }
}

async function begin() {
  at("send").addEventListener("click", run);
  at("stop").addEventListener("click", () => running && running.abort());
  for (const id of ["prompt", "max", "heat"]) at(id).addEventListener("input", showCommand);
  const [model] = (await (await fetch("/v1/models")).json()).data;
  isChat = model.has_chat;
  at("model").textContent = model.id + ", step " + model.step;
  showCommand();
}

begin();
"""


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


# The one script and the one style may run, and connect to this server.
POLICY = (
    f"default-src 'none'; script-src {_source(SCRIPT)}; style-src {_source(STYLE)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

PAGE = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>jaxlm serve</title><style>{STYLE}</style></head>
<body>
<h1>jaxlm serve</h1>
<p id="model"></p>
<textarea id="prompt" rows="4" aria-label="prompt"></textarea>
<p>
<label>tokens <input id="max" type="number" min="1" value="64"></label>
<label>temperature <input id="heat" type="number" min="0" step="0.1" value="0.8"></label>
<button id="send">Send</button>
<button id="stop" disabled>Stop</button>
</p>
<div id="out" aria-live="polite"></div>
<p>Colors mark unlikely tokens; the pointer shows the probability.</p>
<p id="curl"></p>
<script>{SCRIPT}</script>
</body>
</html>
"""
