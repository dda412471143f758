"use strict";
// The trajectories: grids of groups, filters, and the turn that is open. Texts are set as text, never as markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const STEERS = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Cn}\p{Co}\p{Zl}\p{Zp}]/gu;
  const MARKS = {
    "right write": "●", "right skip": "○", "wrongly skipped": "⊘", "wrongly written": "⊕", unparsed: "?", answer: "A",
  };
  const MEASURES = [ // name, column, where it is, how a value becomes a share of full colour
    ["recorded log-probability", "behavior_logprobs", "turn", (v) => Math.min(1, -v / 5)],
    ["current log-probability", "logprobs", "update", (v) => Math.min(1, -v / 5)],
    ["KL to the reference", "token_kl", "update", (v, most) => (most ? Math.max(0, v) / most : 0)],
  ];
  const PAGE = 40; // groups that are drawn at once
  let data, groups, turns, byId, shownGroups, matching, drawn, open = null, measure = 0;

  // ---- text and elements ----

  const escaped = (character) => {
    const code = character.codePointAt(0);
    if (code < 0x100) return "\\x" + code.toString(16).padStart(2, "0");
    return code < 0x10000 ? "\\u" + code.toString(16).padStart(4, "0") : "\\U" + code.toString(16).padStart(8, "0");
  };

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") made.className = value;
      else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return made;
  }

  function plain(text) { // what would steer, as its escape, in an element of its own
    const made = document.createDocumentFragment();
    let from = 0;
    for (const found of String(text).matchAll(STEERS)) {
      made.append(text.slice(from, found.index), element("span", { class: "control" }, escaped(found[0])));
      from = found.index + found[0].length;
    }
    made.append(String(text).slice(from));
    return made;
  }

  const shortened = (text, length) => (text.length > length ? text.slice(0, length) + " …" : text);
  const isolated = (text) => element("bdi", {}, plain(text));
  const box = (...children) => element("div", { class: "text", dir: "auto", tabindex: 0 }, ...children);
  const number = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(+value.toPrecision(4)) : String(value));
  const known = (value) => value !== null && value !== undefined;

  function pairs(records) { // [name, value]: a table of numbers, exact in the title
    const body = element("tbody");
    for (const [name, value] of records) {
      if (known(value)) {
        body.append(element("tr", {}, element("th", { scope: "row" }, plain(name)), element("td", { title: value }, number(value))));
      }
    }
    return element("table", { class: "pairs" }, body);
  }

  // ---- what there is ----

  async function load() {
    const bytes = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    data = { trajectories: [], rows: {}, texts: [], tokens: {} };
    for (const line of (await new Response(stream).text()).split("\n").filter(Boolean)) {
      for (const [name, value] of Object.entries(JSON.parse(line))) {
        if (Array.isArray(data[name])) data[name].push(...value);
        else if (data[name]) for (const [key, one] of Object.entries(value)) Object.defineProperty(data[name], key, { value: one });
        else data[name] = value;
      }
    }
    const sources = [...new Set(data.trajectories.map((one) => one.source))];
    const place = (one) => [sources.indexOf(one.source), one.iteration, one.group, one.member];
    data.trajectories.sort((a, b) => place(a).reduce((less, value, index) => less || value - place(b)[index], 0));
    groups = []; turns = []; byId = new Map();
    let last = null;
    for (const one of data.trajectories) {
      const key = [one.source, one.iteration, one.group].join("\n");
      if (!last || last.key !== key) groups.push((last = { key, source: one.source, iteration: one.iteration, members: [] }));
      one.home = last;
      last.members.push(one);
      one.turns.forEach((turn, index) => {
        Object.assign(turn, { owner: one, index });
        turns.push(turn);
        byId.set(address(turn), turn);
      });
    }
    groups.forEach((group, index) => { group.place = index; });
  }

  const address = (turn) => (turn.owner.source ? turn.owner.source + ":" : "") + turn.id;
  const chunksOf = (one) => (Object.hasOwn(data.rows, one.row_id) ? data.rows[one.row_id].chunks : []);
  const evidenceAt = (group, step) => {
    const chunk = chunksOf(group.members[0])[step - 1];
    if (chunk) return chunk.evidence;
    const read = group.members.flatMap((one) => one.turns).find((turn) => turn.step === step);
    return read ? read.evidence : null;
  };

  // ---- filters ----

  const FIELDS = {
    source: (turn) => turn.owner.source, iteration: (turn) => String(turn.owner.iteration),
    project: (turn) => turn.owner.project || "",
  };
  let until = null; // the last iteration, where a button asked for several

  function fillFilters() {
    const options = (id, values, all) => {
      $(id).replaceChildren(element("option", { value: "" }, all), ...values.map((value) => element("option", { value }, plain(value))));
      $(id).parentElement.hidden = values.length < 2 && id !== "fault";
    };
    const distinct = (field) => [...new Set(turns.map(FIELDS[field]))].filter((value) => value !== "");
    options("source", distinct("source"), "all");
    options("iteration", distinct("iteration").sort((a, b) => a - b), "all");
    options("project", distinct("project").sort(), "all");
    options("kind", data.kinds.filter((kind) => turns.some((turn) => turn.kinds.includes(kind))), "any");
    options("fault", data.faults.filter((fault) => turns.some((turn) => turn.faults.includes(fault))), "any fault");
  }

  function matches(turn) {
    const fault = $("fault").value;
    if (fault ? !turn.faults.includes(fault) : !turn.faults.length) return false;
    return !$("kind").value || turn.kinds.includes($("kind").value);
  }

  function isInside(group) {
    const turn = group.members[0].turns[0];
    if (until !== null && $("iteration").value === "") {
      if (group.iteration < until[0] || group.iteration > until[1]) return false;
    }
    return ["source", "iteration", "project"].every((id) => !$(id).value || FIELDS[id](turn) === $(id).value);
  }

  const rewardsOf = (group) => group.members.map((one) => one.reward).filter(known);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
  const ORDERS = {
    place: (group) => group.place, newest: (group) => -group.iteration * 1e6 + group.place,
    faults: (group) => -group.members.flatMap((one) => one.turns.flatMap((turn) => turn.faults)).length,
    low: (group) => mean(rewardsOf(group)), high: (group) => -mean(rewardsOf(group)),
    spread: (group) => Math.min(...rewardsOf(group)) - Math.max(...rewardsOf(group)),
  };

  function refresh() {
    const rank = ORDERS[$("order").value];
    const specific = $("fault").value || $("kind").value;
    shownGroups = groups.filter(isInside);
    if (specific) shownGroups = shownGroups.filter((group) => group.members.some((one) => one.turns.some(matches)));
    shownGroups = shownGroups.map((group) => [rank(group), group]).sort((a, b) => a[0] - b[0]).map((pair) => pair[1]);
    matching = shownGroups.flatMap((group) => group.members.flatMap((one) => one.turns.filter(matches)));
    drawn = 0;
    $("groups").replaceChildren();
    draw();
    tell();
  }

  function tell() {
    const at = open ? matching.indexOf(open) : -1;
    const readings = shownGroups.reduce((sum, group) => sum + group.members.length, 0);
    const name = $("fault").value || "fault";
    $("told").textContent = `${at < 0 ? "" : `${at + 1} of `}${matching.length} × ${name}, in ${readings} readings of ${shownGroups.length} groups`
      + (until && $("iteration").value === "" ? `, iterations ${until[0]}–${until[1]}` : "");
  }

  // ---- the grids ----

  function draw(least = PAGE) {
    $("groups").querySelector(".more")?.remove();
    const end = Math.min(shownGroups.length, Math.max(drawn + PAGE, least));
    for (; drawn < end; drawn++) $("groups").append(grid(shownGroups[drawn]));
    if (drawn < shownGroups.length) {
      const rest = shownGroups.length - drawn;
      $("groups").append(element("button", { type: "button", class: "more", onclick: () => draw() }, `show ${Math.min(PAGE, rest)} more of ${rest}`));
    }
  }

  function grid(group) {
    const first = group.members[0], last = first.last_evidence;
    const steps = Math.max(chunksOf(first).length, last || 0, ...group.members.flatMap((one) => one.turns.map((turn) => turn.step || 0)));
    const answers = group.members.some((one) => one.turns.some((turn) => !known(turn.step)));
    const head = element("tr", {}, element("th", { scope: "col", title: "reading of the group" }, "#"));
    for (let step = 1; step <= steps; step++) {
      const evidence = evidenceAt(group, step);
      const name = `chunk ${step}${evidence ? ", evidence" : ""}${step === last ? ", T*: the last one" : ""}`;
      const marks = [evidence ? "evidence" : "", step === last ? "last" : ""].join(" ");
      head.append(element("th", { scope: "col", class: marks, title: name, "aria-label": name }, step === last ? `${step} T*` : String(step)));
    }
    if (answers) head.append(element("th", { scope: "col" }, steps ? "answer" : "turns"));
    if (known(last)) head.append(element("th", { scope: "col" }, "left"));
    head.append(element("th", { scope: "col" }, "reward"));
    const body = element("tbody");
    for (const one of group.members) {
      const row = element("tr", {}, element("th", { scope: "row" }, String(one.member)));
      for (let step = 1; step <= steps; step++) {
        const turn = one.turns.find((turn) => turn.step === step);
        row.append(element("td", { class: step === last ? "last" : "" }, turn ? cell(turn) : unread(evidenceAt(group, step), step)));
      }
      if (answers) row.append(element("td", {}, ...one.turns.filter((turn) => !known(turn.step)).map(cell)));
      if (known(last)) row.append(element("td", { class: `number ${(one.leaving || "").split(" ")[1] || ""}` }, (one.leaving || "–").replace("left ", "")));
      const zeroed = one.strict_zero ? ", made 0: a turn did not parse" : "";
      row.append(element("td", { class: "number" + (zeroed && " zeroed"), title: one.reward + zeroed }, known(one.reward) ? one.reward.toFixed(2) : "–"));
      body.append(row);
    }
    const row = Object.hasOwn(data.rows, first.row_id) ? data.rows[first.row_id] : null;
    const where = [first.source, `iteration ${group.iteration}`, first.project].filter((text) => text && text !== "iteration -1");
    return element("section", { class: "group" },
      element("h3", {}, isolated(first.row_id || `group ${first.group}`), element("small", {}, plain(where.join(" · ")))),
      row ? element("p", {}, isolated(shortened(row.question, 200))) : null,
      first.gold ? element("p", {}, element("small", {}, "gold: ", isolated(shortened(first.gold.join(" | "), 120)))) : null,
      element("div", { class: "grid" }, element("table", {}, element("thead", {}, head), body)));
  }

  const unread = (evidence, step) => element("span", { class: "cell unread", title: `chunk ${step} was not read${evidence ? ": evidence" : ""}` }, evidence ? "E" : "");

  function says(turn) { // a cell in words
    const said = [known(turn.step) ? `chunk ${turn.step}` : `turn ${turn.turn}`, turn.verdict];
    if (turn.fault) said.push(turn.fault);
    if (isRight(turn) !== null) said.push(isRight(turn) ? "right" : "wrong");
    if (turn.exit) said.push("left here");
    if (turn.finish_reason === "length") said.push("reply cut");
    if (turn.memory_cut) said.push("memory cut");
    return said.concat(turn.faults.filter((fault) => fault !== turn.verdict)).join(", ");
  }

  function isRight(turn) { // whether a reading's last turn, which no gate is in, was right; null where no reward says
    const found = turn.owner.rewards || {}, told = found.answer_reward ?? found.stock_reward;
    const answers = turn === turn.owner.turns.at(-1) && !known(turn.check) && turn.verdict !== "unparsed";
    return answers && known(told) ? told > 0 : null;
  }

  function cell(turn) {
    const right = isRight(turn), filtered = $("fault").value || $("kind").value;
    const kind = known(right) ? "answer" : turn.verdict.replaceAll(" ", "-");
    const marks = ["cell", kind, turn.exit && "exit", turn.finish_reason === "length" && "cut",
      turn.memory_cut && "memory-cut", right && "good", right === false && "bad", filtered && matches(turn) && "match", turn === open && "open"];
    let mark = MARKS[turn.verdict] || (turn.check === false ? "○" : "●");
    if (known(right)) mark = right ? "✓" : "✗";
    turn.cell = element("button", { type: "button", class: marks.filter(Boolean).join(" "), title: says(turn),
      "aria-label": `reading ${turn.owner.member}, ${says(turn)}`, onclick: () => show(turn) }, mark);
    turn.cell.turn = turn;
    return turn.cell;
  }

  // ---- one turn ----

  function marked(text, spans, gold, whole) { // a chunk with its evidence, and the gold answers in it
    const kinds = new Array(text.length).fill(0);
    for (const [from, to] of spans || (whole ? [[0, text.length]] : [])) kinds.fill(1, from, to);
    for (const answer of gold || []) {
      for (let at = answer ? text.indexOf(answer) : -1; at >= 0; at = text.indexOf(answer, at + answer.length)) {
        for (let i = at; i < at + answer.length; i++) kinds[i] |= 2;
      }
    }
    const made = [];
    for (let from = 0, to; from < text.length; from = to) {
      for (to = from + 1; to < text.length && kinds[to] === kinds[from]; to++);
      const classes = [kinds[from] & 1 && "evidence-text", kinds[from] & 2 && "gold"].filter(Boolean).join(" ");
      made.push(element(classes ? "mark" : "span", { class: classes }, plain(text.slice(from, to))));
    }
    return made;
  }

  function difference(before, after) { // words that went and came, by the longest common sequence
    const a = before.match(/^\s+|\S+\s*/g) || [], b = after.match(/^\s+|\S+\s*/g) || [];
    const whole = [element("del", {}, plain(before)), " ", element("ins", {}, plain(after))];
    if (a.length * b.length > 4e6) return whole;
    const common = Array.from({ length: a.length + 1 }, () => new Uint32Array(b.length + 1));
    for (let i = a.length - 1; i >= 0; i--) {
      for (let j = b.length - 1; j >= 0; j--) {
        common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
      }
    }
    if (common[0][0] < 0.3 * Math.min(a.length, b.length)) return whole; // another text
    const made = [];
    const add = (tag, word) => {
      if (made.length && made.at(-1)[0] === tag) made.at(-1)[1] += word;
      else made.push([tag, word]);
    };
    for (let i = 0, j = 0; i < a.length || j < b.length;) {
      if (i < a.length && j < b.length && a[i] === b[j]) { add("span", a[i]); i++; j++; }
      else if (j >= b.length || (i < a.length && common[i + 1][j] >= common[i][j + 1])) add("del", a[i++]);
      else add("ins", b[j++]);
    }
    return made.map(([tag, text]) => element(tag, {}, plain(text)));
  }

  function tokens(turn) {
    const update = (turn.updates || []).at(-1) || {};
    const held = MEASURES.map(([name, column, where, share]) => [name, (where === "turn" ? turn : update)[column], share]).filter((one) => one[1]);
    if (!held.length) return null;
    const at = Math.min(measure, held.length - 1), [, values, share] = held[at];
    const most = Math.max(...values.map(Math.abs));
    const told = element("p", { role: "status" }, "Point at a token for its numbers.");
    const say = (index, span) => {
      text.querySelector(".told")?.classList.remove("told");
      span.classList.add("told");
      told.replaceChildren(`token ${index + 1}, id ${turn.completion_ids[index]}: `
        + held.map(([name, column]) => `${name} ${number(column[index])}`).join("; "));
    };
    const spans = turn.completion_ids.map((id, index) => {
      const word = Object.hasOwn(data.tokens, id) ? data.tokens[id] : ` ${id}`;
      const span = element("span", { class: "token" + (update.token_clipped?.[index] ? " clipped" : "") }, plain(word));
      span.style.backgroundColor = `rgb(213 94 0 / ${(0.75 * (share(values[index], most) || 0)).toFixed(3)})`;
      span.addEventListener("mouseenter", () => say(index, span));
      span.addEventListener("click", () => say(index, span));
      return span;
    });
    const text = box(...spans);
    const choice = element("select", { "aria-label": "what the shading shows", onchange: (event) => { measure = +event.target.value; show(turn); } },
      ...held.map(([name], index) => element("option", { value: index, selected: index === at }, name)));
    const scale = held[at][0].includes("log-prob") ? "full colour at −5 nats" : `full colour at ${number(most)} nats`;
    return [element("h4", {}, "Tokens"), element("p", { class: "measure" }, "shading: ", choice, element("small", {}, scale + (update.token_clipped ? "; wavy: clipped" : ""))), text, told];
  }

  function promptParts(turn, chunk) {
    return (turn.prompt || []).map((part) => {
      if (part === "chunk") return element("span", { class: "chunk-text", title: "the chunk" }, plain(data.texts[chunk.text]));
      if (part === "memory") return element("span", { class: "memory-text", title: "the memory" }, plain(turn.memory_before));
      return element("span", {}, plain(data.texts[part]));
    });
  }

  function show(turn, focus = true) {
    const one = turn.owner, chunk = chunksOf(one)[turn.step - 1], row = Object.hasOwn(data.rows, one.row_id) ? data.rows[one.row_id] : null;
    open?.cell?.classList.remove("open");
    const isNew = open !== turn;
    open = turn;
    const badge = (text, kind) => (text ? element("span", { class: `badge ${kind}` }, plain(text)) : null);
    const title = known(turn.step) && (chunk || known(turn.check) || known(turn.evidence)) ? `Chunk ${turn.step}${chunk ? ` of ${chunksOf(one).length}` : ""}` : turn.verdict === "answer" && one.turns.length > 1 ? "Answer" : `Turn ${turn.turn + 1}`;
    const place = [one.source, one.iteration >= 0 ? `iteration ${one.iteration}` : "", `group ${one.group}`, `reading ${one.member}`].filter(Boolean).join(", ");
    const where = known(one.last_evidence) && known(one.exit_step) ? `read ${one.exit_step} chunks, T* is ${one.last_evidence}` : "";
    const parts = [
      element("div", { class: "bar-top" }, element("div", {}, element("h3", {}, title), element("small", {}, plain(place))),
        element("span", {}, element("button", { type: "button", title: "turn before", onclick: () => step(-1) }, "←"), " ",
          element("button", { type: "button", title: "turn after", onclick: () => step(1) }, "→"), " ",
          element("button", { type: "button", title: "key Esc", onclick: close }, "close"))),
      element("p", { class: "badges" }, badge(turn.verdict, turn.verdict.replaceAll(" ", "-")), known(turn.evidence) ? badge(`label: ${turn.evidence ? "evidence" : "no evidence"}`, "plain") : null,
        known(turn.check) ? badge(`check: ${turn.check ? "yes" : "no"}`, "plain") : null, known(turn.exit) ? badge(`exit: ${turn.exit ? "leaves" : "reads on"}`, "plain") : null,
        badge(turn.kinds[0], "plain"), badge(turn.fault && `did not parse: ${turn.fault}`, "unparsed"), turn.finish_reason === "length" ? badge("reply cut at the limit", "plain") : null,
        turn.memory_cut ? badge("memory cut at the limit", "plain") : null, badge(one.leaving && `${one.leaving}: ${where}`, "plain")),
      row ? element("p", {}, element("b", {}, "Question "), isolated(row.question)) : null,
      one.gold ? element("p", {}, element("b", {}, "Gold "), isolated(one.gold.join(" | ")), known(one.answer) ? element("b", {}, " Answer ") : "", known(one.answer) ? isolated(one.answer) : "") : null,
    ];
    if (chunk) {
      const how = chunk.spans ? "" : chunk.evidence ? "the label is of the whole chunk" : "";
      parts.push(element("h4", {}, "Chunk ", element("small", {}, how)), box(...marked(data.texts[chunk.text], chunk.spans, one.gold, chunk.evidence)));
    } else if (turn.prompt) {
      parts.push(element("h4", {}, "What it read"), box(...promptParts(turn, chunk)));
    }
    if (known(turn.memory)) {
      const before = turn.memory_before;
      parts.push(element("h4", {}, "Memory before"), box(plain(before)), element("h4", {}, before === turn.memory ? "Memory after: unchanged" : "Memory after, as a difference"));
      if (before !== turn.memory) parts.push(box(...difference(before, turn.memory)));
    }
    if (known(turn.candidate) && turn.check === false && turn.candidate) parts.push(element("h4", {}, "Candidate that was not written"), box(plain(turn.candidate)));
    parts.push(element("h4", {}, "Reply"), box(plain(turn.text ?? "")));
    parts.push(...(tokens(turn) || []));
    const rewards = (found) => Object.entries(found || {});
    parts.push(element("h4", {}, "This turn"), pairs([...rewards(turn.turn_rewards), ["turn reward", turn.turn_reward], ["turn advantage, same step of the group", turn.turn_advantage],
      ["trajectory advantage", one.trajectory_advantage], ["advantage trained on, mixed by alpha", turn.advantage], ["prompt tokens", turn.prompt_tokens]]));
    parts.push(element("h4", {}, "The whole reading"), pairs([...rewards(one.rewards), [one.strict_zero ? "reward, made 0: a turn did not parse" : "reward", one.reward], ["seconds of its rollout", one.seconds]]));
    for (const update of turn.updates || []) {
      parts.push(element("h4", {}, `Update ${update.update}`), pairs(Object.entries(update).filter(([name, value]) => name !== "update" && !Array.isArray(value))));
    }
    if (chunk && turn.prompt) parts.push(element("details", {}, element("summary", {}, "the whole prompt"), box(...promptParts(turn, chunk))));
    $("turn").replaceChildren(...parts.filter(Boolean));
    $("turn").hidden = false;
    if (isNew) $("turn").scrollTop = 0;
    reveal(turn, focus);
    history.replaceState(null, "", "#turn=" + encodeURIComponent(address(turn)));
    tell();
  }

  function reveal(turn, focus) {
    const place = shownGroups.indexOf(turn.owner.home);
    if (place >= drawn) draw(place + 1);
    turn.cell.classList.add("open");
    if (focus) turn.cell.focus({ preventScroll: true });
    const isFixed = getComputedStyle($("turn")).position === "fixed";
    if (!isFixed && $("turn").getBoundingClientRect().top > innerHeight / 3) $("next").scrollIntoView();
    turn.cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    const at = turn.cell.getBoundingClientRect();
    if (isFixed && at.bottom > $("turn").getBoundingClientRect().top) window.scrollBy(0, at.top - 90);
  }

  function close() {
    const was = open;
    open = null;
    $("turn").hidden = true;
    was?.cell?.classList.remove("open");
    was?.cell?.focus();
    history.replaceState(null, "", "#trajectories");
    tell();
  }

  // ---- moving ----

  function step(by) {
    const next = open?.owner.turns[open.index + by];
    if (next) show(next);
  }

  function jump(by) { // to the next or previous matching turn after the open one, in the order that is shown
    if (!matching.length) return tell();
    let at = matching.indexOf(open);
    if (at < 0 && open) {
      const order = shownGroups.flatMap((group) => group.members.flatMap((one) => one.turns)), here = order.indexOf(open);
      at = matching.findLastIndex((turn) => order.indexOf(turn) < here) + (by < 0 ? 1 : 0);
    }
    show(matching[(at + by + (at < 0 && by < 0 ? 1 : 0) + matching.length) % matching.length]);
  }

  function neighbour(turn, key) {
    if (key === "ArrowLeft" || key === "ArrowRight") return turn.owner.turns[turn.index + (key === "ArrowRight" ? 1 : -1)];
    const members = turn.owner.home.members, other = members[members.indexOf(turn.owner) + (key === "ArrowDown" ? 1 : -1)];
    return other && (other.turns.find((one) => one.step === turn.step) || other.turns.at(-1));
  }

  function iterate(by) {
    const select = $("iteration");
    const next = Math.min(select.options.length - 1, Math.max(0, select.selectedIndex + by));
    select.selectedIndex = next;
    until = null;
    refresh();
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const cellTurn = event.target.turn;
    const action = { n: () => jump(1), p: () => jump(-1), "]": () => iterate(1), "[": () => iterate(-1), Escape: () => open && close() }[event.key];
    if (action) action();
    else if (cellTurn && event.key.startsWith("Arrow")) {
      const next = neighbour(cellTurn, event.key);
      if (next && open) show(next);
      else next?.cell?.focus();
    } else return;
    event.preventDefault();
  }

  function ask(button) { // a share of a table: filter for its cases and show the first
    const asked = button.dataset, several = asked.until !== "" && asked.until !== asked.iteration;
    until = several ? [+asked.iteration, +asked.until] : null;
    for (const name of ["source", "project"]) $(name).value = JSON.parse(asked[name]);
    for (const name of ["kind", "fault"]) $(name).value = asked[name];
    $("iteration").value = several ? "" : asked.iteration;
    $("order").value = "place";
    refresh();
    if (matching.length) { open = null; show(matching[0]); } else { $("trajectories").scrollIntoView(); }
  }

  async function start() {
    await load();
    fillFilters();
    for (const id of ["source", "iteration", "project", "fault", "kind", "order"]) {
      $(id).addEventListener("change", () => { if (id === "iteration") until = null; refresh(); });
    }
    $("filters").addEventListener("submit", (event) => event.preventDefault());
    $("clear").addEventListener("click", () => { $("filters").reset(); until = null; refresh(); });
    $("next").addEventListener("click", () => jump(1));
    $("previous").addEventListener("click", () => jump(-1));
    document.addEventListener("keydown", onKey);
    for (const button of document.querySelectorAll(".jump")) button.addEventListener("click", () => ask(button));
    refresh();
    const asked = byId.get(decodeURIComponent(location.hash.replace("#turn=", "")));
    if (asked) show(asked);
  }

  start().catch((error) => { $("told").textContent = `The trajectories cannot be shown: ${error.message}`; });
})();
