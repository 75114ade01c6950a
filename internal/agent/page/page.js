'use strict';
// The page shows what the agent's JSON says. Names, annotations and rules can be what a pod's author wrote: they reach the
// document as text and as values of attributes only, and lists are bounded whatever a pod has.
//
// Start at refresh. Each show… function builds what it wants and patch changes the document where that differs, so that focus,
// scroll position and opened details survive.

const pause = 5000; // ms between the answers and the next requests
const pageSize = 50; // pods
const decisionsSize = 64;
const maxChains = 200;

const $ = id => document.getElementById(id);

/** element makes an element of HTML with attributes and children; strings become text nodes, undefined and '' nothing. */
const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);

/** draw makes an element of SVG. */
const draw = (name, attributes = {}, ...children) => fill(document.createElementNS('http://www.w3.org/2000/svg', name), attributes, children);

function fill(e, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== '' && value !== false) e.setAttribute(key, value);
  }
  e.append(...children.flat().filter(c => c !== undefined && c !== ''));
  return e;
}

/** patch gives a parent these children by the fewest changes. Whether a detail is open is the reader's. */
function patch(parent, ...children) {
  const wanted = children.flat().filter(c => c !== undefined && c !== '');
  const have = [...parent.childNodes];
  wanted.forEach((w, i) => {
    const node = w instanceof Node ? w : document.createTextNode(w);
    const old = have[i];
    if (!old) parent.append(node);
    else if (old.nodeName !== node.nodeName) old.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (old.data !== node.data) old.data = node.data;
    } else {
      for (const a of [...old.attributes]) if (a.name !== 'open' && !node.hasAttribute(a.name)) old.removeAttribute(a.name);
      for (const a of node.attributes) if (a.name !== 'open' && old.getAttribute(a.name) !== a.value) old.setAttribute(a.name, a.value);
      patch(old, ...node.childNodes);
    }
  });
  have.slice(wanted.length).forEach(node => node.remove());
}

/** say shows a text in an element that is hidden without one. */
function say(id, ...text) {
  patch($(id), ...text);
  $(id).hidden = $(id).childNodes.length === 0;
}

/** get reads JSON. An error has the answer's status, 0 if there is no answer. */
async function get(path) {
  let answer;
  try {
    answer = await fetch(path, {headers: {Accept: 'application/json'}, signal: AbortSignal.timeout(20000)});
    const failed = !answer.ok && path !== 'readyz'; // its 503 is an answer with reasons
    if (!failed) return await answer.json();
    return await Promise.reject(Object.assign(new Error((await answer.text()).trim().slice(0, 2000) || answer.statusText), {status: answer.status}));
  } catch (error) {
    throw Object.assign(error, {status: error.status ?? 0});
  }
}

const tone = state => ({captured: 'good', 'not-inspected': 'warn', sandboxed: 'warn', pending: 'warn', outside: 'quiet'})[state] ?? 'bad';

/** ago is the time since then by its largest unit. */
function ago(text) {
  const seconds = Math.max(0, (Date.now() - Date.parse(text)) / 1000);
  if (Number.isNaN(seconds)) return '-';
  const [unit, size] = [['d', 86400], ['h', 3600], ['min', 60]].find(([, size]) => seconds >= size) ?? ['s', 1];
  return `${Math.floor(seconds / size)} ${unit}`;
}

const time = text => element('time', {datetime: text, title: text}, ago(text));

const plural = (n, what) => `${n} ${what}${n === 1 ? '' : 's'}`;

/** chosen is the pod that the address names by #NAMESPACE/NAME. */
function chosen() {
  try {
    const [namespace, name, rest] = location.hash.slice(1).split('/').map(decodeURIComponent);
    return {namespace, name, valid: Boolean(namespace && name && rest === undefined), none: !location.hash.slice(1)};
  } catch {
    return {valid: false, none: false};
  }
}

const link = p => element('a', {href: `#${encodeURIComponent(p.namespace)}/${encodeURIComponent(p.pod)}`}, `${p.namespace}/${p.pod}`);

// ---- the node ----

let pods = [];
let state = 'all'; // the only one that is shown
let first = 0; // place of the first pod that is shown

