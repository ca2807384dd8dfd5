// The page: agents with their slots, what waits and why. It follows the decisions as they are made and asks again when
// there was one, at most once a second, while somebody looks. It changes only what has changed, so that 1,000 agents
// stay readable and the keyboard stays where it is.
"use strict";

const REFRESH_MILLISECONDS_MIN = 1000;
const REFRESH_MILLISECONDS_MAX = 5000; // durations grow, and the tables are a moment behind the decisions
const POLL_MILLISECONDS = 2000; // while decisions can't be followed
const SETTLE_MILLISECONDS = 150; // from a decision until the tables have it, usually
const AGENTS_PER_PAGE = 1000;
const AGENTS_SHOWN = 1000;
const QUEUE_SHOWN = 50;

const WORDS = {
  agent_paused: "the agent is paused",
  agent_parked: "the agent is parked until it is configured",
  conversation_busy: "an earlier turn of its conversation is not over",
  not_yet_available: "its time has not come",
  agent_parallelism_limit_reached: "all slots of the agent are taken",
};

const rows = new Map(); // agent id -> its row and what it shows
let agents = [];
let chosen = null;

const byId = (id) => document.getElementById(id);

// The token comes in the address's fragment, which no server gets to see, and is kept for this tab only.
const TOKEN = "berth-token";

function readFragment() {
  const fragment = location.hash.slice(1);
  if (fragment.startsWith("token=")) {
    sessionStorage.setItem(TOKEN, fragment.slice("token=".length));
    history.replaceState(null, "", location.pathname + location.search);
  } else {
    chosen = decodeURIComponent(fragment) || null;
  }
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function headersFor(accept) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { accept, authorization: `Bearer ${token}` } : { accept };
}

async function ask(path) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = headersFor("application/json");
  const answer = await fetch(path, { headers, cache: "no-store" });
  const content = await answer.json();
  if (answer.status === 401) askForToken(token);
  if (!answer.ok && path !== "/readyz") throw Object.assign(new Error(content.detail), { code: content.code });
  return content;
}

async function allAgents() {
  const found = [];
  let cursor = null;
  do {
    const query = `limit=${AGENTS_PER_PAGE}` + (cursor ? `&cursor=${encodeURIComponent(cursor)}` : "");
    const page = await ask(`/api/agents?${query}`);
    found.push(...page.agents);
    cursor = page.next_cursor;
  } while (cursor);
  return found;
}

function reasonOf(agent) {
  if (agent.archived) return "archived";
  if (agent.parked) return "parked";
  if (agent.paused) return "paused";
  if (!agent.waiting) return "";
  if (agent.limit !== null && agent.running >= agent.limit) return "all slots taken";
  return "time or conversation";
}

function slotsOf(agent) {
  const cell = element("td");
  if (agent.limit !== null) {
    const pips = element("span", "pips");
    pips.setAttribute("aria-hidden", "true");
    for (let number = 0; number < Math.min(Math.max(agent.limit, agent.running), 20); number++) {
      const state = number >= agent.running ? "" : number >= agent.limit ? "over" : "taken";
      pips.append(element("i", state));
    }
    cell.append(pips);
  }
  const limit = agent.limit === null ? ", no limit" : ` of ${agent.limit}`;
  cell.append(element("span", "count", agent.running + limit));
  return cell;
}

function rowOf(agent) {
  const shown = JSON.stringify([agent, agent.agent_id === chosen]);
  const known = rows.get(agent.agent_id);
  if (known && known.shown === shown) return known.row;
  const row = known ? known.row : element("tr");
  const hadFocus = row.contains(document.activeElement);
  const cell = element("th");
  cell.scope = "row";
  const button = element("button", "", agent.agent_id);
  button.type = "button";
  button.setAttribute("aria-pressed", String(agent.agent_id === chosen));
  button.addEventListener("click", () => choose(agent.agent_id));
  cell.append(button);
  if (agent.display_name) cell.append(element("span", "name", agent.display_name));
  const waiting = element("td", "number", String(agent.waiting));
  row.className = agent.agent_id === chosen ? "chosen" : "";
  row.replaceChildren(cell, slotsOf(agent), waiting, element("td", "why", reasonOf(agent)));
  if (hadFocus) button.focus({ preventScroll: true });
  rows.set(agent.agent_id, { row, shown });
  return row;
}

