const FOLDED = 400; // characters; a longer text is folded
const ENDS = { environment: "the environment", turn_tokens: "the token limit of a turn", tokens: "the token limit", turns: "the limit of turns", seconds: "the time limit" };

/** A text with its invisible characters written out, which change the order of others, or nothing. */
const visible = (text) => text.replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
  (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** A text whose marks of the chat template, such as <|im_start|>, are pale. */
const marked = (text) => text.split(/(<\|[\w-]+\|>)/).map((part, i) => (i % 2 ? node("span", { class: "mark" }, part) : part));

/** A text in a block of its own; a long one is folded. */
function block(kind, text) {
  const shown = marked(visible(text));
  if (text.length <= FOLDED) return node("div", { class: `piece ${kind}` }, ...shown);
  const size = `${text.length.toLocaleString("en")} characters`;
  return node("details", { class: `piece ${kind}` }, node("summary", {}, `${visible(text.slice(0, 100).trim())} ... (${size})`), ...shown);
}

/** A call: what was called with what, what came of it, and how long it took. */
function callLine(call) {
  const given = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments ?? {});
  const facts = [
    call.status && call.status !== "ok" ? `${call.status}, not run` : "",
    call.timed_out ? "timed out" : "",
    call.seconds != null ? duration(call.seconds) : "",
  ].filter(Boolean).join(", ");
  const result = call.result == null ? "" : typeof call.result === "string" ? call.result : JSON.stringify(call.result);
  return node("div", { class: "call" },
    node("code", {}, visible(`${call.name ?? "?"}(${given.length > FOLDED ? given.slice(0, FOLDED) + " ..." : given})`)), node("span", { class: "facts" }, facts),
    ...(call.error ? [node("div", { class: "error" }, visible(String(call.error).slice(0, 4 * FOLDED)))] : []),
    ...(result && !call.error ? [block("result", result)] : []));
}

/** An episode, turn by turn: what the policy drew in one colour, what it read in another. */
function transcript({ turns, pieces, ended_by }, open) {
  const calls = turns.reduce((sum, turn) => sum + turn.calls.length, 0);
  const drawn = pieces.reduce((sum, piece) => sum + (piece.sampled ? piece.tokens : 0), 0);
  const read = pieces.reduce((sum, piece) => sum + (piece.sampled ? 0 : piece.tokens), 0);
  const counted = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
  const summary = node("summary", {}, [counted(turns.length, "turn"), counted(calls, "call"),
    `${counted(drawn, "token")} trained on`, `${counted(read, "token")} of context`, ended_by ? `ended by: ${ENDS[ended_by] ?? ended_by}` : "",
  ].filter(Boolean).join(", "));
  const last = Math.max(turns.length - 1, ...pieces.map((piece) => piece.turn));
  const body = Array.from({ length: last + 1 }, (_, i) => {
    const turn = turns[i] ?? { calls: [] }, own = pieces.filter((piece) => piece.turn === i);
    const head = [`turn ${i + 1}`, turn.tokens != null ? counted(turn.tokens, "token") : "",
      turn.reward != null ? `reward ${number(turn.reward)}` : "", turn.wait_s ? `answered after ${duration(turn.wait_s)}` : ""];
    const part = (piece) => block(piece.sampled ? "sampled" : "context", piece.text);
    const end = own.findLastIndex((piece) => piece.sampled) + 1;
    return node("div", { class: "turn" }, node("h3", {}, head.filter(Boolean).join(", ")),
      ...own.slice(0, end).map(part), ...turn.calls.map(callLine), ...own.slice(end).map(part));
  });
  const swatch = (kind, text) => node("span", { class: "key" }, node("span", { class: `swatch piece ${kind}` }), text);
  return node("details", { class: "transcript", ...(open ? { open: "" } : {}) }, summary, node("div", { class: "legend small" },
    swatch("sampled", "drawn by the policy and trained on"), swatch("context", "context, not trained on")), ...body);
}