/** why is one line about a pod, as the command pods has it. */
function why(p) {
  const n = p.problems?.length ?? 0;
  if (n) return p.problems[0].detail + (n > 1 ? ` (and ${n - 1} more)` : '');
  return p.state === 'captured' && p.exceptions?.length ? `${plural(p.exceptions.length, 'exception')} by its own settings` : p.sentence ?? '';
}

function showPods() {
  const search = $('search').value.trim().toLowerCase();
  const counts = new Map();
  for (const p of pods) counts.set(p.state, (counts.get(p.state) ?? 0) + 1);
  if (!counts.has(state)) state = 'all';
  const some = pods.filter(p => (state === 'all' || p.state === state) && (!search || `${p.namespace}/${p.pod} ${why(p)}`.toLowerCase().includes(search)));
  first = Math.max(0, Math.min(first, Math.floor((some.length - 1) / pageSize) * pageSize));
  const chip = (value, n) => element('button', {type: 'button', 'data-state': value, 'aria-pressed': String(value === state), class: value === 'all' ? '' : tone(value)}, `${value}: ${n}`);
  patch($('states'), chip('all', pods.length), [...counts].map(([value, n]) => chip(value, n)));
  patch($('pods'), some.slice(first, first + pageSize).map(p => element('tr', {},
    element('td', {}, link(p)), element('td', {class: `${tone(p.state)} line`}, p.state), element('td', {class: 'line more'}, time(p.since)),
    element('td', {class: 'line more'}, time(p.checked)), element('td', {class: 'line more'}, p.backend ?? '-'), element('td', {}, why(p)))));
  const found = some.length === pods.length ? '' : `${plural(some.length, 'pod')} of ${pods.length}`;
  patch($('found'), pods.length ? found : 'The agent knows no pod of this node.');
  $('pages').hidden = some.length <= pageSize;
  patch($('page'), `${first + 1} to ${Math.min(first + pageSize, some.length)} of ${some.length}`);
  $('previous').disabled = first === 0;
  $('next').disabled = first + pageSize >= some.length;
}

const remedies = [
  ['switched off', 'Set audit.interval of the chart (AUDIT_INTERVAL of the agent) to more than 0. Without the audit, "istio-cni why --pid" reads a pod\'s rules on the node.'],
  ['the node agent lacks', 'Give the agent what it lacks: the chart does if audit.interval is more than 0.'],
  ['has not begun', 'It begins in a moment; the page asks again.'],
  ['no such pod', 'It is on another node, or gone: see "kubectl get pod -o wide". "kubectl istio-cni dashboard NAMESPACE/NAME" opens the page of the pod\'s node.'],
];

/** explain is an error with what to do. */
function explain(error) {
  const known = remedies.find(([text]) => error.message.includes(text));
  return [`${error.message}. `, known ? known[1] : 'It is tried again.'];
}

// ---- a pod ----

let pod; // the last answer about it
let question = ''; // the packet that is followed, as a query
let asked = ''; // the question of the answer that is shown
let refused = ''; // why the last question was none

/** family of the packet in question, as chains name it. */
const isFamily = c => c.family === 'inet' || (c.family.includes('6') === /(to|from)=%5B|from=[^&]*%3A/.test(question));

function showState(p) {
  const lines = [element('p', {}, element('strong', {class: tone(p.state)}, p.state), `: the pod ${p.sentence}.`)];
  if (p.remedy) lines.push(element('p', {}, `What to do: ${p.remedy}.`));
  if (p.problems?.length) lines.push(element('ul', {class: 'bad', 'aria-label': 'problems'}, p.problems.map(x => element('li', {}, `${x.state}: ${x.detail}`))));
  if (p.inspectionError) lines.push(element('p', {class: 'bad'}, `The network namespace could not be read: ${p.inspectionError}`));
  const d = p.decision;
  if (d) {
    const injection = [p.injection?.proxy && `proxy as ${p.injection.proxy}`, p.injection?.setup && `init container ${p.injection.setup}`, p.injection?.revision && `revision ${p.injection.revision}`];
    const what = injection.filter(Boolean).join(', ');
    lines.push(element('p', {}, `${p.injected ? 'Injected' : 'Not injected'}${what && ` (${what})`}; the plugin's decision about the pod as it is now: ${d.captured ? 'captured' : 'not captured'}`,
      d.sentence ? `, ${d.sentence}` : '', d.detail ? ` (${d.detail})` : '', '.', d.remedy ? ` ${d.remedy}.` : ''));
  }
  lines.push(element('p', {class: 'quiet'}, 'In this state for ', time(p.since), ', checked ', time(p.checked), ' ago', p.backend ? `, backend ${p.backend}` : '', '.'));
  if (p.exceptions?.length) {
    lines.push(element('h3', {}, 'Traffic that the pod\'s own settings let past the proxy'),
      element('ul', {}, p.exceptions.map(x => element('li', {}, element('code', {}, `${x.setting}=${x.value}`), `: ${x.traffic}`))));
  }
  patch($('state'), lines);
}