function showAgents() {
  const wanted = byId("find").value.trim().toLowerCase();
  const matches = agents.filter(
    (agent) =>
      !wanted ||
      agent.agent_id.toLowerCase().includes(wanted) ||
      (agent.display_name || "").toLowerCase().includes(wanted),
  );
  if (byId("order").value === "waiting") {
    matches.sort((a, b) => b.waiting - a.waiting || b.running - a.running);
  }
  const shown = matches.slice(0, AGENTS_SHOWN).map(rowOf);
  const body = byId("rows");
  shown.forEach((row, index) => {
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] || null);
  });
  while (body.children.length > shown.length) body.lastElementChild.remove();
  const empty = byId("empty");
  empty.hidden = matches.length > 0;
  empty.textContent = agents.length ? "No agent matches." : "No agents yet. PUT /api/agents/{id} makes one.";
  const more = byId("more");
  more.hidden = matches.length <= AGENTS_SHOWN;
  more.textContent = `${matches.length - AGENTS_SHOWN} more; use Find.`;
  byId("total-agents").textContent = agents.length.toLocaleString();
  for (const name of ["running", "waiting"]) {
    byId(`total-${name}`).textContent = agents.reduce((sum, agent) => sum + agent[name], 0).toLocaleString();
  }
}

function choose(agentId) {
  chosen = agentId;
  history.replaceState(null, "", `#${encodeURIComponent(agentId)}`);
  byId("detail-title").textContent = agentId;
  byId("detail-state").textContent = "loading …";
  byId("detail-body").hidden = true;
  showAgents();
  showChosen().catch(failed);
}

function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

const secondsSince = (instant) => (Date.now() - Date.parse(instant)) / 1000;

function slotItem(slot) {
  const item = element("li");
  const head = element("div", "head");
  head.append(element("span", "place", `#${slot.slot_number}`), element("span", "", slot.trigger_id));
  const time = element("span", "time", duration(secondsSince(slot.started_at)));
  time.title = `since ${slot.started_at}`;
  head.append(time);
  item.append(head);
  if (slot.message_preview) item.append(element("div", "preview", slot.message_preview));
  return item;
}

function queueItem(entry) {
  const item = element("li");
  const head = element("div", "head");
  head.append(element("span", "place", `${entry.position}.`), element("span", "", entry.trigger_id));
  const time = element("span", "time", duration(secondsSince(entry.accepted_at)));
  time.title = `accepted ${entry.accepted_at}`;
  head.append(time);
  item.append(head);
  const words = entry.reasons.map((reason) =>
    reason === "conversation_busy"
      ? `${WORDS[reason]} (${entry.waits_behind})`
      : reason === "not_yet_available"
        ? `not before ${new Date(entry.available_at).toLocaleString()}`
        : WORDS[reason] || reason,
  );
  item.append(element("div", "why", words.join("; ") || "about to start"));
  return item;
}