const hopsOf = p => p.answer?.hops ?? [];
const isLit = h => h.answer === 'matched';

/** chainsOf has, for each hook, its chains as one row for both families: those that its rules lead to, or should lead to. */
function chainsOf(p) {
  const hooks = new Map();
  const foreign = (p.problems ?? []).some(x => x.state === 'foreign-rule');
  const all = p.chains ?? [];
  const byName = new Map();
  for (const c of all) {
    const name = `${c.family} ${c.table} ${c.chain}`;
    byName.set(name, [...byName.get(name) ?? [], c]);
  }
  const add = (hook, c, live) => {
    const rows = hooks.get(hook) ?? hooks.set(hook, new Map()).get(hook);
    const name = `${c.table} ${c.chain}`;
    const row = rows.get(name) ?? rows.set(name, {hook, table: c.table, chain: c.chain, rules: 0, missing: 0, extra: 0, foreign: 0, live: false}).get(name);
    if (row.live === false) row.live = live;
    row.rules += (c.omitted ?? 0) + c.rules.filter(r => r.op !== 'missing').length;
    for (const r of c.rules) if (r.op) row[r.op] += 1;
    row.bad = row.missing + row.extra > 0 || (foreign && row.foreign > 0) || !row.live;
  };
  for (const base of all.filter(c => c.hook)) {
    const seen = new Map([[base, true]]); // chain, and whether live rules lead to it
    for (const [c, live] of seen) { // grows meanwhile
      add(base.hook, c, live);
      for (const r of c.rules) {
        const to = /(?:-[jg]|jump|goto) (\S+)/.exec(r.rule.replace(/"(\\.|[^"\\])*"/g, ''))?.[1];
        for (const next of byName.get(`${c.family} ${c.table} ${to}`) ?? []) {
          if (!seen.has(next)) seen.set(next, live && r.op !== 'missing');
        }
      }
    }
  }
  return new Map([...hooks].map(([hook, rows]) => [hook, [...rows.values()]]));
}

/** boxesOf are the stations of both lanes in the order of a packet, with what is wrong with each. */
function boxesOf(p) {
  const hooks = chainsOf(p);
  const states = new Set((p.problems ?? []).map(x => x.state));
  const ports = p.ports ?? {};
  const outbound = ports.outbound || 15001;
  const inbound = ports.inbound || 15006;
  const hops = hopsOf(p);
  const hook = name => {
    const rows = hooks.get(name) ?? [];
    const met = hops.some(h => h.hook === name);
    return {kind: 'hook', name, label: name.toUpperCase(), rows: rows.slice(0, 10), omitted: rows.length - Math.min(rows.length, 10), met,
      note: rows.length ? '' : 'no rules', bad: rows.some(r => r.bad) || (!rows.length && states.has('bypassed'))};
  };
  const proxy = port => {
    const bad = (p.problems ?? []).some(x => ['foreign-listener', 'no-listener'].includes(x.state) && x.detail.includes(`:${port},`));
    const heard = (p.listeners ?? []).some(l => l.address.endsWith(`:${port}`));
    return {kind: 'proxy', label: `proxy :${port}`, port, bad, note: heard ? (bad ? 'not the proxy' : 'listens') : 'nothing listens'};
  };
  const some = (...names) => names.filter(n => hooks.has(n) || n === 'prerouting' || n === 'output').map(hook);
  const app = {kind: 'app', label: 'application'};
  const collision = states.has('uid-collision');
  return {states, lanes: [
    {name: 'inbound', boxes: [{kind: 'outside', label: 'outside', note: 'clients'}, ...some('prerouting', 'forward', 'input'), proxy(inbound), {...app, note: 'serves'}]},
    {name: 'outbound', boxes: [{...app, note: collision ? 'has the proxy\'s user' : 'connects', bad: collision}, ...some('output', 'postrouting'), proxy(outbound),
      {kind: 'outside', label: 'outside', note: 'servers'}]},
  ]};
}

/** light marks where the packet in question goes, and returns the lane's state. */
function light(p, picture) {
  const a = p.answer;
  if (!a || !question) return;
  const lane = picture.lanes[new URLSearchParams(question).get('direction') === 'in' ? 0 : 1];
  const end = a.verdict;
  const taken = end === 'redirected' || end === 'handed-over';
  if (end === 'not-sent') {
    Object.assign(lane.boxes[0], {note: 'not sent', bad: true});
    return;
  }
  lane.lit = true;
  lane.boxes[0].lit = true;
  lane.passes = end === 'passed';
  lane.bad = a.wanted === 'past-the-mesh';
  if (taken) {
    const port = Number(/:?(\d+)$/.exec(a.to ?? '')?.[1] ?? 0);
    const proxies = picture.lanes.flatMap(l => l.boxes.filter(b => b.kind === 'proxy'));
    const to = proxies.find(b => b.port === port) ?? lane.boxes.find(b => b.kind === 'proxy');
    to.lit = true;
    to.bad ||= Boolean(a.noListener);
    lane.redirects = lane.boxes.includes(to);
    if (port && port !== to.port) to.note = `at port ${port}`;
  } else if (lane.passes) {
    lane.boxes.at(-1).lit = true;
  } else {
    const met = lane.boxes.filter(b => b.kind === 'hook').at(-1);
    met.note = {dropped: 'dropped here', rejected: 'rejected here'}[end] ?? 'cannot tell';
    met.bad ||= end !== 'cannot-tell';
  }
}

const rowHeight = 22;

/** place gives each box its place: lanes from left to right and back, or on a narrow window from top to bottom. */
function place(lanes, width, narrow) {
  let y = 0;
  for (const lane of lanes) {
    for (const b of lane.boxes) {
      b.w = narrow ? width - 46 : {hook: 250, proxy: 122}[b.kind] ?? 104;
      b.h = b.rows?.length ? 30 + rowHeight * (b.rows.length + Math.sign(b.omitted)) : 50;
    }
    y += 22; // the lane's name
    lane.y = y;
    if (narrow) {
      for (const b of lane.boxes) {
        Object.assign(b, {x: 0, y});
        y += b.h + 24;
      }
      continue;
    }
    const high = Math.max(...lane.boxes.map(b => b.h));
    const gap = (width - 4 - lane.boxes.reduce((n, b) => n + b.w, 0)) / (lane.boxes.length - 1);
    let x = 2;
    for (const b of lane.name === 'inbound' ? lane.boxes : lane.boxes.toReversed()) {
      Object.assign(b, {x, y: y + (high - b.h) / 2});
      x += b.w + gap;
    }
    y += high + 40; // room for the way past the proxy
    lane.below = y - 30;
  }
  return y;
}