async function showChosen() {
  if (chosen === null) return;
  const agentId = chosen;
  const path = `/api/agents/${encodeURIComponent(agentId)}`;
  let answers;
  try {
    answers = await Promise.all([ask(`${path}/capacity`), ask(`${path}/queue?limit=${QUEUE_SHOWN}`)]);
  } catch (error) {
    if (error.code !== "agent_not_found" || agentId !== chosen) throw error;
    byId("detail-state").textContent = "There is no such agent.";
    byId("detail-body").hidden = true;
    return;
  }
  if (agentId !== chosen) return;
  const [capacity, queue] = answers;
  const limit = capacity.max_parallel_tasks === null ? "without a limit" : `of ${capacity.max_parallel_tasks}`;
  const state = [`${capacity.active_slots} running ${limit}`, `${capacity.waiting} waiting`];
  if (capacity.forced) state.push(`${capacity.forced} forced`);
  if (capacity.paused) state.push("paused");
  if (capacity.serial) state.push("serial");
  byId("detail-title").textContent = agentId;
  byId("detail-state").textContent = state.join(" · ");
  byId("slots").replaceChildren(
    ...(capacity.slots.length ? capacity.slots.map(slotItem) : [element("li", "preview", "nothing")]),
  );
  byId("queue").replaceChildren(
    ...(queue.queue.length ? queue.queue.map(queueItem) : [element("li", "preview", "nothing")]),
  );
  const beyond = queue.waiting - queue.queue.length;
  byId("queue-more").textContent = beyond > 0 ? `and ${beyond.toLocaleString()} more` : "";
  byId("detail-body").hidden = false;
}

function askForToken(refused) {
  if (sessionStorage.getItem(TOKEN) !== refused) return; // another one was given meanwhile
  sessionStorage.removeItem(TOKEN);
  byId("sign-in").hidden = false;
  if (document.activeElement === document.body) byId("token").focus();
}

function signIn(event) {
  event.preventDefault();
  // What berth token --page prints is taken as well as the token alone.
  const given = byId("token").value.trim();
  sessionStorage.setItem(TOKEN, given.slice(given.indexOf("#token=") + 1).replace(/^token=/, ""));
  byId("token").value = "";
  byId("sign-in").hidden = true;
  refresh().catch(failed);
}

function health(good, text) {
  const line = byId("health");
  const className = good ? "good" : "bad";
  if (line.className !== className) line.className = className;
  if (line.textContent !== text) line.textContent = text;
}

function failed(error) {
  const isSignedOut = !byId("sign-in").hidden;
  if (isSignedOut) health(false, "not signed in");
  else health(false, error.code ? error.message : "Berth doesn't answer; what is shown may be old.");
}

async function refresh() {
  const ready = await ask("/readyz");
  agents = await allAgents();
  showAgents();
  await showChosen();
  const reasons = ready.reasons.slice(0, 3).join("; ") + (ready.reasons.length > 3 ? "; …" : "");
  health(ready.ready, ready.ready ? "live" : `not ready: ${reasons}`);
}

let hasChanged = false;
let isFollowing = false;
let wake = () => {};

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function keepFresh() {
  for (;;) {
    hasChanged = false;
    if (!document.hidden && byId("sign-in").hidden) await refresh().catch(failed);
    await pause(REFRESH_MILLISECONDS_MIN);
    if (hasChanged) continue;
    const changed = new Promise((resolve) => (wake = resolve));
    await Promise.race([changed, pause(isFollowing ? REFRESH_MILLISECONDS_MAX : POLL_MILLISECONDS)]);
    if (hasChanged) await pause(SETTLE_MILLISECONDS);
  }
}

// Not with EventSource, which can't send a token. Only that something was decided is of use here, not what.
async function follow() {
  const answer = await fetch("/api/events", { headers: headersFor("text/event-stream"), cache: "no-store" });
  if (!answer.ok) return;
  isFollowing = true;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    if (!lines.some((line) => line.startsWith("event: "))) continue;
    hasChanged = true;
    wake();
  }
}

async function keepFollowing() {
  for (;;) {
    if (!document.hidden && byId("sign-in").hidden) await follow().catch(() => {});
    isFollowing = false;
    await pause(POLL_MILLISECONDS);
  }
}

byId("sign-in").addEventListener("submit", signIn);
addEventListener("hashchange", () => {
  readFragment();
  byId("sign-in").hidden = true;
  refresh().catch(failed);
});
readFragment();
byId("find").addEventListener("input", showAgents);
byId("order").addEventListener("change", showAgents);
document.addEventListener("visibilitychange", () => document.hidden || refresh().catch(failed));
keepFresh();
keepFollowing();