/** wires are the ways between the boxes of a lane, and the one past the proxy. */
function wires(lane, states, narrow) {
  const all = [];
  const boxes = lane.boxes;
  const proxy = boxes.findIndex(b => b.kind === 'proxy');
  const rulesBad = boxes.some(b => b.kind === 'hook' && b.bad);
  const back = lane.name === 'outbound' ? -1 : 1;
  const line = (points, style) => {
    const [[px, py], [x, y]] = points.slice(-2);
    const [dx, dy] = [Math.sign(x - px) * 8, Math.sign(y - py) * 8];
    const tip = [[x, y], [x - dx - dy / 2, y - dy - dx / 2], [x - dx + dy / 2, y - dy + dx / 2]];
    all.push(draw('path', {class: `wire ${style}`, d: `M${points.map(q => q.join(' ')).join('L')}`}), draw('path', {class: `tip ${style}`, d: `M${tip.map(q => q.join(' ')).join('L')}Z`}));
  };
  boxes.slice(1).forEach((to, i) => {
    const from = boxes[i];
    const lit = lane.lit && (i + 1 < proxy || (i + 1 === proxy && lane.redirects));
    const bad = i + 1 < proxy ? false : (i + 1 === proxy && rulesBad) || boxes[proxy].bad;
    const style = lit ? 'lit' : bad ? 'bad' : '';
    if (narrow) line([[from.w / 2, from.y + from.h], [to.w / 2, to.y]], style);
    else line([[back > 0 ? from.x + from.w : from.x, from.y + from.h / 2], [back > 0 ? to.x : to.x + to.w, to.y + to.h / 2]], style);
  });
  const [from, to] = [boxes[proxy - 1], boxes.at(-1)];
  const style = lane.passes ? (lane.bad ? 'lit bad' : 'lit') : states.has('bypassed') || (states.has('foreign-rule') && from.bad) || states.has('ipv6-open') ? 'bad' : '';
  const note = states.has('ipv6-open') && !states.has('bypassed') ? 'IPv6 passes the proxy' : 'past the proxy';
  if (narrow) {
    const x = from.w + 24;
    line([[from.w, from.y + from.h / 2], [x, from.y + from.h / 2], [x, to.y + to.h / 2], [to.w, to.y + to.h / 2]], style);
    all.push(draw('text', {class: `note ${style}`, x: x + 14, y: (from.y + to.y) / 2, transform: `rotate(90 ${x + 14} ${(from.y + to.y) / 2})`, 'text-anchor': 'middle'}, note));
  } else {
    const [x1, x2, y] = [from.x + from.w / 2, to.x + to.w / 2, lane.below];
    line([[x1, from.y + from.h], [x1, y], [x2, y], [x2, to.y + to.h]], style);
    all.push(draw('text', {class: `note ${style}`, x: (x1 + x2) / 2, y: y + 13, 'text-anchor': 'middle'}, note));
  }
  return all;
}

const short = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;

/** boxOf draws a station with its chains. */
function boxOf(b, hops) {
  const middle = b.x + b.w / 2;
  const style = ['box-group', b.bad ? 'bad' : '', b.lit ? 'lit' : '', b.met ? 'met' : ''].join(' ').trim();
  const text = [draw('text', {x: middle, y: b.y + 20, 'text-anchor': 'middle'}, b.label + (b.rows?.length && b.note ? `: ${b.note}` : ''))];
  if (!b.rows?.length && b.note) text.push(draw('text', {class: 'note', x: middle, y: b.y + 37, 'text-anchor': 'middle'}, b.note));
  const rows = (b.rows ?? []).map((r, i) => {
    const y = b.y + 27 + i * rowHeight;
    const here = hops.filter(h => h.hook === r.hook && h.table === r.table && h.chain === r.chain);
    const faults = ['missing', 'extra', 'foreign'].filter(op => r[op]).map(op => `${r[op]} ${op}`);
    if (!r.live) faults.push('no rule leads here');
    const count = faults.join(', ') || plural(r.rules, 'rule');
    return draw('g', {class: ['chain', r.bad ? 'bad' : r.foreign ? 'warn' : '', here.some(isLit) ? 'lit' : here.length ? 'met' : ''].join(' ').trim()},
      draw('title', {}, `${r.table} ${r.chain}: ${plural(r.rules, 'rule')}${faults.length ? `, ${faults.join(', ')}` : ''}`),
      draw('rect', {class: 'box', x: b.x + 5, y, width: b.w - 10, height: rowHeight - 3, rx: 3}),
      draw('text', {class: 'small', x: b.x + 10, y: y + 14}, short(`${r.table.replace(/^istio-proxy-/, '')} ${r.chain}`, faults.length ? 22 : 28)),
      draw('text', {class: 'small', x: b.x + b.w - 10, y: y + 14, 'text-anchor': 'end'}, short(count, 20)));
  });
  if (b.omitted > 0) rows.push(draw('text', {class: 'note', x: middle, y: b.y + 42 + b.rows.length * rowHeight, 'text-anchor': 'middle'}, `and ${plural(b.omitted, 'more chain')}`));
  return draw('g', {class: style, 'data-kind': b.kind}, draw('rect', {class: 'box', x: b.x, y: b.y, width: b.w, height: b.h, rx: 6}), text, rows);
}

function showPath(p) {
  const box = $('path');
  if (!p.chains) {
    patch(box, element('p', {}, p.decision && !p.decision.captured ? 'The plugin does not redirect this pod: its traffic passes no proxy.' : 'The rules are not known.'));
    say('legend');
    return;
  }
  const picture = boxesOf(p);
  light(p, picture);
  const narrow = box.clientWidth < 700;
  const width = narrow ? Math.max(280, box.clientWidth) : Math.max(880, box.clientWidth);
  const height = place(picture.lanes, width, narrow);
  const hops = hopsOf(p);
  const wrong = picture.lanes.flatMap(l => l.boxes).filter(b => b.bad).map(b => b.label);
  patch(box, draw('svg', {viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', 'aria-labelledby': 'path-title',
    'aria-description': picture.lanes.map(l => `${l.name}: ${l.boxes.map(b => b.label).join(', ')}`).join('; ') + (wrong.length ? `; wrong at ${wrong.join(', ')}` : '')},
  picture.lanes.map(lane => draw('g', {class: 'lane', 'data-lane': lane.name},
    draw('text', {class: 'note', x: 2, y: lane.y - 7}, lane.name), wires(lane, picture.states, narrow), lane.boxes.map(b => boxOf(b, hops))))));
  say('legend', wrong.length ? 'Red is wrong. ' : '', hops.length ? 'Blue is the way of the packet below; a filled chain has a rule that matched.' : '');
}

function showRules(p) {
  const all = p.chains ?? [];
  const rules = all.reduce((n, c) => n + c.rules.length, 0);
  const matched = new Set(hopsOf(p).filter(isLit).map(h => `${h.table} ${h.chain} ${h.number}`));
  const rule = (c, r, i) => {
    const lit = r.op !== 'missing' && isFamily(c) && matched.has(`${c.table} ${c.chain} ${i + 1}`);
    return element('li', {class: lit ? 'lit' : ''}, element('span', {class: `rule ${r.op ? 'bad' : ''}`}, r.rule), r.op ? ' ' : '', r.op ? element('span', {class: 'op bad'}, r.op) : '',
      r.why ? element('span', {class: 'why'}, ` ${r.why}`) : '');
  };
  patch($('rules'), all.slice(0, maxChains).map(c => {
    const faults = c.rules.filter(r => r.op).length;
    return element('details', {...(faults || rules <= 80 ? {open: 'open'} : {})},
      element('summary', {}, `${c.family} table ${c.table}, chain ${c.chain}${c.hook ? `, hook ${c.hook}` : ''} — ${plural(c.rules.length + (c.omitted ?? 0), 'rule')}`,
        faults ? element('span', {class: 'bad'}, `, ${faults} not as wanted`) : ''),
      element('ol', {}, c.rules.map((r, i) => rule(c, r, i))),
      c.omitted ? element('p', {}, `and ${plural(c.omitted, 'more rule')}`) : '');
  }), all.length > maxChains ? element('p', {}, `and ${plural(all.length - maxChains, 'more chain')}`) : '',
  all.length ? '' : element('p', {}, 'None is known.'), (p.unread ?? []).slice(0, maxChains).map(u => element('p', {class: 'warn'}, `not read: ${u}`)));
  const sockets = p.listeners ?? [];
  patch($('listeners'), sockets.length ? element('ul', {}, sockets.slice(0, maxChains).map(l => element('li', {}, element('code', {}, l.address), ` of user ${l.uid}`))) : element('p', {}, 'None is known.'),
    sockets.length > maxChains ? element('p', {}, `and ${sockets.length - maxChains} more`) : '');
}

function showAnswer(p) {
  const a = p.answer;
  const hops = hopsOf(p);
  $('verdict').className = {'as-wanted': 'good', 'past-the-mesh': 'bad'}[a?.wanted] ?? 'warn';
  if (!question) {
    $('verdict').className = 'bad';
    patch($('verdict'), refused);
    patch($('packet'));
    patch($('hops'));
    return;
  }
  patch($('packet'), a?.packet ? `The packet is ${a.packet}.` : '');
  patch($('verdict'), a?.sentence ? `The packet ${a.sentence}.` : `Cannot tell: ${p.inspectionError || 'the pod is not redirected by the plugin, and has no rules to follow'}.`);
  const item = h => element('li', {class: isLit(h) ? 'lit' : ''}, `${h.hook.toUpperCase()} ${h.table}/${h.chain}${h.number ? ` rule ${h.number}` : ''}: `,
    element('span', {class: 'rule'}, h.rule), ` — ${h.answer}`, h.why ? element('span', {class: 'why'}, `, ${h.why}`) : '');
  const met = hops.filter(h => h.answer !== 'not-matched');
  const rest = hops.length - met.length + (a?.omitted ?? 0);
  patch($('hops'), element('ol', {'aria-label': 'rules that match'}, met.map(item)), rest ? element('details', {}, element('summary', {}, `all rules that it meets (${plural(rest, 'rule')} did not match)`), element('ol', {}, hops.map(item))) : '');
  if (asked !== question) {
    asked = question;
    for (const lit of document.querySelectorAll('#rules li.lit')) lit.closest('details').open = true;
  }
}

function showPod(p) {
  pod = p;
  say('pod-failure');
  $('pod-found').hidden = false;
  showState(p);
  showPath(p);
  showAnswer(p);
  showRules(p);
}

/** podFailed shows why there is no answer about the pod. A question that is not understood leaves the rest as it is. */
function podFailed(error) {
  if (error.status === 400 && question && pod) {
    question = '';
    refused = `${error.message}. Give an IP address, not a name: the pod's own resolver decides about names.`;
    showPod({...pod, answer: undefined});
    return;
  }
  say('pod-failure', element('p', {}, explain(error)));
  $('pod-found').hidden = !pod || error.status === 404;
}

// ---- decisions ----

const phases = ['read', 'decide', 'program'];
let older = [];

function showDecisions(latest, key) {
  const lowest = latest.at(-1)?.number ?? Infinity;
  const all = key.none ? [...latest, ...older.filter(d => d.number < lowest)] : latest.filter(d => d.namespace === key.namespace && d.pod === key.name);
  const longest = Math.max(0.001, ...all.map(d => d.seconds?.total ?? 0));
  const ms = s => `${(s * 1000).toFixed(1)} ms`;
  const bar = seconds => {
    let x = 0;
    const parts = phases.filter(name => seconds[name]).map(name => {
      const width = Math.max(1, 140 * seconds[name] / longest);
      return draw('rect', {class: name, x: (x += width) - width, y: 0, width, height: 12});
    });
    const label = phases.filter(name => seconds[name]).map(name => `${name} ${ms(seconds[name])}`).join(', ');
    return draw('svg', {viewBox: '0 0 146 12', width: 146, height: 12, role: 'img', 'aria-label': label}, draw('title', {}, label), parts);
  };
  patch($('decisions'), all.map(d => element('tr', {},
    element('td', {class: 'line'}, time(d.time)), element('td', {}, link(d)),
    element('td', {class: d.error ? 'bad' : d.captured ? 'good' : ''}, d.error ? 'failed' : d.captured ? 'captured' : 'not captured', d.reason && d.reason !== 'captured' ? `, ${d.reason}` : '',
      element('span', {class: 'quiet'}, d.source ? ` (${d.command ? `${d.command}, ` : ''}by ${d.source})` : '')),
    element('td', {class: 'line'}, d.seconds?.total ? bar(d.seconds) : '', d.seconds?.total ? ms(d.seconds.total) : '-'),
    element('td', {class: d.error ? 'bad' : ''}, d.error || d.detail || ''))));
  $('no-decisions').hidden = all.length > 0;
  $('older').hidden = !key.none || !((all.at(-1)?.number ?? 1) > 1) || (older.end ?? false);
  $('older').dataset.before = all.at(-1)?.number ?? '';
}

async function showOlder() {
  const before = $('older').dataset.before;
  try {
    const more = await get(`decisions?limit=${decisionsSize}&before=${before}`);
    older = [...older, ...more];
    older.end = more.length < decisionsSize;
    $('older').hidden = older.end;
  } catch (error) {
    say('decisions-failure', explain(error));
  }
  refresh();
}

// ---- all of it ----

let timer;
let turn = 0;
let answered = new Date();

function showReady(r) {
  patch($('ready'), (r.parts ?? []).map(p => element('li', {class: p.ready ? 'good' : 'bad', title: p.since}, `${p.name}: ${p.ready ? 'ready' : p.reason}`)),
    r.parts?.length ? '' : element('li', {class: 'good'}, 'ready'));
}

/** showAlive says whether there was any answer. */
function showAlive(results) {
  const alive = results.some(r => r.status === 'fulfilled' || r.reason.status > 0);
  if (alive) answered = new Date();
  document.body.classList.toggle('stale', !alive);
  say('failure', alive ? '' : `The agent has not answered since ${answered.toLocaleTimeString()}: what is shown is of then. See whether its pod is running, and whether `
    + `"kubectl istio-cni dashboard" or "kubectl port-forward" has ended. It is tried again every ${pause / 1000} seconds.`);
  return alive;
}

/** refresh asks the agent and shows its answers; it runs again after a pause while the page is visible. */
async function refresh() {
  clearTimeout(timer);
  const mine = ++turn;
  const key = chosen();
  let main = Promise.resolve();
  if (key.none) main = get('api/pods');
  else if (key.valid) main = get(`api/pods/${encodeURIComponent(key.namespace)}/${encodeURIComponent(key.name)}${question && `?${question}`}`);
  const results = await Promise.allSettled([get('api/agent'), get('readyz'), main, get(`decisions?limit=${key.none ? decisionsSize : 512}`)]);
  if (mine !== turn) return; // a later one has begun
  if (!document.hidden) timer = setTimeout(refresh, pause);
  if (!showAlive(results)) return;
  const [agent, ready, shown, decisions] = results;
  if (agent.value) patch($('agent'), `on node ${agent.value.node || 'without a name'}, version ${agent.value.version}`);
  if (ready.value) showReady(ready.value);
  if (key.none && shown.value) pods = shown.value ?? [];
  if (key.none) {
    say('pods-failure', shown.reason ? explain(shown.reason) : '');
    showPods();
  } else if (key.valid) {
    if (shown.reason) podFailed(shown.reason);
    else showPod(shown.value);
  }
  say('decisions-failure', decisions.reason ? explain(decisions.reason) : '');
  if (decisions.value) showDecisions(decisions.value, key);
}

/** navigate shows what the address names. */
function navigate() {
  const key = chosen();
  pod = undefined;
  question = asked = refused = '';
  older = [];
  $('walk').reset();
  for (const id of ['state', 'path', 'rules', 'listeners', 'hops', 'verdict', 'packet', 'decisions']) patch($(id));
  $('node').hidden = !key.none;
  $('pod').hidden = key.none;
  $('pod-found').hidden = true;
  patch($('pod-title'), key.valid ? `${key.namespace}/${key.name}` : 'No pod');
  document.title = key.none ? 'istio-cni' : `${$('pod-title').textContent} · istio-cni`;
  say('pod-failure', key.valid || key.none ? '' : `The address names no pod: want #NAMESPACE/NAME, got ${location.hash}`);
  if (!key.none) $('pod-title').focus();
  return refresh();
}

$('search').addEventListener('input', () => { first = 0; showPods(); });
$('states').addEventListener('click', event => {
  const button = event.target.closest('button');
  if (!button) return;
  state = button.dataset.state === state ? 'all' : button.dataset.state;
  first = 0;
  showPods();
});
for (const [id, step] of [['previous', -pageSize], ['next', pageSize]]) {
  $(id).addEventListener('click', () => { first += step; showPods(); });
}
$('walk').addEventListener('submit', event => {
  event.preventDefault();
  const data = new FormData($('walk'));
  const fields = data.get('direction') === 'in' ? ['direction', 'from', 'port', 'udp'] : ['direction', 'to', 'uid', 'udp'];
  const query = new URLSearchParams();
  for (const name of fields) {
    const value = (data.get(name) ?? '').trim();
    if (value || name === 'to' || name === 'from') query.set(name, value);
  }
  question = query.toString();
  asked = refused = '';
  refresh();
});
$('walk').addEventListener('reset', () => { question = asked = refused = ''; if (pod) showPod({...pod, answer: undefined}); });
$('older').addEventListener('click', showOlder);
$('skip').addEventListener('click', event => { event.preventDefault(); $('main').focus(); });
window.addEventListener('hashchange', navigate);
window.addEventListener('resize', () => { if (pod) showPath(pod); });
document.addEventListener('visibilitychange', () => { if (!document.hidden) refresh(); });
navigate();
